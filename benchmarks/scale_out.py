"""A denoising step of one clip on several groups of ranks, with one CPU thread a rank.

    python benchmarks/scale_out.py

A small random checkpoint at TP 1. Context parallelism 1, 2 and 4 take turns on an unguided step,
and guidance groups 1, 2 and 4 on a step of four passes and on one in four tiles. Medians count; the
last line is JSON. With more ranks than cores, a step cannot become faster; its ratio then shows
what the groups cost. A CPU is no chip: the ratios say nothing of the links between chips.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from lib.harness import finish, print_conditions, print_ratios, take_turns
from lib.harness import parser as harness_parser
from lib.sizes import parse_size
from tiny import TinySizes, make_tiny

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends import registry
from ltx_neuron.config.profiles import resolve
from ltx_neuron.denoise import CompiledStep, StageRun
from ltx_neuron.job import Job
from ltx_neuron.sampling import rules
from ltx_neuron.tune.step import prepared

# Products of a width of 1,024 take nearly all of a step, as in the released model.
MODEL = TinySizes(layers=2, heads=16, head_dim=64, audio_head_dim=32, connector_layers=1)
SIZE, ROUNDS, DEGREES = "384x512x25", 7, (1, 2, 4)
TILE = 224, 288  # pixels: four tiles of a canvas of 384x512
# Four passes: prompt, negative prompt, STG, isolated.
GUIDANCE = {
    name: value
    for names in rules.GUIDANCE
    for name, value in zip(names, (3.0, 1.0, (0,), 3.0, 0.7, 0), strict=True)
}


def layouts(job: Job, guided: Job, tiled: Job) -> dict[str, tuple[Job, tuple[str, ...]]]:
    """Job and profile settings of each way."""
    gather = {f"context {n}": (job, (f"context_parallel={n}",)) for n in DEGREES}
    groups = {f"guidance {n}": (guided, (f"guidance_parallel={n}",)) for n in DEGREES}
    tiles = {f"tiles {n}": (tiled, (f"guidance_parallel={n}",)) for n in DEGREES}
    return gather | groups | tiles


def stage_of(tiny, folder: Path, job: Job, settings: tuple[str, ...], stack: ExitStack) -> StageRun:
    """The job's prepared stage on started ranks."""
    profile = resolve("cpu", ("threads=1", *settings))
    workspace = Workspace(tiny.checkpoint, profile, folder, 1, "float32")
    weights = build.make(workspace, workspace.weight_sets("dit"))
    build.make(workspace, workspace.dit_graphs(job.buckets))
    first, *others = (CompiledStep(*p) for p in workspace.dit_programs_for(job, job.stages[0]))
    compiled = replace(first, tiles=(first, *others)) if others else first
    ranks = registry.ranks(workspace.profile, 1, workspace.compiler_cache)
    stack.enter_context(ranks)
    programs = {step.bucket.name: step.manifest for step in compiled.programs}
    ranks.load(weights[0], programs, torch.float32)
    return prepared(ranks, compiled, workspace, torch.float32, job, job.stages[0])


def main() -> None:
    parser = harness_parser(__doc__)
    parser.add_argument("--size", type=parse_size, default=parse_size(SIZE), metavar="HxWxF")
    parser.add_argument("--repeats", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", metavar="NAME", help="ways whose names begin so")
    args = parser.parse_args()
    print_conditions(f"a step of {SIZE} at a width of 1,024, TP 1, float32, one thread a rank")
    job = Job.of_size(args.size)
    guided = Job.of_size(args.size, recipe="dev", **GUIDANCE)
    tiled = Job.of_size(args.size, tile=True, tile_height=TILE[0], tile_width=TILE[1])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tiny = make_tiny(Path(folder) / "model", MODEL)
        stages = {
            name: stage_of(tiny, Path(folder) / "artifacts", *way, stack)
            for name, way in layouts(job, guided, tiled).items()
            if name.startswith(args.only)
        }
        for stage in stages.values():
            stage.start()
        turns = take_turns({n: partial(s.step, 0) for n, s in stages.items()}, args.repeats)
        for name, stage in stages.items():  # after the first step, which uploads the tiles' inputs
            before = stage.ranks.bytes_sent
            stage.step(0)
            print(f"{name}: {stage.ranks.bytes_sent - before:,} bytes to the ranks in a step")
    for kind in ("context", "guidance", "tiles"):
        if ways := {name: turn for name, turn in turns.items() if name.startswith(kind)}:
            print_ratios(ways, f"{kind} 1", cpu=False)
    finish(args, **{name: turn.median for name, turn in turns.items()})


if __name__ == "__main__":
    main()
