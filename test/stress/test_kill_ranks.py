"""A job of each kind, killed (-9) at random moments, its host or one of its ranks: it ends soon, leaves no process and
no shared memory behind, and is resumed to the same bytes."""

import os
import random
import signal
import time

import psutil
import pytest
from conftest import SCRIPT_SECONDS
from helpers import allowed, ended, ranks_of, shared_memories, stress_count, wait_for

pytestmark = pytest.mark.timeout(8 * SCRIPT_SECONDS)
KILLS, SEED = stress_count(20), 1
SOON = 10  # seconds until nothing of a killed run is there: docs/failures.md
# The share of a run after which it denoises: starting ranks takes most of it, and a tiny model's steps are fast. Every
# second kill comes then.
DENOISING = 0.85


@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_job_leaves_nothing_behind_and_is_resumed_to_the_same_bytes(run, number, tmp_path):
    """Three of four times a rank is killed, if there are ranks then; else the host."""
    chance, before = random.Random(f"{SEED} {number} {run.name}"), shared_memories()
    process = run.begun(tmp_path)
    time.sleep(run.seconds * chance.uniform(DENOISING if number % 2 else 0, 1))
    try:
        descendants = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        descendants = []
    ranks = ranks_of(process.pid)
    victim = chance.choice(ranks) if number % 4 and ranks else process.pid
    if process.is_alive():
        os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    process.join(allowed(SCRIPT_SECONDS))
    assert time.monotonic() - killed < allowed(SOON) and ended(descendants, SOON)
    wait_for(lambda: shared_memories() <= before, allowed(SOON))
    if process.exitcode and victim != process.pid:
        assert "failed: the process was killed" in (tmp_path / "printed").read_text()
    if process.exitcode:  # else it had done its work
        process = run.begun(tmp_path, resume=True)
    assert run.finish(tmp_path, process) == run.written
    assert {path.suffix for path in tmp_path.iterdir()} & {".partial", ".log"} == set()
    assert not [*tmp_path.glob("*.resume.*")]
