"""The released size on this machine, from files to MP4 by the five scripts at TP=4: all 48 blocks
of the transformer and all 48 layers of Gemma3-12B, at full width, on the CPU.

    python benchmarks/rehearsal.py --folder DIR [--keep] [--dense] [--tiny]

Two jobs, each with the prompt encoded on the ranks: a distilled one of 8 steps, upscaled, and a
guided one (--recipe dev, two passes a step) of 2 steps. Every script is a process of its own and is
watched while it runs. No memory is needed for weights: ranks map their files, and the system keeps
of them what it has room for and reads the rest again.

Sources are sparse (lib/random_sources.py): of each large tensor one row of 128 is random, the
others are holes. The sharder writes rank files with all their bytes. The transformer's stay so,
and each pass of a step reads them from the disk where memory cannot hold them; into Gemma's, holes
are made where they are zeros (fallocate --dig-holes), so that 40 GB of disk are enough for both.
With --dense (70 GB) Gemma's stay too.

What it made is deleted at its end, at Ctrl-C and at SIGTERM, unless --keep is given: then the same
command goes on from there.
--tiny makes the whole way with tiny models in a minute, to try this script.
--release 2.5 writes and runs the files of LTX-2.5, and makes only the distilled video.
"""

import json
import platform
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from lib.harness import finish
from lib.harness import parser as harness_parser
from lib.random_sources import write_checkpoint, write_gemma, write_split, write_upsampler
from lib.scripts import ROOT, Scripts
from lib.watch import Watched, run_watched
from tiny import make_tiny
from tiny.split import make_split, split_assets_in

from ltx_neuron.errors import UserError, run

RUN = ["--profile", "cpu", "--tp-degree", 4]
SIZE = ["--height", 64, "--width", 64, "--num-frames", 9]
ROOM, ROOM_DENSE, ROOM_TINY = 40e9, 70e9, 0.2e9  # bytes of disk
PROMPT = "a golden retriever puppy runs across a sunny green meadow"
NEGATIVE = "birds sing in the distance"
# Guidance by the negative prompt alone: two passes a step. All kinds together are four.
CFG_ONLY = ["--video-stg-guidance-scale", 0, "--audio-stg-guidance-scale", 0]
CFG_ONLY += ["--a2v-guidance-scale", 1, "--v2a-guidance-scale", 1]
COLUMNS = ("seconds", "own_memory_gb", "mapped_gb", "read_gb")


class Row(NamedTuple):
    """What a script, a phase or a step took. Memory is the peak of all its processes together, with
    pages that several of them have mapped counted once for each; read: from the disk."""

    name: str
    seconds: float
    own_memory_gb: float
    mapped_gb: float
    read_gb: float


class Rehearsal:
    """The folder of a rehearsal: sources, artifacts, videos, and a log of every script."""

    def __init__(self, folder: Path, tiny: bool, dense: bool, split: bool):
        self.folder, self.tiny, self.dense, self.split = folder, tiny, dense, split
        self.sources, self.artifacts = folder / "sources", folder / "artifacts"
        self.checkpoint = self.sources / "ltx-2.3-22b-random.safetensors"
        self.gemma, self.upsampler = self.sources / "gemma", self.sources / "upsampler.safetensors"
        self.rows: list[Row] = []
        self.disk_gb: dict[str, float] = {}  # after a script, of all files

    def take_folder(self) -> None:
        """Make the folder this rehearsal's own, which it may delete. Raises UserError where it
        holds other files, or its disk has too little room."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = self.folder / ".rehearsal"
        if any(self.folder.iterdir()) and not mark.exists():
            raise UserError(
                f"{self.folder} holds files of others, and would be deleted at the end.\nType"
                " --folder with an empty folder"
            )
        wanted = ROOM_TINY if self.tiny else ROOM_DENSE if self.dense else ROOM
        free = shutil.disk_usage(self.folder).free + used(self.folder)
        if free < wanted:
            raise UserError(
                f"the rehearsal writes {wanted / 1e9:.1f} GB to {self.folder}, whose disk has"
                f" {free / 1e9:.1f} GB for it.\nType --folder with a folder of a larger disk"
            )
        mark.touch()

    def write_sources(self) -> None:
        """Checkpoint, Gemma's folder and the upsampler, unless an earlier run left them."""
        self.sources.mkdir(exist_ok=True)
        began = time.perf_counter()
        if self.split:
            write = make_split if self.tiny else partial(write_split, seed=1)
            made = self.sources / "split"
            assets = split_assets_in(made)
            if not assets.spatial_upsampler.exists():  # the last one that is written
                assets = write(made)
            self.checkpoint, self.gemma = made, assets.text_encoder
            self.upsampler = assets.spatial_upsampler
        elif self.tiny:
            assets = make_tiny(self.sources / "tiny")
            self.checkpoint, self.gemma = assets.checkpoint, assets.gemma_root
            self.upsampler = assets.spatial_upsampler
        else:
            for write, path, made in (
                (write_checkpoint, self.checkpoint, self.checkpoint),
                (write_gemma, self.gemma, self.gemma / "model.safetensors"),
                (write_upsampler, self.upsampler, self.upsampler),
            ):
                if not made.exists():
                    write(path, seed=1)
        files = [path for path in self.sources.rglob("*") if path.is_file()]
        length = sum(path.stat().st_size for path in files)
        print(
            f"sources: {length / 1e9:.2f} GB long, {used(self.sources) / 1e9:.2f} GB on the disk,"
            f" {time.perf_counter() - began:.1f} s",
            flush=True,
        )

    def run_all(self) -> None:
        """The five scripts, in an order that needs little disk: Gemma's rank files lose their zeros
        before the transformer's are written."""
        scripts = Scripts(self.checkpoint, self.artifacts, RUN, SIZE, self.gemma, self.upsampler)
        command = scripts.command
        self.script("plan", ["-m", "ltx_neuron.plan", *scripts.common, *SIZE])
        self.script("shard_gemma3", command("shard_gemma3"))
        if not self.dense:
            self.dig_holes()
        self.script("shard_backbone", command("shard_dit"))
        for recipe in ("distilled",) if self.split else ("distilled", "dev"):
            dit = command("compile_dit", "--recipe", recipe)
            self.script(f"compile_transformer {recipe}", dit)
        self.script("compile_gemma3", command("compile_gemma3"))
        self.generate("distilled", command("generate", "--upscale", "spatial"))
        if self.split:
            return
        negative = ["--negative-prompt", NEGATIVE, "--num-inference-steps", 2]
        self.generate("dev", command("generate", *negative, *CFG_ONLY))

    def script(self, name: str, command: list) -> Watched:
        """Run a script; its row is kept and printed. SystemExit with the end of its log where it
        fails."""
        log = self.folder / f"{name.replace(' ', '_')}.log"
        watched = run_watched([sys.executable, *map(str, command)], log, cwd=ROOT)
        if watched.exit_code:
            end = "\n".join(log.read_text().splitlines()[-30:])
            raise SystemExit(f"{name} ended with exit code {watched.exit_code}:\n{end}")
        self.keep(row(name, watched))
        self.disk_gb[name] = used(self.folder) / 1e9
        return watched

    def keep(self, row: Row) -> None:
        self.rows.append(row)
        print(line(row), flush=True)

    def dig_holes(self) -> None:
        """Give back the disk's blocks that hold zeros only, in Gemma's rank files."""
        for path in self.artifacts.glob("weights/gemma3-*/*.safetensors"):
            subprocess.run(["fallocate", "--dig-holes", path], check=True)
        size = sum(used(path) for path in self.artifacts.glob("weights/gemma3-*"))
        print(f"Gemma's rank files with holes: {size / 1e9:.2f} GB", flush=True)

    def generate(self, recipe: str, command: list) -> None:
        """One video, with a row for each of its report's phases and steps."""
        report_path = self.folder / f"{recipe}.report.json"
        command = [*command, "--recipe", recipe, "--no-prompt-cache", "--prompt", PROMPT]
        command += ["--perf-dump-path", report_path]
        command += ["--output-path", self.folder / f"{recipe}.mp4"]
        watched = self.script(f"generate {recipe}", command)
        report = json.loads(report_path.read_text())
        for row in phase_rows(report, report_path.stat().st_mtime, watched):
            self.keep(row)


