"""ltx-neuron prepare: makes the weights and graphs of a generation in one process.

A killed run continues when the command is typed again. If everything exists, it does nothing.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from ltx_neuron import flags, invocation
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Need, RunOptions, Workspace, needs
from ltx_neuron.commands import generate
from ltx_neuron.engine.preflight import Preflight, check_dfr, check_distilled_loras, check_plans_fit
from ltx_neuron.errors import UserError
from ltx_neuron.files import check_space, nearest_existing, read_json, write_json
from ltx_neuron.flags import verbs
from ltx_neuron.format import columns, format_bytes, format_seconds
from ltx_neuron.job import Job
from ltx_neuron.report.progress import this_machine, times_file

_SAMPLE_BYTES = 256 * 2**20  # of the checkpoint, copied to measure the write rate


class ArtifactGroup(NamedTuple):
    """Weights or graphs that are made together. folders: their final folders. make: makes the
    missing ones. size: bytes of weights; None for graphs, whose size is unknown before
    compilation."""

    title: str
    needs: list[Need]
    folders: list[Path]
    make: Callable[[], object]
    size: int | None = None

    @property
    def bytes_there(self) -> int:
        folders = filter(Path.is_dir, self.folders)
        return sum(file.stat().st_size for folder in folders for file in folder.iterdir())


def parts_of(
    workspace: Workspace, jobs: list[Job], options: RunOptions, workers: int | None = None
) -> list[ArtifactGroup]:
    """The needs of jobs by their titles, in the order of their making."""
    parts = []
    for title, group in groupby(needs(workspace, jobs, options), lambda need: need.title):
        listed = [*group]
        make, size = partial(build.make, workspace, listed, workers), None
        if listed[0].source:
            size = sum(build.weight_bytes(workspace, need) for need in listed)
        parts.append(ArtifactGroup(title, listed, [*map(workspace.folder, listed)], make, size))
    return parts


class Preparation:
    """The parts of a workspace. Finds the missing ones and makes them. command: what the user types
    to continue."""

    def __init__(self, workspace: Workspace, parts: list[ArtifactGroup], command: str):
        self.workspace, self.parts, self.command = workspace, parts, command
        # Records of this machine: "rate", bytes of weights per second; "seconds" of parts;
        # "folders" of graphs that the ranks' compiler has compiled.
        self._file = times_file(workspace.artifacts, "preparation")
        self.took: dict[str, Any] = {"rate": None, "seconds": {}, "folders": []}
        with suppress(UserError):  # no file, or a damaged one
            self.took |= read_json(self._file)
        self.missing = [part for part in parts if not self._is_there(part)]

    def _is_there(self, part: ArtifactGroup) -> bool:
        """Raises UserError for a damaged folder."""
        finished = [need for need in part.needs if self.workspace.is_made(need)]
        for need in finished:
            self.workspace.find(need, self.command)
        if len(finished) < len(part.needs):
            return False
        # The manifests do not record the ranks' compiler.
        known = {*map(str, part.folders)} <= {*self.took["folders"]}
        return known or not self._compiled_by_ranks(part)

    def _compiled_by_ranks(self, part: ArtifactGroup) -> bool:
        profile = self.workspace.profile
        ranks = profile.backend == "torchdist" and profile.compile_backend != "export"
        return ranks and part.size is None

    def table(self) -> str:
        rows = [["part", "size on disk", "time", "state"]]
        for part in self.parts:
            size, state, expected = part.size or part.bytes_there or None, "finished", "-"
            if part in self.missing:
                state = "partial" if any(map(Path.is_dir, part.folders)) else "missing"
                expected = self._expected(part)
            rows.append([part.title, format_bytes(size), expected, state])
        lines = columns(rows, left=(0, -1))
        if weights := sum(part.size or 0 for part in self.missing):
            rate, source = self.rate
            size = f"{format_bytes(weights)} of weights"
            lines.append(f"\n{size} at {format_bytes(rate)} a second ({source})")
        return "\n".join(lines)

    @cached_property
    def rate(self) -> tuple[float, str]:
        """Bytes of weights written per second, and the source of this value."""
        if self.took["rate"]:
            return self.took["rate"], "as last time"
        place = nearest_existing(self.workspace.artifacts)
        return measured_rate(self.workspace.checkpoint_path, place), "of a copied sample"

    def _expected(self, part: ArtifactGroup) -> str:
        if part.size is not None:
            return f"about {format_seconds(part.size / self.rate[0])}"
        if self.workspace.profile.device == "neuron":
            return "not measured"
        seconds = self.took["seconds"].get(self._key(part))
        return f"about {format_seconds(seconds)}" if seconds else "not known yet"

    def _key(self, part: ArtifactGroup) -> str:
        """A key of a part's graphs that does not depend on the code's version."""
        names = (path.name.rpartition("-")[0] for path in part.folders)
        profile = self.workspace.profile
        return " ".join([profile.name, profile.backend, profile.compile_backend, *names])

    def check_space(self) -> None:
        """Raise UserError if the disk has no room for the missing weights."""
        needed = sum(max(0, (part.size or 0) - part.bytes_there) for part in self.missing)
        check_space(nearest_existing(self.workspace.artifacts), needed, "the weights need")

    def run(self) -> None:
        """Make the missing parts in order, and record the seconds of each."""
        for number, part in enumerate(self.missing, 1):
            print(f"{number} of {len(self.missing)}: {part.title}", flush=True)
            began, whole = time.monotonic(), not part.bytes_there
            part.make()
            seconds = time.monotonic() - began
            if part.size is None and whole:
                self.took["seconds"][self._key(part)] = round(seconds, 1)
            elif part.size and whole and part.size >= _SAMPLE_BYTES:  # else startup dominates
                self.took["rate"] = part.size / seconds
            if self._compiled_by_ranks(part):
                self.took["folders"] += map(str, part.folders)
            write_json(self._file, self.took | {"machine": this_machine()})


def measured_rate(checkpoint: Path, folder: Path) -> float:
    """The rate, in bytes per second, of reading a sample from the middle of a checkpoint, hashing
    it, and writing it to the disk of a folder."""
    size = checkpoint.stat().st_size
    count, began = min(size, _SAMPLE_BYTES), time.monotonic()
    hasher = blake3()
    with open(checkpoint, "rb") as source, tempfile.TemporaryFile(dir=folder) as target:
        source.seek((size - count) // 2)
        while piece := source.read(min(count - target.tell(), 8 * 2**20)):
            hasher.update(piece)
            target.write(piece)
        target.flush()
        os.fsync(target.fileno())
    return count / (time.monotonic() - began)


def jobs_of(args: argparse.Namespace, workspace: Workspace) -> list[Job]:
    """The jobs of the flags; prompts are ignored. Raises UserError for impossible jobs."""
    if args.prompts_file:
        jobs = [line.job for line in flags.lines(args, workspace)]
    else:
        jobs = [workspace.resolved(flags.shape(args, args.recipe))]
        jobs[0].check_shape()
        jobs[0].check_rules()
    if any(job.auto_duration for job in jobs):
        raise UserError(
            "--auto-duration: a graph has one length, and this length is unknown before the prompt"
            " is encoded\nType --num-frames N, the length that generate --predict-duration prints"
        )
    check_distilled_loras(jobs, workspace.checkpoint.release)
    check_dfr(jobs)
    return jobs


def main(argv: list[str]) -> None:
    parser = verbs.prepare()
    args = parser.parse_args(argv)
    if args.num_workers is not None and args.num_workers < 1:
        raise UserError(f"--num-workers {args.num_workers}: wanted 1 or more")
    args.recipe = flags.recipe(args)
    workspace, options = flags.workspace(args), flags.run_options(args)
    jobs, words = jobs_of(args, workspace), [w for w in parser.words if w != "--dry-run"]
    command = invocation.command("prepare", *words)
    Preflight.of(workspace, options).check_files(jobs)
    parts = parts_of(workspace, jobs, options, args.num_workers)
    preparation = Preparation(workspace, parts, command)
    workspace.print_tuned()
    if missing := preparation.missing:
        if any(part.size is None for part in missing):
            workspace.check_runtime()
            check_plans_fit(workspace, jobs, options.neuron_gemma)
        print(preparation.table(), flush=True)
        preparation.check_space()
        if args.dry_run:
            return
        try:
            preparation.run()
        except KeyboardInterrupt:
            print(f"\nstopped; to continue, type: {command}", file=sys.stderr)
            raise
    for job in jobs:  # another size may have made their graphs
        build.record_size(workspace, job, job.buckets_to_compile)
    state = "all parts are finished" if missing else "everything exists, nothing to do"
    print(f"{state}: {workspace.artifacts}\nNow type:")
    words = generate.words_of(
        parser, parser.words, lambda dest: dest not in ("num_workers", "dry_run")
    )
    file = "out.wav" if args.sound_only else "out.mp4"
    if not args.prompts_file:
        prompt = ["--prompt", "a red fox trots through snow"]
        words += [] if args.prompt or args.text_embeddings else prompt
        words += [] if args.output_path else ["--output-path", file]
    elif not args.output_dir:
        words += ["--output-dir", "outputs"]
    print(invocation.command("generate", *words))
