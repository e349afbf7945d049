"""The parts of the NxD backend that need neither NxD nor PyTorch/XLA; the rest is in test/xla."""

import inspect
import os
import socket
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import save_weights
from torch import Tensor, nn

from ltx_neuron.backends import export, nki, registry
from ltx_neuron.backends.export import TorchDistComm
from ltx_neuron.backends.nxd import compile as nxd_compile
from ltx_neuron.backends.nxd import runtime
from ltx_neuron.config.profiles import resolve
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.models.parallel import RowLinear
from ltx_neuron.models.programs import Graph, Program
from ltx_neuron.models.signatures import Field

TRN2, NXD, TORCH = "trn2.3xlarge", ("backend=nxd",), ("backend=torchdist",)


class Toy(nn.Module):
    def __init__(self, tp: int):
        super().__init__()
        self.comm, self.down = nxd_compile.XlaComm(tp), RowLinear(8, 16, tp, bias=False)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        (y,) = self.comm.sum(self.down.partial(inputs["x"]) * inputs["step"])
        return {"y": y}


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"y": inputs["x"] * self.weight}


FIELDS = {"step": Field((1,), torch.int32), "x": Field((1, 3, 4), torch.bfloat16)}
SCALE = Graph(Scale(), ("step", "x"), ("y",))


def toy() -> Graph:
    with torch.device("meta"):
        return Graph(Toy(tp=2).to(torch.bfloat16), ("step", "x"), ("y",))


def test_what_nxd_traces_has_a_keyword_for_each_input_no_default_and_its_own_weights():
    """ModelBuilder V2 reads the signature: it refuses **tensors, and defaults that are not None. torch_neuronx may copy
    the module; a forward bound to the first one would mix them."""
    module = nxd_compile.traceable(toy())
    parameters = inspect.signature(module.forward).parameters
    assert [*parameters] == ["step", "x"]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters.values())
    assert [name for name, _ in module.named_parameters()] == ["module.down.weight"]
    first = nxd_compile.traceable(SCALE)
    second = deepcopy(first)
    with torch.no_grad():
        second.module.weight.fill_(3)
    assert (first(step=None, x=torch.ones(1))[0], second(step=None, x=torch.ones(1))[0]) == (1, 3)


def test_a_graph_for_several_groups_of_blocks_takes_its_weights_as_inputs_and_has_none():
    """Bound to one group's weights, it would have to be loaded once for each."""
    module = nxd_compile.traceable(SCALE, cut=True)
    assert [*inspect.signature(module.forward).parameters] == ["step", "x", "weight"]
    assert not [*module.parameters()] and not [*module.buffers()]
    for weight in (3.0, 5.0):
        (scaled,) = module(step=None, x=torch.ones(2), weight=torch.tensor([weight]))
        assert scaled.tolist() == [weight] * 2
    assert SCALE.module.weight.item() == 1
    name = nxd_compile.argument_name("transformer_blocks.0.attn1.to_q.weight")
    assert name == "transformer_blocks__0__attn1__to_q__weight" and name.isidentifier()


def test_small_tensors_are_summed_together_and_large_ones_alone(monkeypatch):
    """torch_xla is stood in for by what its all_reduce does with a list (pytorch/xla, torch_xla/
    core/xla_model.py): the tensors are replaced in place, as one operation."""
    calls = []

    def all_reduce(kind: str, inputs: list[Tensor], groups: list[list[int]]) -> None:
        calls.append([tensor.numel() for tensor in inputs])
        inputs[:] = [tensor * len(groups[0]) for tensor in inputs]

    model = SimpleNamespace(REDUCE_SUM="sum", all_reduce=all_reduce)
    core = SimpleNamespace(xla_model=model)
    modules = {"": SimpleNamespace(core=core), ".core": core, ".core.xla_model": model}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"torch_xla{name}", module)
    most = nxd_compile.TOGETHER_BYTES // 4
    tensors = [torch.full((size,), float(size)) for size in (most + 1, 3, most + 2, most)]
    summed = nxd_compile.XlaComm(4, [[0, 1, 2, 3]]).sum(*tensors)
    assert calls == [[3, most], [most + 1], [most + 2]]
    assert [float(tensor[0]) for tensor in summed] == [4.0 * tensor.numel() for tensor in tensors]


