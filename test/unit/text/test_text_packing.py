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

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.gemma import gemma_config
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.host.arithmetic import MatmulLibraries
from ltx_neuron.sampling.guidance import NEGATIVE_PROMPT
from ltx_neuron.text import inputs
from ltx_neuron.text.host_encoder import HostTextEncoder
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.sharding import SHARDED_MODELS

# Four layers of a width of 32 and at most 256 tokens: the sums of an attention have more, masked,
# summands
ALONE = fp32_bound(*block_summands(32, 256, attentions=1) * 4)
SHOWS = 0.01  # what another position, or seeing the other prompt, changes at least

PUPPY, NIGHT = "a golden retriever puppy runs across a sunny green meadow", "night, fog"


@pytest.fixture(scope="module")
def encoder(tiny):
    checkpoint = Checkpoint(tiny.checkpoint)
    source = Source(SHARDED_MODELS["gemma3"], [checkpoint, *gemma_files(tiny.gemma_root)])
    config = transformer_config(checkpoint.config)
    return HostTextEncoder(source, gemma_config(tiny.gemma_root), config, torch.float32, MatmulLibraries())


@pytest.fixture(scope="module")
def ids(tiny):
    tokenizer = inputs.load_tokenizer(tiny.gemma_root)
    return lambda prompt: inputs.tokenize(tokenizer, prompt)


def distances(got, wanted) -> dict[str, float]:
    assert torch.equal(got.attention_mask, wanted.attention_mask)
    return {name: rel(getattr(got, name), getattr(wanted, name)) for name in (*STREAMS, "hidden_states")}


@pytest.mark.parametrize(
    "pair", [(PUPPY, NIGHT), (NIGHT, PUPPY), (PUPPY, PUPPY)], ids=["longer first", "shorter", "equal"]
)
def test_a_prompt_packed_with_its_negative_is_encoded_as_alone(encoder, ids, pair):
    together = encoder.encode([ids(prompt) for prompt in pair])
    alone = [encoder.encode([ids(prompt)])[0] for prompt in pair]
    differences = [distances(packed, single) for packed, single in zip(together, alone, strict=True)]
    assert max(max(of_prompt.values()) for of_prompt in differences) <= ALONE
    if pair[0] != pair[1]:
        assert (
            min(distances(together[0], alone[0]._replace(attention_mask=together[0].attention_mask)).values()) <= ALONE
        )
        for stream in STREAMS:  # and the two are not the same thing, nor in the other order
            assert rel(getattr(together[0], stream), getattr(alone[1], stream)) > SHOWS


def test_the_default_negative_prompt_packs_as_well(encoder, ids):
    negative = ids(NEGATIVE_PROMPT)
    packed, alone = encoder.encode([ids(PUPPY), negative]), encoder.encode([negative])
    assert len(packed) == 2 and max(distances(packed[1], alone[0]).values()) <= ALONE


def embeddings(encoder, *prompts):
    table = encoder.source.tensor("embed_tokens.weight")
    return inputs.scale_embeddings(table[[i for prompt in prompts for i in prompt]], torch.float32)[None]


def test_prompts_do_not_see_each_other_or_the_padding(encoder, ids):
    counts, bucket = [5, 3], 12
    taken = inputs.encoder_inputs(torch.zeros(1, bucket, 32), counts, encoder.gemma)
    seen = taken["attention_mask"][0, 0] == 0
    padding, first, second = slice(0, 4), slice(4, 9), slice(9, 12)
    assert inputs.prompt_slices(counts, bucket) == [first, second]
    for rows, own in ((padding, padding), (first, first), (second, second)):
        count = own.stop - own.start
        assert torch.equal(seen[rows, own], torch.ones(count, count, dtype=torch.bool).tril())
        assert seen[rows].sum() == seen[rows, own].sum()


def test_each_prompt_has_the_positions_it_has_when_padded_alone_to_1024(encoder):
    packed = inputs.encoder_inputs(torch.zeros(1, 8, 32), [5, 3], encoder.gemma)
    for count, part in zip((5, 3), inputs.prompt_slices([5, 3], 8), strict=True):
        alone = inputs.encoder_inputs(torch.zeros(1, TEXT_TOKENS, 32), [count], encoder.gemma)
        for name in ("local_cos", "local_sin", "global_cos", "global_sin"):
            got, wanted = packed[name], alone[name]
            assert torch.equal(got[..., part, :], wanted[..., TEXT_TOKENS - count :, :]), name


@pytest.mark.parametrize("spare", [0, 1, 40])
def test_a_pass_may_have_padding_before_the_prompts(encoder, ids, spare):
    """As in a bucket on the ranks."""
    prompts = ids(PUPPY), ids(NIGHT)
    counts = [len(prompt) for prompt in prompts]
    rows = torch.cat([torch.zeros(1, spare, 32), embeddings(encoder, *prompts)], dim=1)
    slices = inputs.prompt_slices(counts, rows.shape[1])
    assert slices[-1].stop == rows.shape[1] and slices[0].start == spare
    assert [part.stop - part.start for part in slices] == counts


def test_pairs_that_do_not_fit_are_encoded_in_two_passes():
    short, long = [2] * 24, [3] * 1000
    assert inputs.pack_prompts([short, long]) == [[short, long]]
    assert inputs.pack_prompts([short, [*long, 3]]) == [[short], [[*long, 3]]]
    assert inputs.bucket_for([short, long], (128, 1024)) == 1024
    assert inputs.bucket_for([short, short], (48, 128)) == 48


def test_a_long_pair_comes_out_in_order_and_as_alone(encoder, ids):
    long = (ids(PUPPY) * 90)[:1015]
    assert len(long) + len(ids(PUPPY)) > TEXT_TOKENS
    packed = encoder.encode([long, ids(PUPPY)])
    for got, prompt in zip(packed, (long, ids(PUPPY)), strict=True):
        assert max(distances(got, encoder.encode([prompt])[0]).values()) == 0


# --- Gemma's folder -------------------------------------------------------------------------------
READERS = gemma_config, gemma_files, inputs.load_tokenizer


@pytest.mark.parametrize(
    ("name", "read"), list(zip(("config.json", "model.safetensors", "tokenizer_config.json"), READERS, strict=True))
)
def test_a_named_pipe_in_gemmas_folder_is_refused_and_not_waited_for(tiny, tmp_path, name, read):
    root = shutil.copytree(tiny.gemma_root, tmp_path / "gemma")
    (root / name).unlink()
    os.mkfifo(root / name)
    with pytest.raises(UserError, match=f"{name}: that is a named pipe, wanted a regular file"):
        read(root)


@pytest.mark.parametrize("read", READERS)
def test_a_gemma_folder_that_one_may_not_enter_is_said_so(tiny, tmp_path, read):
    root = shutil.copytree(tiny.gemma_root, tmp_path / "gemma")
    with locked(root):
        said = said_to_an_ordinary_user(lambda: read(root))
    assert said.startswith(f"NoPermission: --gemma-root {root}") and "you may not" in said
