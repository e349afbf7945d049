"""The FX front end: reads exported programs and AOT graphs, TorchNeuron's input."""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from lint.rules import Collective, Finding, Group, Kind, Operation, Reading, Target, check
from ltx_neuron.backends import mesh
from ltx_neuron.backends.export import TorchDistComm, trace
from ltx_neuron.models.programs import Program

TITLE = "exported graphs (TorchNeuron)"
BACKEND = "torchdist"
SPELLING = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bool: "pred",
    torch.uint8: "u8",
    torch.int8: "s8",
    torch.int16: "s16",
    torch.int32: "s32",
    torch.int64: "s64",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def _aten(names: str) -> set[str]:
    return {f"aten.{name}" for name in names.split()}


# Elementwise arithmetic, matrix products, reductions over fixed dimensions, and reshapes that are
# known when compiling. No gather, index, scatter, sort, loop or random number: each is slow or
# refused on some device.
EXPORTED = _aten(
    """
    mul.Tensor add.Tensor sub.Tensor div.Tensor rsub.Scalar square.default sqrt.default
    rsqrt.default sigmoid.default gelu.default clamp_min.default abs.default floor.default
    eq.Tensor to.dtype clamp.default sin.default exp.default log.default reciprocal.default
    addcmul.default linear.default conv2d.default conv3d.default bmm.default softmax.int
    scaled_dot_product_attention.default
    layer_norm.default sum.dim_IntList sum.default mean.dim mean.default amax.default
    select.int slice.Tensor unsqueeze.default transpose.int unflatten.int flatten.using_ints
    view.default permute.default reshape.default cat.default stack.default chunk.default unbind.int
    split.Tensor split_with_sizes.default repeat_interleave.self_int expand.default squeeze.dim
    pad.default
    """
) | {"ltx_neuron.attention_cte.default"}
# Operations of torch.compile's graphs of the same modules: composite operations are decomposed.
TRACED = _aten(
    """
    _to_copy.default pow.Tensor_Scalar mm.default addmm.default convolution.default t.default
    clone.default _unsafe_view.default native_layer_norm.default constant_pad_nd.default
    _softmax.default _scaled_dot_product_flash_attention_for_cpu.default
    """
)
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
OPERATIONS = frozenset(EXPORTED | TRACED | {"placeholder", "constant"})
WAIT = "_c10d_functional.wait_tensor.default"


def require() -> None:
    """Nothing but torch."""


def comm(groups: mesh.Groups) -> TorchDistComm:
    """The Comm of a tensor-parallel group."""
    return TorchDistComm(len(groups[mesh.TENSOR][0]))


def target(groups: mesh.Groups) -> Target:
    """The allowed content of a graph for these groups of ranks."""
    # A graph means its tensor-parallel group by the default group's name.
    spelled = {mesh.WORLD if name == mesh.TENSOR else name: name for name in groups}
    return Target(
        operations=OPERATIONS,
        collectives={f"_c10d_functional.{name}.default": 1 for name in COLLECTIVES},
        reduction="sum",
        groups={text: Group(name, len(groups[name][0])) for text, name in spelled.items()},
    )


def check_fx(
    module: fx.GraphModule | torch.export.ExportedProgram, groups: mesh.Groups, graph: str = "graph"
) -> list[Finding]:
    """Findings in an exported program, or in an AOT graph that torch.compile gives a backend."""
    return check(graph, operations(module.graph), target(groups))


def read(
    program: Program, name: str, groups: mesh.Groups, dtype: torch.dtype, graph: str
) -> Reading:
    """One graph of a program made with TorchDistComms, exported and then compiled. Call it in a
    process group that has these groups."""
    try:
        exported = trace(program, name, dtype)
    # torch.export cannot export this graph: that is a finding.
    except RuntimeError as error:
        wrong = f"cannot be exported: {str(error).strip().splitlines()[0]}"
        do = "fix every size, branch on no data, make every tensor an input"
        return Reading("", lambda: ([], [Finding(graph, "the whole graph", wrong, do)]))

    def check_both() -> tuple[list[Operation], list[Finding]]:
        aot = compiled(exported)
        return operations(aot.graph), check_fx(exported, groups, graph) + check_fx(
            aot, groups, f"{graph}, compiled"
        )

    return Reading(text(exported), check_both)


def text(exported: torch.export.ExportedProgram) -> str:
    """Code and signature of a graph, without source locations. It must be the same on all ranks."""
    return "\n".join([exported.graph_module.code, str(exported.graph_signature)])


def compiled(exported: torch.export.ExportedProgram) -> fx.GraphModule:
    """The AOT graph that torch.compile passes to a backend for an exported graph. Runs nothing."""
    recorder = Recorder()
    with torch.no_grad():
        recorder(
            exported.graph_module,
            [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"],
        )
    (graph,) = recorder.graphs
    return graph


def operations(graph: fx.Graph) -> list[Operation]:
    """Every operation of a graph except the output, Python's unpacking of tuples, and waits for
    collectives."""
    nodes = [
        node for node in graph.nodes if node.op != "output" and node.target is not operator.getitem
    ]
    return [_operation(node) for node in nodes if str(node.target) != WAIT]


def _operation(node: fx.Node) -> Operation:
    name = {"placeholder": "placeholder", "get_attr": "constant"}.get(node.op, str(node.target))
    if "split_with_sizes" in name and [*node.args, 0][2] != 0:
        name += f" along dimension {node.args[2]}"
    operands = tuple(kind for used in node.all_input_nodes for kind in kinds(used))
    return Operation(
        name, node.name, kinds(node), operands, _collective(node) if "c10d" in name else None
    )


def kinds(node: fx.Node) -> tuple[Kind, ...]:
    """The tensors of a node's value, and its symbolic numbers."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    symbols = tuple(
        Kind("symbol", ())
        for v in values
        if isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool)
    )
    return tuple(_kind(v) for v in values if isinstance(v, Tensor)) + symbols


def _kind(value: Tensor) -> Kind:
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return Kind(SPELLING.get(value.dtype, str(value.dtype).removeprefix("torch.")), shape)


def _collective(node: fx.Node) -> Collective:
    assert isinstance(node.target, torch._ops.OpOverload)
    given: dict[str, Any] = {
        argument.name: value
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False)
    }
    given |= node.kwargs
    waited = all(str(user.target) == WAIT for user in node.users)
    size = given.get("group_size") or len(given.get("output_split_sizes", ())) or None
    return Collective(given.get("reduce_op", ""), given.get("group_name", ""), waited, size)


class Recorder:
    """A torch.compile backend that records every graph and runs it unchanged:
    torch.compile(f, backend=recorder)."""

    def __init__(self):
        from torch._dynamo.backends.common import aot_autograd

        self.graphs: list[fx.GraphModule] = []
        self._backend = aot_autograd(fw_compiler=self._keep, keep_inference_input_mutations=True)

    def __call__(self, module: fx.GraphModule, example_inputs: list):
        return self._backend(module, example_inputs)

    def _keep(self, module: fx.GraphModule, example_inputs: list):
        self.graphs.append(module)
        return module.forward
