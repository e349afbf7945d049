"""One clip on several groups of ranks that divide the stream too, in processes: every step equals one rank's, and a
killed rank is named and the clip goes on to the same bits. Groups alone: test_golden.py."""

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
from ltx_neuron.config.transformer import STREAMS
from ltx_neuron.engine.resume import restore_state, save_state
from ltx_neuron.job import Size

ONE, TWO = (Size(64, 64, 9, two_stage=both) for both in (False, True))
GROUPS = 2, "context_parallel=2 sequence_parallel=true"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def opened(tiny, artifacts):
    """opened(tp, settings): an engine with all that a job needs, and the job."""
    engines = []

    def engine(tp: int = 1, settings: str = "", size: Size = ONE):
        workspace = opened_workspace(tiny, artifacts, 1, tp=tp, settings=settings.split())
        build.make(workspace, workspace.weight_sets("dit", [()]))
        job = make_job("a red fox", size, 5)
        build.make(workspace, workspace.dit_graphs(job.buckets))
        engines.append(opened_engine(workspace, tiny))
        give_contexts(engines[-1], job, lambda prompt: drawn(workspace, 7))
        return engines[-1], job

    yield engine
    for each in engines:
        each.close()


def steps_of(engine, job) -> list[dict[str, torch.Tensor]]:
    """The latents of every step."""
    found = []

    def read(stage, number):
        name = job.bucket(stage).name
        found.append({s: engine.residency.ranks.get(name, f"{s}_latent") for s in STREAMS})

    engine.on_step_end = read
    list(engine.run([job], keep=True, decode=False))
    engine.on_step_end = None
    return found


def test_every_step_of_several_groups_equals_one_ranks(opened):
    alone, groups = steps_of(*opened()), steps_of(*opened(*GROUPS))
    assert len(alone) == make_job("", ONE).steps
    for ours, theirs in zip(groups, alone, strict=True):
        assert all(rel(ours[stream], theirs[stream]) < EQUAL for stream in STREAMS)


def test_a_killed_rank_of_each_group_is_named_and_the_clip_goes_on_to_the_same_bits(opened, tmp_path):
    engine, job = opened(*GROUPS, size=TWO)
    state = tmp_path / "state"
    engine.on_stage_end = lambda run: run.stages_left and save_state(state, run, {})
    (whole,) = engine.run([job], keep=True, decode=False)
    engine.on_stage_end = None

    def resume(job):
        return restore_state(state, job, {}, torch.float32)

    for rank in (0, 3):
        pids = []

        def kill(stage, number, rank=rank, pids=pids):
            pids += [process.pid for process in engine.residency.ranks._processes]
            os.kill(pids[rank], signal.SIGKILL)

        engine.on_step_end = kill
        with pytest.raises(RankError, match=rf"rank {rank} of 4 failed: the process was killed"):
            list(engine.run([job], keep=True, decode=False, resume=resume))
        assert alive(pids) == []
        engine.on_step_end = None
        (again,) = engine.run([job], keep=True, decode=False, resume=resume)
        for name in ("s2_video", "s2_audio"):
            assert torch.equal(again.tensors[name], whole.tensors[name]), name
