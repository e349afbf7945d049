"""Tables and numbers as every message and report of the package writes them."""

from collections.abc import Sequence
from functools import cache
from typing import TextIO

WIDTH = 100  # of a terminal, in characters


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """A line of aligned cells for every row, the head included.

    left  columns whose text begins at the same place, the others are numbers and end there; -1 is
          the last one
    """
    count = len(rows[0])
    to_left = {index % count for index in left}
    widths = [max(len(row[index]) for row in rows) for index in range(count)]
    return [
        "  ".join(
            cell.ljust(width) if index in to_left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def few(lines: Sequence[str], most: int = 5) -> list[str]:
    """The first lines, and one with the number of the others."""
    more = len(lines) - most
    return [*lines[:most], *([f"and {more:,} more"] if more > 0 else [])]


@cache
def print_once(line: str, file: TextIO | None = None) -> None:
    """Print a line that this process has not printed. file: a stream (default: stdout)."""
    print(line, file=file, flush=True)


def format_bytes(count: float | None) -> str:
    """Bytes as 12.34 GB (1 GB is 1e9 bytes), 5.6 MB, 7.8 kB or 9 B."""
    if count is None:
        return "-"
    if count >= 1e9:
        return f"{count / 1e9:,.2f} GB"
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def format_flops(count: float | None) -> str:
    """Floating-point operations as 1.2 TFLOP, or as 3.4 GFLOP if they are few."""
    if count is None:
        return "-"
    if 0 < count < 1e11:
        return f"{count / 1e9:,.1f} GFLOP"
    return f"{count / 1e12:,.1f} TFLOP"


def format_seconds(seconds: float) -> str:
    """A time as 12 s, 34 min or 5.6 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
