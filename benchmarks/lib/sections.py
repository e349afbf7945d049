"""Sections of a long benchmark: run one after another, kept in a file so that a stopped benchmark
goes on, and written as one Markdown report. A run may have a budget of minutes. on_device.py is
made of them."""

import math
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json
from ltx_neuron.tune.tolerance import FACTOR, FLOOR
from ltx_neuron.tune.tolerance import rel_l2 as rel

NOT_REACHED = {"status": "not run", "why": "not reached", "seconds": 0.0, "lines": []}


class NotRun(Exception):
    """A section cannot run here, which is no failure; the text says why."""


class Failed(Exception):
    """A section failed: the text says how; `lines` are its lines of the report until then."""

    def __init__(self, text: str, lines: tuple[str, ...] | list[str] = ()):
        super().__init__(text)
        self.lines = list(lines)


class Stopped(Exception):
    """The time of a section ended before it did; the text says where it was."""


class Section(NamedTuple):
    """A part of the report.

    run      from the benchmark to lines of Markdown; of a generator, those until it fails are kept
    needs    names of the sections that must be done before it
    minutes  an estimate of what it takes
    """

    name: str
    run: Callable[..., Iterable[str]]
    needs: tuple[str, ...] = ()
    minutes: float = 1


class Budget:
    """The minutes of a whole run; None: as long as it takes."""

    # A section that takes so many times its estimate may hang: the others want their time.
    LONGEST = 4

    def __init__(self, minutes: float | None = None):
        self.finite = minutes is not None
        self._end = time.monotonic() + 60 * minutes if self.finite else math.inf
        self._section_end = self._end

    def begin(self, section: Section) -> None:
        """Give a section its time. Raises NotRun where the budget ends before its estimate."""
        minutes = self.left() / 60
        if section.minutes > minutes:
            raise NotRun(f"takes about {section.minutes:g} minutes, {minutes:.1f} are left")
        longest = 60 * self.LONGEST * section.minutes if self.finite else math.inf
        self._section_end = min(self._end, time.monotonic() + longest)

    def left(self) -> float:
        """Seconds until the budget ends."""
        return max(0.0, self._end - time.monotonic())

    def end(self) -> str:
        """Why the section's time has ended."""
        return f"{self.LONGEST} times the estimate" if self.left() else "the budget ended"

    def section_left(self) -> float:
        """Seconds that the section may still take."""
        return max(0.0, self._section_end - time.monotonic())


def run_all(
    sections: tuple[Section, ...],
    bench,
    done: dict[str, dict],
    keep: Callable[[dict], None],
    budget: Budget,
) -> dict[str, dict]:
    """Run every section that `done` does not have as finished, if those it needs are finished and
    the budget lasts.

    `done` has for each section its status ("done", "failed", "stopped", "not run"), why, lines and
    seconds. `keep` is called with it after each section.
    """
    for section in sections:
        if done.get(section.name, {}).get("status") == "done":
            print(f"{section.name}: done before", flush=True)
            continue
        print(f"{section.name} ...", flush=True)
        began, lines, interrupt = time.perf_counter(), [], None
        missing = [need for need in section.needs if done.get(need, {}).get("status") != "done"]
        try:
            if missing:
                raise NotRun(f"needs {', '.join(missing)}")
            budget.begin(section)
            for line in section.run(bench):
                lines.append(line)
            status, why = "done", ""
        except NotRun as reason:
            status, why = "not run", str(reason)
        except Stopped as reason:
            status, why = "stopped", str(reason)
        except Failed as failure:
            lines += failure.lines
            status, why = "failed", str(failure)
        except UserError as error:
            status, why = "failed", str(error)
        except KeyboardInterrupt as error:  # Ctrl-C, SIGTERM, a connection that was lost
            status, why, interrupt = "stopped", "interrupted", error
        except Exception:
            status, why = "failed", traceback.format_exc()
        done[section.name] = {
            "status": status,
            "why": why,
            "lines": lines,
            "seconds": time.perf_counter() - began,
        }
        print(
            f"  {status}{': ' + why.splitlines()[0] if why else ''}"
            f" ({done[section.name]['seconds']:.1f} s)",
            flush=True,
        )
        keep(done)
        if interrupt:
            raise interrupt
    return done


def cell(text: str) -> str:
    """Text as a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def markdown(sections: tuple[Section, ...], done: dict[str, dict], facts: dict[str, str]) -> str:
    """The report: the facts of the run, a table with a line for each section, then the lines of
    each section."""
    lines = ["# On the device", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| section | | seconds |", "|---|---|---|"]
    for section in sections:
        result = done.get(section.name, NOT_REACHED)
        why = f": {cell(result['why'].splitlines()[0])}" if result["why"] else ""
        lines.append(f"| {section.name} | {result['status']}{why} | {result['seconds']:.1f} |")
    for section in sections:
        result = done.get(section.name, NOT_REACHED)
        if result["lines"] or result["status"] in ("failed", "stopped"):
            lines += ["", f"## {section.name}", "", *result["lines"]]
        if result["status"] in ("failed", "stopped"):
            lines += ["", "```", result["why"], "```"]
    return "\n".join(lines) + "\n"


def restored(path: Path, identity: dict, anew: bool) -> dict[str, dict]:
    """The sections of an earlier run that `path` keeps; UserError where its identity is another."""
    if anew or not path.is_file():
        return {}
    state = read_json(path)
    if state.get("identity") != identity:
        before = state.get("identity", {})
        differs = sorted(key for key in identity if before.get(key) != identity[key])
        raise UserError(
            f"{path} is of another run: {', '.join(differs)} differ. Type --anew, or another"
            " --work-dir"
        )
    return state["sections"]


def three_way(device: dict, bf16: dict, fp32: dict, names: tuple[str, ...]) -> list[str]:
    """A table with a row for each tensor: its relative L2 distance from fp32 on the device and in
    bf16 on the CPU. Failed where the device's is larger than FACTOR times the CPU's plus FLOOR."""
    rows, wrong = ["| tensor | device | CPU bf16 | allowed |", "|---|---|---|---|"], []
    for name in names:
        on_device = rel(device[name], fp32[name])
        on_cpu = rel(bf16[name], fp32[name])
        allowed = FACTOR * on_cpu + FLOOR
        rows.append(f"| {name} | {on_device:.4%} | {on_cpu:.4%} | {allowed:.4%} |")
        if not on_device <= allowed < float("inf"):
            wrong.append(name)
    if wrong:
        raise Failed(f"further from fp32 than the rule allows: {', '.join(wrong)}", rows)
    return rows
