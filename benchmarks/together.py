"""Processes that shard, compile, generate and read the prompt cache in one artifacts folder, all at
once: whether every one of them succeeds, and what lies there afterwards.

    python benchmarks/together.py --folder DIR [--processes 4] [--rounds 50]

A round begins with an empty artifacts folder. Its processes start at the same moment, and each runs
the two shard scripts, the two compile scripts and generate_ltx23.py on tiny assets at TP 2; every
second one then generates once more, now with a prompt that some process has encoded. Every exit
code must be 0 and all videos the same bytes; afterwards both weight sets must pass --verify, every
graph must have its manifest's digest, and no lock or unfinished file may be left.

Prints a line a round and the verdict last; exits 1 on any problem. Every script runs in a process
of its own, forked from this one, which has imported what they need and has run none of it.
"""

import argparse
import importlib
import multiprocessing
import os
import runpy
import shutil
import sys
import time
from pathlib import Path

from lib.scripts import Scripts

from ltx_neuron.backends.manifest import damaged_graphs
from ltx_neuron.files import MANIFEST
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.tiny import TinyAssets, assets_in, make_tiny

FORK = multiprocessing.get_context("fork")
SECONDS = 600  # until a round counts as hanging
# What scripts import later than at their beginning.
PRELOADED = (
    "ltx_neuron.flags",
    "ltx_neuron.generate",
    "ltx_neuron.workspace",
    "ltx_core.model.audio_vae",
    "ltx_core.model.video_vae",
    "torch._dynamo",
    "torch._export.serde.serialize",
    "torch.export",
    "torch.testing._internal.distributed.fake_pg",
    "transformers",
    "av",
)
SHARD = ("shard_dit", "shard_gemma3")
SIZE = ["--height", 64, "--width", 64, "--num-frames", 9]
RUN = ["--profile", "cpu", "--tp-degree", 2, "--dtype", "float32"]


class Round:
    """One round: its folder, its processes' scripts with their logs, and what was found wrong."""

    def __init__(self, folder: Path, assets: TinyAssets, processes: int, wanted: bytes | None):
        """wanted: the video of earlier rounds"""
        self.folder, self.processes, self.wanted = folder, processes, wanted
        self.artifacts = folder / "artifacts"
        made = assets.checkpoint, self.artifacts, RUN, SIZE, assets.gemma_root
        self.command = Scripts(*made).command
        folder.mkdir(parents=True)

    def scripts(self, number: int) -> list[tuple[str, list[str]]]:
        """What a process runs, in order: the name of a log, and a command."""
        names = ("first", "again")[: 1 + number % 2]
        videos = [self.folder / f"{number}-{name}.mp4" for name in names]
        make = self.command("generate", "--prompt", "a red fox", "--output-path")
        return [
            *((name, self.command(name)) for name in (*SHARD, "compile_dit", "compile_gemma3")),
            *((f"generate_{video.stem}", [*make, str(video)]) for video in videos),
        ]

    def run_all(self) -> list[str]:
        """Let all processes do their scripts; returns the problems."""
        start = time.monotonic() + 0.5  # all are forked by then
        numbers = range(self.processes)
        running = [FORK.Process(target=self._work, args=(number, start)) for number in numbers]
        for process in running:
            process.start()
        problems = []
        for number, process in enumerate(running):
            process.join(max(0.0, start + SECONDS - time.monotonic()))
            if process.exitcode is None:
                process.terminate()
                problems.append(f"process {number}: still running after {SECONDS} s")
            elif process.exitcode:
                problems.append(f"process {number}: {self._failure(number).read_text()}")
        return problems or self._check()

    def _work(self, number: int, start: float) -> None:
        """A process's scripts, one after another; exit code 1 at the first that fails."""
        self._failure(number).write_text("ended by itself")
        time.sleep(max(0.0, start - time.monotonic()))
        for name, command in self.scripts(number):
            if code := self._run(f"{number}-{name}", command):
                self._failure(number).write_text(f"{name} ended with {code}")
                raise SystemExit(1)

    def _failure(self, number: int) -> Path:
        """The file in which a process says what failed."""
        return self.folder / f"{number}.failed"

    def _run(self, log: str, command: list[str]) -> int:
        """Run a script in a process of its own; returns its exit code."""
        process = FORK.Process(target=self._as_main, args=(self.folder / f"{log}.log", command))
        process.start()
        process.join()
        return process.exitcode

    def _as_main(self, log: Path, command: list[str]) -> None:
        with open(log, "wb", buffering=0) as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        sys.argv = command
        runpy.run_path(sys.argv[0], run_name="__main__")

    def _check(self) -> list[str]:
        """What is wrong with what the processes left."""
        problems = []
        videos = {path.read_bytes() for path in self.folder.glob("*.mp4")}
        if len(videos | {self.wanted or self.video()}) != 1:
            problems.append(f"{len(videos)} different videos in this round, or others than before")
        for name in SHARD:
            if code := self._run("verify", self.command(name, "--verify")):
                problems.append(f"{name} --verify ended with {code}")
        graphs = [path.parent for path in self.artifacts.glob(f"graphs/*/{MANIFEST}")]
        problems += [f"{path.name}: {bad}" for path in graphs for bad in damaged_graphs(path)]
        left = [p for p in self.artifacts.rglob("*") if p.name.endswith((".lock", ".partial"))]
        return problems + [f"left behind: {path.relative_to(self.folder)}" for path in left]

    def said(self, words: str, logs: str = "*.log") -> int:
        """How many scripts printed these words."""
        return sum(words in path.read_text() for path in self.folder.glob(logs))

    def video(self) -> bytes:
        """One of the videos."""
        return next(self.folder.glob("*.mp4")).read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="for assets and artifacts")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    import_ltx_core()
    for name in PRELOADED:
        importlib.import_module(name)
    # In a process of its own: torch's threads, once started here, would be missing in the forks.
    making = FORK.Process(target=make_tiny, args=(options.folder / "assets",))
    making.start()
    making.join()
    assets, wanted, bad = assets_in(options.folder / "assets"), None, []
    for number in range(1, options.rounds + 1):
        began = time.monotonic()
        this = Round(options.folder / f"round-{number}", assets, options.processes, wanted)
        problems = this.run_all()
        generated = this.said("video: ", "*-generate_*.log")
        cached = generated - this.said("load_gemma3", "*-generate_*.log")
        print(
            f"round {number}: {time.monotonic() - began:.1f} s, {this.said('waiting for it')}"
            f" scripts waited, {cached} of {generated} videos from cached contexts;"
            f" {'; '.join(problems) or 'all the same bytes'}",
            flush=True,
        )
        if problems:
            bad.append(number)
            continue  # its folder stays, with the logs
        wanted = this.video()
        shutil.rmtree(this.folder)
    print(
        f"{options.rounds} rounds of {options.processes} processes, bad: {bad or 'none'}",
        flush=True,
    )
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
