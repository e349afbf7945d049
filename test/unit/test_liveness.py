"""A rank that is broken is told from one that is slow because its machine is busy or was paused."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import allowed

from ltx_neuron.backends.torchdist import liveness
from ltx_neuron.backends.torchdist.liveness import ProcessState, Watch, process_state

LIMIT, LOOK = 0.6, 0.05  # seconds; a rank may show nothing for LIMIT
BUSY = "while True: pass"  # as in a computation that keeps the interpreter's lock
IDLE = "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    monkeypatch.setattr(liveness, "FROZEN_SECONDS", LIMIT)
    monkeypatch.setattr(liveness, "GAP_SECONDS", 4 * LOOK)
    # One tick of the system's clock: checks are ten times as frequent as the host's, and a process
    # gets a small part of a busy core between two of them.
    monkeypatch.setattr(liveness, "_WORK_SECONDS", 0.01)


@pytest.fixture
def watched():
    """watched(code, ...) watches Python processes that run the code, as ranks."""
    processes = []

    def watch(*codes: str) -> tuple[Watch, list[int]]:
        processes.extend(subprocess.Popen([sys.executable, "-Sc", code]) for code in codes)
        time.sleep(0.5)  # they begin
        progress = [0] * len(codes)
        return Watch([process.pid for process in processes], progress), progress

    yield watch
    for process in processes:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def look_for(watch: Watch, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        watch.look()
        time.sleep(LOOK)


def stop(watch: Watch, rank: int = 0) -> None:
    os.kill(watch.pids[rank], signal.SIGSTOP)


def test_a_stopped_rank_is_frozen(watched):
    watch, _ = watched(IDLE, BUSY)
    look_for(watch, LIMIT)
    stop(watch, 0)
    stop(watch, 1)
    look_for(watch, LIMIT / 2)
    assert watch.frozen(0) is watch.frozen(1) is None
    look_for(watch, LIMIT)
    said = f"the process gives no sign of life for {LIMIT} s: somebody has stopped it (SIGSTOP)"
    assert [watch.frozen(rank) for rank in (0, 1)] == [said] * 2


def test_a_rank_lives_as_long_as_it_is_not_stopped(watched):
    """It may wait for its device, or compute, and hold the interpreter's lock meanwhile."""
    watch, _ = watched(IDLE, BUSY)
    look_for(watch, 3 * LIMIT)
    assert watch.frozen(0) is watch.frozen(1) is None


def test_a_gap_of_the_host_counts_for_no_rank_and_is_told(watched):
    watch, _ = watched(IDLE)
    stop(watch)
    watch.look()
    time.sleep(2 * LIMIT)  # as if the machine had been paused
    watch.look()
    assert watch.frozen(0) is None
    assert "the host's own gaps: 1." in watch.describe()
    look_for(watch, 2 * LIMIT)
    assert watch.frozen(0)


@pytest.mark.parametrize("state", ["R", "D"])
def test_ranks_that_wait_for_a_cpu_or_a_disk_do_not_hang(watched, monkeypatch, state):
    """As under eight busy loops at a better priority, which a test cannot rely on."""
    watch, _ = watched(IDLE)
    watch.begin()
    states = ProcessState(0.0, frozenset({"S", state}))
    monkeypatch.setattr(liveness, "process_state", lambda pid: states)
    look_for(watch, 2 * LIMIT)
    assert watch.hanging({0}, LIMIT) is None


def test_of_ranks_that_hang_the_one_that_has_done_least_is_named(watched):
    watch, progress = watched(IDLE, IDLE)
    watch.begin()
    progress[0] += 1
    look_for(watch, LIMIT / 2)
    assert watch.hanging({0, 1}, LIMIT) is None
    look_for(watch, LIMIT)
    assert watch.hanging({0, 1}, LIMIT) == (
        1,
        f"it hangs; the other ranks have waited for it for {LIMIT} s",
    )


def test_ranks_do_not_hang_while_one_of_them_works(watched):
    watch, _ = watched(IDLE, BUSY)
    watch.begin()
    look_for(watch, 2 * LIMIT)
    assert watch.hanging({0, 1}, LIMIT) is None
    assert watch.hanging({0}, LIMIT) == (
        0,
        f"it hangs, as all ranks do: none has done anything for {LIMIT} s",
    )


def test_what_the_host_did_between_two_commands_is_no_hang(watched):
    watch, _ = watched(IDLE)
    look_for(watch, 2 * LIMIT)
    watch.begin()
    assert watch.hanging({0}, LIMIT) is None


CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-Sc', {BUSY!r}])"
GRANDCHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-Sc', {CHILD!r}])"
SHORT_LIVED = (
    "import subprocess, sys\n"
    "while True: subprocess.run([sys.executable, '-Sc', 'sum(range(10**7))'])"
)


@pytest.mark.parametrize("code", [GRANDCHILD, SHORT_LIVED])
def test_a_rank_that_sleeps_while_a_process_that_it_started_computes_does_not_hang(watched, code):
    """As a rank that waits for neuronx-cc."""
    watch, _ = watched(code, IDLE)
    watch.begin()
    limit = allowed(LIMIT)  # others may have the cores for as long
    look_for(watch, 3 * limit)
    assert watch.hanging({0, 1}, limit) is None


def test_a_process_that_is_gone_has_no_state():
    process = subprocess.Popen([sys.executable, "-Sc", ""])
    process.wait()
    assert process_state(process.pid) == ProcessState()
