"""Graphs for NxD: one process traces a program for all ranks with ModelBuilder V2 and compiles it
to files; nxd.py runs them.

The same programs, fields and manifests as export.py; a graph is one NEFF in a file of NxD's own.
neuronx-cc is behind the one call of `builder.compile`. Written from NxD 0.18's source; NxD is
supported up to SDK 2.33, with torch 2.9.
"""

import inspect
import math
import os
import shlex
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ltx_neuron.backends import nki
from ltx_neuron.backends.manifest import graph_file, sha256
from ltx_neuron.backends.neuron_errors import explained
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, write_json
from ltx_neuron.models.programs import Graph, Program
from ltx_neuron.models.signatures import Field
from ltx_neuron.profiles import Profile

PACKAGES = ("neuronx-distributed", "torch-neuronx", "neuronx-cc", "libneuronxla", "torch-xla")
WRAPPED = "module."  # prefix of a graph's parameters in the module that NxD traces


def versions() -> dict[str, str | None]:
    """Installed versions of what makes and reads the graphs: NxD's files fit no other ones."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def set_environment(profile: Profile) -> None:
    """What the compiler and the runtime read from the environment, at their import. The user's own
    values stay."""
    for name, value in profile.environment:
        os.environ.setdefault(name, value)
    lnc = os.environ.setdefault("NEURON_LOGICAL_NC_CONFIG", str(profile.lnc))
    if lnc != str(profile.lnc):
        raise UserError(
            f"NEURON_LOGICAL_NC_CONFIG is {lnc}, profile {profile.name} is compiled for"
            f" {profile.lnc}: graphs and runtime must agree. Type: unset NEURON_LOGICAL_NC_CONFIG"
        )


class XlaComm:
    """Comm that sums all tensors of a call in one variadic all-reduce: over NxD's replica groups,
    or those given."""

    def __init__(self, size: int, groups: list[list[int]] | None = None):
        self.size, self.groups = size, groups

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.size == 1 or tensors[0].is_meta:
            return tensors
        import torch_xla.core.xla_model as xm

        summed = list(tensors)
        xm.all_reduce(xm.REDUCE_SUM, summed, groups=self.groups or _replica_groups())
        return tuple(summed)


def _replica_groups() -> list[list[int]]:
    from neuronx_distributed.parallel_layers import parallel_state

    return parallel_state.get_tensor_model_parallel_replica_groups()


def traceable(graph: Graph) -> nn.Module:
    """A graph's module with one keyword for each of its inputs: NxD reads the signature and refuses
    **tensors."""

    def forward(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.module(graph.inputs(**tensors)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind) for name in ("self", *graph.inputs._fields)]
    )
    module = type("Traceable", (nn.Module,), {"forward": forward})()
    module.module = graph.module
    return module


def example_inputs(graph: Graph, fields: dict[str, Field]) -> dict[str, Tensor]:
    """Distinct, non-constant tensors: NxD merges inputs that are one object, and a constant may be
    folded."""
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.rand(fields[name].shape, generator=generator) + 0.5
        for name in graph.inputs._fields
    }
    return {name: (value * 4).to(fields[name].dtype) for name, value in drawn.items()}


def trace(program: Program, name: str, tag: str):
    """A ModelBuilder that has traced one graph for all ranks. Call inside NxDParallelState."""
    from neuronx_distributed import ModelBuilder

    graph = program.graphs[name]
    module = traceable(graph).to_empty(device="cpu")
    builder = ModelBuilder(module).trace(kwargs=example_inputs(graph, program.fields), tag=tag)
    traced = builder.trace_artifacts_collection[tag].weight_name_to_idx
    if lost := sorted({parameter for parameter, _ in module.named_parameters()} - {*traced}):
        raise RuntimeError(
            f"{name}: weights that became constants or are not used: {', '.join(lost)}"
        )
    return builder


def compiler_flags(profile: Profile, model: str) -> str:
    """neuronx-cc's flags for a model, which must say the --lnc that the runtime has."""
    flags = profile.flags(model)
    said = {word.partition("=")[2] for word in shlex.split(flags) if word.startswith("--lnc")}
    if said != {str(profile.lnc)}:
        raise UserError(
            f"profile {profile.name}: compiler flags of {model} are {flags!r}, wanted"
            f" --lnc={profile.lnc} alone"
        )
    return flags


