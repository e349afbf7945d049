"""A finding: one fact, whether it stands in the way, and the command that mends it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ltx_neuron.errors import UserError

State = Literal["ok", "note", "todo", "blocks"]


@dataclass(frozen=True)
class Finding:
    """`note`: works, but is good to know. `todo`: not made yet. `fix`: the command that mends or
    makes it."""

    check: str
    state: State
    text: str
    fix: str = ""


def blocked(check: str, error: UserError, state: State = "blocks") -> Finding:
    """A UserError's first line says what is wrong, the others what to type."""
    text, _, fix = str(error).partition("\n")
    return Finding(check, state, text, fix)


def attempt(check: str, fact: Callable[[], str], missing: State = "blocks") -> Finding:
    """A finding from something that raises UserError where it is not well. `missing`: what it then
    is, unless damaged."""
    try:
        return Finding(check, "ok", fact())
    except UserError as error:
        damaged = any(words in str(error) for words in (" is damaged", "cannot be read"))
        return blocked(check, error, "blocks" if damaged else missing)


def gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def table(findings: list[Finding]) -> str:
    """The findings as a person reads them, and the verdict."""
    width, lines = max(len(finding.check) for finding in findings), []
    for finding in findings:
        lines.append(f"{finding.state:<7}{finding.check:<{width}}  {finding.text}")
        lines += [f"{'':<7}{'':<{width}}  > {line}" for line in finding.fix.splitlines()]
    return "\n".join([*lines, "", verdict(findings)])


def verdict(findings: list[Finding]) -> str:
    blocks, todo = (
        dict.fromkeys(f.check for f in findings if f.state == state) for state in ("blocks", "todo")
    )
    if blocks:
        return f"cannot run what was asked: {'; '.join(blocks)}"
    return "nothing stands in the way of what was asked" + (
        f"; still to be made: {'; '.join(todo)}" if todo else ""
    )
