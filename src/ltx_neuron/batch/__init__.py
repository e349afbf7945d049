"""--prompts-file: a job per line, with flags as keys. Models load once for all lines, and each
result is recorded when it ends.

The same command resumes a killed batch. It skips finished lines that have not changed, and
continues an interrupted one after its last finished stage. Before a batch has begun, nothing runs
if a line is wrong. Once it has, a line whose files cannot be used fails alone.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ltx_neuron import files
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.batch import prompts_file
from ltx_neuron.config.common import digest
from ltx_neuron.engine.decode import DecodedClip, JobFailure
from ltx_neuron.engine.outputs import (
    JobRun,
    OutputPaths,
    check_replaceable,
    is_log,
    log_path,
    logging_failure,
    make_report,
    not_ours,
    remove_state,
    restore_state,
    run_identity,
    save_state,
    sibling_files,
    state_path,
    write_sidecar,
)
from ltx_neuron.engine.run import Engine, with_durations
from ltx_neuron.errors import UserError
from ltx_neuron.files import check_readable, content_digest, write_json
from ltx_neuron.format import few
from ltx_neuron.job import Job
from ltx_neuron.report.latency import Recorder, show

RESULTS = "results.json"
MAX_LINES = 100_000
_MOST_LISTED = 10  # wrong lines in a message


@dataclass(frozen=True)
class Line:
    """One line of a prompts file.

    digest  of everything on which its video depends
    typed   the same, with its files' paths in place of their content
    error   why its files cannot be used; its job then has the prompt alone
    """

    number: int
    job: Job
    digest: str
    typed: str = ""
    error: UserError | None = None

    @property
    def file(self) -> str:
        return f"{self.number:04d}.{'wav' if self.job.sound_only else 'mp4'}"


def read_lines(
    path: Path,
    job_of_line: Callable[[dict[str, Any]], Job],
    identity: dict,
    command: Job | None = None,
    check_files: Callable[[Job], None] = lambda job: None,
    folder: Path | None = None,
) -> list[Line]:
    """Parse and check every line. One UserError names the first bad lines by number, and counts
    the others.

    job_of_line  returns the Job for a line's keys, or raises UserError
    identity     everything besides the job on which videos depend, such as the checkpoint: if it
                 changes, finished lines run again
    command      the command's own flags
    check_files  raises UserError for a job whose files cannot be used
    folder       of the results: if a batch has begun there, lines keep their errors
    """
    check_readable(path, "--prompts-file", f". {prompts_file.WANTED}")
    earlier = _entries(folder) if folder else None
    lines, problems, hints = [], [], []
    for number, values, name in prompts_file.read(path):
        if number > MAX_LINES:
            raise UserError(f"{path} has more than {MAX_LINES} lines; split it")
        spec, typed = None, ""
        try:
            if isinstance(values, UserError):
                hints = [prompts_file.WANTED]
                raise values
            if not isinstance(values, dict):
                kind = type(values).__name__
                raise UserError(f"got {kind}, wanted a JSON object with flags as keys")
            spec = (command or Job()).updated(values)
            typed = digest([spec.to_json(), identity])
            job = job_of_line(values)
            job.check()
            line = Line(number, job, _digest(job, identity), typed)
            if not (folder and _is_done(line, (earlier or {}).get(number, {}), folder)):
                check_files(job)
            lines.append(line)
        except UserError as error:
            if spec and earlier is not None:
                job = Job(prompt=spec.prompt, sound_only=spec.sound_only)
                lines.append(Line(number, job, "", typed, error))
            else:
                problems.append(f"{name} {number}: {error}")
    if problems:
        problems = few(problems, _MOST_LISTED)
        raise UserError("\n".join([f"{path}: nothing was run.", *problems, *hints]))
    if not lines:
        raise UserError(f"{path} has no lines")
    return lines


def generate(
    lines: list[Line],
    prompts_file: Path,
    workspace: Workspace,
    options: RunOptions,
    outputs: OutputPaths,
) -> None:
    """Make the videos of a prompts file's lines. Exits with 1 if one failed."""
    recorder = Recorder(outputs.price)

    def save(clip: DecodedClip, path: Path) -> None:
        clip.write(path, recorder)
        write_sidecar(path, clip.job, recorder, workspace, engine.preflight.notes(clip.job))

    assert outputs.folder
    log = log_path(outputs.folder / RESULTS)
    with logging_failure(log), Engine(workspace, recorder, options) as engine:
        lines = with_lengths(lines, engine)
        read = engine.preflight.files_read([line.job for line in lines])
        read["--prompts-file"] = prompts_file
        check_outputs(lines, outputs.folder, outputs.report, read)
        entries = run(
            lines, engine, outputs.folder, save, lambda job: run_identity(job, workspace, options)
        )
    described = {"prompts_file": str(prompts_file), "lines": len(lines)}
    show(make_report(recorder, workspace, described), outputs.report)
    end(outputs.folder, entries)


