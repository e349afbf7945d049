"""A batch whose lines need several weight sets swaps them as seldom as can be, and each line is its
single run bit for bit."""

from pathlib import Path

import pytest
import torch
from engines import assert_same, each_alone, jobs_of_three_sets, latents, opened, swaps
from helpers import one_thread  # noqa: F401
from jobs import make_job

from ltx_neuron.backends.ranks import RankError
from ltx_neuron.engine.outputs import restore_state, run_identity, save_state
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job


@pytest.fixture(scope="module")
def jobs(tiny, tmp_path_factory) -> list[Job]:
    return jobs_of_three_sets(tiny, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def engine_of(tiny, jobs, artifacts):
    with opened(jobs, tiny, artifacts) as anew:
        yield anew


@pytest.fixture(scope="module")
def alone(engine_of, jobs) -> dict:
    return each_alone(engine_of(), jobs)


def test_a_batch_swaps_least_and_every_line_is_its_single_run(engine_of, jobs, alone):
    engine, order = engine_of(), []
    engine.on_stage_end = lambda run: order.append((run.job.seed, len(run.stages_left)))
    assert_same(latents(engine, jobs), alone)
    assert swaps(engine) == 2  # three sets
    assert engine.recorder.counters.weight_swap_seconds > 0
    # Style; the IC-LoRA's stage 1; then all that is plain, each in the file's order.
    assert order == [(1, 0), (4, 1), (4, 0), (2, 1), (5, 1), (2, 0), (3, 0), (5, 0)]
    # The same again begins with what is there: the plain set is where the first run ended.
    assert_same(latents(engine, jobs), alone)
    latents(engine, [jobs[2]])
    report = engine.recorder.report({}, "cpu", 1, {}, {})
    assert swaps(engine) == report["weight_swaps"]["count"] == 2 + 3


def test_an_interrupted_batch_goes_on_to_the_same_bits(engine_of, jobs, alone, tmp_path):
    """Ended after every third stage, and gone on with by an engine that has nothing loaded."""

    def path(job: Job) -> Path:
        return tmp_path / f"{job.seed}.safetensors"

    def resume(job: Job):
        kept, identity = path(job), run_identity(job, engine.workspace, engine.options)
        return restore_state(kept, job, identity, torch.float32) if kept.is_file() else None

    def keep(run) -> None:
        save_state(path(run.job), run, run_identity(run.job, engine.workspace, engine.options))
        ended.append(run.job.seed)
        if len(ended) % 3 == 0:
            raise RankError("killed")

    engine, ended = engine_of(), []
    for _ in range(2):
        engine.on_stage_end = keep
        with pytest.raises(RankError):
            latents(engine, jobs, resume=resume)
        engine = engine_of()
    engine.on_stage_end = keep
    assert_same(latents(engine, jobs, resume=resume), alone)
    assert ended == [1, 4, 4, 2, 5, 2, 3, 5]
    assert swaps(engine) == 0  # stage 2 of both is left, and the plain one
    other = make_job(jobs[0].prompt, jobs[0].size, jobs[0].seed, loras=jobs[1].stage_1_loras)
    with pytest.raises(UserError, match="is from another run: loras: got"):
        restore_state(path(other), other, run_identity(other, engine.workspace, engine.options), torch.float32)
