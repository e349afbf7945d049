"""torch.export graphs: a Program is traced once for all ranks, into files that rank processes load.

The files contain ATen operations and functional collectives, no weights and no pickle. This module
also counts the cost of a call in the graph itself.
"""

import io
import operator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx, nn
from torch._C import _distributed_c10d as c10d
from torch.export.graph_signature import InputKind
from torch.fx import config as fx_config
from torch.utils.flop_counter import FlopCounterMode

from ltx_neuron.backends import mesh
from ltx_neuron.backends.manifest import describe_graph, graph_file, write_manifest
from ltx_neuron.files import MANIFEST, whole_file
from ltx_neuron.models.programs import Program


class TorchDistComm:
    """Comm over a named process group, with collectives of one tensor each, as TorchNeuron lowers
    them. Statistics (last dimension 1, one number per token) are reduced in one flat buffer.
    Activations are reduced one by one, because copying 50 MB into a buffer costs more than a
    launch."""

    def __init__(self, size: int, group: str = mesh.WORLD):
        self.size, self.group = size, group

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # One rank needs neither a process group nor collectives.
        if self.size == 1:
            return tensors
        if any(t.shape[-1] != 1 for t in tensors):
            return tuple(_all_reduce(t, self.group) for t in tensors)
        flat = _all_reduce(torch.cat([t.flatten() for t in tensors]), self.group)
        parts = flat.split([t.numel() for t in tensors])
        return tuple(part.view(t.shape) for part, t in zip(parts, tensors, strict=True))

    # Along dimension 0, as both collectives are: the batch is 1. As operations, because the names
    # of torch's functions for them change between 2.12 and 2.13.
    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = _OPERATIONS.all_gather_into_tensor(tensor.flatten(0, 1), self.size, self.group)
        return functional.wait_tensor(gathered).unsqueeze(0)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        part = _OPERATIONS.reduce_scatter_tensor(tensor.flatten(0, 1), "sum", self.size, self.group)
        return functional.wait_tensor(part).unsqueeze(0)


_OPERATIONS = torch.ops._c10d_functional


def _all_reduce(tensor: Tensor, group: str) -> Tensor:
    # The functional form: what writes into its input cannot be traced into a graph. Waited for at
    # once, because the result is what comes next.
    return functional.wait_tensor(functional.all_reduce(tensor, "sum", group))  # pyright: ignore[reportArgumentType]


def name_groups(groups: mesh.Groups, **options: Any) -> list[str]:
    """Make this process a member of named groups (mesh.groups), inside a default process group.
    options: of new_group. Returns the names. new_group numbers its groups, differently in each
    rank; graphs need the same name in all."""
    for name, partition in groups.items():
        # Every process takes part in making every group.
        for group in [dist.new_group(ranks, **options) for ranks in partition]:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                c10d._register_process_group(name, group)  # pyright: ignore[reportArgumentType]
    return [*groups]


@contextmanager
def fake_process_group(size: int, rank: int = 0, groups: mesh.Groups = MappingProxyType({})):
    """A process group of `size` ranks within this process, for tracing only, with named groups of
    them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    names = name_groups(groups)
    try:
        yield
    finally:
        for name in names:
            c10d._unregister_process_group(name)  # pyright: ignore[reportArgumentType]
        dist.destroy_process_group()


class _Keywords(nn.Module):
    """A graph's module with its inputs as keywords and a tuple of outputs."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.module(tensors).values())


