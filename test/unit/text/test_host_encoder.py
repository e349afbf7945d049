"""A prompt and its negative are encoded in one pass, and each comes out as if it were alone. The host maps a layer when
it is its turn, and multiplies with weights as they are stored."""

import os
import shutil
from functools import partial
from pathlib import Path

import helpers
import pytest
import torch
from helpers import STREAMS, locked, one_thread, randn, rel, said_to_an_ordinary_user  # noqa: F401
from safetensors.torch import save_file
from torch import nn

from ltx_neuron.config.gemma import gemma_config
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.sampling.guidance import NEGATIVE_PROMPT
from ltx_neuron.text import host_encoder, inputs
from ltx_neuron.text.host_encoder import HostTextEncoder, MappedWeights, StoredLinear, StreamedLayers
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.tensorfile import TensorFile

# Four layers of a width of 32 and at most 256 tokens: the sums of an attention have more, masked, summands
ALONE = helpers.fp32_bound(*helpers.block_summands(32, 256, attentions=1) * 4)
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


@pytest.mark.parametrize("pair", [("night, fog", PUPPY), (PUPPY, NEGATIVE_PROMPT)])
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


def test_a_file_or_folder_of_gemma_that_cannot_be_read_is_refused_by_name(tiny, tmp_path):
    readers = {"config.json": gemma_config, "model.safetensors": gemma_files}
    for name, read in (readers | {"tokenizer_config.json": inputs.load_tokenizer}).items():
        root = shutil.copytree(tiny.gemma_root, tmp_path / name)
        with locked(root):
            message = said_to_an_ordinary_user(partial(read, root))
        assert message.startswith(f"NoPermission: --gemma-root {root}") and "you may not" in message
        (root / name).unlink()
        os.mkfifo(root / name)
        with pytest.raises(UserError, match=f"{name}: that is a named pipe, wanted a regular file"):
            read(root)


LAYERS, WIDTH = 3, 24
EQUAL = helpers.fp32_bound(WIDTH)


class Layer(nn.Module):
    """What the names of Gemma3's layers allow: a matrix and a vector."""

    def __init__(self):
        super().__init__()
        self.mlp, self.input_layernorm = nn.Module(), nn.Module()
        self.mlp.down_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.input_layernorm.weight = nn.Parameter(torch.empty(WIDTH))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["in bf16", "in fp32"])
def test_each_layer_has_its_own_weights_when_it_is_its_turn_and_none_afterwards(tmp_path, monkeypatch, dtype):
    tensors, path, announced, places = {}, tmp_path / "model.safetensors", [], []
    for index in range(LAYERS):
        tensors[f"layers.{index}.mlp.down_proj.weight"] = randn(WIDTH, WIDTH, seed=index).bfloat16()
        tensors[f"layers.{index}.input_layernorm.weight"] = randn(WIDTH, seed=index).bfloat16()
    save_file({f"language_model.model.{name}": tensor for name, tensor in tensors.items()}, path)
    source = Source(SHARDED_MODELS["gemma3"], [TensorFile(path, "made here")])
    with torch.device("meta"):
        layers = StreamedLayers([Layer() for _ in range(LAYERS)], "layers.", MappedWeights(source, dtype))
    prefetch = source.prefetch
    monkeypatch.setattr(source, "prefetch", lambda name: (announced.append(name), prefetch(name)))
    for prompt in range(2):  # a second one finds all as the first one did, and what is mapped needs no announcement
        for index, layer in enumerate(layers):
            for name, value in layer.state_dict().items():
                assert torch.equal(value.to(dtype), tensors[f"layers.{index}.{name}"].to(dtype))
            # Vectors are cast, whatever the matrices are.
            assert layer.input_layernorm.weight.dtype == dtype
            places.append(layer.mlp.down_proj.weight.data_ptr())
            # The system has heard of the next layer before it is its turn.
            last = min(index + 2, LAYERS) if prompt == 0 else LAYERS
            assert {name.split(".")[1] for name in announced} == {str(i) for i in range(1, last)}
        assert all(parameter.is_meta for parameter in layers.parameters())
        assert len(announced) == (LAYERS - 1) * 2
    # Matrices are the file's own pages, mapped once.
    assert places[:LAYERS] == places[LAYERS:] and len({*places}) == LAYERS
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ours = [words[0].split("-") for words in maps if words[-1] == str(path)]
    assert all(any(int(start, 16) <= place < int(stop, 16) for start, stop in ours) for place in places)
    with pytest.raises(UserError, match="layers.3.mlp.down_proj.weight"):
        MappedWeights(source, dtype).fill(Layer(), f"layers.{LAYERS}.")


@pytest.mark.parametrize("rows", [7, 300], ids=["few rows", "many rows"])
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("outputs", [10, 3000])  # in one piece, and in several
@pytest.mark.parametrize("onednn", [True, False])
def test_products_are_those_of_the_weights_cast_to_fp32(weight, outputs, rows, onednn, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    for name in ("PIECE_ELEMENTS", "LARGE_PIECE_ELEMENTS"):
        monkeypatch.setattr(host_encoder, name, 2**15)
    layer = nn.Linear(WIDTH, outputs).requires_grad_(False)
    x = randn(2, rows, WIDTH)
    layer.weight = nn.Parameter(layer.weight.to(weight), requires_grad=False)
    expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    with StoredLinear():
        got = layer(x)
    assert got.dtype == torch.float32 and rel(got, expected) < EQUAL
