"""torch.export graphs: a Program traced once for all ranks into files that other processes load,
run and read.

The files hold ATen operations and functional collectives, no weights and no pickle. What a step
costs (collectives, FLOPs, operations) is read from them.
"""

import hashlib
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ltx_neuron.backends.manifest import graph_file
from ltx_neuron.files import MANIFEST, write_json
from ltx_neuron.models.programs import Program

GROUP = "0"  # c10d's name of the default group, the same in every process


class TorchDistComm:
    """Comm over the default process group, in the form that TorchNeuron lowers: plain all-reduces
    only.

    Statistics (one number per token: last dimension 1) travel in one flat buffer; activations
    travel alone, because concatenating a 50 MB activation costs more than a launch.
    """

    def __init__(self, size: int):
        self.size = size

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.size == 1:
            return tensors
        if any(t.shape[-1] != 1 for t in tensors):
            return tuple(_all_reduce(t) for t in tensors)
        flat = _all_reduce(torch.cat([t.flatten() for t in tensors]))
        parts = flat.split([t.numel() for t in tensors])
        return tuple(part.view(t.shape) for part, t in zip(parts, tensors, strict=True))


def _all_reduce(tensor: Tensor) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(tensor, "sum", GROUP))


@contextmanager
def fake_process_group(size: int, rank: int = 0):
    """A process group of `size` ranks in this one process that only records what is traced."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Named(nn.Module):
    """A graph's module taking its named inputs as keywords and returning a plain tuple: what
    torch.export can store."""

    def __init__(self, module: nn.Module, inputs: type):
        super().__init__()
        self.module, self.inputs = module, inputs

    def forward(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.module(self.inputs(**tensors)))


def trace(program: Program, name: str, dtype: torch.dtype) -> torch.export.ExportedProgram:
    """Export one graph of a program with meta tensors. Call inside a (fake or real) process
    group."""
    graph = program.graphs[name]
    example = {
        field: torch.empty(
            program.fields[field].shape, dtype=program.fields[field].dtype, device="meta"
        )
        for field in graph.inputs._fields
    }
    module = _Named(graph.module.to(dtype).eval().requires_grad_(False), graph.inputs)
    with torch.no_grad():
        exported = torch.export.export(module, (), example)
    kinds = torch.export.graph_signature.InputKind
    if any(
        spec.kind not in (kinds.PARAMETER, kinds.USER_INPUT)
        for spec in exported.graph_signature.input_specs
    ):
        raise RuntimeError(
            "the graph holds a tensor of its own; make it an input instead"
        )  # traced on meta, it has no value
    return _without_traces_of_the_tracer(exported)


def _without_traces_of_the_tracer(
    exported: torch.export.ExportedProgram,
) -> torch.export.ExportedProgram:
    """Drop what ties a graph to where it was traced: source locations, and assertions that tensors
    are on meta."""
    for node in list(exported.graph.nodes):
        if node.target == torch.ops.aten._assert_tensor_metadata.default:
            exported.graph.erase_node(node)
            continue
        if "device" in node.kwargs:
            raise RuntimeError(
                f"the graph makes a tensor of its own ({node.target}); make it an input instead"
            )
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(key, None)
    exported.graph_module.recompile()
    return exported


def compile_program(program: Program, folder: Path, identity: dict, dtype: torch.dtype) -> None:
    """Trace every graph of a program into `folder` and, last, write the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    graphs = {}
    for name, graph in program.graphs.items():
        exported = trace(program, name, dtype)
        file = graph_file(name)
        _save(exported, folder / file)
        graphs[name] = {
            "file": file,
            "sha256": hashlib.sha256((folder / file).read_bytes()).hexdigest(),
            "parameters": {
                _parameter(spec.target): list(exported.state_dict[spec.target].shape)
                for spec in exported.graph_signature.input_specs
                if spec.kind == torch.export.graph_signature.InputKind.PARAMETER
            },
            "inputs": list(graph.inputs._fields),
            "outputs": list(graph.outputs._fields),
            "cost": cost(exported),
        }
    fields = {
        name: {**field._asdict(), "dtype": str(field.dtype).removeprefix("torch.")}
        for name, field in program.fields.items()
    }
    content = {"identity": identity, "graphs": graphs, "runs": program.runs, "fields": fields}
    write_json(folder / MANIFEST, content)


def cost(exported: torch.export.ExportedProgram) -> dict[str, int]:
    """What one call of a graph costs a rank, counted in the graph: all-reduces, their bytes, and
    FLOPs."""
    reduced = [
        n.meta["val"]
        for n in exported.graph.nodes
        if n.target == torch.ops._c10d_functional.all_reduce.default
    ]
    arguments = [n.meta["val"] for n in exported.graph.nodes if n.op == "placeholder"]
    with FlopCounterMode(display=False) as counter:
        exported.graph_module(
            *(torch.empty(a.shape, dtype=a.dtype, device="meta") for a in arguments)
        )
    total = sum(t.numel() * t.dtype.itemsize for t in reduced)
    return {
        "collectives": len(reduced),
        "collective_bytes": total,
        "flops": counter.get_total_flops(),
    }


def _parameter(target: str) -> str:
    return target.removeprefix("module.")


def _save(exported: torch.export.ExportedProgram, path: Path) -> None:
    exported._example_inputs = None  # torch would store them as a pickle
    temporary = path.with_name(path.name + ".partial.pt2")
    torch.export.save(exported, temporary)
    temporary.replace(path)
