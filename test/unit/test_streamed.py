"""The host maps a layer when it is its turn, and multiplies with weights as they are stored."""

from pathlib import Path

import pytest
import torch
from helpers import fp32_bound, one_thread, randn, rel  # noqa: F401
from safetensors.torch import save_file
from torch import nn

from ltx_neuron.errors import UserError
from ltx_neuron.host.products import AMX, BLAS, ONEDNN, Libraries, has_amx, multiplier
from ltx_neuron.text.streamed import HostKernels, MappedWeights, StreamedLayers
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.sharding import MODELS
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
    return Source(MODELS["gemma3"], [TensorFile(path, "made here")]), tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["in bf16", "in fp32"])
def test_each_layer_has_its_own_weights_when_it_is_its_turn_and_none_afterwards(stored, dtype):
    source, tensors = stored
    with torch.device("meta"):
        layers = StreamedLayers(
            [Layer() for _ in range(LAYERS)], "layers.", MappedWeights(source, dtype)
        )
    for _ in range(2):  # a second prompt finds all as the first one did
        for index, layer in enumerate(layers):
            for name, value in layer.state_dict().items():
                assert torch.equal(value.to(dtype), tensors[f"layers.{index}.{name}"].to(dtype))
            # Vectors are cast, whatever the matrices are.
            assert layer.input_layernorm.weight.dtype == dtype
        assert all(parameter.is_meta for parameter in layers.parameters())


def test_weights_are_the_files_own_pages_and_mapped_once(stored):
    source, tensors = stored
    dtype = next(iter(tensors.values())).dtype  # nothing is cast
    with torch.device("meta"):
        layers = StreamedLayers(
            [Layer() for _ in range(LAYERS)], "layers.", MappedWeights(source, dtype)
        )
    places = [
        [value.data_ptr() for layer in layers for value in layer.state_dict().values()]
        for _ in range(2)
    ]
    assert places[0] == places[1] and len(set(places[0])) == len(tensors)
    maps = Path("/proc/self/maps").read_text().splitlines()
    ours = [line.split()[0] for line in maps if line.endswith("/model.safetensors")]
    spans = [tuple(int(end, 16) for end in span.split("-")) for span in ours]
    assert all(any(start <= place < stop for start, stop in spans) for place in places[0])


def test_the_next_layer_is_announced_to_the_system_before_it_is_its_turn(stored):
    source, _ = stored
    with torch.device("meta"):
        layers = StreamedLayers(
            [Layer() for _ in range(LAYERS)], "layers.", MappedWeights(source, torch.float32)
        )
    announced, original = [], source.prefetch
    source.prefetch = lambda name: (announced.append(name), original(name))
    for index, _ in enumerate(layers):
        assert {name.split(".")[1] for name in announced} == {
            str(i) for i in range(1, min(index + 2, LAYERS))
        }
    first = list(announced)
    for _ in layers:
        pass
    assert announced == first  # what is mapped needs no announcement


def test_a_source_without_a_layers_weights_is_refused(stored):
    source, _ = stored
    with pytest.raises(UserError, match="layers.3.mlp.down_proj.weight"):
        MappedWeights(source, torch.float32).fill(Layer(), f"layers.{LAYERS}.")


NEEDS_AMX = pytest.mark.skipif(not has_amx(), reason="this CPU has no AMX")


@pytest.mark.parametrize("library", [BLAS, ONEDNN, pytest.param(AMX, marks=NEEDS_AMX)])
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("outputs", [10, 3000])  # in one piece, and in several
def test_products_are_those_of_the_weights_cast_to_fp32(weight, outputs, library, monkeypatch):
    monkeypatch.setattr("ltx_neuron.text.streamed._PIECE_ELEMENTS", 2**15)
    layer = nn.Linear(WIDTH, outputs).requires_grad_(False)
    x, wanted = randn(2, 7, WIDTH), None
    layer.weight = nn.Parameter(layer.weight.to(weight), requires_grad=False)
    wanted = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    with HostKernels(Libraries(few=library)):
        got = layer(x)
    assert got.dtype == torch.float32 and rel(got, wanted) < EQUAL


def test_activations_of_another_dtype_are_multiplied_as_ever():
    x, weight = randn(3, WIDTH).bfloat16(), randn(5, WIDTH).bfloat16()
    wanted = nn.functional.linear(x, weight)
    with HostKernels():
        assert torch.equal(nn.functional.linear(x, weight), wanted)


def exact_and_amx(x, weight):
    """A product in float64, and by the kernel, in memory that held something else."""
    out = torch.full((len(x), len(weight)), torch.nan)
    multiplier(AMX)(x, weight, out)
    return x.double() @ weight.double().t(), out


@NEEDS_AMX
@pytest.mark.parametrize("inputs", [1, 31, 32, 97, 512, 513, 1100])
@pytest.mark.parametrize("outputs", [1, 16, 63, 129, 300])
def test_the_matrix_units_product_is_as_exact_as_one_in_float32(inputs, outputs):
    weight = randn(outputs, inputs, seed=1).bfloat16()
    for rows in (1, 15, 16, 17, 60, 70):
        x = randn(rows, inputs, seed=rows)
        wanted, got = exact_and_amx(x, weight)
        assert rel(got, wanted) < 2e-7  # libraries: 2e-7 to 5e-7, for more rows than one


@NEEDS_AMX
def test_more_rows_than_are_taken_at_once_and_shared_out_among_threads(
    one_thread,  # noqa: F811
):
    x, weight = randn(1100, 70), randn(600, 70, seed=1).bfloat16()
    wanted, alone = exact_and_amx(x, weight)
    assert rel(alone, wanted) < fp32_bound(70)
    torch.set_num_threads(3)
    assert torch.equal(exact_and_amx(x, weight)[1], alone)  # threads decide on no bit


@NEEDS_AMX
def test_all_24_bits_of_an_activation_are_multiplied():
    x = torch.tensor([[1 + 2**-23, -(2**-100) * (1 + 2**-12), 2.0**127 * (2 - 2**-23), 0.0]])
    for place in range(4):
        weight = torch.eye(4)[place : place + 1].bfloat16()
        assert exact_and_amx(x, weight)[1].item() == x[0, place].item()


@NEEDS_AMX
def test_what_is_not_finite_stays_visible():
    for broken in (torch.nan, torch.inf):
        got = exact_and_amx(torch.tensor([[broken, 1.0]]), torch.ones(3, 2).bfloat16())[1]
        assert not got.isfinite().any()


@NEEDS_AMX
def test_torchs_own_products_in_bf16_stay_what_they_are_between_ours():
    """oneDNN uses the same tiles, and need not set them up anew."""
    x, weight = randn(100, 200).bfloat16(), randn(300, 200, seed=1).bfloat16()
    wanted = nn.functional.linear(x, weight)
    for _ in range(3):
        exact_and_amx(x.float(), weight)
        assert torch.equal(nn.functional.linear(x, weight), wanted)


def test_a_compiler_told_of_another_cpu_is_not_asked_for_tiles(monkeypatch):
    has_amx.cache_clear()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert not has_amx()
    has_amx.cache_clear()
