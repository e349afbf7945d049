"""From a call of LTXPipeline to its first denoising step, where models and contexts are
there already: what a call costs besides the steps and the decoding.

    python benchmarks/second_call.py --folder DIR [--calls 9] [--tp-degree 4]

A tiny model with the profile of a trn2.3xlarge, whose memory limit each call is checked against, on
this CPU. The last line is the median in milliseconds, of the calls after the second.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from ltx_neuron.denoise import StageRun
from ltx_neuron.job import Job, Size
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.profiles import resolve
from ltx_neuron.tiny import TinySizes, make_tiny
from ltx_neuron.workspace import Workspace

PROFILE = "trn2.3xlarge"
ON_A_CPU = ("backend=torchdist", "device=cpu", "compile_backend=export", "attention=sdpa")
SIZE = Size(64, 64, 9)


def prepare(folder: Path, tp: int):
    """Tiny assets, sharded and compiled for the profile."""
    assets = make_tiny(folder / "assets", TinySizes())
    workspace = Workspace(
        assets.checkpoint,
        resolve(PROFILE, ON_A_CPU),
        folder / "artifacts",
        tp,
        "float32",
        assets.gemma_root,
    )
    workspace.shard_dit()
    workspace.shard_gemma3()
    workspace.compile_text()
    workspace.compile_dit(Job("", SIZE).buckets)
    return assets


def milliseconds_to_first_step(pipe: LTXPipeline, calls: int) -> list[float]:
    """Of each call, from its beginning to the beginning of its first step."""
    began, step = [], StageRun.step

    def noting(self, number: int) -> float:
        if number == 0:
            began.append(time.perf_counter())
        return step(self, number)

    StageRun.step, times = noting, []
    for _ in range(calls):
        called = time.perf_counter()
        pipe(
            prompt="rain",
            height=SIZE.height,
            width=SIZE.width,
            num_frames=SIZE.num_frames,
            output_type="latent",
        )
        times.append((began[-1] - called) * 1e3)
    StageRun.step = step
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="for assets and artifacts")
    parser.add_argument("--calls", type=int, default=9)
    parser.add_argument("--tp-degree", type=int, default=4)
    args = parser.parse_args()
    assets = prepare(args.folder, args.tp_degree)
    with LTXPipeline.from_pretrained(
        checkpoint_path=assets.checkpoint,
        gemma_root=assets.gemma_root,
        artifacts_dir=args.folder / "artifacts",
        profile=PROFILE,
        profile_set=ON_A_CPU,
        tp_degree=args.tp_degree,
        dtype="float32",
    ) as pipe:
        pipe.engine.progress = False
        times = milliseconds_to_first_step(pipe, args.calls)
    print(f"tp {args.tp_degree}, torch {torch.__version__}; milliseconds from call to first step")
    print("first call, which loads both models:", f"{times[0]:.0f}")
    print("later calls:", " ".join(f"{each:.1f}" for each in times[1:]))
    print(f"{statistics.median(times[2:]):.1f}")


if __name__ == "__main__":
    main()
