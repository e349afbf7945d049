"""A batch whose lines need several weight sets swaps them as seldom as can be, and each line is its
single run bit for bit."""

import pytest
import torch
from helpers import one_thread  # noqa: F401
from jobs import make_job
from swapping import assert_same, each_alone, jobs_of_three_sets, latents, opened, swaps

from ltx_neuron.engine.outputs import run_identity
from ltx_neuron.engine.resume import restore_state, save_state
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job
from ltx_neuron.weights.lora import Lora


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
    assert swaps(engine) == 2 + 3
    plain = [jobs[2]]
    latents(engine, plain)
    assert swaps(engine) == 5
    report = engine.recorder.report({}, "cpu", 1, {}, {})
    assert report["weight_swaps"]["count"] == 5


def test_a_state_of_another_lora_is_refused(engine_of, jobs, tmp_path):
    engine, job = engine_of(), jobs[0]
    path = tmp_path / "state.safetensors"

    def identity(job: Job) -> dict:
        return run_identity(job, engine.workspace, engine.options)

    engine.on_stage_end = lambda run: save_state(path, run, identity(run.job))
    latents(engine, [job])
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(job.loras[0].path.read_bytes())
    moved = make_job(job.prompt, job.size, job.seed, loras=(Lora(copy, 0.8),))
    assert restore_state(path, moved, identity(moved), torch.float32).stages_left == []
    for loras in ((), (Lora(copy, 0.7),), jobs[1].stage_1_loras):
        other = make_job(job.prompt, job.size, job.seed, loras=loras)
        with pytest.raises(UserError, match="is from another run: loras: got"):
            restore_state(path, other, identity(other), torch.float32)
