"""NxD ModelBuilder V2: this one process traces, compiles and drives all ranks of a program on a chip's cores.

The same programs, fields, manifests and rank files as torchdist; a graph is one NEFF in NxD's own file. What cannot run
without Neuron hardware (the compiler behind `compile`, the runtime behind `to_neuron` and the call) is NxD's, one line each.
Written for NxD 0.15 to 0.19 (SDK 2.27 to 2.33, torch 2.9); where it differs from its documentation, from its source.
"""

import gc
import hashlib
import inspect
import os
import shlex
import shutil
import time
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ltx_neuron.backends.export import Manifest
from ltx_neuron.backends.neuron_errors import explained
from ltx_neuron.checkpoint import MANIFEST, load, rank_file, write_json
from ltx_neuron.errors import UserError
from ltx_neuron.graphs import Field
from ltx_neuron.profiles import Profile
from ltx_neuron.programs import Graph, Program, weight_name

PACKAGES = ("neuronx-distributed", "torch-neuronx", "neuronx-cc", "libneuronxla", "torch-xla")
_WRAPPED = "module."  # prefix of a graph's parameters in the module that NxD traces


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
    """What the compiler and the runtime read from the environment, at their import. The user's own values stay."""
    for name, value in profile.environment.items():
        os.environ.setdefault(name, value)
    lnc = os.environ.setdefault("NEURON_LOGICAL_NC_CONFIG", str(profile.lnc))
    if lnc != str(profile.lnc):
        raise UserError(f"NEURON_LOGICAL_NC_CONFIG is {lnc}, profile {profile.name} is compiled for {profile.lnc}: graphs and "
                        "runtime must agree. Type: unset NEURON_LOGICAL_NC_CONFIG")  # fmt: skip


class XlaComm:
    """Comm that sums all tensors of a call in one variadic all-reduce: NxD's replica groups, torch_xla's operation.

    On meta tensors it sends nothing and only counts: `sent` lists the bytes of every all-reduce.
    """

    def __init__(self, size: int):
        self.size, self.sent = size, []

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.size == 1:
            return tensors
        if tensors[0].is_meta:
            self.sent.append(sum(t.nbytes for t in tensors))
            return tensors
        import torch_xla.core.xla_model as xm
        from neuronx_distributed.parallel_layers import parallel_state

        summed = list(tensors)
        xm.all_reduce(xm.REDUCE_SUM, summed, groups=parallel_state.get_tensor_model_parallel_replica_groups())
        return tuple(summed)


class _Keywords(nn.Module):
    """A graph's module with one keyword for each of its inputs: NxD reads the signature and refuses **tensors."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.module, self.inputs = graph.module, graph.inputs

        def forward(**tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.module(self.inputs(**tensors)))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in graph.inputs._fields])
        self.forward = forward


def example_inputs(graph: Graph, fields: dict[str, Field]) -> dict[str, Tensor]:
    """Distinct, non-constant tensors: NxD merges inputs that are one object, and a constant may be folded."""
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.rand(fields[name].shape, generator=generator) + 0.5 for name in graph.inputs._fields}
    return {name: (value * 4).to(fields[name].dtype) for name, value in drawn.items()}


def trace(program: Program, name: str, tag: str, dtype: torch.dtype):
    """A ModelBuilder that has traced one graph for all ranks. Call inside NxDParallelState."""
    from neuronx_distributed import ModelBuilder

    graph = program.graphs[name]
    module = _Keywords(graph).to(dtype).eval().requires_grad_(False).to_empty(device="cpu")
    builder = ModelBuilder(module).trace(kwargs=example_inputs(graph, program.fields), tag=tag)
    traced = builder.trace_artifacts_collection[tag].weight_name_to_idx
    if lost := sorted({parameter for parameter, _ in module.named_parameters()} - {*traced}):
        raise RuntimeError(f"{name}: weights that became constants or are not used: {', '.join(lost)}")
    return builder
