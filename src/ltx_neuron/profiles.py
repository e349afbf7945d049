"""The hardware registry: what each machine has, and how the models are cut and placed on it.

A profile is resolved once at start and handed down; no layer looks one up.
"""

import os
from dataclasses import dataclass

from ltx_neuron.errors import UserError


@dataclass(frozen=True)
class Chip:
    """Documented limits of what a tensor-parallel group runs on, all its ranks together unless said otherwise.

    link_bytes_per_second  what moves between the ranks of the group
    """

    flops: float  # dense bf16
    memory_bytes_per_rank: int
    memory_bytes_per_second: float
    link_bytes_per_second: float
    host_memory_bytes: int
    source: str


@dataclass(frozen=True)
class Profile:
    """One way of running. `chip` is None where no limit is known and a percentage of one would mean nothing."""

    name: str
    tp: int
    device: str  # torch device of a rank
    process_group: str  # torch.distributed backend of a rank
    compile_backend: str  # "export": graphs saved by torch.export, interpreted op by op
    blocks_per_graph: int  # transformer blocks in one graph, called num_layers / this many times; 0: the whole step
    return_hidden_states: bool  # whether the text graph hands back all layers (49 x tokens x width) as well
    chip: Chip | None
    # How rank processes start. A forked child cannot use a Neuron or CUDA runtime; on a CPU a fork server imports torch
    # once for all ranks instead of once each.
    start_method: str = "spawn"
    text_buckets: tuple[int, ...] = (128, 256, 512, 1024)

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of one rank."""
        return self.chip and self.chip.flops / self.tp

    def rank_threads(self, tp: int) -> int:
        """CPU threads of one rank: fixed per machine, because results change with the count."""
        return max(1, (os.cpu_count() or 1) // tp)

    @property
    def host_threads(self) -> int:
        """CPU threads of the host's own stages (text fallback, AdaLN, VAE, vocoder); recorded in every report."""
        return os.cpu_count() or 1


_GIB = 2**30
TRAINIUM2 = Chip(
    flops=667e12, memory_bytes_per_rank=24 * _GIB, memory_bytes_per_second=2.9e12, link_bytes_per_second=3.5e12,
    host_memory_bytes=124 * _GIB,
    source="AWS Neuron docs, trainium2.rst: 667 TF bf16 dense, 96 GiB HBM in four banks at 2.9 TB/s, DMA 3.5 TB/s; "
    "host memory: users of trn2.3xlarge. One chip, four logical cores (LNC=2)",
)  # fmt: skip

PROFILES = {
    # The cut is TorchNeuron's fastest one (4 blocks per graph), so what is proven on a CPU is what runs there.
    "cpu": Profile("cpu", tp=4, device="cpu", process_group="gloo", compile_backend="export", blocks_per_graph=4,
                   return_hidden_states=True, chip=None, start_method="forkserver"),
    # Known to the plan only: the Neuron backend is not written yet.
    "trn2.3xlarge": Profile("trn2.3xlarge", tp=4, device="neuron", process_group="neuron", compile_backend="neuron",
                            blocks_per_graph=4, return_hidden_states=False, chip=TRAINIUM2),
}  # fmt: skip


def resolve(name: str | None, to_run: bool = True) -> Profile:
    """The profile of that name; without one, `cpu`. to_run: refuse one that this version can only plan for."""
    name = name or "cpu"
    if name not in PROFILES:
        raise UserError(f"unknown profile {name!r}; known: {', '.join(sorted(PROFILES))}. Type --profile with one of them")
    if to_run and PROFILES[name].compile_backend == "neuron":
        raise UserError(f"profile {name!r} can be planned for (python -m ltx_neuron.plan) but not run yet: this version has "
                        "no Neuron backend. Type --profile cpu")  # fmt: skip
    return PROFILES[name]
