"""A finding: one fact, whether it blocks a generation, and the command that fixes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ltx_neuron.errors import NoPermission, UserError
from ltx_neuron.hub import NotDownloaded

State = Literal["ok", "note", "todo", "blocks"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    check: str  # the checked item, in a word or two
    state: State  # ok; note: works, with a remark; todo: files are not made yet; blocks
    text: str  # the fact
    fix: str = ""  # the command that fixes the problem or makes the files


def from_error(check: str, error: UserError, state: State = "blocks") -> Finding:
    """The finding of a UserError: its first line is the fact, the others are the fix."""
    text, _, fix = str(error).partition("\n")
    return Finding(check, state, text, fix)


def finding_of(check: str, *steps: Callable[[], object], missing: State = "blocks") -> Finding:
    """The finding of functions that may raise UserError; the last returns the fact. missing: the
    state after an error; errors of damaged or unreadable files always block."""
    try:
        *_, fact = (step() for step in steps)
        return Finding(check, "ok", str(fact))
    except NotDownloaded as error:
        return from_error(check, error, "todo")
    except UserError as error:
        damaged = any(words in str(error) for words in (" is damaged", "cannot be read"))
        blocks = damaged or isinstance(error, NoPermission)
        return from_error(check, error, "blocks" if blocks else missing)


def finding_if(check: str, good: bool, text: str, fix: str, otherwise: State = "blocks") -> Finding:
    """A finding that is ok if `good`; otherwise it has the other state and the fix."""
    return Finding(check, "ok", text) if good else Finding(check, otherwise, text, fix)


def table(findings: list[Finding]) -> str:
    """The findings as lines of text. The last line is the verdict."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<7}{finding.check:<{width}}  {finding.text}")
        lines += [f"{'':<7}{'':<{width}}  > {line}" for line in finding.fix.splitlines()]
    return "\n".join([*lines, "", verdict(findings)])


def verdict(findings: list[Finding]) -> str:
    """One line with the blocking checks, or else the files to make."""
    blocks, todo = (
        dict.fromkeys(f.check for f in findings if f.state == state) for state in ("blocks", "todo")
    )
    if blocks:
        return f"this run is blocked by: {'; '.join(blocks)}"
    return "nothing blocks this run" + (f"; still to make: {'; '.join(todo)}" if todo else "")
