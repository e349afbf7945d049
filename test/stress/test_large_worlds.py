"""One clip on several groups of ranks, where that is large: 64 processes, which on two cores would slow the tests
beside them, and a block of the released width, with rank files of gigabytes."""

import os
import signal

import golden_runs
import pytest
from helpers import ended, within
from toy import SOON

from ltx_neuron.backends.ranks import RankError

runs = golden_runs.runs  # a fixture
pytestmark = pytest.mark.timeout(600)


def test_64_ranks_start_run_and_end_and_a_killed_one_is_named_soon(runs):
    job, engine = runs.job("nag_in_one_stage"), runs.engine("four", 4, 0, ["context_parallel=16"])
    golden_runs.assert_is_recorded("nag_in_one_stage", runs.run(engine, job))
    pids = [process.pid for process in engine.residency.ranks._processes]
    assert len(pids) == 64
    os.kill(pids[37], signal.SIGKILL)
    with within(SOON), pytest.raises(RankError, match="rank 37 of 64 failed: the process was killed"):
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
