"""The report of test/device: what each section found, in a file that is written after every section."""

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json, whole_file, write_json

NOT_REACHED = {"status": "not reached", "why": "", "seconds": 0.0, "lines": []}


class NotReached(pytest.skip.Exception):
    """The time that is left is too short for a section; the text has both."""


class Stopped(pytest.skip.Exception):
    """The time of a section ended before it did, which is no failure; the text says where it was."""


ENDS = [
    (NotReached, "not reached"),
    (Stopped, "stopped"),
    (pytest.skip.Exception, "not run"),
    (pytest.fail.Exception, "failed"),
    (UserError, "failed"),
]


class Section(NamedTuple):
    """A test of test_device.py.

    minutes  an estimate of what it takes
    run      returns its lines of the report
    needs    names of the sections that must be done before it
    """

    name: str
    minutes: float = 1
    run: Callable[..., Iterable[str]] = lambda bench: ()
    needs: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")


class Budget:
    """The minutes of a whole run; None: as long as it takes."""

    # A section that takes so many times its estimate may hang: the others want their time.
    LONGEST = 4

    def __init__(self, minutes: float | None = None):
        if minutes is not None and not 0 < minutes < math.inf:
            text = f"--minutes {minutes:g}: wanted minutes above 0, as in --minutes 60"
            raise UserError(text)
        self.finite = minutes is not None
        self._end = time.monotonic() + 60 * minutes if self.finite else math.inf
        self._section_end = self._end

    def begin(self, section: Section) -> None:
        """Give a section its time, or skip it where the budget ends before its estimate."""
        if section.minutes > (minutes := self.left() / 60):
            text = f"takes about {section.minutes:g} minutes, {minutes:.1f} are left"
            raise NotReached(text)
        longest = 60 * self.LONGEST * section.minutes if self.finite else math.inf
        self._section_end = min(self._end, time.monotonic() + longest)

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def end(self) -> str:
        """Why the section's time has ended."""
        return f"{self.LONGEST} times the estimate" if self.left() else "the budget ended"

    def section_left(self) -> float:
        return max(0.0, self._section_end - time.monotonic())


class Report:
    """What the sections of a run found, in report.json and report.md of a folder.

    identity  what must be equal for results to be of one run
    facts     what the report says of the run above its table
    redacted  takes out of a text what a report must not carry
    lines     of the section that runs
    """

    def __init__(
        self,
        folder: Path,
        sections: dict[str, Section],
        budget: Budget,
        identity: dict,
        facts: dict[str, str],
        redacted: Callable[[str], str] = str,
    ):
        self.folder, self.sections, self.budget = folder, sections, budget
        self.identity, self.facts, self.redacted = identity, facts, redacted
        self.done: dict[str, dict] = {}
        self.lines: list[str] = []

    def restore(self, wanted: bool) -> None:
        """Take the results of an earlier run with this identity. UserError where one is wanted and there is none."""
        path = self.folder / "report.json"
        before = read_json(path) if path.is_file() else {"identity": {}}
        if before["identity"] == self.identity:
            self.done = before["sections"]
        elif wanted:
            differs = sorted(key for key in self.identity if before["identity"].get(key) != self.identity[key])
            raise UserError(
                f"{path} is of another run: {', '.join(differs)} differ. Leave --lf out, or type another --work-dir"
                if path.is_file()
                else f"nothing was run in {self.folder}: leave --lf out"
            )

    def is_done(self, name: str) -> bool:
        return self.result(name)["status"] == "done"

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Keep how the section in the block ends. It is skipped where one that it needs is not done, or the budget
        does not last."""
        began, status, why = time.perf_counter(), "done", ""
        self.lines.clear()
        try:
            self.budget.begin(self.sections[name])
            missing = [self.sections[need].title for need in self.sections[name].needs if not self.is_done(need)]
            if missing:
                pytest.skip(f"needs {', '.join(missing)}")
            yield
        except KeyboardInterrupt:  # Ctrl-C, SIGTERM, a connection that was lost
            status, why = "stopped", "interrupted"
            raise
        except BaseException as error:
            other = "failed", traceback.format_exc()
            status, why = next(((word, str(error)) for kind, word in ENDS if isinstance(error, kind)), other)
            raise
        finally:
            seconds = time.perf_counter() - began
            self.done[name] = {"status": status, "why": why, "lines": [*self.lines], "seconds": seconds}
            self.keep()

    def keep(self) -> None:
        content = {"identity": self.identity, "facts": self.facts, "sections": self.done}
        write_json(self.folder / "report.json", content)
        with whole_file(self.folder / "report.md") as partial:
            partial.write_text(self.redacted(self.markdown()))

    def result(self, name: str) -> dict:
        return self.done.get(name, NOT_REACHED)

    def how(self, name: str) -> str:
        result = self.result(name)
        return result["status"] + (f": {result['why'].splitlines()[0]}" if result["why"] else "")

    def markdown(self) -> str:
        lines = ["# ltx-neuron on a device", "", *(f"- {key}: {fact}" for key, fact in self.facts.items())]
        lines += ["", "| section | | seconds |", "|---|---|---|"]
        reached = [name for name in self.sections if self.result(name)["status"] != "not reached"]
        for name in reached:
            cells = self.sections[name].title, cell(self.how(name)), f"{self.result(name)['seconds']:.1f}"
            lines.append(f"| {' | '.join(cells)} |")
        if left := len(self.sections) - len(reached):
            lines += ["", f"Sections that were not reached: {left}."]
        for name in reached:
            result = self.result(name)
            why = ["", "```", result["why"], "```"] if result["status"] in ("failed", "stopped") else []
            if result["lines"] or why:
                lines += ["", f"## {self.sections[name].title}", "", *result["lines"], *why]
        return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