def test_replicas_of_one_machine_have_communicators_of_their_own(monkeypatch):
    """The runtime of replicas on other cores would meet at one address otherwise."""
    large = resolve("trn2.48xlarge")
    monkeypatch.setattr(runtime.NxdRanks, "_started", None)
    with mock.patch.dict(os.environ, {"NEURON_RT_VISIBLE_CORES": "48-51"}), socket.socket() as other:
        os.environ.pop("NEURON_RT_ROOT_COMM_ID", None)
        other.bind(("127.0.0.1", 61234 + 48))
        with pytest.raises(UserError, match="port 61282 is taken: another run holds core 48"):
            runtime.NxdRanks(large, 4)
        other.close()
        runtime.NxdRanks(large, 4).close()
        assert os.environ["NEURON_RT_ROOT_COMM_ID"] == "127.0.0.1:61282"
        os.environ["NEURON_RT_ROOT_COMM_ID"] = "10.0.0.1:5000"  # the user's own
        runtime.NxdRanks(large, 4).close()
        assert os.environ["NEURON_RT_ROOT_COMM_ID"] == "10.0.0.1:5000"


@pytest.mark.parametrize("cut", [False, True])
def test_example_inputs_are_of_the_fields_different_objects_and_neither_zero_nor_constant(cut):
    examples = nxd_compile.example_inputs(toy(), FIELDS, cut)
    weights = {"down__weight": Field((16, 4), torch.bfloat16)} if cut else {}
    assert {name: Field(tuple(t.shape), t.dtype) for name, t in examples.items()} == FIELDS | weights
    assert all(t.unique().numel() > 1 for t in examples.values() if t.numel() > 1)
    assert all(t.all() for t in examples.values())


def test_flops_and_peak_bytes_are_counted_on_meta_without_nxd_and_without_ranks():
    program = Program({"toy": toy().module}, {"main": (("toy", 0),)}, FIELDS, {"y": FIELDS["x"]}, torch.bfloat16)
    cost, product = export.cost(export.trace(program, "toy", torch.bfloat16)), 3 * 16
    # bf16: the product, and the product times the step
    assert (cost["flops"], cost["peak_bytes"]) == (2 * 4 * product, 2 * 2 * product)


