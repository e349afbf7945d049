"""Sections of a long benchmark: run one after another, kept in a file so that a stopped benchmark
goes on, and written as one Markdown report. on_device.py is made of them."""

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json
from ltx_neuron.tune.agree import FACTOR, FLOOR
from ltx_neuron.tune.agree import distance as rel

NOT_REACHED = {"status": "not run", "why": "not reached", "seconds": 0.0, "lines": []}


class NotRun(Exception):
    """A section cannot run here, which is no failure; the text says why."""


class Failed(Exception):
    """A section failed: the text says how; `lines` are its lines of the report until then."""

    def __init__(self, text: str, lines: tuple[str, ...] | list[str] = ()):
        super().__init__(text)
        self.lines = list(lines)


class Section(NamedTuple):
    """A part of the report: a function from the benchmark to lines of Markdown, and the names of
    the sections that must be done before it."""

    name: str
    run: Callable[..., list[str]]
    needs: tuple[str, ...] = ()


def run_all(
    sections: tuple[Section, ...], bench, done: dict[str, dict], keep: Callable[[dict], None]
) -> dict[str, dict]:
    """Run every section that `done` does not have as finished, if those it needs are finished.

    `done` has for each section its status ("done", "failed", "not run"), why, lines and seconds.
    `keep` is called with it after each section.
    """
    for section in sections:
        if done.get(section.name, {}).get("status") == "done":
            print(f"{section.name}: done before", flush=True)
            continue
        print(f"{section.name} ...", flush=True)
        began, lines = time.perf_counter(), []
        missing = [need for need in section.needs if done.get(need, {}).get("status") != "done"]
        try:
            if missing:
                raise NotRun(f"needs {', '.join(missing)}")
            lines, status, why = section.run(bench), "done", ""
        except NotRun as reason:
            status, why = "not run", str(reason)
        except Failed as failure:
            lines, status, why = failure.lines, "failed", str(failure)
        except UserError as error:
            status, why = "failed", str(error)
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
        if result["lines"] or result["status"] == "failed":
            lines += ["", f"## {section.name}", "", *result["lines"]]
        if result["status"] == "failed":
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
