"""Detects dead, frozen and hanging rank processes: ProcessState reads the system, Watch decides.

A rank that waits for its device or for a compiler may hold Python's lock for minutes, so none of
its threads can send a heartbeat. The host therefore reads the system's state of a rank. A rank is
frozen if the system shows it as stopped. Ranks hang if the system shows no work of any of them for
longer than their command can take. Time counts only while the host itself runs, so pauses of the
whole job (Ctrl-Z, a paused container, a stalled virtual machine) do not count.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

# Time for which a rank may be stopped.
FROZEN_SECONDS = 6.0
# Time for which ranks may be idle during a command whose duration is known, and the multiple of its
# last duration.
HANG_SECONDS, HANG_TIMES = 8.0, 10.0
# Until a process has imported torch and joined the group.
START_SECONDS = 120.0
# A longer time between two checks is a pause of the host itself.
GAP_SECONDS = 2.0
_GAPS_KEPT = 20
_STOPPED = {"T", "t"}
# CPU time between two checks that counts as work: an idle rank's network threads use a hundredth.
_WORK_SECONDS = 0.02


class ProcessState(NamedTuple):
    """The system's state of a process.

    seconds  CPU time of its threads and descendants; a rank sleeps while a compiler that it started
             works
    states   of its threads, as proc(5) has them: R computes or waits for a CPU, D waits for a disk,
             S sleeps, T and t are stopped. Empty if there is no such process, or no /proc
    """

    seconds: float = 0.0
    states: frozenset[str] = frozenset()


def process_state(pid: int) -> ProcessState:
    ticks, children, states = 0, [], set()
    # Without pathlib, which takes three times as long: a world of 64 ranks has 2,000 threads.
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # a thread that has just ended
                fields = _stat(f"/proc/{pid}/task/{thread}/stat")
                states.add(fields[0])
                ticks += int(fields[11]) + int(fields[12])  # user and system time
                children += _read(f"/proc/{pid}/task/{thread}/children").split()
    ticks += sum(map(_descendants_ticks, children))
    return ProcessState(ticks / os.sysconf("SC_CLK_TCK"), frozenset(states))


def _read(path: str) -> str:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16).decode()
    finally:
        os.close(file)


def _stat(path: str) -> list[str]:
    """The fields of proc(5)'s stat, from the state on."""
    return _read(path).rpartition(")")[2].split()


def _descendants_ticks(pid: str) -> int:
    """CPU ticks of a child process and its descendants, also of those that have ended."""
    ticks, children = 0, []
    with suppress(OSError):
        fields = _stat(f"/proc/{pid}/stat")
        # Its own time, and that of its ended children.
        ticks += sum(map(int, fields[11:15]))
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                children += _read(f"/proc/{pid}/task/{thread}/children").split()
    return ticks + sum(map(_descendants_ticks, children))


@dataclass
class _Signs:
    """The last signs of life of a rank, with their times on the watch's clock.

    alive_at  when it was last not stopped
    work_at   when it last worked: used CPU time, waited for a disk or a CPU, or made progress
    """

    alive_at: float = 0.0
    work_at: float = 0.0
    progress: int = 0
    state: ProcessState = ProcessState()

    def update(self, clock: float, progress: int, state: ProcessState) -> None:
        # In two checks: short-lived threads of a waiting rank may be seen running once.
        runs = "R" in state.states & self.state.states
        # Less than before if a child ended that was not waited for.
        used = abs(state.seconds - self.state.seconds) >= _WORK_SECONDS
        if runs or used or "D" in state.states or progress != self.progress:
            self.work_at = clock
        if state.states - _STOPPED:
            self.alive_at = clock
        self.progress, self.state = progress, state


class Watch:
    """The host's watch over its rank processes, updated by `look`.

    progress  the number of commands and launches that each rank has done, in shared memory
    clock     seconds during which the host ran; a pause of the host counts as GAP_SECONDS
    """

    def __init__(self, pids: list[int], progress: Sequence[int]):
        self.pids, self.progress = pids, progress
        self.clock, self._looked = 0.0, time.monotonic()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_GAPS_KEPT)
        self._signs = [_Signs() for _ in pids]

    def begin(self) -> None:
        """Start waiting for the ranks: earlier idle time does not count."""
        self._looked = time.monotonic()
        for signs in self._signs:
            signs.work_at = self.clock

    @property
    def age(self) -> float:
        """Seconds since the last `look`, which costs a millisecond or more."""
        return time.monotonic() - self._looked

    def look(self) -> None:
        now = time.monotonic()
        elapsed, self._looked = now - self._looked, now
        if elapsed > GAP_SECONDS:
            self._gaps.append((time.time(), elapsed))
        self.clock += min(elapsed, GAP_SECONDS)
        for rank, (pid, signs) in enumerate(zip(self.pids, self._signs, strict=True)):
            signs.update(self.clock, self.progress[rank], process_state(pid))

    def frozen(self, rank: int) -> str | None:
        """A description if a rank has shown no sign of life for too long, otherwise None."""
        if self.clock - self._signs[rank].alive_at <= FROZEN_SECONDS:
            return None
        stopped = ": somebody has stopped it (SIGSTOP)" if self._signs[rank].state.states else ""
        return f"the process gives no sign of life for {FROZEN_SECONDS} s{stopped}"

    def hanging(self, ranks: set[int], patience: float) -> tuple[int, str] | None:
        """The rank for which all of these wait, with a description, if none has worked for
        `patience` seconds; otherwise None."""
        if any(self.clock - self._signs[rank].work_at <= patience for rank in ranks):
            return None
        progress = self.progress
        rank = min(ranks, key=lambda rank: (progress[rank], rank))
        if all(progress[other] == progress[rank] for other in range(len(self.pids))):
            return rank, f"it hangs, as all ranks do: none has done anything for {patience:.1f} s"
        return rank, f"it hangs; the other ranks have waited for it for {patience:.1f} s"

    def describe(self) -> str:
        """The last observations, for a log."""
        lines = []
        for rank, (pid, signs) in enumerate(zip(self.pids, self._signs, strict=True)):
            lines.append(
                f"rank {rank}: process {pid}, last sign of life"
                f" {self.clock - signs.alive_at:.1f} s ago, last work"
                f" {self.clock - signs.work_at:.1f} s ago, {self.progress[rank]} commands and"
                f" launches, {signs.state.seconds:.1f} s of CPU, threads"
                f" {''.join(sorted(signs.state.states)) or 'unknown'}"
            )
        gaps = ", ".join(
            f"{seconds:.1f} s until {time.strftime('%H:%M:%S', time.localtime(until))}"
            for until, seconds in self._gaps
        )
        lines.append(f"the host's own gaps: {gaps or 'none'}")
        return "\n".join(lines)
