"""How step time and memory grow with tokens and ranks: measured on a CPU at tiny width, and by the
plan at full width.

    python benchmarks/scale.py

A tiny checkpoint is sharded and compiled for every size and TP degree, and steps run on rank
processes as in a generation. The sizes take turns, one step each, and the medians count; the first
turn is cold and gives the memory: the kernel's peak of every rank, over what it held before. The
plan counts the same in the graphs of the released width, for one Trainium2 chip.

Between successive sizes, log(what) / log(tokens) must not exceed attention's 2 for time and FLOPs
and 1 for memory and bytes: exit code 1 where it does. Writes JSON and a plot; the largest exponents
come last. With more ranks than cores, time is what it is.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing import active_children
from pathlib import Path
from typing import NamedTuple

import torch
from lib.full_size import write_sparse_checkpoint
from lib.sizes import parse_size, video_tokens
from matplotlib.figure import Figure

from ltx_neuron import errors
from ltx_neuron.backends import registry
from ltx_neuron.config import TEXT_TOKENS
from ltx_neuron.denoise import CompiledStep, StageRun
from ltx_neuron.job import Job, Size
from ltx_neuron.plan import plan
from ltx_neuron.profiles import PROFILES
from ltx_neuron.sampling import latents
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.tiny import make_tiny
from ltx_neuron.weights.checkpoint import Checkpoint
from ltx_neuron.weights.rankfiles import open_host_file
from ltx_neuron.workspace import Workspace

# 192 to 24,576 tokens.
SIZES = ("192x256x25", "384x512x25", "512x768x57", "512x768x121", "1024x1536x57", "1024x1536x121")
DEGREES, ROUNDS = (1, 2, 4), 3
TIME, MEMORY = 2, 1  # the exponents of attention, and of holding every token once
# Noise: an exponent between sizes a factor of two apart is off by 0.2 where one of the two medians
# is 15 % off, and tiles that fall out of the cache cost as much once. Counts have none.
SLACK = {"measured": 0.2, "planned": 0.001}
LEAST_BYTES = 16e6  # of all ranks: less is the allocators' pages, which come in lumps


class Growth(NamedTuple):
    """By which power of the tokens something grows from one size to the next, and by which it
    may."""

    what: str
    tokens: tuple[int, int]
    exponent: float
    allowed: float

    @property
    def exceeded(self) -> bool:
        return self.exponent > self.allowed


def growth(what: str, series: dict[int, float], allowed: float, least: float = 0.0) -> list[Growth]:
    """The growth between successive entries of {tokens: value}. Values of at most `least` are left
    out: too small to measure."""
    points = [(tokens, value) for tokens, value in sorted(series.items()) if value > least]
    return [
        Growth(
            what,
            (before[0], after[0]),
            math.log(after[1] / before[1]) / math.log(after[0] / before[0]),
            allowed,
        )
        for before, after in zip(points, points[1:], strict=False)
    ]


class Running:
    """The rank processes of one TP degree, on the tiny checkpoint, with a step of every size
    compiled for it."""

    def __init__(self, checkpoint: Path, artifacts: Path, tp: int, sizes: list[Size]):
        self.workspace = Workspace(checkpoint, PROFILES["cpu"], artifacts, tp, "float32")
        self.tp = tp
        self.workspace.shard_dit()
        self.workspace.compile_dit([Job("", size).buckets[0] for size in sizes])
        weights = self.workspace.dit_weights()
        host = open_host_file(weights)
        self.adaln = {name: host.read(name) for name in host.shapes}
        self.steps = {
            size: CompiledStep(*self.workspace.dit_program_for(job, job.stages[0]))
            for size, job in ((size, Job("", size)) for size in sizes)
        }
        others = set(active_children())
        self.ranks = registry.ranks(self.workspace.profile, tp, self.workspace.compiler_cache)
        self.pids = [process.pid for process in set(active_children()) - others]
        self.ranks.load(
            weights,
            {step.bucket.name: step.manifest for step in self.steps.values()},
            torch.float32,
        )
        self.base = self._memory("VmRSS")

    def step(self, size: Size) -> dict[str, float]:
        """Upload what a stage of that size uploads and run its first step: milliseconds of both,
        and the ranks' bytes."""
        compiled = self.steps[size]
        job = Job("contexts are given", size)
        for pid in self.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        generator = torch.Generator().manual_seed(0)
        widths = self.workspace.transformer.video.inner, self.workspace.transformer.audio.inner
        contexts = Contexts(
            *(torch.randn(1, TEXT_TOKENS, n, generator=generator) for n in widths),
            torch.ones(1),
            None,
        )
        stage = job.stages[0]
        shape = latents.video_latent_shape(size.height, size.width, size.num_frames)
        frames = latents.audio_latent_frames(size.num_frames, size.frame_rate)
        empty = (
            torch.zeros(1, latents.VIDEO_CHANNELS, *shape),
            torch.zeros(1, latents.AUDIO_CHANNELS, frames, latents.MEL_BINS),
        )
        began, sent = time.perf_counter(), self.ranks.bytes_sent
        config, dtype = self.workspace.transformer, self.workspace.dtype
        run = StageRun(self.ranks, compiled, config, dtype, self.adaln, COMPAT[None])
        run.prepare(job, stage, [contexts], *empty, generator, [])
        run.start()
        prepared = time.perf_counter()
        uploaded = self.ranks.bytes_sent - sent
        run.step(0)
        ended = time.perf_counter()
        return {
            "prepare_ms": (prepared - began) * 1e3,
            "step_ms": (ended - prepared) * 1e3,
            "upload_bytes": uploaded,
            "memory_bytes": self._memory("VmHWM") - self.base,
        }

    def _memory(self, line: str) -> int:
        """Bytes of a line of /proc/PID/status, summed over the ranks: VmRSS is resident memory,
        VmHWM its peak."""
        tables = (
            dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
            for pid in self.pids
        )
        return sum(int(status[line].split()[0]) * 1024 for status in tables)


