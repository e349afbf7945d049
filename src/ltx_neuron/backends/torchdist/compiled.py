"""Runs exported graphs in a rank: interpreted, or compiled by the profile's torch.compile.

An exported graph takes its weights as inputs, so one compiled graph serves every group of blocks.
It is tested with inductor on CPUs; the backend "neuron" (TorchNeuron) was not run.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from ltx_neuron.backends import mesh, nki
from ltx_neuron.backends.export import fake_process_group
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.torchdist.protocol import RankSettings
from ltx_neuron.config.profiles import STACKS, Profile
from ltx_neuron.errors import UserError

# One object for all graphs: a different one would cause recompilation.
OPTIONS: dict[str, dict] = {
    "aot_eager": {},
    "inductor": {},
    "neuron": {"fallback_execution": False},
}


class Compiled:
    """A graph that torch.compile compiles at its first call; then it is `warm`. A later call that
    would recompile it, for another shape, stride or dtype, raises RuntimeError."""

    def __init__(self, graph: Callable, backend: str):
        self.compiled = torch.compile(
            graph, backend=backend, fullgraph=True, dynamic=False, options=OPTIONS[backend]
        )
        self.warm = False

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Not for the whole process, because other graphs may not have been called yet.
        if self.warm:
            with torch.compiler.set_stance("fail_on_recompile"):
                return self.compiled(*tensors)
        results = self.compiled(*tensors)
        self.warm = True
        return results


def runner(graph: Callable, backend: str) -> Callable:
    return graph if backend == "export" else Compiled(graph, backend)


def ready(module: fx.GraphModule, settings: RankSettings, names: Mapping[str, str]) -> Callable:
    """A program's graph as a callable of its weights, then its inputs. names: of group_names."""
    profile = settings.profile
    _rename_groups(module, names)
    if profile.device == "neuron":
        replace_attention(module, lambda: nki.native_attention(profile.lnc))
    return runner(module, profile.compile_backend)


def _rename_groups(module: fx.GraphModule, names: Mapping[str, str]) -> None:
    """Rename the groups of a graph's collectives, which are their last arguments."""
    for node in module.graph.nodes:
        if node.args and isinstance(node.args[-1], str):
            node.args = *node.args[:-1], names.get(node.args[-1], node.args[-1])
    module.recompile()


def replace_attention(module: fx.GraphModule, make_kernel: Callable[[], Callable]) -> None:
    """Replace a graph's attention_cte by the device's kernel. make_kernel is called only for graphs
    with this operation, because the kernel's package may be missing."""
    operation = torch.ops.ltx_neuron.attention_cte.default
    nodes = [node for node in module.graph.nodes if node.target is operation]
    kernel = make_kernel() if nodes else None
    for node in nodes:
        node.target = kernel
    module.recompile()


def sum_of_ones(ones: Tensor) -> tuple[Tensor]:
    """The smallest graph with a collective: a sum of ones over the ranks."""
    # `* 1`: TorchNeuron reduces intermediates, never a graph's input.
    summed = functional.all_reduce(ones * 1, "sum", mesh.WORLD)  # pyright: ignore[reportArgumentType]
    return (functional.wait_tensor(summed),)


def compile_only(folders: list[Path], settings: RankSettings) -> None:
    """Fill the compiler's cache: compile every graph of the programs in `folders` for one rank,
    without other ranks or weights. Ends the process with exit code 1 if a graph failed, 2 if
    TorchNeuron does not know the layout's groups.

    Runs in a separate process with a rank's environment. For TorchNeuron it serves machines without
    a device (TORCH_NEURONX_COMPILE_ONLY), which was not tested. By its source (NRTUtils.cpp, 2026)
    a graph with collectives is compiled and then fails to load without a process group. Therefore a
    failure does not stop the compilation of the other graphs.
    """
    torch.set_num_threads(settings.profile.rank_threads(settings.tp))
    device, failed = torch.device(settings.profile.device), False
    profile, tp = settings.profile, settings.tp
    groups = mesh.groups(profile, tp)
    with fake_process_group(profile.world_size(tp), groups=groups), torch.no_grad():
        try:
            known = group_names(groups, profile)
        except UserError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
        for manifest in map(Manifest, folders):
            os.environ.update(settings.compilers.get(manifest.identity.get("model"), {}))
            for name in manifest.graphs:
                module = manifest.load(name).graph_module
                inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
                values = [node.meta["val"] for node in inputs]
                zeros = [torch.zeros(value.shape, dtype=value.dtype).to(device) for value in values]
                try:
                    ready(module, settings, known)(*zeros)
                except Exception as error:
                    failed = True
                    line = f"{manifest.folder.name}, graph {name}: {type(error).__name__}: {error}"
                    print(line, file=sys.stderr)
    sys.exit(int(failed))


# The names of groups in a process's graphs.
# TorchNeuron replaces a name by ranks while it compiles, and needs every group of the name: a
# rank's own alone is refused ("replica id #0 not seen in replica groups"). We did not run it; our
# tests have a stand-in, written from public sources.


def group_names(groups: mesh.Groups, profile: Profile) -> dict[str, str]:
    """The names of groups in graph files -> those in this process's graphs. Call it in a process
    group with these named groups. Raises UserError if TorchNeuron does not know their ranks."""
    names, registered = {name: name for name in groups}, True
    if groups and profile.compile_backend == "neuron":
        try:
            # torch-neuronx has the module (Difflet's parallel_mesh.py). The table is that of its
            # copy in libtorch-neuronx-lite, which vllm-omni-neuron fills by c10d's names.
            from torch_neuronx.distributed.mesh_registry import _MESH_REGISTRY

            for name, partition in groups.items():
                own = c10d._resolve_process_group(name).group_name  # pyright: ignore[reportArgumentType]
                _MESH_REGISTRY[name] = _MESH_REGISTRY[own] = partition
        except ImportError:
            names, registered = _device_mesh(groups, profile.device), False
        for name, partition in groups.items():
            known = _replica_groups(names[name])
            if known != partition and (known or not registered):
                raise UserError(
                    f"torch-neuronx compiles group {name} as {known or 'unknown ranks'}, wanted"
                    f" {partition}.\nType --profile-set context_parallel=1, or install another"
                    f" release: {STACKS['torchdist'].install}"
                )
    return {mesh.WORLD: names[mesh.TENSOR], **names} if groups else {}


def _device_mesh(groups: mesh.Groups, device: str) -> dict[str, str]:
    """Make the groups once more, by init_device_mesh. Returns their names in c10d."""
    axes = mesh.CONTEXT, mesh.TENSOR
    shape = tuple(len(groups[axis][0]) for axis in axes)
    made = init_device_mesh(device, shape, mesh_dim_names=axes)
    return {axis: made.get_group(axis).group_name for axis in axes}


def _replica_groups(group: str) -> list[list[int]] | None:
    """What TorchNeuron writes into a graph for a group; None if its pass cannot be asked."""
    graph = fx.Graph()
    arguments = graph.placeholder("x"), "sum", group
    summed = graph.call_function(torch.ops._c10d_functional.all_reduce.default, arguments)
    try:
        from torch_neuronx.neuron_dynamo_backend.fx.passes import collective_legalization

        collective_legalization.CollectiveLegalization()(fx.GraphModule({}, graph))
        return json.loads(str(summed.args[2]))
    except (ImportError, AttributeError, ValueError):
        return None
