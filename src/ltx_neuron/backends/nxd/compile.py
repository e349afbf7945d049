"""Graphs for NxD: one process traces a program for all ranks with ModelBuilder V2 and compiles it
to files, which runtime.py runs.

A file in NxD's format contains one NEFF. NxD binds a graph's weights when it loads the graph, so a
graph that serves several groups of blocks takes its weights as inputs. `builder.compile` is the
only call that runs neuronx-cc. Written from NxD 0.18's source; NxD is supported up to SDK 2.33,
with torch 2.9.
"""

import inspect
import math
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ltx_neuron.backends import environment, export, mesh, nki
from ltx_neuron.backends.manifest import describe_graph, graph_file, write_manifest
from ltx_neuron.backends.neuron_errors import explained
from ltx_neuron.config.profiles import STACKS, Profile
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.files import MANIFEST, whole_file
from ltx_neuron.models.programs import Graph, Program, cut_graphs
from ltx_neuron.models.signatures import Field

# Packages that write and read the graphs: NxD's files need the same versions.
PACKAGES = ("neuronx-distributed", "torch-neuronx", "neuronx-cc", "libneuronxla", "torch-xla")
WRAPPED = "module."  # prefix of a graph's parameters in the module that NxD traces
# Bytes of tensors that are summed together: statistics have 0.1 to 0.4 MB, activations 6 MB.
TOGETHER_BYTES = 2**20


def set_environment(profile: Profile) -> None:
    """Set the environment variables that compiler and runtime read at import. Values of the user
    are kept. Raises UserError if they contradict the compiled graphs' profile."""
    for name, value in profile.environment:
        os.environ.setdefault(name, value)
    os.environ["PATH"] = environment.path()
    lnc = os.environ.setdefault("NEURON_LOGICAL_NC_CONFIG", str(profile.lnc))
    if lnc != str(profile.lnc):
        raise UserError(
            f"NEURON_LOGICAL_NC_CONFIG is {lnc}, profile {profile.name} is compiled for"
            f" {profile.lnc}: graphs and runtime must agree. Type: unset NEURON_LOGICAL_NC_CONFIG"
        )


class XlaComm:
    """Comm that sums the small tensors of a call in one variadic all-reduce and every large one
    separately. On meta tensors it returns only shapes. groups: lists of the ranks that form its
    groups; None: NxD's tensor-parallel ones."""

    def __init__(self, size: int, groups: list[list[int]] | None = None):
        self.size, self.groups = size, groups

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # On meta tensors there may be no replica groups yet.
        if self.size == 1 or tensors[0].is_meta:
            return tensors
        xm, groups = self._collectives()
        summed = list(tensors)
        small = [i for i, tensor in enumerate(tensors) if tensor.nbytes <= TOGETHER_BYTES]
        large = [[i] for i, tensor in enumerate(tensors) if tensor.nbytes > TOGETHER_BYTES]
        for indices in [small, *large] if small else large:
            together = [tensors[index] for index in indices]  # replaced in place
            xm.all_reduce(xm.REDUCE_SUM, together, groups=groups)
            for index, tensor in zip(indices, together, strict=True):
                summed[index] = tensor
        return tuple(summed)

    def all_gather(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor.repeat(1, self.size, 1)
        xm, groups = self._collectives()
        # A pinned layout would pad the reduced tensor.
        return xm.all_gather(tensor, dim=1, groups=groups, pin_layout=False)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor.unflatten(1, (self.size, -1)).sum(1)
        xm, groups = self._collectives()
        return xm.reduce_scatter(
            xm.REDUCE_SUM, tensor, 1.0, 1, self.size, groups=groups, pin_layout=False
        )

    def _collectives(self):
        import torch_xla.core.xla_model as xm

        if self.groups is None:
            from neuronx_distributed.parallel_layers import parallel_state

            return xm, parallel_state.get_tensor_model_parallel_replica_groups()
        return xm, self.groups


def argument_name(parameter: str) -> str:
    return parameter.replace(".", "__")


def traceable(graph: Graph, cut: bool = False) -> nn.Module:
    """A graph's module with a keyword for each input: NxD reads the signature of `forward` and
    refuses **tensors. cut: weights are inputs too, and the module for NxD has none."""
    weights = _arguments(graph) if cut else {}

    def forward(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = {name: tensors[name] for name in graph.inputs}
        if not cut:
            return tuple(self.module(inputs).values())
        parameters = {name: tensors[argument] for argument, name in weights.items()}
        return tuple(functional_call(graph.module, parameters, (inputs,), strict=True).values())

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # A new class: torch_neuronx may copy the module, and a bound forward uses the first's weights.
    forward.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind) for name in ("self", *graph.inputs, *weights)]
    )
    module = type("Traceable", (nn.Module,), {"forward": forward})()
    if not cut:
        module.module = graph.module
    return module


def _arguments(graph: Graph) -> dict[str, str]:
    return {argument_name(name): name for name, _ in graph.module.named_parameters()}


def example_inputs(graph: Graph, fields: dict[str, Field], cut: bool = False) -> dict[str, Tensor]:
    """Example inputs for tracing. They are distinct, because NxD merges inputs that are one object,
    and not constant, because constants may be folded into the graph. cut: as in traceable."""
    wanted = {name: fields[name][:2] for name in graph.inputs}
    if cut:
        weights = graph.module.named_parameters()
        wanted |= {argument_name(name): (value.shape, value.dtype) for name, value in weights}
    generator = torch.Generator().manual_seed(0)
    return {
        name: (4 * (torch.rand(shape, generator=generator) + 0.5)).to(dtype)
        for name, (shape, dtype) in wanted.items()
    }


