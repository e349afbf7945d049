"""How every benchmark measures: ways that take turns, medians, and a last line of JSON.

On a shared machine one way is never timed long after another: they run in turn, and other work
slows all of them.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from ltx_neuron.machine import processor


class Turns(NamedTuple):
    """What the turns of one way took, cold ones left out.

    seconds  by the wall clock
    cpu      seconds of all threads, which other work on the machine lengthens less
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


def print_ratios(turns: Mapping[str, Turns], reference: str) -> None:
    """How many times as fast as the reference every other way is."""
    base = turns[reference]
    for name, taken in turns.items():
        if name != reference:
            cpu = statistics.median(base.cpu) / statistics.median(taken.cpu)
            print(
                f"{name}: {base.median / taken.median:.2f} times as fast as {reference},"
                f" {cpu:.2f} times in CPU seconds"
            )


def finish(**numbers: Any) -> None:
    """The last line: all numbers of a run as one JSON object."""
    print(json.dumps(numbers))
