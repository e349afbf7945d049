"""The host maps a layer when it is its turn, and multiplies with weights as they are stored."""

from pathlib import Path

import pytest
import torch
from helpers import fp32_bound, randn, rel
from safetensors.torch import save_file
from torch import nn

from ltx_neuron.errors import UserError
from ltx_neuron.text import host_encoder
from ltx_neuron.text.host_encoder import MappedWeights, StoredLinear, StreamedLayers
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.tensorfile import TensorFile

LAYERS, WIDTH = 3, 24
EQUAL = fp32_bound(WIDTH)


class Layer(nn.Module):
    """What the names of Gemma3's layers allow: a matrix and a vector."""

    def __init__(self):
        super().__init__()
        self.mlp, self.input_layernorm = nn.Module(), nn.Module()
        self.mlp.down_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.input_layernorm.weight = nn.Parameter(torch.empty(WIDTH))


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["stored bf16", "stored fp32"])
def stored(request, tmp_path):
    """A source of three layers, and its tensors by their names in it."""
    tensors = {}
    for index in range(LAYERS):
        tensors[f"layers.{index}.mlp.down_proj.weight"] = randn(WIDTH, WIDTH, seed=index)
        tensors[f"layers.{index}.input_layernorm.weight"] = randn(WIDTH, seed=index)
    tensors = {name: tensor.to(request.param) for name, tensor in tensors.items()}
    path = tmp_path / "model.safetensors"
    save_file({f"language_model.model.{name}": tensor for name, tensor in tensors.items()}, path)
    return Source(SHARDED_MODELS["gemma3"], [TensorFile(path, "made here")]), tensors


def layers_of(source: Source, dtype: torch.dtype) -> StreamedLayers:
    with torch.device("meta"):
        return StreamedLayers([Layer() for _ in range(LAYERS)], "layers.", MappedWeights(source, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["in bf16", "in fp32"])
def test_each_layer_has_its_own_weights_when_it_is_its_turn_and_none_afterwards(stored, dtype):
    source, tensors = stored
    layers = layers_of(source, dtype)
    for _ in range(2):  # a second prompt finds all as the first one did
        for index, layer in enumerate(layers):
            for name, value in layer.state_dict().items():
                assert torch.equal(value.to(dtype), tensors[f"layers.{index}.{name}"].to(dtype))
            # Vectors are cast, whatever the matrices are.
            assert layer.input_layernorm.weight.dtype == dtype
        assert all(parameter.is_meta for parameter in layers.parameters())


def test_weights_are_the_files_own_pages_and_mapped_once(stored):
    source, tensors = stored
    layers = layers_of(source, next(iter(tensors.values())).dtype)  # nothing is cast
    places = [[value.data_ptr() for layer in layers for value in layer.state_dict().values()] for _ in range(2)]
    assert places[0] == places[1] and len(set(places[0])) == len(tensors)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ours = [words[0].split("-") for words in maps if words[-1].endswith("/model.safetensors")]
    assert all(any(int(start, 16) <= place < int(stop, 16) for start, stop in ours) for place in places[0])


def test_the_next_layer_is_announced_to_the_system_before_it_is_its_turn(stored, monkeypatch):
    source, _ = stored
    layers, announced, prefetch = layers_of(source, torch.float32), [], source.prefetch
    monkeypatch.setattr(source, "prefetch", lambda name: (announced.append(name), prefetch(name)))
    for index, _ in enumerate(layers):
        assert {name.split(".")[1] for name in announced} == {str(i) for i in range(1, min(index + 2, LAYERS))}
    count = len(announced)
    assert [*layers] and len(announced) == count  # what is mapped needs no announcement


def test_a_source_without_a_layers_weights_is_refused(stored):
    with pytest.raises(UserError, match="layers.3.mlp.down_proj.weight"):
        MappedWeights(stored[0], torch.float32).fill(Layer(), f"layers.{LAYERS}.")


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
