"""A prompt and its negative are encoded in one pass, and each comes out as if it were alone."""

import os
import shutil

import pytest
import torch
from helpers import (
    STREAMS,
    block_summands,
    fp32_bound,
    locked,
    one_thread,  # noqa: F401
    rel,
    said_to_an_ordinary_user,
)

from ltx_neuron.config.gemma import gemma_config
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.sampling.guidance import NEGATIVE_PROMPT
from ltx_neuron.text import inputs
from ltx_neuron.text.host_encoder import HostTextEncoder
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.sharding import SHARDED_MODELS

# Four layers of a width of 32 and at most 256 tokens: the sums of an attention have more, masked, summands
ALONE = fp32_bound(*block_summands(32, 256, attentions=1) * 4)
SHOWS = 0.01  # what another position, or seeing the other prompt, changes at least
PUPPY = "a golden retriever puppy runs across a sunny green meadow"


@pytest.fixture(scope="module")
def encoder(tiny):
    checkpoint = Checkpoint(tiny.checkpoint)
    source = Source(SHARDED_MODELS["gemma3"], [checkpoint, *gemma_files(tiny.gemma_root)])
    config = transformer_config(checkpoint.config)
    return HostTextEncoder(source, gemma_config(tiny.gemma_root), config, torch.float32)


@pytest.fixture(scope="module")
def ids(tiny):
    tokenizer = inputs.load_tokenizer(tiny.gemma_root)
    return lambda prompt: inputs.tokenize(tokenizer, prompt)


def distance(got, wanted) -> float:
    assert torch.equal(got.attention_mask, wanted.attention_mask)
    return max(rel(getattr(got, name), getattr(wanted, name)) for name in (*STREAMS, "hidden_states"))


@pytest.mark.parametrize("pair", [(PUPPY, "night, fog"), ("night, fog", PUPPY), (PUPPY, NEGATIVE_PROMPT)])
def test_a_prompt_packed_with_its_negative_is_encoded_as_alone(encoder, ids, pair):
    together = encoder.encode([ids(prompt) for prompt in pair])
    alone = [encoder.encode([ids(prompt)])[0] for prompt in pair]
    for packed, single in zip(together, alone, strict=True):
        assert distance(packed, single) <= ALONE
    for stream in STREAMS:  # and the two are not the same thing, nor in the other order
        assert rel(getattr(together[0], stream), getattr(alone[1], stream)) > SHOWS


def test_a_pair_that_does_not_fit_is_encoded_in_two_passes_in_order(encoder, ids):
    short, long = [2] * 24, [3] * 1000
    assert inputs.pack_prompts([short, long]) == [[short, long]]
    assert inputs.pack_prompts([short, [*long, 3]]) == [[short], [[*long, 3]]]
    assert inputs.bucket_for([short, long], (128, 1024)) == 1024
    assert inputs.bucket_for([short, short], (48, 128)) == 48
    long = (ids(PUPPY) * 90)[:1015]
    for got, prompt in zip(encoder.encode([long, ids(PUPPY)]), (long, ids(PUPPY)), strict=True):
        assert distance(got, encoder.encode([prompt])[0]) == 0


def test_prompts_do_not_see_each_other_or_the_padding(encoder):
    counts, bucket = [5, 3], 12
    mask = inputs.encoder_inputs(torch.zeros(1, bucket, 32), counts, encoder.gemma)["attention_mask"]
    seen = mask[0, 0] == 0
    padding, first, second = slice(0, 4), slice(4, 9), slice(9, 12)
    assert inputs.prompt_slices(counts, bucket) == [first, second]
    for own in (padding, first, second):
        count = own.stop - own.start
        assert torch.equal(seen[own, own], torch.ones(count, count, dtype=torch.bool).tril())
        assert seen[own].sum() == seen[own, own].sum()


# --- Gemma's folder -------------------------------------------------------------------------------

READERS = {
    "config.json": gemma_config,
    "model.safetensors": gemma_files,
    "tokenizer_config.json": inputs.load_tokenizer,
}


@pytest.mark.parametrize(("name", "read"), READERS.items())
def test_a_file_or_folder_of_gemma_that_cannot_be_read_is_refused_by_name(tiny, tmp_path, name, read):
    root = shutil.copytree(tiny.gemma_root, tmp_path / "gemma")
    with locked(root):
        message = said_to_an_ordinary_user(lambda: read(root))
    assert message.startswith(f"NoPermission: --gemma-root {root}") and "you may not" in message
    (root / name).unlink()
    os.mkfifo(root / name)
    with pytest.raises(UserError, match=f"{name}: that is a named pipe, wanted a regular file"):
        read(root)
