"""How every benchmark measures: ways that take turns, medians, a last line of JSON, and one file of
results.

On a shared machine one way is never timed long after another: they run in turn, and other work
slows all of them.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ltx_neuron.machine import processor

RESULTS = Path(__file__).parents[1] / "results.csv"
COLUMNS = ("date", "commit", "cpu", "versions", "command", "metric", "value")
FOLDERS = ("--folder", "--before")  # flags whose paths say nothing of a result


class Turns(NamedTuple):
    """What the turns of one way took, cold ones left out.

    seconds  by the wall clock
    cpu      seconds of this process's threads, which other work on the machine lengthens less
    result   of the last turn
    """

    seconds: list[float]
    cpu: list[float]
    result: Any

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def summary(self) -> dict[str, float]:
        """The medians, for the last line."""
        return {"seconds": self.median, "cpu_seconds": statistics.median(self.cpu)}


def print_conditions(what: str) -> None:
    """The first line of an output: what is measured, and on what."""
    print(
        f"{what}; {torch.get_num_threads()} threads, torch {torch.__version__}, ltx-core"
        f" {version('ltx-core')}, {processor()}, load average {os.getloadavg()[0]:.1f}",
        flush=True,
    )


@torch.no_grad()
def take_turns(
    ways: Mapping[str, Callable[[], Any]], repeats: int, cold: int = 1
) -> dict[str, Turns]:
    """Run every way `repeats` times, one after another, after `cold` rounds that do not count."""
    turns = {name: Turns([], [], None) for name in ways}
    for number in range(cold + repeats):
        for name, way in ways.items():
            began, cpu = time.perf_counter(), time.process_time()
            result = way()
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            if number >= cold:
                turns[name].seconds.append(seconds)
                turns[name].cpu.append(cpu)
            turns[name] = turns[name]._replace(result=result)
            print(f"{name:20} turn {number + 1:2} {seconds:9.3f} s, CPU {cpu:9.3f} s", flush=True)
    return turns


def print_ratios(turns: Mapping[str, Turns], reference: str, cpu: bool = True) -> None:
    """How many times as fast as the reference every other way is. cpu: also in CPU seconds, which
    are those of this process."""
    base = turns[reference]
    for name, taken in turns.items():
        if name == reference:
            continue
        line = f"{name}: {base.median / taken.median:.2f} times as fast as {reference}"
        if cpu:
            ratio = statistics.median(base.cpu) / statistics.median(taken.cpu)
            line += f", {ratio:.2f} times in CPU seconds"
        print(line)


def parser(description: str) -> argparse.ArgumentParser:
    """A benchmark's parser, for the flags that `finish` reads."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help = "append the numbers of the last line to benchmarks/results.csv"
    made.add_argument("--record", action="store_true", help=help)
    return made


def finish(args: argparse.Namespace, **numbers: Any) -> None:
    """The last line: all numbers of a run as one JSON object."""
    print(json.dumps(numbers))
    if args.record:
        record(numbers)


def record(numbers: Mapping[str, Any], path: Path = RESULTS) -> None:
    """Append a line for every number to the file of results."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    versions += f", ltx-core {version('ltx-core')}"
    run = (f"{datetime.date.today()}", _commit(), processor(), versions, _command())
    with open(path, "a", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if not file.tell():
            rows.writerow(COLUMNS)
        rows.writerows((*run, metric, value) for metric, value in named(numbers))


def named(numbers: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number with its place: {"ways": {"ours": 1.5}} gives ("ways ours", 1.5)."""
    if isinstance(numbers, Mapping):
        inner = numbers.items()
    elif isinstance(numbers, list | tuple):
        inner = enumerate(numbers)
    else:
        inner = ()
        if isinstance(numbers, int | float) and not isinstance(numbers, bool):
            yield name, numbers
    for key, value in inner:
        yield from named(value, f"{name} {key}".strip())


def _commit() -> str:
    git = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() or "not recorded"


def _command() -> str:
    """What was typed, without --record and without paths of this machine."""
    words = [Path(sys.argv[0]).name, *(word for word in sys.argv[1:] if word != "--record")]
    places = [index for index, word in enumerate(words[:-1], 1) if word in FOLDERS]
    words = ["DIR" if index in places else word for index, word in enumerate(words)]
    for index, word in enumerate(words):
        flag, joined, _ = word.partition("=")
        if joined and flag in FOLDERS:
            words[index] = f"{flag}=DIR"
    return shlex.join(words)
