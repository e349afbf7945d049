"""--prompts-file: one JSON object per line, flags as keys. Models load once; every line's result is
recorded as it ends.

A batch that was killed is resumed by the same command: lines that are done, and still say the same,
are not run again, and one that was on its way goes on after its last finished stage.
"""

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ltx_neuron import progress
from ltx_neuron.config import digest
from ltx_neuron.decode_queue import Failure, Result
from ltx_neuron.engine import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_json
from ltx_neuron.host.images import content_digest
from ltx_neuron.job import Job
from ltx_neuron.progress import JobRun

RESULTS = "results.json"
MAX_LINES, MAX_LINE_BYTES = 100_000, 1_000_000


@dataclass(frozen=True)
class Line:
    """One line of a prompts file."""

    number: int
    job: Job
    digest: str

    @property
    def file(self) -> str:
        return f"{self.number:04d}.mp4"


class LineParser(argparse.ArgumentParser):
    """A parser whose errors name the line instead of ending the program."""

    def error(self, message: str) -> None:
        raise UserError(message)


def read_lines(
    path: Path,
    parser: argparse.ArgumentParser,
    base: argparse.Namespace,
    job_of: Callable,
    identity: dict,
) -> list[Line]:
    """Parse and check every line on top of the command's own flags. One UserError lists every bad
    line by number.

    identity is what a line's video depends on besides the job: another checkpoint's videos are not
    taken for done.
    """
    if not path.is_file():
        raise UserError(
            f"--prompts-file {path}: no such file. Wanted: one JSON object per line, for example\n"
            '{"prompt": "a golden retriever runs across a meadow", "seed": 10}'
        )
    known = {option for action in parser._actions for option in action.option_strings}
    lines, problems = [], []
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if number > MAX_LINES:
                raise UserError(f"{path} has more than {MAX_LINES} lines; split it")
            if not raw.strip():
                continue
            try:
                words = _words(raw, known)
                job = job_of(parser.parse_args(words, copy.copy(base)))
                job.check()
                pictures = [content_digest(image.path) for image in job.images]
                lines.append(Line(number, job, digest([job.describe(), pictures, identity])))
            except UserError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        raise UserError(f"{path}: nothing was run.\n" + "\n".join(problems))
    if not lines:
        raise UserError(f"{path} has no lines")
    return lines


def _words(raw: bytes, known: set[str]) -> list[str]:
    """A line as command-line words. Keys are flags without dashes; a list is several values, a list
    of lists repeats."""
    try:
        if len(raw) > MAX_LINE_BYTES:
            raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"got {type(values).__name__}, wanted a JSON object with flags as keys")
    words = []
    for key, value in values.items():
        flag = "--" + key.replace("_", "-")
        if flag not in known:
            names = ", ".join(
                sorted(
                    name.strip("-") for name in known if name.startswith("--") and name != "--help"
                )
            )
            raise UserError(f"unknown key {key!r}; known: {names}")
        if value is True:
            words.append(flag)
        elif value not in (False, None):
            repeats = (
                value
                if isinstance(value, list) and value and isinstance(value[0], list)
                else [value]
            )
            for one in repeats:
                words += [flag, *map(str, one)] if isinstance(one, list) else [f"{flag}={one}"]
    return words


def run(
    lines: list[Line],
    engine: Engine,
    folder: Path,
    write: Callable[[Result, Path], None],
    describe: Callable[[Job], dict],
) -> list[dict]:
    """Run the lines that are not done yet; returns every line's entry, in the file's order.

    A line keeps its state beside its video until it is done. `describe` says all that its latents
    depend on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = _earlier(folder / RESULTS, lines, folder)
    todo = [line for line in lines if line.number not in entries]
    if len(todo) < len(lines):
        print(f"resumed: {len(lines) - len(todo)} of {len(lines)} lines were done before")
    pending = {id(line.job): line for line in todo}

    def note(job: Job, error: Exception | None = None) -> None:
        line = pending[id(job)]
        entry = {"line": line.number, "digest": line.digest, "prompt": line.job.prompt}
        if error:
            entry |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            print(f"line {line.number} failed: {error}")
        else:
            entry |= {"status": "done", "output": line.file}
        entries[line.number] = entry
        write_json(folder / RESULTS, {"lines": [entries[n] for n in sorted(entries)]})
        if not error:
            state(job).unlink(missing_ok=True)

    def state(job: Job) -> Path:
        return progress.beside(folder / pending[id(job)].file)

    def begun(job: Job) -> JobRun | None:
        """A line's interrupted run, where it has left one that still fits."""
        path, number = state(job), pending[id(job)].number
        if not path.is_file():
            return None
        try:
            found = progress.restore(path, job, describe(job), engine.workspace.dtype)
        except UserError:  # the line, or the set-up, is another one now
            print(f"line {number} begins anew: {path} does not fit it")
            return None
        print(
            f"resumed: line {number};"
            f" {', '.join(stage.name for stage in found.left) or 'the decoding'} is left"
        )
        return found

    def hand_over(result: Result) -> None:
        try:
            write(result, folder / pending[id(result.job)].file)
        except Exception as error:  # whatever it is, the other lines can be made
            note(result.job, error)
        else:
            note(result.job)

    # Jobs end one after another, so no two of them are noted at a time, whichever threads they end
    # in.
    engine.on_stage_end = lambda run: progress.keep(state(run.job), run, describe(run.job))
    jobs = [line.job for line in todo]
    for outcome in engine.run(jobs, isolate=True, begun=begun, hand_over=hand_over) if jobs else ():
        if isinstance(outcome, Failure):
            note(outcome.job, outcome.error)
    return [entries[line.number] for line in lines]


def _earlier(path: Path, lines: list[Line], folder: Path) -> dict[int, dict]:
    """Entries of an earlier run that still hold: done, of the same job, and the video is there."""
    if not path.is_file():
        return {}
    try:
        found = {entry["line"]: entry for entry in json.loads(path.read_text())["lines"]}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not a results file; delete it to run every line") from None
    wanted = {line.number: line for line in lines}
    return {
        number: entry
        for number, entry in found.items()
        if number in wanted
        and entry.get("status") == "done"
        and entry.get("digest") == wanted[number].digest
        and (folder / wanted[number].file).is_file()
    }