def trace(program: Program, name: str, dtype: torch.dtype) -> torch.export.ExportedProgram:
    """Export one graph of a program with meta tensors, without computing and without weights. Call
    it inside a process group of the Comm's size, fake_process_group or a real one. Raises
    RuntimeError for a graph that creates a tensor."""
    graph = program.graphs[name]
    fields = {name: program.fields[name] for name in graph.inputs}
    example = {
        name: torch.empty(field.shape, dtype=field.dtype, device="meta")
        for name, field in fields.items()
    }
    # On meta only the dtype changes. Without gradients this is the inference graph.
    module = _Keywords(graph.module.to(dtype).eval().requires_grad_(False))
    # Source lines of operations are dropped afterwards, so torch need not look them up. Releases
    # without this switch do.
    no_traces = mock.patch.object(fx_config, "do_not_emit_stack_traces", True, create=True)
    with torch.no_grad(), no_traces:
        exported = torch.export.export(module, (), example)
    kinds = {spec.kind for spec in exported.graph_signature.input_specs}
    if not kinds <= {InputKind.PARAMETER, InputKind.USER_INPUT}:
        # Traced on meta, such a tensor has no value.
        raise RuntimeError("the graph holds a constant tensor; make it an input instead")
    _drop_origin(exported)
    return exported


def _drop_origin(exported: torch.export.ExportedProgram) -> None:
    """Drop source locations, which would make equal graphs differ, and assertions that tensors are
    on meta."""
    for node in list(exported.graph.nodes):
        if node.target == torch.ops.aten._assert_tensor_metadata.default:
            exported.graph.erase_node(node)
            continue
        # Its device is meta. A rank would create it there, without a value.
        if "device" in node.kwargs:
            raise RuntimeError(
                f"the graph makes a constant tensor ({node.target}); make it an input instead"
            )
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(key, None)
    exported.graph_module.recompile()


def compile_program(program: Program, folder: Path, identity: dict, dtype: torch.dtype) -> None:
    """Trace every graph of a program into `folder` and, last, write the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    # A folder is finished as long as it has a manifest: not while its graphs are replaced.
    (folder / MANIFEST).unlink(missing_ok=True)
    graphs = {}
    for name, graph in program.graphs.items():
        exported, path = trace(program, name, dtype), folder / graph_file(name)
        exported._example_inputs = None  # torch would store them as a pickle
        # torch would write a path's name into the file: equal graphs would have different digests.
        torch.export.save(exported, content := io.BytesIO())
        with whole_file(path) as partial:
            partial.write_bytes(content.getbuffer())
        graphs[name] = describe_graph(graph, path, cost(exported))
    write_manifest(folder, identity, program, graphs)


def cost(exported: torch.export.ExportedProgram) -> dict[str, int]:
    """The cost of one call for one rank, counted in the graph.

    collectives       all-reduces, all-gathers and reduce-scatters
    collective_bytes  bytes that a rank contributes to them
    *_bytes           of these, bytes for all-gathers and for reduce-scatters
    context_collectives  of these, those between tensor-parallel groups
    context_bytes     bytes that a rank receives from other tensor-parallel groups
    elementwise_bytes bytes that norms, modulation, RoPE, gates and residuals read and write;
                      a compiler that fuses them moves fewer
    flops             of matrix products and attention, as torch counts them: a multiply-add is two
    attention_flops   of these, attention's
    peak_bytes        as peak_bytes() counts them
    """
    nodes = [node for node in exported.graph.nodes if node.target in _COLLECTIVES]
    collectives = [(_COLLECTIVES[n.target], _nbytes(n.args[0].meta["val"])) for n in nodes]
    between = [node for node in nodes if node.args[-1] != mesh.WORLD]
    # Meta tensors: operations are counted without computing.
    arguments = [
        torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta")
        for node in exported.graph.nodes
        if node.op == "placeholder"
    ]
    with FlopCounterMode(display=False) as counter:
        exported.graph_module(*arguments)
    flops = counter.get_flop_counts().get("Global", {})
    return {
        **collective_cost(collectives),
        "context_collectives": len(between),
        "context_bytes": sum(map(_received, between)),
        "elementwise_bytes": sum(map(_elementwise_bytes, exported.graph.nodes)),
        "flops": counter.get_total_flops(),
        "attention_flops": sum(flops.get(operation, 0) for operation in _ATTENTION),
        "peak_bytes": peak_bytes(exported),
    }


def _received(node: fx.Node) -> int:
    """Bytes that a rank receives from others in a collective of a named group."""
    (source,), result = node.all_input_nodes, _nbytes(node.meta["val"])
    sent = _nbytes(source.meta["val"])
    if node.target is _OPERATIONS.all_reduce.default:
        return received_in_sum(result, c10d._resolve_process_group(node.args[-1]).size())  # pyright: ignore[reportArgumentType]
    return result - sent


def received_in_sum(size: int, ranks: int) -> int:
    """Bytes that a rank receives in an all-reduce of `size` bytes: a reduce-scatter, then an
    all-gather."""
    return 2 * size * (ranks - 1) // ranks


def largest_collective(exported: torch.export.ExportedProgram) -> int:
    """Bytes of a graph's largest collective: the larger of its input and output."""
    sums = [node for node in exported.graph.nodes if node.target in _COLLECTIVES]
    ends = [max(_nbytes(n.args[0].meta["val"]), _nbytes(n.meta["val"])) for n in sums]
    return max(ends, default=0)


