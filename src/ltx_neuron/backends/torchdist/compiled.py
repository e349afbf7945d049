"""Runs exported graphs in a rank: interpreted, or compiled by the profile's torch.compile.

An exported graph takes its weights as inputs, so one compiled graph serves every group of blocks.
It is tested with inductor on CPUs; the backend "neuron" (TorchNeuron) was not run.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx

from ltx_neuron.backends import mesh, nki
from ltx_neuron.backends.export import fake_process_group
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.torchdist.groups import group_names
from ltx_neuron.backends.torchdist.protocol import RankSettings
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
    """The callable with which a compile backend runs a graph."""
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
