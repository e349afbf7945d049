"""One clip on several groups of ranks, where that is large: 64 processes, which on two cores would slow the tests
beside them, and a block of the released width, with rank files of gigabytes."""

import os
import signal

import golden_runs
import pytest
from engines import drawn, give_contexts, opened_engine, opened_workspace
from helpers import ended, one_thread, rel, within  # noqa: F401
from jobs import make_job
from steps import EQUAL
from toy import SOON

from ltx_neuron.artifacts import build
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.job import Size

runs = golden_runs.runs  # a fixture
MANY, JOB = 64, make_job("a red fox", Size(64, 64, 9), 5)
pytestmark = pytest.mark.timeout(600)


def opened(tiny, artifacts, tp: int, *settings: str):
    workspace = opened_workspace(tiny, artifacts, 0, tp=tp, settings=settings)
    build.make(workspace, workspace.weight_sets("dit", [()]))
    build.make(workspace, workspace.dit_graphs(JOB.buckets))
    engine = opened_engine(workspace, tiny)
    give_contexts(engine, JOB, lambda prompt: drawn(workspace, 7))
    return engine


def test_64_ranks_start_run_and_end_and_a_killed_one_is_named_soon(tiny, artifacts):
    """Tokens for half of the groups; the others have padding alone."""
    (alone,) = opened(tiny, artifacts, 1).run([JOB], decode=False)
    with opened(tiny, artifacts, 4, f"context_parallel={MANY // 4}") as engine:
        (result,) = engine.run([JOB], keep=True, decode=False)
        assert rel(result.tensors["s1_video"], alone.tensors["s1_video"]) < EQUAL
        pids = [process.pid for process in engine.residency.ranks._processes]
        assert len(pids) == MANY
        os.kill(pids[37], signal.SIGKILL)
        with within(SOON), pytest.raises(RankError, match="rank 37 of 64 failed: the process was killed"):
            list(engine.run([JOB], keep=True, decode=False))
    assert ended(pids, 0)


@pytest.mark.parametrize(
    ("tp", "settings"), [(1, "context_parallel=3"), (2, "context_parallel=2 sequence_parallel=true")]
)
def test_a_block_of_the_released_width_on_several_groups_equals_ltx_pipelines(runs, tp, settings):
    engine = runs.engine("wide", tp, None, settings.split())
    golden_runs.assert_is_recorded("wide", runs.run(engine, runs.job("wide")))
    engine.close()
