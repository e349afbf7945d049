"""Kill -9 of a job of each kind, of its host or a rank, at random moments; jobs on many ranks and on wide ones."""

import os
import random
import signal
import time
from contextlib import suppress

import golden_runs
import psutil
import pytest
import toy
from conftest import SCRIPT_SECONDS
from helpers import allowed, ended, ranks_of, shared_memories, stress_count, wait_for, within

from ltx_neuron.backends.ranks import RankError

runs = golden_runs.runs  # a fixture

pytestmark = pytest.mark.timeout(8 * SCRIPT_SECONDS)
KILLS, SEED = stress_count(20), 1
SOON = 10  # seconds until nothing of a killed run is there: docs/failures.md


@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_job_leaves_nothing_behind_and_is_resumed_to_the_same_bytes(run, number, tmp_path):
    """Three of four times a rank is killed, if there are ranks then; else the host."""
    chance, before = random.Random(f"{SEED} {number} {run.name}"), shared_memories()
    process = run.begun(tmp_path)
    time.sleep(run.seconds * chance.uniform(0.85 if number % 2 else 0, 1))  # every second kill: while it denoises
    descendants, ranks = [], ranks_of(process.pid)
    with suppress(psutil.NoSuchProcess):
        descendants = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    victim = chance.choice(ranks) if number % 4 and ranks else process.pid
    if process.is_alive():
        os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    process.join(allowed(SCRIPT_SECONDS))
    assert time.monotonic() - killed < allowed(SOON) and ended(descendants, SOON)
    wait_for(lambda: shared_memories() <= before, allowed(SOON))
    if process.exitcode:  # else it had done its work
        assert victim == process.pid or "failed: the process was killed" in (tmp_path / "printed").read_text()
        process = run.begun(tmp_path, resume=True)
    assert run.finish(tmp_path, process) == run.written
    assert {path.suffix for path in tmp_path.iterdir()} & {".partial", ".log"} == set()
    assert not [*tmp_path.glob("*.resume.*")]


def test_64_ranks_start_run_and_end_and_a_killed_one_is_named_soon(runs):
    job, engine = runs.job("nag_in_one_stage"), runs.engine("four", 4, 0, ["context_parallel=16"])
    golden_runs.assert_is_recorded("nag_in_one_stage", runs.run(engine, job))
    pids = [process.pid for process in engine.residency.ranks._processes]
    assert len(pids) == 64
    os.kill(pids[37], signal.SIGKILL)
    with within(toy.SOON), pytest.raises(RankError, match="rank 37 of 64 failed: the process was killed"):
        runs.run(engine, job)
    engine.close()
    assert ended(pids, 1)


@pytest.mark.parametrize(
    ("tp", "settings"), [(1, "context_parallel=3"), (2, "context_parallel=2 sequence_parallel=true")]
)
def test_a_block_of_the_released_width_on_several_groups_equals_ltx_pipelines(runs, tp, settings):
    engine = runs.engine("wide", tp, None, settings.split())
    golden_runs.assert_is_recorded("wide", runs.run(engine, runs.job("wide")))
    engine.close()
