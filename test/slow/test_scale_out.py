"""One clip on several groups of ranks that divide the stream too, in processes: it equals one rank's, and a killed rank
is named and the clip goes on to the same bits. Groups alone: test_golden.py."""

import os
import signal

import pytest
import torch
from engines import drawn, give_contexts, opened_engine, opened_workspace
from helpers import one_thread, rel  # noqa: F401
from jobs import make_job
from steps import EQUAL
from toy import alive

from ltx_neuron.artifacts import build
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.engine.resume import restore_state, save_state
from ltx_neuron.job import Size

JOB = make_job("a red fox", Size(64, 64, 9, two_stage=True), 5)
GROUPS = "context_parallel=2", "sequence_parallel=true"

pytestmark = pytest.mark.timeout(600)


def opened(tiny, artifacts, tp: int, settings=()):
    """An engine with all that the job needs."""
    workspace = opened_workspace(tiny, artifacts, 1, tp=tp, settings=settings)
    build.make(workspace, workspace.weight_sets("dit", [()]))
    build.make(workspace, workspace.dit_graphs(JOB.buckets))
    engine = opened_engine(workspace, tiny)
    give_contexts(engine, JOB, lambda prompt: drawn(workspace, 7))
    return engine


def test_a_killed_rank_of_each_group_is_named_and_the_clip_goes_on_to_the_same_bits(tiny, artifacts, tmp_path):
    with opened(tiny, artifacts, 1) as engine:
        (alone,) = engine.run([JOB], keep=True, decode=False)
    state, latents = tmp_path / "state", ("s1_video", "s1_audio", "s2_video", "s2_audio")
    with opened(tiny, artifacts, 2, GROUPS) as engine:
        engine.on_stage_end = lambda run: run.stages_left and save_state(state, run, {})
        (whole,) = engine.run([JOB], keep=True, decode=False)
        engine.on_stage_end = None
        assert all(rel(whole.tensors[name], alone.tensors[name]) < EQUAL for name in latents)

        def resume(job):
            return restore_state(state, job, {}, torch.float32)

        for rank in (0, 3):
            pids = []

            def kill(stage, number, rank=rank, pids=pids):
                pids += [process.pid for process in engine.residency.ranks._processes]
                os.kill(pids[rank], signal.SIGKILL)

            engine.on_step_end = kill
            with pytest.raises(RankError, match=rf"rank {rank} of 4 failed: the process was killed"):
                list(engine.run([JOB], keep=True, decode=False, resume=resume))
            assert alive(pids) == []
            engine.on_step_end = None
            (again,) = engine.run([JOB], keep=True, decode=False, resume=resume)
            assert all(torch.equal(again.tensors[name], whole.tensors[name]) for name in latents[2:])