def compile_program(
    make: Callable[[], Program],
    folder: Path,
    identity: dict,
    dtype: torch.dtype,
    profile: Profile,
    tp: int,
) -> None:
    """Trace and compile every graph of the program that `make()` returns into `folder` and, last,
    write the manifest.

    ModelBuilder V2 never looks into the compile cache: a folder that has its manifest is not
    compiled again by the caller.
    """
    set_environment(profile)
    from neuronx_distributed import NxDParallelState

    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    flags, graphs = compiler_flags(profile, identity["model"]), {}
    if profile.attention == "nki":
        nki.register_for_xla(profile.lnc)
    with (
        explained(),
        NxDParallelState(world_size=tp, tensor_model_parallel_size=tp, lnc_size=profile.lnc),
    ):
        program = make()
        _check_calls(program)
        for name in program.graphs:
            graphs[name] = _compile(
                program,
                name,
                f"{identity['model']}-{identity['bucket']}-{name}",
                folder,
                dtype,
                flags,
            )
    fields = {
        name: {**field._asdict(), "dtype": str(field.dtype).removeprefix("torch.")}
        for name, field in program.fields.items()
    }
    content = {
        "identity": identity,
        "graphs": graphs,
        "runs": program.runs,
        "fields": fields,
        "compiler_flags": flags,
    }
    write_json(folder / MANIFEST, content)


def _check_calls(program: Program) -> None:
    """A graph's weights are bound when it is loaded, so one that stands for several groups of
    blocks would load as often."""
    called = [name for calls in program.runs.values() for name, _ in calls]
    if len(called) != len({*called}):
        raise UserError(
            "NxD runs a step as one graph, this program cuts it into groups of blocks. Type"
            " --blocks-per-graph 0"
        )


def _compile(
    program: Program, name: str, tag: str, folder: Path, dtype: torch.dtype, flags: str
) -> dict:
    """Trace and compile a graph; returns what the manifest says of it. Working files, with the log,
    stay if it fails."""
    graph, file, workdir = program.graphs[name], graph_file(name, "nxd"), folder / "neuronx-cc"
    graph.module.to(dtype).eval().requires_grad_(False)
    spent = flops(graph, program.fields)  # while it is on meta
    builder = trace(program, name, tag)
    compiled = builder.compile(compiler_workdir=str(workdir), compiler_args=flags)
    temporary = folder / f"{file}.partial"
    compiled.save(str(temporary))
    temporary.replace(folder / file)
    shutil.rmtree(workdir)
    return {
        "file": file,
        "sha256": sha256(folder / file),
        "tag": tag,
        "parameters": {
            parameter: list(t.shape) for parameter, t in graph.module.named_parameters()
        },
        "inputs": list(graph.inputs._fields),
        "outputs": list(graph.outputs._fields),
        "cost": {**collectives(builder.trace_artifacts_collection[tag].hlo), "flops": spent},
    }


_DTYPE_BYTES = {
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    10: 2,
    11: 4,
    12: 8,
    16: 2,
}  # XLA's numbers of S8 S16 S32 S64 F16 F32 F64 BF16


def collectives(hlo) -> dict[str, int]:
    """All-reduces of a graph and the bytes a rank puts into them, counted in its HLO."""
    operations = [
        i
        for computation in hlo.computations
        for i in computation.instructions
        if i.opcode == "all-reduce"
    ]
    shapes = [shape for i in operations for shape in i.shape.tuple_shapes or [i.shape]]
    # XLA keeps all-reduces in order by a scalar that travels with them and is no part of the model.
    sent = sum(
        math.prod(s.dimensions) * _DTYPE_BYTES[s.element_type] for s in shapes if s.dimensions
    )
    return {"collectives": len(operations), "collective_bytes": sent}


def flops(graph: Graph, fields: dict[str, Field]) -> int:
    """FLOPs of one call of a graph on a rank. Counted in the model: the HLO does not show what is
    inside a kernel."""
    example = {
        name: torch.empty(fields[name].shape, dtype=fields[name].dtype, device="meta")
        for name in graph.inputs._fields
    }
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        graph.module(graph.inputs(**example))
    return counter.get_total_flops()