def collective_cost(sizes: list[tuple[str, int]]) -> dict[str, int]:
    """The entries of `cost` for collectives. sizes: (kind, as in _COLLECTIVES; a rank's bytes)."""
    return {
        "collectives": len(sizes),
        "collective_bytes": sum(size for _, size in sizes),
        "all_gather_bytes": sum(size for kind, size in sizes if kind == "all_gather"),
        "reduce_scatter_bytes": sum(size for kind, size in sizes if kind == "reduce_scatter"),
    }


_COLLECTIVES = {
    _OPERATIONS.all_reduce.default: "all_reduce",
    _OPERATIONS.all_gather_into_tensor.default: "all_gather",
    _OPERATIONS.reduce_scatter_tensor.default: "reduce_scatter",
}


def _elementwise_bytes(node: fx.Node) -> int:
    """Bytes that an operation reads and writes; 0 for views, products, attention and
    collectives."""
    computes = node.op == "call_function" and node.target not in (*_COLLECTIVES, *_NOT_ELEMENTWISE)
    value = node.meta.get("val")
    if not computes or not isinstance(value, Tensor) or _is_view(node):
        return 0
    return sum(_nbytes(n.meta["val"]) for n in node.all_input_nodes) + _nbytes(value)


# The operations that the kernels of models.attention consist of; no other product is a bmm.
_ATTENTION = {
    torch.ops.aten.bmm,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.ltx_neuron.attention_cte,
}
_NOT_ELEMENTWISE = {
    operator.getitem,
    _OPERATIONS.wait_tensor.default,
    torch.ops.aten.linear.default,
    torch.ops.aten.conv2d.default,
    *(operation.default for operation in _ATTENTION),
}


def peak_bytes(exported: torch.export.ExportedProgram) -> int:
    """Peak bytes of intermediate tensors when a graph's operations run in order. A tensor lives
    until its last use, the graph's outputs until the end. Weights, inputs, and operations that may
    return a view do not count."""
    nodes = [node for node in exported.graph.nodes if node.op == "call_function"]
    position = {node: i for i, node in enumerate(nodes)}
    freed_after = [0] * (len(nodes) + 1)  # the last entry is the end of the graph
    alive = peak = 0
    for index, node in enumerate(nodes):
        value = node.meta.get("val")
        size = _nbytes(value) if isinstance(value, Tensor) and not _is_view(node) else 0
        # A user without a position is the graph's output node.
        last_use = max((position.get(user, len(nodes)) for user in node.users), default=index)
        freed_after[last_use] += size
        alive += size
        peak = max(peak, alive)
        alive -= freed_after[index]
    return peak


def _is_view(node: torch.fx.Node) -> bool:
    # An operator's schema lists the arguments with which its result may share memory. In-place
    # writes return an argument too, but are not views.
    schema = getattr(node.target, "_schema", None)
    return bool(schema) and any(
        argument.alias_info and not argument.alias_info.is_write for argument in schema.arguments
    )


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