def measured(folder: Path, sizes: list[Size], degrees: list[int], rounds: int) -> list[dict]:
    """Every size at every degree on this machine: medians, every number behind them, and the cold
    turn's memory."""
    checkpoint = make_tiny(folder / "tiny").checkpoint
    with ExitStack() as stack:
        running = []
        for tp in degrees:
            running.append(Running(checkpoint, folder / "artifacts", tp, sizes))
            stack.enter_context(running[-1].ranks)
        turns = {(size, ranks.tp): [] for size in sizes for ranks in running}
        for turn in range(1 + rounds):
            for size in sizes:
                for ranks in running:
                    turns[size, ranks.tp].append(ranks.step(size))
            print(
                f"turn {turn + 1} of {1 + rounds}{' (cold)' if not turn else ''} done", flush=True
            )
    rows = []
    for (size, tp), (cold, *warm) in turns.items():
        rows.append(
            {
                "size": f"{size.height}x{size.width}x{size.num_frames}",
                "tp": tp,
                "video_tokens": video_tokens(size),
                "step_ms": statistics.median(turn["step_ms"] for turn in warm),
                "steps_ms": [turn["step_ms"] for turn in warm],
                "cold_step_ms": cold["step_ms"],
                "prepare_ms": statistics.median(turn["prepare_ms"] for turn in warm),
                "memory_bytes": cold["memory_bytes"],
                "upload_bytes": cold["upload_bytes"],
            }
        )
    return rows


def planned(folder: Path, sizes: list[Size], degrees: list[int]) -> list[dict]:
    """Every size at every degree by the plan: the released width and depth in bf16 on one Trainium2
    chip."""
    checkpoint = Checkpoint(write_sparse_checkpoint(folder / "ltx-2.3-sparse.safetensors"))
    rows = []
    for tp in degrees:
        for size in sizes:
            trn2, job = PROFILES["trn2.3xlarge"], Job("", size)
            estimate = plan(checkpoint, trn2, job, tp, "bfloat16", gemma=None)
            stage = estimate.stages[-1]
            rows.append(
                {
                    "size": f"{size.height}x{size.width}x{size.num_frames}",
                    "tp": tp,
                    "video_tokens": stage.video_tokens,
                    "flops_per_step": stage.flops_per_step,
                    "ideal_step_ms": stage.ideal_step_ms,
                    "activation_bytes_per_core": stage.activation_bytes_per_core,
                    "upload_bytes": stage.upload_bytes,
                    "collective_bytes": stage.collectives_per_step["bytes"],
                    "fits": estimate.fits,
                }
            )
    return rows


LIMITS = {
    "measured": {
        "step_ms": TIME,
        "prepare_ms": TIME,
        "memory_bytes": MEMORY,
        "upload_bytes": MEMORY,
    },
    "planned": {
        "flops_per_step": TIME,
        "ideal_step_ms": TIME,
        "activation_bytes_per_core": MEMORY,
        "upload_bytes": MEMORY,
        "collective_bytes": MEMORY,
    },
}


def growths(tables: dict[str, list[dict]]) -> list[Growth]:
    """The growth of every column that has a limit, at every degree."""
    rows = []
    for kind, limits in LIMITS.items():
        for column, limit in limits.items():
            for tp in dict.fromkeys(row["tp"] for row in tables[kind]):
                series = {
                    row["video_tokens"]: row[column] for row in tables[kind] if row["tp"] == tp
                }
                least = LEAST_BYTES if column == "memory_bytes" else 0
                rows += growth(f"{kind} {column}, tp {tp}", series, limit + SLACK[kind], least)
    return rows