def with_lengths(lines: list[Line], engine: Engine) -> list[Line]:
    """The lines with their jobs after the lengths are predicted, which the engine names by their
    numbers."""
    engine.preflight.title_of = titles(lines)
    usable = [line for line in lines if not line.error]
    jobs = with_durations(engine, [line.job for line in usable])
    known = {
        line.number: replace(line, job=job, digest=_digest(job, engine.workspace.identity))
        for line, job in zip(usable, jobs, strict=True)
        if job is not line.job
    }
    lines = [known.get(line.number, line) for line in lines]
    engine.preflight.title_of = titles(lines)
    return lines


def titles(lines: list[Line]) -> Callable[[Job], str]:
    """A function from a line's job to its name in messages."""
    numbers = {id(line.job): line.number for line in lines}
    return lambda job: f"line {numbers[id(job)]}"


def _digest(job: Job, identity: dict) -> str:
    return digest([job.with_paths(content_digest).identity, identity])


def run(
    lines: list[Line],
    engine: Engine,
    folder: Path,
    write: Callable[[DecodedClip, Path], None],
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

    # Jobs end one after another in any thread, so this never runs concurrently.
    def finish(clip: DecodedClip) -> None:
        line = line_of(clip.job)
        write(clip, folder / line.file)
        results.done(line)
        remove_state(state_of(clip.job))

    engine.on_stage_end = lambda run: save_state(state_of(run.job), run, identity_of(run.job))
    jobs = [line.job for line in pending.values()]
    if jobs:
        for outcome in engine.run(jobs, isolate=True, resume=resume, write=finish):
            if isinstance(outcome, JobFailure):
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
        for path in (video, *sibling_files(video).values()):
            outputs[f"{path.name} of --output-dir"] = path
    files.check_outputs(outputs, inputs)
    if os.path.lexists(log) and not is_log(log):
        raise not_ours(log, "--output-dir")
    done = _recorded_files(folder)
    for line in lines:
        video = folder / line.file
        check_replaceable(video, "--output-dir", line.job)
        ours = line.file in done or any(map(os.path.lexists, sibling_files(video).values()))
        if os.path.lexists(video) and not ours:
            raise not_ours(video, "--output-dir")


def _recorded_files(folder: Path) -> set[str]:
    """The videos in a folder's results.json; empty if it cannot be read."""
    with suppress(UserError):
        entries = (_entries(folder) or {}).values()
        return {entry["output"] for entry in entries if "output" in entry}
    return set()


class Results:
    """results.json: an entry per finished line, rewritten whenever a line ends."""

    def __init__(self, folder: Path, lines: list[Line]):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RESULTS
        earlier = _entries(folder) or {}
        done = [line for line in lines if _is_done(line, earlier.get(line.number, {}), folder)]
        self.entries: dict[int, dict] = {line.number: earlier[line.number] for line in done}
        if self.entries:
            print(f"resumed: {len(self.entries)} of {len(lines)} lines were done before")
        for line in lines:
            if line.error and line.number not in self.entries:
                self.failed(line, line.error)

    def done(self, line: Line) -> None:
        self._record(line, {"status": "done", "output": line.file})

    def failed(self, line: Line, error: Exception) -> None:
        print(f"line {line.number} failed: {error}")
        self._record(line, {"status": "failed", "error": f"{type(error).__name__}: {error}"})

    def _record(self, line: Line, outcome: dict) -> None:
        entry = {"line": line.number, "digest": line.digest, "typed": line.typed}
        entry["prompt"] = line.job.prompt
        self.entries[line.number] = entry | outcome
        write_json(self.path, {"lines": [self.entries[n] for n in sorted(self.entries)]})


def _entries(folder: Path) -> dict[int, dict] | None:
    """The entries of a folder's results by line; None if no batch has begun there."""
    path = folder / RESULTS
    try:
        stored = json.loads(path.read_text())["lines"] if path.is_file() else None
        return stored if stored is None else {entry["line"]: entry for entry in stored}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not a results file; delete it to run every line") from None


def _is_done(line: Line, entry: dict, folder: Path) -> bool:
    """Whether a line's entry of an earlier run is still valid: done, with the same job and an
    existing video. Of a line whose files cannot be used any more, the text counts."""
    name = "typed" if line.error else "digest"
    same = entry.get("status") == "done" and entry.get(name) == getattr(line, name)
    return same and (folder / line.file).is_file()