def trace(program: Program, name: str, tag: str):
    """A ModelBuilder that has traced one graph for all ranks. Call it inside NxDParallelState.
    Raises RuntimeError for weights that the traced graph does not use."""
    from neuronx_distributed import ModelBuilder

    graph, cut = program.graphs[name], name in cut_graphs(program.runs)
    module = traceable(graph, cut).to_empty(device="cpu")
    examples = example_inputs(graph, program.fields, cut)
    builder = ModelBuilder(module).trace(kwargs=examples, tag=tag)
    # A weight that became a constant while tracing would be rank 0's on every rank.
    traced = builder.trace_artifacts_collection[tag]
    unused = {traced.provided_args[index].param_name for index in traced.flattener.exclude or ()}
    lost = {parameter for parameter, _ in module.named_parameters()} - {*traced.weight_name_to_idx}
    if lost := sorted(lost | (unused & {*_arguments(graph)})):
        raise RuntimeError(
            f"{name}: weights that became constants or are not used: {', '.join(lost)}"
        )
    return builder


def compiler_flags(profile: Profile, model: str) -> str:
    """neuronx-cc's flags for a model. UserError unless their --lnc is the profile's."""
    flags = profile.flags(model)
    lnc = {word.partition("=")[2] for word in shlex.split(flags) if word.startswith("--lnc")}
    if lnc != {str(profile.lnc)}:
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
    """Compile every graph of the program `make()` into `folder` and, last, write the manifest."""
    set_environment(profile)
    from neuronx_distributed import NxDParallelState

    folder.mkdir(parents=True, exist_ok=True)
    # A folder is finished as long as it has a manifest: not while its graphs are replaced.
    (folder / MANIFEST).unlink(missing_ok=True)
    flags, graphs = compiler_flags(profile, identity["model"]), {}
    program = make()
    # While the modules are on meta. HLO shows neither the inside of kernels nor peak memory, so
    # costs are counted in exported graphs.
    costs = {name: export.cost(export.trace(program, name, dtype)) for name in program.graphs}
    # After counting, which uses the operation's reference.
    if profile.attention == "nki":
        nki.register_for_xla(profile.lnc)
    with (
        explained(),
        NxDParallelState(
            world_size=profile.world_size(tp),
            tensor_model_parallel_size=tp,
            context_parallel_size=profile.context_parallel,
            lnc_size=profile.lnc,
        ),
    ):
        for name in program.graphs:
            tag = f"{identity['model']}-{identity['bucket']}-{name}"
            counted = costs[name], mesh.compiled(profile, tp)
            graphs[name] = _compile(program, name, tag, folder, flags, *counted)
    write_manifest(folder, identity, program, graphs, compiler_flags=flags)


def _compile(
    program: Program,
    name: str,
    tag: str,  # NxD's name for the graph
    folder: Path,
    flags: str,
    cost: dict[str, int],  # of a call, without collectives, which are counted in the graph's HLO
    groups: mesh.Groups,  # as in `collectives`
) -> dict:
    """Trace and compile a graph; returns its entry of the manifest. If it fails, the compiler's
    working files and log stay in the folder.
    """
    graph, path, workdir = program.graphs[name], folder / graph_file(name, "nxd"), "neuronx-cc"
    builder = trace(program, name, tag)
    cost = cost | collectives(builder.trace_artifacts_collection[tag].hlo, groups)
    compiled = builder.compile(compiler_workdir=str(folder / workdir), compiler_args=flags)
    # NxD saves its example inputs, which may be as large as weights. Only their shapes matter.
    compiled.reserved_example_inputs = {
        tag: [torch.zeros((), dtype=x.dtype).expand(x.shape) for x in examples]
        for tag, examples in compiled.reserved_example_inputs.items()
    }
    with whole_file(path) as partial:
        compiled.save(str(partial))
    shutil.rmtree(folder / workdir)
    return {**describe_graph(graph, path, cost), "tag": tag}


# Bytes by XLA's number of S8, S16, S32, S64, F16, F32, F64, BF16
_DTYPE_BYTES = {2: 1, 3: 2, 4: 4, 5: 8, 10: 2, 11: 4, 12: 8, 16: 2}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")


def collectives(hlo, groups: mesh.Groups) -> dict[str, int]:
    """The collectives of a graph as export.cost counts them, counted in its HLO. Raises RunError
    for one over other ranks than `groups` (mesh.compiled), whose result would be wrong: empty
    replica groups are the world (aws-neuron-sdk issue 1107)."""
    sizes, received = [], []
    for computation in hlo.computations:
        shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
        for instruction in computation.instructions:
            if instruction.opcode not in _COLLECTIVES:
                continue
            sent = sum(_nbytes(shapes[operand]) for operand in instruction.operand_ids)
            sizes.append((instruction.opcode.replace("-", "_"), sent))
            over = [[*group.replica_ids] for group in instruction.replica_groups]
            if over not in groups.values():
                raise RunError(
                    f"the traced graph has an {instruction.opcode} over ranks {over}, wanted one of"
                    f" {[*groups.values()]}.\nInstall NxD anew: {STACKS['nxd'].install}"
                )
            if over != groups[mesh.TENSOR]:
                ranks, result = len(over[0]), _nbytes(instruction.shape)
                summed = instruction.opcode == "all-reduce"
                received.append(export.received_in_sum(sent, ranks) if summed else result - sent)
    between = {"context_collectives": len(received), "context_bytes": sum(received)}
    return export.collective_cost(sizes) | between


def _nbytes(shape) -> int:
    """Bytes of a tensor or tuple, without the scalar by which XLA keeps collectives in order."""
    return sum(
        math.prod(each.dimensions) * _DTYPE_BYTES[each.element_type]
        for each in shape.tuple_shapes or [shape]
        if each.dimensions
    )
