"""Runs of recipes by engines in this process on a model of four blocks, and their oracle's jobs
(test/recipes_oracle.py). Imported as `recipe_runs`."""

from functools import cache

import pytest
import recipes_oracle
import torch
from conftest import once
from engines import opened_engine, opened_workspace
from helpers import rel
from jobs import make_job, replace
from recipes_oracle import STREAMS
from tiny import TinySizes, make_tiny

from ltx_neuron.artifacts import build
from ltx_neuron.engine.run import Engine
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.weights.lora import Lora

FP32 = 1e-5  # sums in another order, over ranks and over many steps; measured 3e-6
# what every other job, release or weight set changes at least; the least is a hundred times FP32
SHOWS = 1e-3

SEA = "fifty grey waves, and thunder !"
NIGHT = "pale, night"
VIDEO = (
    ("cfg_scale", 2.5),
    ("stg_scale", 0.8),
    ("stg_blocks", (1, 3)),
    ("modality_scale", 2.2),
    ("rescale_scale", 0.6),
)
AUDIO = (("cfg_scale", 5.0), ("stg_scale", 1.3), ("stg_blocks", (0,)), ("modality_scale", 1.7), ("rescale_scale", 0.35))
GUIDED = recipes_oracle.Job(
    SEA,
    height=96,
    width=64,
    num_frames=9,
    frame_rate=30.0,
    seed=77,
    negative_prompt=NIGHT,
    steps=3,
    video=VIDEO,
    audio=AUDIO,
)
HELD_IN_PART = (0, 0.7), (16, 0.6)


@pytest.fixture(scope="module")
def assets(shared):
    """Four blocks: graphs of one and of two have several groups, and STG blocks are some of
    many."""
    return once(shared / "four", lambda path: make_tiny(path, TinySizes(layers=4, seed=31)))


@pytest.fixture(scope="module")
def opened(assets, artifacts):
    """opened(tp, ...): an engine, the same one for the same arguments."""
    made, threads = {}, torch.get_num_threads()

    def engine(tp: int = 1, blocks: int | None = 1, settings: tuple[str, ...] = ()) -> Engine:
        key = tp, blocks, settings
        if key not in made:
            workspace = opened_workspace(assets, artifacts, blocks, tp=tp, settings=settings)
            upsampler = assets.temporal_upsampler
            made[key] = opened_engine(workspace, assets, temporal_upsampler_path=upsampler)
        return made[key]

    yield engine
    for one in made.values():
        one.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def wanted(assets):
    return cache(lambda job: recipes_oracle.generate(assets, job))


def told(job: recipes_oracle.Job, **more) -> Job:
    """The oracle's job in our words."""
    guided = {}
    if job.video is not None:
        streams = (StreamGuidance(**parameters) for parameters in job.guidance)
        guided = dict(recipe="dev", guidance=Guidance(*streams), num_inference_steps=job.steps)
        guided |= dict(negative_prompt=job.negative_prompt)
    size = Size(job.height, job.width, job.num_frames, job.frame_rate, job.two_stage)
    images = tuple(ImageCondition(str(path), *how) for path, *how in job.images)
    given = dict(images=images, loras=merged(job.loras))
    return make_job(job.prompt, size, job.seed, **given, **guided, **more)


def merged(loras: tuple) -> tuple[Lora, ...]:
    return tuple(Lora(path, strength) for path, strength in loras)


def generate(engine: Engine, job: Job, **options) -> dict[str, torch.Tensor]:
    """Latents and the predictions of a guided first step, read from the ranks. Makes weights and
    graphs that are not there yet."""
    workspace, first = engine.workspace, {}
    build.make(workspace, workspace.weight_sets("dit", {stage.loras for stage in job.stages}))
    for stage in job.stages:
        build.make(workspace, workspace.dit_graphs([job.bucket(stage)]))

    def read(stage, step):
        if step or not stage.guided:
            return
        name = workspace.dit_program_for(job, stage)[0].name
        for kind in (*job.resolved_guidance.passes(), "guided"):
            first.update({f"step0.{kind}.{s}": engine.residency.ranks.get(name, f"{kind}_{s}") for s in STREAMS})

    engine.on_step_end = read
    (result,) = engine.run([job], keep=True, **{"decode": False} | options)
    return result.tensors | first


def assert_equals_the_oracle(got: dict, want: dict) -> None:
    found = {name: rel(got[name], want[name]) for name in want}
    print({name: f"{distance:.1e}" for name, distance in found.items()})
    assert {name: distance for name, distance in found.items() if not distance <= FP32} == {}


def image_job(assets, *images, **more) -> recipes_oracle.Job:
    """Two stages of the distilled recipe."""
    held = tuple((assets.image, *image) for image in images)
    size = dict(height=64, width=128, num_frames=17, frame_rate=12.5, seed=3)
    return recipes_oracle.Job(SEA, **size, two_stage=True, images=held, **more)


def hq_job(assets) -> recipes_oracle.Job:
    """The distilled LoRA at .25, and in stage 2 at .5, of which another .25 is the same to the bit;
    a first frame and a keyframe held in part; a stream that skips, which substeps never do."""
    return replace(
        GUIDED,
        height=192,
        width=128,
        two_stage=True,
        sampler="res_2s",
        video=(*VIDEO, ("skip_step", 1)),
        images=((assets.image, 0, 0.7), (assets.image, 8, 0.5)),
        loras=((assets.lora, 0.25),),
        refining_loras=((assets.lora, 0.25),),
    )


def told_hq(assets) -> Job:
    """That job in our words, with its two weight sets."""
    first, second = (merged(((assets.lora, strength),)) for strength in (0.25, 0.5))
    job = told(replace(hq_job(assets), loras=()), sampler="res_2s")
    return replace(job, stage_1_loras=first, stage_2_loras=second)
