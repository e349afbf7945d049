"""The hardware registry: what each machine has, and how the models are cut and placed on it.

A profile is resolved once at start and handed down; no layer looks one up.
"""

import os
from dataclasses import dataclass

from ltx_neuron.errors import UserError


@dataclass(frozen=True)
class Profile:
    """One way of running. Peaks are per device and None where a percentage of it would mean nothing."""

    name: str
    tp: int
    device: str  # torch device of a rank
    process_group: str  # torch.distributed backend of a rank
    compile_backend: str  # "export": graphs saved by torch.export, interpreted op by op
    blocks_per_graph: int  # transformer blocks in one graph, called num_layers / this many times; 0: the whole step
    return_hidden_states: bool  # whether the text graph hands back all layers (49 x tokens x width) as well
    peak_flops: float | None
    # How rank processes start. A forked child cannot use a Neuron or CUDA runtime; on a CPU a fork server imports torch
    # once for all ranks instead of once each.
    start_method: str = "spawn"
    text_buckets: tuple[int, ...] = (128, 256, 512, 1024)

    def rank_threads(self, tp: int) -> int:
        """CPU threads of one rank: fixed per machine, because results change with the count."""
        return max(1, (os.cpu_count() or 1) // tp)

    @property
    def host_threads(self) -> int:
        """CPU threads of the host's own stages (text fallback, AdaLN, VAE, vocoder); recorded in every report."""
        return os.cpu_count() or 1


PROFILES = {
    # The cut is TorchNeuron's fastest one (4 blocks per graph), so what is proven on a CPU is what runs there.
    "cpu": Profile("cpu", tp=4, device="cpu", process_group="gloo", compile_backend="export", blocks_per_graph=4,
                   return_hidden_states=True, peak_flops=None, start_method="forkserver"),
}  # fmt: skip


def resolve(name: str | None) -> Profile:
    """The profile of that name; without one, the one detected: `cpu` where there is no Neuron device."""
    name = name or "cpu"
    if name not in PROFILES:
        raise UserError(f"unknown profile {name!r}; known: {', '.join(sorted(PROFILES))}. Type --profile with one of them")
    return PROFILES[name]
