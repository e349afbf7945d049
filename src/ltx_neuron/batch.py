"""--prompts-file: one JSON object per line, flags as keys. Models load once for all lines, and each
result is recorded when it ends.

The same command resumes a killed batch. It skips finished lines that have not changed, and
continues an interrupted one after its last finished stage.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx_neuron import files
from ltx_neuron.config.common import digest
from ltx_neuron.decode_queue import Clip, Failure, Result
from ltx_neuron.engine import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.files import check_readable, read_json, write_json
from ltx_neuron.host.images import content_digest
from ltx_neuron.job import Job
from ltx_neuron.progress import (
    JobRun,
    beside,
    check_replaceable,
    is_log,
    log_path,
    not_ours,
    restore_state,
    save_state,
    state_path,
)

RESULTS = "results.json"
MAX_LINES = 100_000
MAX_LINE_BYTES = 1_000_000


@dataclass(frozen=True)
class Line:
    """One line of a prompts file. digest: of everything on which its video depends."""

    number: int
    job: Job
    digest: str

    @property
    def file(self) -> str:
        return f"{self.number:04d}.{'wav' if self.job.sound_only else 'mp4'}"


def read_lines(
    path: Path, job_of_line: Callable[[dict[str, Any]], Job], identity: dict
) -> list[Line]:
    """Parse and check every line. One UserError lists every bad line by number.

    job_of_line  returns the Job for a line's keys, or raises UserError
    identity     everything besides the job on which videos depend, such as the checkpoint: if it
                 changes, finished lines run again
    """
    example = '{"prompt": "a golden retriever runs across a meadow", "seed": 10}'
    wanted = f". Wanted: one JSON object per line, for example\n{example}"
    check_readable(path, "--prompts-file", wanted)
    lines, problems = [], []
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if number > MAX_LINES:
                raise UserError(f"{path} has more than {MAX_LINES} lines; split it")
            if not raw.strip():
                continue
            try:
                job = job_of_line(_parse(raw))
                job.check()
                lines.append(Line(number, job, _digest(job, identity)))
            except UserError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        raise UserError(f"{path}: nothing was run.\n" + "\n".join(problems))
    if not lines:
        raise UserError(f"{path} has no lines")
    return lines


def with_job(line: Line, job: Job, identity: dict) -> Line:
    """A line with its job after the length is predicted. identity: as for read_lines."""
    return line if job is line.job else Line(line.number, job, _digest(job, identity))


def _digest(job: Job, identity: dict) -> str:
    return digest([job.with_paths(content_digest).identity, identity])


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        if len(raw) > MAX_LINE_BYTES:
            raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
        values = json.loads(raw, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise UserError(f"got {kind}, wanted a JSON object with flags as keys")
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises UserError for a repeated key."""
    values = {}
    for key, value in pairs:
        if key in values:
            raise UserError(f"the key {key!r} is given twice; leave one out")
        values[key] = value
    return values


def run(
    lines: list[Line],
    engine: Engine,
    folder: Path,
    write: Callable[[Clip, Path], None],
    identity_of: Callable[[Job], dict],
) -> list[dict]:
    """Run the unfinished lines. Returns every line's entry, in the file's order.

    write        writes a clip to its video's path while it is decoded
    identity_of  everything on which a job's latents depend, stored in its resume file
    """
    results = Results(folder, lines)
    pending = {id(line.job): line for line in lines if line.number not in results.entries}

    def line_of(job: Job) -> Line:
        return pending[id(job)]

    def state_of(job: Job) -> Path:
        return state_path(folder / line_of(job).file)

    def resume(job: Job) -> JobRun | None:
        """A line's interrupted run, if there is one with the same identity."""
        path, number = state_of(job), line_of(job).number
        if not path.is_file():
            return None
        try:
            run = restore_state(path, job, identity_of(job), engine.workspace.dtype)
        except UserError:  # the line or its weights changed since
            print(f"line {number} starts over: {path} is from another run")
            return None
        print(f"resumed: line {number}; {run.left}")
        return run

    # Jobs end one after another in any thread, so these never run concurrently.
    def hand_over(result: Result) -> None:
        results.done(line_of(result.job))
        state_of(result.job).unlink(missing_ok=True)

    engine.on_stage_end = lambda run: save_state(state_of(run.job), run, identity_of(run.job))
    jobs = [line.job for line in pending.values()]
    if jobs:
        for outcome in engine.run(
            jobs,
            isolate=True,
            resume=resume,
            write=lambda clip: write(clip, folder / line_of(clip.job).file),
            hand_over=hand_over,
        ):
            if isinstance(outcome, Failure):
                results.failed(line_of(outcome.job), outcome.error)
    return [results.entries[line.number] for line in lines]


