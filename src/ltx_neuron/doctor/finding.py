"""A finding: one fact, whether it blocks a generation, and the command that corrects it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ltx_neuron.errors import NoPermission, UserError
from ltx_neuron.hub import NotDownloaded

State = Literal["ok", "note", "todo", "blocks"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    check  what was looked at, in a word or two
    state  ok; note: works, but is good to know; todo: files that are still to be made; blocks
    text   the fact
    fix    the command that corrects or makes it
    """

    check: str
    state: State
    text: str
    fix: str = ""


def blocked(check: str, error: UserError, state: State = "blocks") -> Finding:
    """The finding of a UserError: its first line is the fact, its other lines are the fix."""
    text, _, fix = str(error).partition("\n")
    return Finding(check, state, text, fix)


def attempt(check: str, fact: Callable[[], object], missing: State = "blocks") -> Finding:
    """The finding of a function that returns a fact, shown as text, or raises UserError.

    missing  the state in case of an error, unless the error is about a file that is damaged or may
             not be read: that blocks
    """
    try:
        return Finding(check, "ok", str(fact()))
    except NotDownloaded as error:
        return blocked(check, error, "todo")
    except UserError as error:
        damaged = any(words in str(error) for words in (" is damaged", "cannot be read"))
        blocks = damaged or isinstance(error, NoPermission)
        return blocked(check, error, "blocks" if blocks else missing)


def judged(check: str, good: bool, text: str, fix: str, otherwise: State = "blocks") -> Finding:
    """A finding that is ok where the fact is `good`; else it has the other state, and the fix."""
    return Finding(check, "ok", text) if good else Finding(check, otherwise, text, fix)


def table(findings: list[Finding]) -> str:
    """The findings as lines of text, with the verdict as the last one."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<7}{finding.check:<{width}}  {finding.text}")
        lines += [f"{'':<7}{'':<{width}}  > {line}" for line in finding.fix.splitlines()]
    return "\n".join([*lines, "", verdict(findings)])


def verdict(findings: list[Finding]) -> str:
    """One sentence: what blocks, else what is still to be made."""
    blocks, todo = (
        dict.fromkeys(f.check for f in findings if f.state == state) for state in ("blocks", "todo")
    )
    if blocks:
        return f"cannot run what was asked: {'; '.join(blocks)}"
    return "nothing stands in the way of what was asked" + (
        f"; still to be made: {'; '.join(todo)}" if todo else ""
    )