PAIRS = {"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]]}  # two kinds of groups of 4 ranks


def shape(*dimensions: int, dtype: int = 11, parts: tuple = ()):
    return SimpleNamespace(dimensions=dimensions, element_type=dtype, tuple_shapes=parts)


def hlo_of(*operations: tuple):
    """The HLO of a graph with these collectives: opcode, shape of the result, groups, and shapes of the operands."""
    instructions = []
    for opcode, result, groups, *operands in operations:
        first = len(instructions)
        for number, each in enumerate(operands, first):
            instructions.append(SimpleNamespace(id=number, opcode="add", shape=each))
        of = {"operand_ids": [*range(first, len(instructions))]}
        of["replica_groups"] = [SimpleNamespace(replica_ids=ranks) for ranks in groups]
        instructions.append(SimpleNamespace(id=len(instructions), opcode=opcode, shape=result, **of))
    return SimpleNamespace(computations=[SimpleNamespace(instructions=instructions)])


def test_collectives_and_their_bytes_are_counted_in_the_hlo_without_the_scalar_that_orders_them():
    token, (within, between) = shape(), PAIRS.values()
    together = shape(2, 3), shape(5, dtype=16), token
    hlo = hlo_of(
        ("all-reduce", shape(parts=together), within, *together),
        ("all-reduce", shape(4), within, shape(4)),
        ("all-gather", shape(1, 8, 3), between, shape(1, 4, 3), token),
        ("reduce-scatter", shape(parts=[shape(1, 2, 3), token]), within, shape(1, 4, 3)),
        ("all-reduce", shape(9), between, shape(9)),
    )
    gathered = scattered = 4 * 4 * 3
    assert nxd_compile.collectives(hlo, PAIRS) == {
        "collectives": 5,
        "collective_bytes": 4 * (6 + 4 + 9) + 2 * 5 + gathered + scattered,
        "all_gather_bytes": gathered,
        "reduce_scatter_bytes": scattered,
        "context_collectives": 2,
        # The other half of the gathered tokens, and a half twice of a sum.
        "context_bytes": gathered + 4 * 9,
    }


OTHERS = [
    *[(PAIRS, over) for over in ([], [[0, 1, 2, 3]], [[1, 0], [3, 2]], [[0, 1]])],
    ({"tp": [[0, 1, 2, 3]]}, [[0, 1], [2, 3]]),
]


@pytest.mark.parametrize("opcode", ["all-reduce", "all-gather", "reduce-scatter"])
@pytest.mark.parametrize(("groups", "over"), OTHERS)
def test_a_graph_whose_collective_is_over_other_ranks_than_those_of_the_layout_is_not_compiled(opcode, groups, over):
    """As a sum that was lowered without its groups: XLA takes none for the world."""
    for right in groups.values():
        assert nxd_compile.collectives(hlo_of((opcode, shape(4), right, shape(4))), groups)["collectives"] == 1
    with pytest.raises(RunError) as error:
        nxd_compile.collectives(hlo_of((opcode, shape(4), over, shape(4))), groups)
    assert f"an {opcode} over ranks {over}, wanted one of" in str(error.value)


def test_flags_have_the_cores_per_logical_core_of_the_profile_and_kernels_need_nkilib():
    assert nxd_compile.compiler_flags(resolve(TRN2, NXD), "dit").endswith("--lnc=2")
    contradicting = resolve(TRN2, (*NXD, "compiler_flags.dit=-O1 --lnc=1"))
    with pytest.raises(UserError, match="wanted --lnc=2 alone"):
        nxd_compile.compiler_flags(contradicting, "dit")
    with pytest.raises(UserError, match="nkilib cannot be imported.*\n.*attention=matmul"):
        nki.register_for_xla(2)


def test_an_environment_that_contradicts_the_graphs_is_refused_and_other_values_of_the_user_stay(monkeypatch):
    profile = replace(resolve(TRN2, NXD), environment=(("LTX_TEST_A", "ours"), ("LTX_TEST_B", "ours")))
    for name in ("LTX_TEST_A", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("LTX_TEST_B", "")  # removed afterwards
    monkeypatch.delenv("LTX_TEST_B")
    with pytest.raises(UserError, match="NEURON_LOGICAL_NC_CONFIG is theirs.*compiled for 2.*unset"):
        nxd_compile.set_environment(profile)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    nxd_compile.set_environment(profile)
    assert (os.environ["LTX_TEST_A"], os.environ["LTX_TEST_B"]) == ("theirs", "ours")


def test_the_profile_chooses_the_backend_and_the_identity_of_a_graph_names_what_compiled_it():
    ours, other = resolve(TRN2, NXD), resolve("cpu")
    assert isinstance(registry.comm(ours, 4), nxd_compile.XlaComm)
    assert isinstance(registry.comm(other, 4), TorchDistComm)
    identity = registry.identity(ours, "dit")
    assert identity["compiler_flags"] == ours.flags("dit") and {*identity["neuron"]} == {*nxd_compile.PACKAGES}
    assert registry.identity(other, "dit") == registry.identity(resolve(TRN2, TORCH), "dit") == {}
    # The compiler's target is that of the profile; Trainium2's graphs have none in their identity.
    assert registry.identity(resolve("trn3", NXD), "dit") == identity | {"target": "trn3"}


def test_weights_that_replace_others_are_those_of_their_folder_from_then_on(tmp_path):
    """Without NxD: of a loaded set, only what replacing touches."""
    held = SimpleNamespace(shapes={"w": (2,)}, dtype=torch.float32, tensors=[{"w": torch.zeros(2)}], folder=None)
    ranks = object.__new__(runtime.NxdRanks)
    ranks.tp, ranks._sets = 1, [held]
    ranks.replace_weights(other := save_weights(tmp_path / "b", {"w": torch.ones(2)}))
    assert held.folder == other and torch.equal(held.tensors[0]["w"], torch.ones(2))
