"""What every part's training shares: a log of losses, a learning rate's course, and states."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import torch
from muon import Muon
from safetensors.torch import load_file
from tiny.weights import save
from torch import Tensor, nn

SAVE_SECONDS = 120.0
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))


@cache
@torch.enable_grad()
def computes_in() -> torch.dtype:
    """bfloat16 where a convolution of the video VAE is faster in it on this CPU, else float32."""
    convolution = nn.Conv3d(24, 24, 3, padding=1)
    signal, seconds = torch.randn(4, 24, 17, 16, 24), {}
    for dtype in (torch.float32, torch.bfloat16):
        runs = []
        for _ in range(4):
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                convolution(signal).float().sum().backward()
            runs.append(time.perf_counter() - began)
        seconds[dtype] = min(runs)
    return min(seconds, key=seconds.get)


def fast() -> torch.autocast:
    """Autocast to bfloat16, where that is faster than float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=computes_in() == torch.bfloat16)


class LossLog:
    """Losses of a part, averaged over `every` steps: one JSON object a line of FOLDER/PART.jsonl,
    with the seconds since the training began, also printed."""

    def __init__(self, folder: Path, part: str, every: int = 50):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{part}.jsonl"
        self.part, self.every = part, every
        self.began = time.monotonic()
        self._losses: dict[str, list[float]] = {}

    def add(self, step: int, **losses: float) -> None:
        """Count a step's losses; every so many steps, write their means."""
        for name, loss in losses.items():
            self._losses.setdefault(name, []).append(float(loss))
        if (step + 1) % self.every == 0:
            means = {name: sum(found) / len(found) for name, found in self._losses.items()}
            self.write(step=step + 1, **means)
            self._losses = {}

    def write(self, **entry) -> None:
        """One line, numbers with five digits."""
        seconds = time.monotonic() - self.began
        entry = {"part": self.part, **entry, "seconds": seconds}
        short = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in entry.items()}
        line = json.dumps(short)
        print(line, flush=True)
        with open(self.path, "a") as file:
            file.write(line + "\n")


def rate(step: int, steps: int, peak: float, warm_up: int = 50) -> float:
    """The learning rate of a step: up in a line, then down along a cosine to a hundredth."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


def train(
    modules: Iterable[nn.Module],
    losses: Callable[[int], dict[str, Tensor]],
    steps: int,
    peak: float,
    log: LossLog,
    on_pause: Callable[[], None] = lambda: None,
    first: int = 0,
    muon: float = 0.0,
) -> None:
    """Minimise the sum of `losses(step)` over the modules' parameters by AdamW.

    on_pause  is called every SAVE_SECONDS, and at the end: it saves what is there
    first     the step to begin with, of a training that goes on
    muon      the rate at which matrices and convolutions learn by Muon instead; 0: they do not
    """
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    optimisers = _optimisers(parameters, peak, muon)
    saved = time.monotonic()
    for step in range(first, steps):
        for optimiser, highest in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate(step, steps, highest)
            optimiser.zero_grad(set_to_none=True)
        found = losses(step)
        sum(found.values()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimiser, _ in optimisers:
            optimiser.step()
        log.add(step, **{name: loss.detach() for name, loss in found.items()})
        if time.monotonic() - saved > SAVE_SECONDS:
            on_pause()
            saved = time.monotonic()
    on_pause()


def _optimisers(parameters: list[nn.Parameter], peak: float, muon: float) -> list:
    """Optimisers of the parameters, each with its highest rate."""
    others = [p for p in parameters if not muon or p.ndim < 2]
    matrices = [p for p in parameters if muon and p.ndim >= 2]
    adam = torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.99), weight_decay=0.01)
    return [(adam, peak), *([(Muon(matrices, lr=muon), muon)] if matrices else [])]


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they are shipped, in bf16, as new tensors."""
    return {
        name: weight.detach().bfloat16().clone().contiguous() for name, weight in weights.items()
    }


def round_weights(module: nn.Module) -> None:
    """Round parameters and buffers to bf16, as they are shipped."""
    for weight in (*module.parameters(), *module.buffers()):
        weight.data = weight.data.bfloat16().float()


def save_weights(path: Path, weights: dict[str, Tensor], metadata: dict | None = None) -> None:
    """Write weights by way of a file beside it, so that others never read half of it."""
    beside = path.with_suffix(".part")
    tensors = {name: weight.detach().contiguous() for name, weight in weights.items()}
    save(beside, tensors, metadata)
    beside.replace(path)


def load_part(path: Path, prefix: str) -> dict[str, Tensor]:
    """The fp32 weights of a file whose names begin with the prefix, under names without it."""
    return {
        name.removeprefix(prefix): weight.float()
        for name, weight in load_file(path).items()
        if name.startswith(prefix)
    }