def phase_rows(report: dict, written: float, watched: Watched) -> list[Row]:
    """A row for every phase of a report, and after a denoising phase for each of its steps.

    written  when the report was written, which is when its last phase had ended. What lies between
             two phases is not placed: it is in the report's residual_seconds
    """
    rows, end = [], written
    steps = {f"denoise_{stage}": list(ms) for stage, ms in report["denoise_steps_ms"].items()}
    for phase in reversed(report["phases"]):
        begin = end - phase["seconds"]
        step_end, durations = end, steps.pop(phase["name"], [])  # the last phase of that name
        for number, ms in reversed(list(enumerate(durations, 1))):
            rows.append(row(f"    step {number}", watched, step_end - ms / 1e3, step_end))
            step_end -= ms / 1e3
        rows.append(row(f"  {phase['name']}", watched, begin, end))
        end = begin
    return rows[::-1]


def row(name: str, watched: Watched, begin: float = 0.0, end: float = 0.0) -> Row:
    """What was measured between two moments, or of a whole script."""
    seconds = end - begin if end else watched.seconds
    end = end or float("inf")
    return Row(
        name,
        seconds,
        watched.peak("anonymous_bytes", begin, end) / 1e9,
        watched.peak("file_bytes", begin, end) / 1e9,
        watched.read_between(begin, end) / 1e9,
    )


def used(folder: Path) -> int:
    """Bytes of the disk that a folder's files take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def line(row: Row) -> str:
    return f"{row.name:32}" + "".join(f"{value:14,.2f}" for value in row[1:])


def main() -> None:
    parser = harness_parser(__doc__)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="an empty folder on a disk with room")
    add("--keep", action="store_true", help="delete nothing, and go on from what is there")
    add("--dense", action="store_true", help="leave Gemma's rank files as the sharder wrote them")
    add("--tiny", action="store_true", help="tiny models")
    add("--release", choices=["2.3", "2.5"], default="2.3", help="release of LTX-2 (default: 2.3)")
    args = parser.parse_args()
    rehearsal = Rehearsal(args.folder, args.tiny, args.dense, args.release == "2.5")
    rehearsal.take_folder()
    memory = psutil.virtual_memory().total
    print(f"{psutil.cpu_count()} CPUs, {memory / 1e9:.1f} GB of memory, {platform.platform()}")
    try:
        rehearsal.write_sources()
        print(f"{'':32}" + "".join(f"{name:>14}" for name in COLUMNS))
        rehearsal.run_all()
    finally:
        if not args.keep:
            shutil.rmtree(args.folder)
    largest = max(rehearsal.disk_gb.values())
    print(f"largest size on the disk: {largest:.2f} GB")
    memory = max(row.own_memory_gb for row in rehearsal.rows)
    finish(args, disk_gb=largest, memory_gb=memory)


if __name__ == "__main__":
    run(main)
