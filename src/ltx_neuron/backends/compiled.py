"""What runs an exported graph on a rank: its operations one by one, or torch.compile with the
profile's backend.

An exported graph takes its weights as inputs, so one compiled graph serves every group of blocks;
and what was counted and checked in the file is what is compiled, with the same text on every rank.
With the backend "neuron" (TorchNeuron) this was not run; with inductor it is tested on CPUs.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx

from ltx_neuron.backends.export import GROUP, fake_process_group
from ltx_neuron.backends.manifest import Manifest

# One object for all graphs: some backends write into it, and another object would compile the same
# graph again.
OPTIONS: dict[str, dict] = {
    "aot_eager": {},
    "inductor": {},
    "neuron": {"fallback_execution": False},
}


class Compiled:
    """A graph that torch.compile has at its first call; whatever would compile it once more is an
    error from then on."""

    def __init__(self, graph: Callable, backend: str):
        self.compiled = torch.compile(
            graph, backend=backend, fullgraph=True, dynamic=False, options=OPTIONS[backend]
        )
        self.warm = False

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.warm:
            with torch.compiler.set_stance("fail_on_recompile"):
                return self.compiled(*tensors)
        results = self.compiled(*tensors)
        self.warm = True
        return results


def runner(graph: Callable, backend: str) -> Callable:
    """What to call for a graph: itself, or its compiled form."""
    return graph if backend == "export" else Compiled(graph, backend)


def ready(module: fx.GraphModule, settings: dict) -> Callable:
    """A program's graph as a rank calls it, with its weights and inputs."""
    if settings["device"] == "neuron":
        from ltx_neuron.backends.nki import native_attention

        put_kernel(module, lambda: native_attention(settings["lnc"]))
    return runner(module, settings["compile_backend"])


def put_kernel(module: fx.GraphModule, make: Callable[[], Callable]) -> None:
    """Put a device's own kernel in the place of every ltx_neuron::attention_cte of a graph; made
    only where there is one."""
    nodes = [
        node
        for node in module.graph.nodes
        if node.target is torch.ops.ltx_neuron.attention_cte.default
    ]
    kernel = make() if nodes else None
    for node in nodes:
        node.target = kernel
    if nodes:
        module.recompile()


def graphs_compiled() -> int:
    """Graphs that torch.compile made in this process so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def sum_of_ones(ones: Tensor) -> tuple[Tensor]:
    """The first collective of a run, which every rank must join: one graph of one all-reduce."""
    return (functional.wait_tensor(functional.all_reduce(ones * 1, "sum", GROUP)),)


def compile_only(folders: list[str], settings: dict) -> None:
    """Compile every graph of programs for one of `tp` ranks, with no process group and no weights:
    fills the compiler's cache.

    Run in a process of its own that has a rank's environment. With TorchNeuron this is for machines
    without a device (TORCH_NEURONX_COMPILE_ONLY); there it was not run.
    """
    torch.set_num_threads(settings["threads"])
    device = torch.device(settings["device"])
    with fake_process_group(settings["tp"]), torch.no_grad():
        runner(sum_of_ones, settings["compile_backend"])(torch.ones(1).to(device))
        for manifest in map(Manifest, map(Path, folders)):
            for name in manifest.graphs:
                module = manifest.load(name).graph_module
                values = [
                    node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"
                ]
                zeros = [torch.zeros(value.shape, dtype=value.dtype).to(device) for value in values]
                ready(module, settings)(*zeros)
