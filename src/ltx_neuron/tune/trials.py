"""Measures variants in separate processes and records them in a journal, so that an interrupted
tuning continues after its last finished variant."""

import dataclasses
import json
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

from ltx_neuron.errors import RunError
from ltx_neuron.files import read_json
from ltx_neuron.tune.search import Row
from ltx_neuron.tune.tolerance import rel_l2, worst_violation
from ltx_neuron.tune.tuned_settings import Settings
from ltx_neuron.tune.variant import OUTPUTS, RESULT

_REFERENCE = "reference.safetensors"
_TIDY_SECONDS = 6.0  # longer than a variant's own clean-up limit


class Journal:
    """The rows of a tuning, one JSON line each, written to disk after each measurement. The first
    line is the head: everything on which rows depend besides their settings. Rows of another head
    are discarded.

    fixed  run settings that an earlier tuning of another size chose
    """

    def __init__(self, path: Path, request: dict, fixed: Settings, force: bool = False):
        self.path, self.request, self.fixed = path, request, fixed
        self.rows: list[Row] = []
        if path.is_file() and not force:
            self._restore()
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"request": request, "fixed": self.fixed}, *map(dataclasses.asdict, self.rows)]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def _restore(self) -> None:
        """Read the file's rows if the head matches. A truncated last line, left by a killed
        process, is dropped."""
        head, *lines = self.path.read_text(errors="replace").split("\n")
        try:
            content = json.loads(head)
            rows = [Row(**json.loads(line)) for line in lines[:-1]]
            request, fixed = content["request"], content["fixed"]
        except (ValueError, KeyError, TypeError) as error:
            print(f"{self.path} is not a journal ({error}); the tuning starts over")
            return
        if request == self.request:
            self.rows, self.fixed = rows, fixed

    def find(self, settings: Settings, repeat: int) -> Row | None:
        return next((r for r in self.rows if (r.settings, r.repeat) == (settings, repeat)), None)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        with open(self.path, "a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return row


@dataclass
class Trials:
    """Measures variants of a tuning.

    typed     the tuning's flags, which its processes get as well
    dtype     of the run
    baseline  the profile's own settings, which are measured first
    limit     time limit of a variant, in seconds
    folder    for the processes' outputs
    report    called with every new row
    """

    typed: list[str]
    dtype: str
    baseline: Settings
    limit: float
    folder: Path
    journal: Journal
    report: Callable[[Row], None]

    def measure(self, settings: Settings, repeat: int) -> Row:
        """A variant's row: from the journal, or measured by a new process."""
        if row := self.journal.find(settings, repeat):
            return row
        self._reference()
        row = Row(settings, repeat)
        try:
            folder = self._run("variant", settings, self.limit)
            result, outputs = read_json(folder / RESULT), load_file(folder / OUTPUTS)
        except RunError as error:
            row = replace(row, problem=str(error))
        else:
            reference = load_file(self.folder / _REFERENCE)
            errors = {name: rel_l2(outputs[name], reference[name]) for name in reference}
            row = replace(row, **result, rel_l2=errors, problem=self._violation(errors))
        self.report(row)
        return self.journal.add(row)

    def _violation(self, errors: dict[str, float]) -> str:
        baseline = self.journal.find(self.baseline, 0)
        worst = worst_violation(errors, baseline and baseline.rel_l2, self.dtype)
        if worst is None:
            return ""
        name, error, tolerance = worst
        return f"differs: {name} is {error:.2g} from float32, allowed {tolerance:.2g}"

    def _reference(self) -> None:
        """Compute the reference latents unless they exist. Raises RunError if that fails."""
        path = self.folder / _REFERENCE
        if not path.is_file():
            print("computing the reference step in float32 on the host", flush=True)
            shutil.move(self._run("reference", self.baseline, None) / OUTPUTS, path)

    def _run(self, name: str, settings: Settings, limit: float | None) -> Path:
        """Run a "variant" or the "reference" in a process; returns the folder of its results.
        Raises RunError with the process's last message if it fails or exceeds the limit."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        log, command = folder / "log", [sys.executable, "-m", "ltx_neuron.tune", *self.typed]
        command += [f"--profile-set={key}={value}" for key, value in settings.items()]
        command += [f"--{name}", folder]
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # its end of file tells the process that we have exited
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


def end_group(process: subprocess.Popen) -> None:
    """End a process group's leader and its descendants. Closing its stdin requests a clean exit;
    processes that are left after _TIDY_SECONDS are killed."""
    if process.stdin:
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_TIDY_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(log: str, code: int) -> str:
    """A failed process's message: its last line that begins with "error: ", else its last line."""
    lines = [line.strip() for line in log.replace("\r", "\n").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if code < 0:
        return f"its process was killed ({signal.Signals(-code).name})"
    return (errors or lines or [f"ended with exit code {code} and no output"])[-1]
