"""The parts of the NxD backend that need neither NxD nor PyTorch/XLA; the rest is in test/xla."""

import inspect
import os
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

from ltx_neuron.backends import nki, registry
from ltx_neuron.backends.export import TorchDistComm
from ltx_neuron.backends.nxd import compile as nxd_compile
from ltx_neuron.backends.nxd import runtime
from ltx_neuron.backends.nxd.buffers import Buffers, copies_needed
from ltx_neuron.backends.nxd.runtime import GraphInputs
from ltx_neuron.backends.ranks import Call
from ltx_neuron.config.profiles import resolve
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.models.programs import Graph
from ltx_neuron.models.signatures import PASSES, Field

TRN2, NXD, TORCH = "trn2.3xlarge", ("backend=nxd",), ("backend=torchdist",)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"y": inputs["x"] * self.weight}


FIELDS = {"step": Field((1,), torch.int32), "x": Field((1, 3, 4), torch.bfloat16)}
SCALE = Graph(Scale(), ("step", "x"), ("y",))


def test_what_nxd_traces_has_a_keyword_for_each_input_no_default_and_its_own_weights_or_none():
    """ModelBuilder V2 reads the signature: it refuses **tensors, and defaults that are not None. torch_neuronx may copy
    the module; a forward bound to the first one would mix them."""
    module = nxd_compile.traceable(SCALE)
    parameters = inspect.signature(module.forward).parameters
    assert [*parameters] == ["step", "x"]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters.values())
    assert [name for name, _ in module.named_parameters()] == ["module.weight"]
    second = deepcopy(module)
    with torch.no_grad():
        second.module.weight.fill_(3)
    assert [each(step=None, x=torch.ones(4))[0].mean().item() for each in (module, second)] == [1, 3]
    # A graph for several groups of blocks has none: bound to one group's, it would have to be loaded once for each.
    module = nxd_compile.traceable(SCALE, cut=True)
    assert [*inspect.signature(module.forward).parameters] == ["step", "x", "weight"]
    assert not [*module.parameters()] and not [*module.buffers()]
    for weight in (3.0, 5.0):
        (scaled,) = module(step=None, x=torch.ones(4), weight=torch.full((4,), weight))
        assert scaled.tolist() == [weight] * 4
    assert SCALE.module.weight.tolist() == [1] * 4
    name = nxd_compile.argument_name("transformer_blocks.0.attn1.to_q.weight")
    assert name == "transformer_blocks__0__attn1__to_q__weight" and name.isidentifier()


def test_small_tensors_are_summed_together_and_large_ones_alone(monkeypatch):
    """As torch_xla's all_reduce does with a list (core/xla_model.py), in place and as one operation."""
    calls = []

    def all_reduce(kind: str, inputs: list[Tensor], groups: list[list[int]]) -> None:
        calls.append([tensor.numel() for tensor in inputs])
        inputs[:] = [tensor * len(groups[0]) for tensor in inputs]

    model = SimpleNamespace(REDUCE_SUM="sum", all_reduce=all_reduce)
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(core=SimpleNamespace(xla_model=model)))
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", model)
    most = nxd_compile.TOGETHER_BYTES // 4
    tensors = [torch.full((size,), float(size)) for size in (most + 1, 3, most + 2, most)]
    comm, meta = nxd_compile.XlaComm(4, [[0, 1, 2, 3]]), torch.ones(1, device="meta")
    summed = comm.sum(*tensors)
    assert comm.sum(meta) == (meta,)  # there may be no groups yet
    assert calls == [[3, most], [most + 1], [most + 2]]
    assert [float(tensor[0]) for tensor in summed] == [4.0 * tensor.numel() for tensor in tensors]


def test_example_inputs_are_of_the_fields_and_neither_zero_nor_constant():
    for cut, weights in ((False, {}), (True, {"weight": Field((4,), torch.float32)})):
        examples = nxd_compile.example_inputs(SCALE, FIELDS, cut)
        assert {name: Field(tuple(t.shape), t.dtype) for name, t in examples.items()} == FIELDS | weights
        assert all(t.all() and (t.numel() == 1 or t.unique().numel() > 1) for t in examples.values())


