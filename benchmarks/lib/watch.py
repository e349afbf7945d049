"""A command and all its descendants, watched while it runs: memory, and bytes read from the disk.

Memory is told apart: a process's anonymous pages are its own, and stay; pages of files that it has
mapped, as the weights, are the system's cache, which takes them back when it needs room.
"""

import bisect
import contextlib
import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

SECONDS = 0.5  # between two samples


class Sample(NamedTuple):
    """All processes together at a moment (time.time). read_bytes: from the disk, since the start,
    by processes that have ended too; own_bytes: anonymous ones of the command's own process."""

    time: float
    anonymous_bytes: int
    file_bytes: int
    read_bytes: int
    own_bytes: int = 0


class Watched(NamedTuple):
    """A command that has ended."""

    exit_code: int
    seconds: float
    samples: list[Sample]

    def peak(self, field: str, begin: float = 0.0, end: float = float("inf")) -> int:
        """The largest value of a Sample's field between two moments."""
        values = [getattr(s, field) for s in self.samples if begin - SECONDS <= s.time <= end]
        return max(values, default=0)

    def read_between(self, begin: float, end: float) -> int:
        """Bytes read from the disk between two moments."""
        return self._read_until(end) - self._read_until(begin)

    def _read_until(self, moment: float) -> int:
        """read_bytes at a moment, on the straight line between the samples around it."""
        index = bisect.bisect(self.samples, moment, key=lambda sample: sample.time)
        if index in (0, len(self.samples)):
            return self.samples[min(index, len(self.samples) - 1)].read_bytes
        before, after = self.samples[index - 1 : index + 1]
        share = (moment - before.time) / (after.time - before.time)
        return round(before.read_bytes + share * (after.read_bytes - before.read_bytes))


def run_watched(command: list[str], log: Path, **options) -> Watched:
    """Run a command, its output in `log`. An exception meanwhile (Ctrl-C) ends the command and
    what it started."""
    samples: list[Sample] = []
    ended = threading.Event()
    with open(log, "wb") as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **options)
        watcher = threading.Thread(target=_watch, args=(process.pid, ended, samples), daemon=True)
        watcher.start()
        try:
            exit_code = process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            ended.set()
            watcher.join()
    return Watched(exit_code, time.perf_counter() - began, samples)


def _end(process: subprocess.Popen) -> None:
    """End a command as Ctrl-C does, and after 30 s for good."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _watch(pid: int, ended: threading.Event, samples: list[Sample]) -> None:
    read = 0
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            samples.append(_sample(psutil.Process(pid), read))
            read = samples[-1].read_bytes
        if ended.wait(SECONDS):
            return


def _sample(root: psutil.Process, read_before: int) -> Sample:
    """A sample of a process and its descendants. What a child has read counts as its parent's once
    the parent has waited for its end (Linux adds it there), and is missing for a moment before."""
    anonymous = mapped = read = own = 0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended since it was listed
            memory = process.memory_info()
            anonymous += memory.rss - memory.shared
            own = own or anonymous  # the root is the first
            mapped += memory.shared
            read += process.io_counters().read_bytes
    return Sample(time.time(), anonymous, mapped, max(read, read_before), own)
