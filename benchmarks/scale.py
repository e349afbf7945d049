"""How step time and memory grow with tokens and ranks: measured on a CPU at tiny width, and by the
plan at full width.

    python benchmarks/scale.py

A tiny checkpoint is sharded and compiled for every size and TP degree, and steps run on rank
processes as in a generation. The sizes take turns, one step each, and the medians count; the first
turn is cold and gives the memory: the kernel's peak of every rank, over what it held before. The
plan counts the same in the graphs of the released width, for one Trainium2 chip.

Between successive sizes, log(what) / log(tokens) must not exceed attention's 2 for time and FLOPs
and 1 for memory and bytes: exit code 1 where it does. Prints both tables, the largest exponents,
and all numbers as one line of JSON. With more ranks than cores, time is what it is.
"""

import argparse
import math
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
from lib.harness import finish, print_conditions
from lib.harness import parser as harness_parser
from lib.sizes import parse_size, video_tokens
from tiny import make_tiny

from ltx_neuron import errors
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends import registry
from ltx_neuron.config.profiles import PROFILES, resolve
from ltx_neuron.denoise import CompiledStep
from ltx_neuron.format import columns
from ltx_neuron.job import Job, Size
from ltx_neuron.plan import plan
from ltx_neuron.tune.step import prepared
from ltx_neuron.weights.checkpoint import Checkpoint

# 192 to 24,576 tokens.
SIZES = ("192x256x25", "384x512x25", "512x768x57", "512x768x121", "1024x1536x57", "1024x1536x121")
DEGREES, ROUNDS = (1, 2, 4), 3
TIME, MEMORY = 2, 1  # the exponents of attention, and of holding every token once
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

    def __str__(self) -> str:
        before, after = self.tokens
        return (
            f"{self.what}: tokens ^ {self.exponent:.2f} from {before:,} to {after:,}, allowed"
            f" {self.allowed:g}"
        )


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
        self.tp = tp
        self.workspace = Workspace(checkpoint, PROFILES["cpu"], artifacts, tp, "float32")
        build.make(self.workspace, self.workspace.weight_sets("dit"))
        jobs = {size: Job.of_size(size, prompt="random contexts") for size in sizes}
        build.make(
            self.workspace, self.workspace.dit_graphs([job.buckets[0] for job in jobs.values()])
        )
        self.steps = {
            size: CompiledStep(*self.workspace.dit_program_for(job, job.stages[0]))
            for size, job in jobs.items()
        }
        others = set(active_children())
        self.ranks = registry.ranks(self.workspace.profile, tp, self.workspace.compiler_cache)
        self.pids = [process.pid for process in set(active_children()) - others]
        programs = {step.bucket.name: step.manifest for step in self.steps.values()}
        self.ranks.load(self.workspace.dit_weights(), programs, torch.float32)
        self.base = self._memory("VmRSS")

    def step(self, size: Size) -> dict[str, float]:
        """Upload what a stage of that size uploads and run its first step: milliseconds of both,
        and the ranks' bytes."""
        for pid in self.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        job = Job.of_size(size, prompt="random contexts")
        began, sent = time.perf_counter(), self.ranks.bytes_sent
        run = prepared(
            self.ranks, self.steps[size], self.workspace, torch.float32, job, job.stages[0]
        )
        run.start()
        ready, uploaded = time.perf_counter(), self.ranks.bytes_sent - sent
        run.step(0)
        return {
            "prepare_ms": (ready - began) * 1e3,
            "step_ms": (time.perf_counter() - ready) * 1e3,
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
    """Every size at every degree on this machine: medians of the warm turns, and the cold turn's
    memory."""
    checkpoint = make_tiny(folder / "tiny").checkpoint
    with ExitStack() as stack:
        running = []
        for tp in degrees:
            running.append(Running(checkpoint, folder / "artifacts", tp, sizes))
            stack.enter_context(running[-1].ranks)
        turns = {(size, ranks.tp): [] for size in sizes for ranks in running}
        for _ in range(1 + rounds):
            for size in sizes:
                for ranks in running:
                    turns[size, ranks.tp].append(ranks.step(size))
    rows = []
    for (size, tp), (cold, *warm) in turns.items():
        medians = {name: statistics.median(turn[name] for turn in warm) for name in cold}
        memory = {"memory_bytes": cold["memory_bytes"], "cold_step_ms": cold["step_ms"]}
        rows.append({**_case(size, tp), **medians, **memory})
    return rows


def _case(size: Size, tp: int) -> dict:
    name = f"{size.height}x{size.width}x{size.num_frames}"
    return {"size": name, "tp": tp, "video_tokens": video_tokens(size)}


def planned(folder: Path, sizes: list[Size], degrees: list[int]) -> list[dict]:
    """Every size at every degree by the plan: the released width and depth in bf16 on one Trainium2
    chip."""
    checkpoint = Checkpoint(write_sparse_checkpoint(folder / "ltx-2.3-sparse.safetensors"))
    rows = []
    for tp in degrees:
        for size in sizes:
            profile = resolve("trn2.3xlarge")
            estimate = plan(checkpoint, profile, Job.of_size(size), tp, "bfloat16", gemma=None)
            stage = estimate.stages[-1]
            names = "flops_per_step", "ideal_step_ms", "activation_bytes_per_core", "upload_bytes"
            row = _case(size, tp) | {name: getattr(stage, name) for name in names}
            row["collective_bytes"] = stage.collectives_per_step["bytes"]
            rows.append(row | {"fits": estimate.fits})
    return rows


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


def _cell(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def conclude(args: argparse.Namespace, tables: dict[str, list[dict]]) -> bool:
    """Print the tables and their growth. True where anything grows too fast."""
    for rows in tables.values():
        print(*columns([list(rows[0]), *([*map(_cell, row.values())] for row in rows)]), sep="\n")
    rates = growths(tables)
    largest = {}
    for rate in sorted(rates, key=lambda rate: rate.exponent):
        largest[rate.what.partition(",")[0]] = rate
    print(*(f"at most {rate}" for rate in largest.values()), sep="\n")
    faster = [rate for rate in rates if rate.exceeded]
    for rate in faster:
        print(f"grows too fast: {rate}", file=sys.stderr)
    finish(args, **tables, growth={name: rate.exponent for name, rate in largest.items()})
    return bool(faster)


def main(argv: list[str] | None = None) -> None:
    parser = harness_parser(__doc__)
    add = parser.add_argument
    help = f"two or more (default: {' '.join(SIZES)})"
    add("--sizes", nargs="+", default=SIZES, metavar="HxWxF", help=help)
    help = "default: 1 2 4"
    add("--tp-degrees", nargs="+", type=int, default=DEGREES, metavar="N", help=help)
    add("--rounds", type=int, default=ROUNDS, help="warm turns (default: %(default)s)")
    args = parser.parse_args(argv)
    sizes = sorted(map(parse_size, args.sizes), key=video_tokens)
    print_conditions(f"{len(sizes)} sizes, tp {', '.join(map(str, args.tp_degrees))}")
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            "measured": measured(Path(folder), sizes, args.tp_degrees, args.rounds),
            "planned": planned(Path(folder), sizes, args.tp_degrees),
        }
    if conclude(args, tables):
        sys.exit(1)


if __name__ == "__main__":
    errors.run(main)
