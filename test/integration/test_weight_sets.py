"""A batch whose lines need several weight sets swaps them as seldom as can be, and each line is its
single run bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import drawn, give_contexts, opened_engine, opened_workspace
from helpers import made_film, one_thread  # noqa: F401
from safetensors.torch import load_file, save_file

from ltx_neuron.backends.ranks import RankError
from ltx_neuron.engine import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.generate import run_identity
from ltx_neuron.job import Job, Size
from ltx_neuron.progress import restore_state, save_state
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ImageCondition,
    ReferenceVideo,
    Retake,
    SoundCondition,
)
from ltx_neuron.weights.lora import Lora

pytestmark = pytest.mark.slow

ONE, TWO = Size(64, 64, 9), Size(64, 64, 9, two_stage=True)


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> dict:
    """A reference, without which an IC-LoRA is none, and its attention mask."""
    folder = tmp_path_factory.mktemp("given")
    film, mask = (made_film(folder / f"{n}.mp4", 9, 64, 64, seed=n) for n in (1, 2))
    return {
        "references": (ReferenceVideo(film, 0.7, 9),),
        "attention_mask": AttentionMask(mask, 0.6),
    }


@pytest.fixture(scope="module")
def jobs(tiny, masked, tmp_path_factory) -> list[Job]:
    """Lines of three sets, in an order that swaps five times if it is kept."""
    other = tmp_path_factory.mktemp("loras") / "other.safetensors"
    tensors = {name: tensor * 1.5 for name, tensor in load_file(tiny.lora).items()}
    save_file(tensors, other)
    style, ic = (Lora(tiny.lora, 0.8),), (Lora(other, 0.6),)
    return [
        Job("style", ONE, 1, loras=style),
        Job("guided by a reference", TWO, 2, stage_1_loras=ic, **masked),
        Job("plain", ONE, 3),
        Job("style again", TWO, 4, loras=style),
        Job("guided again", TWO, 5, stage_1_loras=ic, **masked),
    ]


@pytest.fixture(scope="module")
def mixed(tiny, jobs, masked) -> list[Job]:
    """A line of each kind, those of two IC-LoRAs apart from each other."""
    (first,), (second,) = jobs[0].loras, jobs[1].stage_1_loras
    film = masked["references"][0].path
    return [
        Job("an IC-LoRA", TWO, 11, stage_1_loras=(first,), **masked),
        Job("text to video", ONE, 12),
        Job("another IC-LoRA", TWO, 13, stage_1_loras=(second,), **masked),
        Job("image to video", ONE, 14, images=(ImageCondition(tiny.image),)),
        Job("a retake", ONE, 15, retake=Retake(film, 0.05, 0.2)),
        Job("the first again", TWO, 16, stage_1_loras=(first,), **masked),
        Job("audio to video", TWO, 17, sound=SoundCondition(film)),
    ]


@pytest.fixture(scope="module")
def opened(tiny, jobs, mixed, artifacts):
    """opened(): the engine, as if it were a new one; it is given the contexts of the jobs."""
    jobs = [*jobs, *mixed]
    workspace = opened_workspace(tiny, artifacts)
    stages = {stage: job for job in jobs for stage in job.stages}
    workspace.shard("dit", {stage.loras for stage in stages})
    workspace.compile_dit(list({bucket for job in jobs for bucket in job.buckets}))
    engine = opened_engine(workspace, tiny)
    for job in jobs:
        give_contexts(engine, job, lambda _, seed=job.seed: drawn(workspace, seed))

    def anew() -> Engine:
        engine.close()
        engine.recorder = engine.residency.recorder = Recorder()
        engine.on_stage_end = None
        return engine

    yield anew
    engine.close()


def swaps(engine: Engine) -> int:
    return engine.recorder.counters.weight_swaps


def latents(engine: Engine, jobs: list[Job], **options) -> dict[int, dict[str, torch.Tensor]]:
    """The latents of every job, by its seed."""
    results = engine.run(jobs, keep=True, decode=False, **options)
    return {
        result.job.seed: {k: v for k, v in result.tensors.items() if k[:3] in ("s1_", "s2_")}
        for result in results
    }


def assert_same(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for seed, tensors in wanted.items():
        assert got[seed].keys() == tensors.keys()
        assert all(torch.equal(got[seed][name], tensors[name]) for name in tensors), seed


@pytest.fixture(scope="module")
def alone(opened, jobs) -> dict:
    """The latents of every job, each run by itself."""
    found, engine = {}, opened()
    for job in jobs:
        found |= latents(engine, [job])
    return found


def test_a_batch_swaps_least_and_every_line_is_its_single_run(opened, jobs, alone):
    engine, order = opened(), []
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


def test_a_batch_of_all_kinds_swaps_least_and_every_line_is_its_single_run(opened, mixed):
    engine, single, order = opened(), {}, []
    for job in mixed:
        single |= latents(engine, [job])
    engine = opened()
    engine.on_stage_end = lambda run: order.append(run.job.seed)
    assert_same(latents(engine, mixed), single)
    # Stage 1 of one IC-LoRA, of the other, and then all that is plain.
    assert swaps(engine) == 2 and order == [11, 16, 13, 11, 12, 13, 14, 15, 16, 17, 17]
    # What was given counts: without it the latents are others.
    for job, given in ((mixed[6], "sound"), (mixed[4], "retake"), (mixed[3], "images")):
        job = replace(job, **{given: None if given != "images" else ()})
        without = latents(engine, [job])[job.seed]
        assert not torch.equal(without["s1_video"], single[job.seed]["s1_video"])


def test_the_loras_change_the_latents_where_they_are_merged(opened, jobs, alone):
    """Else equal bits would prove nothing."""
    engine = opened()
    for job in jobs[:2]:
        plain = Job(job.prompt, job.size, job.seed)
        got = latents(engine, [plain])[job.seed]
        assert not any(torch.equal(got[name], alone[job.seed][name]) for name in got)


def test_an_interrupted_batch_goes_on_to_the_same_bits(opened, jobs, alone, tmp_path):
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

    engine, ended = opened(), []
    for _ in range(2):
        engine.on_stage_end = keep
        with pytest.raises(RankError):
            latents(engine, jobs, resume=resume)
        engine = opened()
    engine.on_stage_end = keep
    assert_same(latents(engine, jobs, resume=resume), alone)
    assert ended == [1, 4, 4, 2, 5, 2, 3, 5]
    assert swaps(engine) == 0  # stage 2 of both is left, and the plain one


def test_a_state_of_another_lora_is_refused(opened, jobs, tmp_path):
    engine, job = opened(), jobs[0]
    path = tmp_path / "state.safetensors"

    def identity(job: Job) -> dict:
        return run_identity(job, engine.workspace, engine.options)

    engine.on_stage_end = lambda run: save_state(path, run, identity(run.job))
    latents(engine, [job])
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(job.loras[0].path.read_bytes())
    moved = Job(job.prompt, job.size, job.seed, loras=(Lora(copy, 0.8),))
    assert restore_state(path, moved, identity(moved), torch.float32).stages_left == []
    for loras in ((), (Lora(copy, 0.7),), jobs[1].stage_1_loras):
        other = Job(job.prompt, job.size, job.seed, loras=loras)
        with pytest.raises(UserError, match="is of another run: loras: got"):
            restore_state(path, other, identity(other), torch.float32)
