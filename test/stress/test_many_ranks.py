"""64 ranks start, run and end, and a killed one is named soon. So many processes on two cores would
slow the tests beside them."""

import os
import signal
import time

import pytest
from engines import drawn, give_contexts, opened_engine, opened_workspace
from helpers import one_thread, rel  # noqa: F401
from steps import EQUAL
from toy import SOON, alive

from ltx_neuron.backends.ranks import RankError
from ltx_neuron.job import Job, Size

MANY, JOB = 64, Job("a red fox", Size(64, 64, 9), 5)

pytestmark = pytest.mark.timeout(600)


def opened(tiny, artifacts, tp: int, settings: tuple[str, ...] = ()):
    workspace = opened_workspace(tiny, artifacts, 0, tp=tp, settings=settings)
    workspace.shard("dit", [()])
    workspace.compile_dit(JOB.buckets)
    engine = opened_engine(workspace, tiny)
    give_contexts(engine, JOB, lambda prompt: drawn(workspace, 7))
    return engine


def test_64_ranks_start_run_and_end_and_a_killed_one_is_named_soon(tiny, artifacts):
    """Tokens for half of the groups; the others have padding alone."""
    (alone,) = opened(tiny, artifacts, 1).run([JOB], decode=False)
    with opened(tiny, artifacts, 4, (f"context_parallel={MANY // 4}",)) as engine:
        (result,) = engine.run([JOB], keep=True, decode=False)
        assert rel(result.tensors["s1_video"], alone.tensors["s1_video"]) < EQUAL
        pids = [process.pid for process in engine.residency.ranks._processes]
        assert len(pids) == MANY
        os.kill(pids[37], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankError, match="rank 37 of 64 failed: the process was killed"):
            list(engine.run([JOB], keep=True, decode=False))
        assert time.monotonic() - began < SOON
    assert alive(pids) == []
