"""Measures variants in separate processes and records them in a journal, so that an interrupted
tuning continues after its last finished variant. Prints them as lines and as a table."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file

from ltx_neuron.artifacts.tuned_settings import Settings
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.files import read_json, write_json
from ltx_neuron.format import columns
from ltx_neuron.tune.search import Measurement, median_ms
from ltx_neuron.tune.variant import OUTPUTS, RESULT, rel_l2

_REFERENCE = "reference.safetensors"
_TIDY_SECONDS = 6.0  # longer than a variant's own clean-up limit
# A variant may be this much further from float32 than the baseline, because the two round at
# different operations. The floor is for tensors that are computed in few operations.
FACTOR, FLOOR = 2, 0.005
_MOST = 0.1  # largest tolerance in bfloat16, for any baseline: rounding alone gives 0.004
_FLOAT32 = 1e-5


class Journal:
    """The rows of a tuning, in a JSON file that is written after each measurement. Rows of another
    request are discarded. request: what rows depend on besides their settings. fixed: run settings
    that an earlier tuning of another size chose."""

    def __init__(self, path: Path, request: dict, fixed: Settings, force: bool = False):
        self.path, self.request, self.fixed = path, request, fixed
        self.rows: list[Measurement] = []
        if path.is_file() and not force:
            self._restore()
        self._write()

    def _restore(self) -> None:
        try:
            content = read_json(self.path)
            rows, request = [Measurement(**row) for row in content["rows"]], content["request"]
            fixed = content["fixed"]
        except (UserError, KeyError, TypeError) as error:
            print(f"{self.path} is not a journal ({error}); the tuning starts over")
            return
        if request == self.request:
            self.rows, self.fixed = rows, fixed

    def _write(self) -> None:
        rows = [*map(dataclasses.asdict, self.rows)]
        write_json(self.path, {"request": self.request, "fixed": self.fixed, "rows": rows})

    def find(self, settings: Settings, repeat: int) -> Measurement | None:
        return next((r for r in self.rows if (r.settings, r.repeat) == (settings, repeat)), None)

    def add(self, row: Measurement) -> Measurement:
        self.rows.append(row)
        self._write()
        return row


@dataclass
class Trials:
    """Measures variants of a tuning."""

    typed: list[str]  # the tuning's flags, which its processes get as well
    dtype: str  # of the run
    baseline: Settings  # the profile's own settings, which are measured first
    limit: float  # time limit of a variant, in seconds
    folder: Path  # for the processes' outputs
    journal: Journal

    def measure(self, settings: Settings, repeat: int) -> Measurement:
        """A variant's row: from the journal, or measured by a new process."""
        if row := self.journal.find(settings, repeat):
            return row
        path, row = self.folder / _REFERENCE, Measurement(settings, repeat)
        if not path.is_file():  # RunError ends the tuning
            print("computing the reference step in float32 on the host", flush=True)
            shutil.move(self._run("reference", self.baseline, None) / OUTPUTS, path)
        try:
            folder = self._run("variant", settings, self.limit)
            result, outputs = read_json(folder / RESULT), load_file(folder / OUTPUTS)
        except RunError as error:
            row = replace(row, problem=str(error))
        else:
            reference = load_file(path)
            errors = {name: rel_l2(outputs[name], reference[name]) for name in reference}
            baseline = self.journal.find(self.baseline, 0)
            problem = violation(errors, baseline.rel_l2 if baseline else {}, self.dtype)
            row = replace(row, **result, rel_l2=errors, problem=problem)
        again = f", run {repeat + 1}" if repeat else ""
        outcome = row.problem or f"{row.step_ms:.2f} ms a step"
        print(f"{name_of(settings, self.baseline)}{again}: {outcome}", flush=True)
        return self.journal.add(row)

    def _run(self, name: str, settings: Settings, limit: float | None) -> Path:
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


def violation(errors: dict[str, float], baseline: dict[str, float], dtype: str) -> str:
    """The tensor that exceeds its tolerance by the largest factor, as text; "" if none does.
    errors: relative L2 of each tensor from the float32 reference. baseline: the same for the
    profile's own settings, if they ran: in bfloat16, the rounding error."""
    tolerances = dict.fromkeys(errors, _FLOAT32 if dtype == "float32" else _MOST)
    if dtype != "float32" and baseline:
        tolerances = {name: min(_MOST, FACTOR * baseline[name] + FLOOR) for name in errors}
    worst = max(errors, key=lambda name: errors[name] / tolerances[name])
    got, allowed = errors[worst], tolerances[worst]
    text = f"differs: {worst} is {got:.2g} from float32, allowed {allowed:.2g}"
    return "" if got <= allowed else text


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


def name_of(settings: Settings, baseline: Settings) -> str:
    """The settings in which a variant differs from the profile's own."""
    changed = [f"{key}={value}" for key, value in settings.items() if value != baseline[key]]
    return " ".join(changed) or "the profile's own"


def table(rows: list[Measurement], baseline: Settings, best: Settings) -> str:
    """A line for each variant, in the order in which they were first measured. rel L2: the largest
    relative distance of its latents from the step in float32."""
    head = "ms a step", "runs", "cold s", "compile s", "rel L2", "variant"
    lines: list[tuple[str, ...]] = [head]
    for settings in map(dict, dict.fromkeys(tuple(row.settings.items()) for row in rows)):
        runs = [row for row in rows if row.settings == settings]
        verdict = next((row.problem for row in runs if row.problem), "not kept")
        if settings == best:
            verdict = "chosen"
        elif settings == baseline and verdict == "not kept":
            verdict = "own"
        cells, first = ("-", str(len(runs)), "-", "-", "-"), runs[0]
        if (ms := median_ms(rows, settings)) is not None:
            cold = sum(times[0] for times in first.steps_ms.values()) / 1e3
            cells = f"{ms:.2f}", cells[1], f"{cold:.2f}", f"{first.compile_seconds:.1f}"
            cells += (f"{max(first.rel_l2.values()):.1e}",)
        lines.append((*cells, f"{name_of(settings, baseline)}: {verdict}"))
    return "\n".join(columns(lines, left=(-1,)))