def plot(tables: dict[str, list[dict]], path: Path) -> None:
    """Four pictures over the tokens: step and memory as measured at tiny width, and as planned at
    full width."""
    figure = Figure(figsize=(12, 9), dpi=100, layout="constrained")
    panels = (
        ("measured", "step_ms", 1, "A step on this CPU, tiny width: milliseconds", TIME),
        (
            "measured",
            "memory_bytes",
            1e6,
            "Memory of all ranks over what they held before, tiny width: MB",
            MEMORY,
        ),
        (
            "planned",
            "ideal_step_ms",
            1,
            "Ideal step on Trainium2, full width, by the plan: milliseconds",
            TIME,
        ),
        (
            "planned",
            "activation_bytes_per_core",
            1e9,
            "Activations a core, full width, by the plan: GB",
            MEMORY,
        ),
    )
    for axes, (kind, column, unit, title, limit) in zip(
        figure.subplots(2, 2).flat, panels, strict=True
    ):
        for tp in dict.fromkeys(row["tp"] for row in tables[kind]):
            rows = sorted(
                (row["video_tokens"], row[column] / unit) for row in tables[kind] if row["tp"] == tp
            )
            axes.plot(*zip(*rows, strict=True), "o-", label=f"TP {tp}")
        last = max((row["video_tokens"], row[column] / unit) for row in tables[kind])
        tokens = sorted({row["video_tokens"] for row in tables[kind]})
        bound = [last[1] * (count / last[0]) ** limit for count in tokens]
        axes.plot(
            tokens,
            bound,
            ":",
            color="0.5",
            label=f"slope {limit}: {'tokens squared' if limit == TIME else 'tokens'}",
        )
        least = min(row[column] / unit for row in tables[kind])
        axes.set(title=title, xlabel="video tokens", xscale="log", yscale="log", xticks=tokens)
        axes.set_ylim(bottom=max(least, 1e-6) / 2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png")


def printed(tables: dict[str, list[dict]]) -> str:
    """Both tables as Markdown."""
    lines = [
        (
            "| tiny width, this CPU | tokens | TP | step, median of | cold | uploads | memory of"
            " all ranks |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['size']} | {row['video_tokens']:,} | {row['tp']} | {row['step_ms']:,.1f} ms of"
        f" {', '.join(f'{ms:,.1f}' for ms in row['steps_ms'])} | {row['cold_step_ms']:,.1f} ms |"
        f" {row['prepare_ms']:,.1f} ms, {row['upload_bytes'] / 1e6:.1f} MB |"
        f" {row['memory_bytes'] / 1e6:,.1f} MB |"
        for row in tables["measured"]
    ]
    lines += [
        "",
        (
            "| full width, plan | tokens | TP | FLOPs | ideal step | activations a core |"
            " all-reduced a rank | fits |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['size']} | {row['video_tokens']:,} | {row['tp']} |"
        f" {row['flops_per_step'] / 1e12:,.1f} T | {row['ideal_step_ms']:,.1f} ms |"
        f" {row['activation_bytes_per_core'] / 1e9:.2f} GB | {row['collective_bytes'] / 1e9:.2f} GB"
        f" | {'yes' if row['fits'] else 'no'} |"
        for row in tables["planned"]
    ]
    return "\n".join(lines)


def conclude(tables: dict[str, list[dict]], out: Path) -> bool:
    """Write the tables with their growth, draw and print them. True where anything grows too
    fast."""
    rates = growths(tables)
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {**tables, "growth": [rate._asdict() for rate in rates]}
    out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    plot(tables, out.with_suffix(".png"))
    print(printed(tables), "", sep="\n")
    for kind, limits in LIMITS.items():
        for column in limits:
            of_column = [rate for rate in rates if rate.what.startswith(f"{kind} {column},")]
            if not of_column:
                print(f"{kind} {column}: too small at these sizes to say how it grows")
                continue
            largest = max(of_column, key=lambda rate: rate.exponent)
            print(
                f"{largest.what}: grows at most as tokens ^ {largest.exponent:.2f}"
                f" ({largest.tokens[0]:,} to {largest.tokens[1]:,}), allowed {largest.allowed:g}"
            )
    faster = [rate for rate in rates if rate.exceeded]
    for rate in faster:
        print(
            f"grows too fast: {rate.what}, {rate.tokens[0]:,} to {rate.tokens[1]:,} tokens: ^"
            f" {rate.exponent:.2f}, allowed {rate.allowed:g}",
            file=sys.stderr,
        )
    step, memory = (
        max(
            (rate.exponent for rate in rates if rate.what.startswith(f"measured {column},")),
            default=math.nan,
        )
        for column in ("step_ms", "memory_bytes")
    )
    print(
        f"a step's time grows at most as tokens ^ {step:.2f}, its memory as tokens ^ {memory:.2f}"
    )
    return bool(faster)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=SIZES,
        metavar="HxWxF",
        help=f"two or more (default: {' '.join(SIZES)})",
    )
    parser.add_argument(
        "--tp-degrees", nargs="+", type=int, default=DEGREES, metavar="N", help="default: 1 2 4"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="warm turns (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/scale"),
        metavar="PREFIX",
        help="PREFIX.json, PREFIX.png",
    )
    args = parser.parse_args(argv)
    sizes = sorted(map(parse_size, args.sizes), key=video_tokens)
    print(
        f"{os.cpu_count()} cores, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            "measured": measured(Path(folder), sizes, args.tp_degrees, args.rounds),
            "planned": planned(Path(folder), sizes, args.tp_degrees),
        }
    if conclude(tables, args.out):
        sys.exit(1)


if __name__ == "__main__":
    errors.run(main)
