"""Generations at TP 4 beside busy loops or paused at a random moment end well, with the same bytes."""

import random
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from helpers import stress_count

pytestmark = [
    pytest.mark.timeout(4 * 3600),  # the slowest seen took one hour, beside a test suite
    pytest.mark.parametrize("run", ["four ranks"], indirect=True),
]
LOOPS, AT_A_TIME, SEED, PAUSE_SECONDS = 8, 8, 1, 10.0
# A loop ends with this process, however that ends.
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@pytest.mark.parametrize("number", range(stress_count(25)))
def test_clips_made_beside_busy_loops_are_the_same(run, tmp_path, number):
    """Several at a time start and load under load. Linux shares CPUs between sessions: the loops have their own."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP], start_new_session=True) for _ in range(LOOPS)]
    try:
        processes = {}
        for folder in (tmp_path / str(number) for number in range(AT_A_TIME)):
            folder.mkdir()
            processes[folder] = run.begun(folder, no_prompt_cache=True)
        for folder, process in processes.items():
            assert run.finish(folder, process) == run.written
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize("number", range(stress_count(20)))
def test_a_run_that_is_paused_at_any_moment_ends_well(run, tmp_path, number):
    """It and its ranks, as by Ctrl-Z and fg."""
    process = run.begun(tmp_path, no_prompt_cache=True)
    time.sleep(random.Random(f"{SEED} {number}").uniform(0, run.seconds))
    paused = []
    with suppress(psutil.NoSuchProcess):  # it has ended
        paused = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for act in (psutil.Process.suspend, psutil.Process.resume):
        for each in paused:
            with suppress(psutil.NoSuchProcess):
                act(each)
        time.sleep(PAUSE_SECONDS)
    assert run.finish(tmp_path, process) == run.written
