"""What on_device.py is made of: sections that run one after another, are kept in a file, and make
one Markdown report."""

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json

# As far from fp32 as the CPU's own bf16, twice that where rounding falls out otherwise, and half a
# percent for tensors that few operations separate from exact ones.
FACTOR, FLOOR = 2, 0.005


class NotRun(Exception):
    """Why a section cannot run here. No failure."""


class Failed(Exception):
    """A section failed: the text says how; `lines` is what it found until then."""

    def __init__(self, text: str, lines: tuple[str, ...] | list[str] = ()):
        super().__init__(text)
        self.lines = list(lines)


class Section(NamedTuple):
    """A part of the report: what it does, and the sections it cannot do without."""

    name: str
    run: Callable[..., list[str]]
    needs: tuple[str, ...] = ()


def run_all(
    sections: tuple[Section, ...], bench, done: dict[str, dict], keep: Callable[[dict], None]
) -> dict[str, dict]:
    """Run every section that is not finished in `done` and whose needs are. `keep` is called after
    each, with all of them."""
    for section in sections:
        if done.get(section.name, {}).get("status") == "done":
            print(f"{section.name}: done before", flush=True)
            continue
        print(f"{section.name} ...", flush=True)
        began, lines = time.perf_counter(), []
        try:
            if lacking := [
                need for need in section.needs if done.get(need, {}).get("status") != "done"
            ]:
                raise NotRun(f"needs {', '.join(lacking)}")
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
    """The report: what ran where, a line for each section, then what each found."""
    lines = ["# On the device", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| section | | seconds |", "|---|---|---|"]
    for section in sections:
        said = done.get(
            section.name, {"status": "not run", "why": "not reached", "seconds": 0.0, "lines": []}
        )
        status = said["status"] + (f": {cell(said['why'].splitlines()[0])}" if said["why"] else "")
        lines.append(f"| {section.name} | {status} | {said['seconds']:.1f} |")
    for section in sections:
        said = done.get(section.name)
        if said and (said["lines"] or said["status"] == "failed"):
            lines += ["", f"## {section.name}", "", *said["lines"]]
            lines += ["", "```", said["why"], "```"] if said["status"] == "failed" else []
    return "\n".join(lines) + "\n"


def restored(path: Path, identity: dict, anew: bool) -> dict[str, dict]:
    """The finished sections of an earlier run; UserError where that was another one."""
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


def rel(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|, summed in fp64; infinite where there is NaN."""
    distance = ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
    return distance if distance == distance else float("inf")


def three_way(device: dict, bf16: dict, fp32: dict, names: tuple[str, ...]) -> list[str]:
    """A table row for each tensor; Failed where the device is further from fp32 than the rule
    allows."""
    rows, wrong = ["| tensor | device | CPU bf16 | allowed |", "|---|---|---|---|"], []
    for name in names:
        off, band = rel(device[name], fp32[name]), rel(bf16[name], fp32[name])
        allowed = FACTOR * band + FLOOR
        rows.append(f"| {name} | {off:.4%} | {band:.4%} | {allowed:.4%} |")
        wrong += [] if off <= allowed < float("inf") else [name]
    if wrong:
        raise Failed(f"further from fp32 than the rule allows: {', '.join(wrong)}", rows)
    return rows