def end(folder: Path, entries: list[dict]) -> None:
    """Print how many lines of a batch have ended in each way; exit with 1 if one failed."""
    failed = sum(entry["status"] != "done" for entry in entries)
    print(f"videos: {folder} ({len(entries) - failed} done, {failed} failed; {RESULTS})")
    if failed:
        raise SystemExit(1)


def check_outputs(
    lines: list[Line], folder: Path, report: Path | None, inputs: dict[str, Path]
) -> None:
    """Raise UserError if a batch would overwrite its inputs, or files that no batch made.

    report  path of the latency report
    inputs  files and folders that lines read, by flag
    """
    log = log_path(folder / RESULTS)
    outputs = {f"{path.name} of --output-dir": path for path in (folder / RESULTS, log)}
    outputs |= {"--perf-dump-path": report} if report else {}
    for line in lines:
        video = folder / line.file
        for path in (video, *beside(video).values()):
            outputs[f"{path.name} of --output-dir"] = path
    files.check_outputs(outputs, inputs)
    if os.path.lexists(log) and not is_log(log):
        raise not_ours(log, "--output-dir")
    done = _recorded_files(folder)
    for line in lines:
        video = folder / line.file
        check_replaceable(video, "--output-dir")
        ours = line.file in done or any(map(os.path.lexists, beside(video).values()))
        if os.path.lexists(video) and not ours:
            raise not_ours(video, "--output-dir")


def _recorded_files(folder: Path) -> set[str]:
    """The videos in a folder's results.json; empty if it cannot be read."""
    path = folder / RESULTS
    try:
        entries = read_json(path)["lines"] if path.is_file() else []
        return {entry["output"] for entry in entries if "output" in entry}
    except (UserError, KeyError, TypeError):
        return set()


class Results:
    """results.json: an entry per finished line, rewritten whenever a line ends."""

    def __init__(self, folder: Path, lines: list[Line]):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RESULTS
        self.entries: dict[int, dict] = self._still_valid(lines)
        if self.entries:
            print(f"resumed: {len(self.entries)} of {len(lines)} lines were done before")

    def done(self, line: Line) -> None:
        self._record(line, {"status": "done", "output": line.file})

    def failed(self, line: Line, error: Exception) -> None:
        print(f"line {line.number} failed: {error}")
        self._record(line, {"status": "failed", "error": f"{type(error).__name__}: {error}"})

    def _record(self, line: Line, outcome: dict) -> None:
        entry = {"line": line.number, "digest": line.digest, "prompt": line.job.prompt}
        self.entries[line.number] = entry | outcome
        write_json(self.path, {"lines": [self.entries[n] for n in sorted(self.entries)]})

    def _still_valid(self, lines: list[Line]) -> dict[int, dict]:
        """Entries of an earlier run that are still valid: done, with the same job and an existing
        video."""
        if not self.path.is_file():
            return {}
        try:
            stored = {entry["line"]: entry for entry in json.loads(self.path.read_text())["lines"]}
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.path} is not a results file; delete it to run every line"
            ) from None
        valid = {}
        for line in lines:
            entry = stored.get(line.number, {})
            same = entry.get("status") == "done" and entry.get("digest") == line.digest
            if same and (self.path.parent / line.file).is_file():
                valid[line.number] = entry
        return valid