PAIRS = {"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]]}  # two kinds of groups of 4 ranks


def shape(*dimensions: int, dtype: int = 11, parts: tuple = ()):
    return SimpleNamespace(dimensions=dimensions, element_type=dtype, tuple_shapes=parts)


def hlo_of(*operations: tuple):
    """The HLO of a graph with these collectives: opcode, shape of the result, groups, and shapes of the operands."""
    instructions = []
    for opcode, result, groups, *operands in operations:
        ids = range(len(instructions), len(instructions) + len(operands))
        instructions += [SimpleNamespace(id=n, opcode="add", shape=each) for n, each in zip(ids, operands, strict=True)]
        of = {"operand_ids": ids, "replica_groups": [SimpleNamespace(replica_ids=ranks) for ranks in groups]}
        instructions.append(SimpleNamespace(id=ids.stop, opcode=opcode, shape=result, **of))
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


@pytest.mark.parametrize("opcode", ["all-reduce", "all-gather", "reduce-scatter"])
@pytest.mark.parametrize("over", [[], [[0, 1, 2, 3]], [[1, 0], [3, 2]], [[0, 1]]])
def test_a_graph_whose_collective_is_over_other_ranks_than_those_of_the_layout_is_not_compiled(opcode, over):
    """As a sum that was lowered without its groups: XLA takes none for the world."""
    for right in PAIRS.values():
        assert nxd_compile.collectives(hlo_of((opcode, shape(4), right, shape(4))), PAIRS)["collectives"] == 1
    with pytest.raises(RunError) as error:
        nxd_compile.collectives(hlo_of((opcode, shape(4), over, shape(4))), PAIRS)
    assert f"an {opcode} over ranks {over}, wanted one of" in str(error.value)


def test_what_contradicts_or_cannot_run_the_graphs_is_refused_and_other_values_of_the_user_stay():
    with pytest.raises(UserError, match="wanted --lnc=2 alone"):
        nxd_compile.compiler_flags(resolve(TRN2, (*NXD, "compiler_flags.dit=-O1 --lnc=1")), "dit")
    with pytest.raises(UserError, match="nkilib cannot be imported.*\n.*attention=matmul"):
        nki.register_for_xla(2)
    profile = replace(resolve(TRN2, NXD), environment=(("LTX_TEST_A", "ours"), ("LTX_TEST_B", "ours")))
    with mock.patch.dict(os.environ, {"LTX_TEST_A": "theirs", "NEURON_LOGICAL_NC_CONFIG": "theirs"}):
        with pytest.raises(UserError, match="NEURON_LOGICAL_NC_CONFIG is theirs.*compiled for 2.*unset"):
            nxd_compile.set_environment(profile)
        os.environ["NEURON_LOGICAL_NC_CONFIG"] = "2"
        nxd_compile.set_environment(profile)
        assert (os.environ["LTX_TEST_A"], os.environ["LTX_TEST_B"]) == ("theirs", "ours")


def test_the_profile_chooses_the_backend_and_the_identity_of_a_graph_names_what_compiled_it():
    ours, other = resolve(TRN2, NXD), resolve("cpu")
    assert isinstance(registry.comm(ours, 4), nxd_compile.XlaComm)
    assert isinstance(registry.comm(other, 4), TorchDistComm)
    identity = registry.identity(ours, "dit")
    assert identity["compiler_flags"] == ours.flags("dit") and ours.flags("dit").endswith("--lnc=2")
    assert {*identity["neuron"]} == {*nxd_compile.PACKAGES}
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


# --- which loaded copy of a graph owns a buffer ---------------------------------------------------


def call(graph: str, reads: list[str], writes: list[str]) -> Call:
    return Call(graph, 0, {name: name for name in reads}, {name: name for name in writes})


def test_a_graph_that_reads_its_own_output_has_two_copies_and_one_that_predicts_has_one_for_each_pass():
    buffers, head, blocks = Buffers(), call("head", ["latent"], ["hidden"]), call("blocks", ["hidden"], ["hidden"])
    assert [buffers.claim("v64", blocks) for _ in range(5)] == [0, 1, 0, 1, 0]
    for repeat in (2, 5):  # blocks of a step, and steps
        step = [head, *[blocks] * repeat, call("tail", ["hidden"], ["latent"])]
        assert copies_needed("v64", step * repeat) == {"head": 1, "blocks": 2, "tail": 1}
    predictions, calls = [f"{kind}_x0" for kind in PASSES], []
    for name in predictions:
        calls += [head, blocks, blocks, call("tail", ["hidden"], [name])]
    calls.append(call("guide", [*predictions, "latent", "guided"], ["latent", "guided"]))
    assert copies_needed("v64", calls) == {"head": 1, "blocks": 2, "tail": 4, "guide": 2}


def test_a_copy_does_not_run_while_one_of_its_two_outputs_is_still_named():
    buffers = Buffers()
    assert buffers.claim("v64", call("tail", [], ["latent", "finite"])) == 0
    # "latent" gets another owner, "finite" does not.
    buffers.upload("latent", [])
    assert buffers.claim("v64", call("tail", [], ["other"])) == 1
    buffers.upload("finite", [])
    assert buffers.claim("v64", call("tail", [], ["third"])) == 0


def test_buckets_have_copies_of_their_own_and_a_released_one_forgets_them_and_no_upload():
    buffers, step = Buffers(), call("step", ["latent"], ["latent"])
    buffers.upload("context", [])
    assert buffers.claim("v64", step) == buffers.claim("v256", step) == 0
    assert buffers.owners == {"latent": ("v256", "step", 0)}
    buffers.claim("v64", call("step", [], ["other"]))
    buffers.tensors |= {"latent": [], "other": []}
    buffers.release({"v64"})
    assert {*buffers.tensors} == {"context", "latent"} and {*buffers.owners} == {"latent"}


# --- the bound inputs of a graph ------------------------------------------------------------------

RANKS = 3


class Model:
    """NxD's methods, and a runtime that keeps what it was given. The graph does not use `unused`."""

    def __init__(self, route: str = "blocks"):
        self.local_ranks_size, self.route = RANKS, route
        self.flattener_map = {"blocks": lambda inputs: inputs[:-1][::-1]}
        self.spmd_models = {"blocks": SimpleNamespace(forward_ranked=self.forward_ranked)}

    def convert_dict_to_ordered_list(self, inputs: dict, positional: int) -> tuple[list, list[str]]:
        assert positional == 0
        return [*inputs.values()], [*inputs]

    def router(self, inputs: list[Tensor], names: list[str]) -> list[str]:
        shapes = [tuple(each.shape) for each in inputs]
        assert (names, shapes) == (["hidden", "table", "weight", "unused"], [(2,), (1,), (4,), ()])
        return [self.route]

    def forward_ranked(self, ranked) -> list[list[Tensor]]:
        self.given = [[*tensors] for tensors in ranked]
        return [[torch.tensor(rank), torch.tensor(-rank)] for rank in range(RANKS)]


def parts(*shape: int) -> list[Tensor]:
    return [torch.randn(shape) for _ in range(RANKS)]


def bound(model: Model, weight: list[Tensor]) -> GraphInputs:
    fields = {"hidden": Field((2,), torch.float32), "table": Field((1,), torch.float32)}
    return GraphInputs(model, "blocks", fields, {"weight": weight, "unused": parts()})


def test_a_warm_call_replaces_only_the_inputs_that_changed_on_a_rank(monkeypatch):
    replaced, inner = [], GraphInputs._set
    monkeypatch.setattr(GraphInputs, "_set", lambda self, name, x: replaced.append(name) or inner(self, name, x))
    model, weight, table = Model(), parts(4), parts(1)
    inputs = bound(model, weight)
    for hidden in (parts(2), parts(2)):
        replaced.clear()
        inputs.take("hidden", hidden)
        inputs.take("table", table)
        inputs.launch(model)
        # In the graph's order, without the input that it does not use.
        for rank, given in enumerate(model.given):
            assert [each.data_ptr() for each in given] == [each[rank].data_ptr() for each in (weight, table, hidden)]
    # The same tensors in another list are the same input; another tensor of one rank is not.
    inputs.take("table", [*table])
    assert replaced == ["hidden"]
    table[2] = torch.randn(1)
    inputs.take("table", table)
    assert replaced == ["hidden", "table"]
    # A further copy of the graph gets the inputs of the first.
    copy, changed = Model(), parts(2)
    inputs.take("hidden", changed)
    outputs = inputs.launch(copy)
    assert model.given[1][2] is hidden[1] and copy.given[1][2] is changed[1] and copy.given[2][1] is table[2]
    assert [[int(each) for each in output] for output in outputs] == [[0, 1, 2], [0, -1, -2]]


def test_shapes_and_dtypes_of_every_rank_and_the_routed_graph_are_checked():
    inputs = bound(Model(), parts(4))
    for wrong, text in ((torch.zeros(3), r"\(3,\)"), (torch.zeros(2).bfloat16(), "bfloat16")):
        with pytest.raises(RuntimeError, match=rf"blocks\.hidden: got .*{text}"):
            inputs.take("hidden", [*parts(2)[1:], wrong])
    with pytest.raises(RuntimeError, match="routes the inputs of blocks to head"):
        bound(Model("head"), parts(4))
