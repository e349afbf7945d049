"""Runs variants in processes of their own, and keeps a journal of them: a tuning that was ended, in
whatever way, goes on after the last one that was finished."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file

from ltx_neuron.errors import RunError, UserError
from ltx_neuron.files import read_json, write_json
from ltx_neuron.tune.agree import disagreement, distances
from ltx_neuron.tune.chosen import Settings
from ltx_neuron.tune.search import Row
from ltx_neuron.tune.variant import OUTPUTS, RESULT, Request

_REFERENCE = "reference.safetensors"
_TIDY_SECONDS = 6.0  # more than a variant takes for it


class Journal:
    """The rows of a tuning that have been measured, on the disk as soon as they are.

    asked  all that a row depends on besides its settings: rows of another request are forgotten
    fixed  settings of the run that an earlier tuning of another size had chosen
    """

    def __init__(self, path: Path, asked: dict, fixed: Settings, again: bool = False):
        self.path, self.asked, self.fixed = path, asked, fixed
        self.rows: list[Row] = []
        if path.is_file() and not again:
            self._restore()

    def _restore(self) -> None:
        try:
            content = read_json(self.path)
            rows = [Row(**row) for row in content["rows"]]
            asked, fixed = content["asked"], content["fixed"]
        except (UserError, KeyError, TypeError) as error:
            print(f"{self.path} is no journal ({error}): the tuning begins anew")
            return
        if asked == self.asked:
            self.rows, self.fixed = rows, fixed

    def find(self, settings: Settings, turn: int) -> Row | None:
        return next((r for r in self.rows if (r.settings, r.turn) == (settings, turn)), None)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        rows = [dataclasses.asdict(row) for row in self.rows]
        write_json(self.path, {"asked": self.asked, "fixed": self.fixed, "rows": rows})
        return row


@dataclass
class Trials:
    """Measures variants of a request.

    own     the profile's own settings, which are measured first
    typed   settings that were typed
    limit   seconds that a variant may take
    folder  for what processes leave; removed by `clean`
    say     called with every row that is measured
    """

    request: Request
    own: Settings
    typed: tuple[str, ...]
    limit: float
    folder: Path
    journal: Journal
    say: Callable[[Row], None]

    def measure(self, settings: Settings, turn: int) -> Row:
        """The row of a variant's turn: the journal's, or a process's."""
        if row := self.journal.find(settings, turn):
            return row
        self._reference()
        row = Row(settings, turn)
        typed = (*self.typed, *(f"{key}={value}" for key, value in settings.items()))
        try:
            folder = self._run(replace(self.request, settings=typed), "variant", self.limit)
            result, outputs = read_json(folder / RESULT), load_file(folder / OUTPUTS)
        except RunError as error:
            row = replace(row, problem=str(error))
        else:
            far = distances(outputs, load_file(self.folder / _REFERENCE))
            row = replace(row, **result, far=far)
            row = replace(row, problem=self._disagrees(row))
        self.say(row)
        return self.journal.add(row)

    def _disagrees(self, row: Row) -> str:
        own = self.journal.find(self.own, 0)
        wrong = disagreement(row.far, own and own.far, self.request.dtype)
        if wrong is None:
            return ""
        name, far, allowed = wrong
        return f"differs: {name} is {far:.2g} from float32, allowed {allowed:.2g}"

    def _reference(self) -> None:
        """Have what every variant's latents are compared with. RunError where it cannot be had."""
        path = self.folder / _REFERENCE
        if not path.is_file():
            print("the step in float32 on the host, to compare with", flush=True)
            settings = (*self.typed, *(f"{key}={value}" for key, value in self.own.items()))
            asked = replace(self.request, settings=settings, steps=0)
            shutil.move(self._run(asked, "reference", None) / OUTPUTS, path)

    def _run(self, request: Request, name: str, limit: float | None) -> Path:
        """Run a process to its end; returns the folder of its results. Raises RunError with its
        last words where it fails or takes longer than the limit."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        log = folder / "log"
        write_json(folder / "request.json", vars(replace(request, folder=str(folder))))
        command = [sys.executable, "-m", "ltx_neuron.tune.variant", folder / "request.json"]
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # its end tells the process that we have ended
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise RunError(f"took longer than --limit {limit:g} s") from None
            finally:
                end_group(process)
        if code:
            raise RunError(last_words(log.read_text(errors="replace"), code))
        return folder

    def clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def end_group(process: subprocess.Popen) -> None:
    """End a process that leads a group, and all that it started and left. The end of its stdin asks
    it to tidy up, and what does not listen is killed."""
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_TIDY_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(log: str, code: int) -> str:
    """The sentence of a failed process: its error's first line, or its last line."""
    lines = [line.strip() for line in log.replace("\r", "\n").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if code < 0:
        return f"its process was killed ({signal.Signals(-code).name})"
    return (errors or lines or [f"ended with exit code {code} and no word"])[-1]
