"""Recipes against ltx-core (test/recipes_oracle.py) by the scripts, on two ranks, of both releases,
and resumed; what is made otherwise is far from them."""

import pytest
import recipe_runs
import recipes_oracle
import torch
from engines import sharing
from given_runs import assert_tail_is_cut
from helpers import rel
from jobs import replace
from nag_oracle import Nag, guided
from recipe_runs import (
    AUDIO,
    GUIDED,
    HELD_IN_PART,
    NIGHT,
    SEA,
    SHOWS,
    VIDEO,
    assert_equals_the_oracle,
    generate,
    hq_job,
    image_job,
    told,
    told_hq,
)

from ltx_neuron.artifacts import build
from ltx_neuron.engine.resume import restore_state, save_state

assets, opened, wanted = recipe_runs.assets, recipe_runs.opened, recipe_runs.wanted  # fixtures

SKIPPING = replace(GUIDED, steps=5, video=(*VIDEO, ("skip_step", 1)), audio=(*AUDIO, ("skip_step", 2)))
KEYFRAMES = (0, 1.0), (16, 0.6)
OTHER_CRF = (0, 0.5, 0), (5, 0.25, 45)  # no H.264 round trip, and a rough one


def test_skipped_steps_equal_ltx_core_of_each_release(opened, wanted):
    later = opened()
    first = sharing(later, compat="ltx-core-1.0.0")
    for engine, release in ((later, "later"), (first, "1.0.0")):
        job = replace(SKIPPING, release=release)
        assert_equals_the_oracle(generate(engine, told(job)), wanted(job))


def test_twice_the_frames_are_shown_twice_as_fast(opened, wanted, assets):
    job = told(GUIDED, upscale="temporal")
    got = generate(opened(), job, decode=True)
    wanted = recipes_oracle.upsampled_in_time(assets, wanted(GUIDED)["s1_video"])
    assert_equals_the_oracle(got, {"temporal_video": wanted})
    assert (len(got["frames"]), job.output_frame_rate) == (17, 60.0)


def test_what_a_tail_leaves_is_the_beginning_of_the_longer_video(opened, assets):
    """Of a clip that is upscaled in space and in time, and of HQ."""
    engine = opened()
    for job in (told(GUIDED, upscale="both"), told_hq(assets)):
        job = replace(job, size=replace(job.size, num_frames=17))
        build.make(engine.workspace, engine.workspace.weight_sets("dit", {stage.loras for stage in job.stages}))
        assert_tail_is_cut(engine, job)


def test_images_held_whole_or_in_part_equal_ltx_core_of_each_release(opened, wanted, assets):
    engine = opened(2)
    for images in (KEYFRAMES, OTHER_CRF):
        job = image_job(assets, *images)
        assert_equals_the_oracle(generate(engine, told(job)), wanted(job))
    job = image_job(assets, *HELD_IN_PART, release="1.0.0")
    as_published = generate(sharing(engine, compat="ltx-core-1.0.0"), told(job))
    assert_equals_the_oracle(as_published, wanted(job))


@pytest.mark.parametrize("settings", ["sequence_parallel=true", "context_parallel=2"])
def test_a_negative_prompt_on_several_ranks_equals_the_papers_equations(opened, assets, settings):
    """In one stage: test_recipes of the first tier has both, on one rank."""
    job = replace(image_job(assets, *HELD_IN_PART), two_stage=False)
    nag = Nag(5.0, 0.5, 1.5)
    with guided(nag, *recipes_oracle.contexts(assets, NIGHT)):
        want = recipes_oracle.generate(assets, job)
    fields = dict(nag_scale=nag.scale, nag_alpha=nag.alpha, nag_tau=nag.tau)
    engine = opened(2, 2, (settings,))
    got = generate(engine, told(job, **fields, negative_prompt=NIGHT))
    assert_equals_the_oracle(got, want)
    engine.close()


def test_hq_goes_on_after_stage_1_and_after_a_warm_up_to_the_same_bits(opened, assets, tmp_path):
    engine, job = opened(), told_hq(assets)
    states = iter(tmp_path / name for name in ("first", "second"))
    engine.on_stage_end = lambda run: save_state(next(states), run, {})
    whole = generate(engine, job)
    engine.on_stage_end = None

    def resume(job):
        return restore_state(tmp_path / "first", job, {}, torch.float32)

    assert [stage.name for stage in resume(job).stages_left] == ["stage_2"]
    warm = sharing(engine, warmup=True)
    (result,) = warm.run([job], keep=True, decode=False, resume=resume)
    for name in ("s1_audio", "s2_video", "s2_audio", "final_audio"):
        assert torch.equal(result.tensors[name], whole[name]), name


# --- the dev recipe in two stages, by the scripts -------------------------------------------------


def test_the_dev_recipe_in_two_stages_equals_ltx_core_through_the_scripts(scripts, tiny):
    job = dev_job(tiny)
    size = dict(height=64, width=128, num_frames=9, frame_rate=30.0, two_stage=True, recipe="dev")
    setup = scripts(tiny, 4)  # on 1 or 2, other tests' services would offer this size
    setup.prepare(**size)
    loras = dict(distilled_lora=job.refining_loras)
    setup.run("shards/shard_backbone_weights.py", gemma=False, **loras)
    flags = dict(prompt=SEA, negative_prompt=NIGHT, seed=77, num_inference_steps=3, neuron_gemma=True)
    for (stream, other), parameters in zip((("video", "a2v"), ("audio", "v2a")), job.guidance, strict=True):
        flags |= {
            f"{stream}_cfg_guidance_scale": parameters["cfg_scale"],
            f"{stream}_stg_guidance_scale": parameters["stg_scale"],
            f"{stream}_stg_blocks": (parameters["stg_blocks"],),
            f"{stream}_rescale_scale": parameters["rescale_scale"],
            f"{other}_guidance_scale": parameters["modality_scale"],
        }
    got = setup.generate(**size, **flags, **loras, compat="ltx-pipelines-1.2.0").tensors
    want = recipes_oracle.generate(tiny, job)
    want = {name: tensor for name, tensor in want.items() if "step0" not in name}
    assert_equals_the_oracle(got, want)


def dev_job(assets) -> recipes_oracle.Job:
    """Of a model of two blocks, with a LoRA in stage 2."""
    video = tuple((dict(VIDEO) | {"stg_blocks": (1,)}).items())
    size = dict(width=128, height=64, two_stage=True)
    return replace(GUIDED, **size, video=video, refining_loras=((assets.lora, 0.8),))


# --- the oracle -----------------------------------------------------------------------------------

# A job, what is done otherwise in another one, and where it shows.
OTHERWISE = {
    "no LoRA": (
        lambda assets: image_job(assets, (0, 0.8), (9, 0.3), loras=((assets.lora, 0.45),)),
        lambda job: replace(job, loras=()),
        ("s1_video", "s2_video"),
    ),
    "the first release's image and keyframe": (
        lambda assets: image_job(assets, *HELD_IN_PART),
        lambda job: replace(job, release="1.0.0"),
        ("s2_video", "s2_audio"),
    ),
    "the default CRF": (
        lambda assets: image_job(assets, *OTHER_CRF),
        lambda job: replace(job, images=tuple(image[:3] for image in job.images)),
        ("s2_video",),
    ),
    "the first release's skipped steps": (
        lambda assets: SKIPPING,
        lambda job: replace(job, release="1.0.0"),
        ("s1_video",),
    ),
    "no guidance of the video": (lambda assets: GUIDED, lambda job: replace(job, video=()), ("s1_video",)),
    "HQ's job by Euler's steps": (
        hq_job,
        lambda job: replace(job, sampler="euler"),
        ("s1_video", "s1_audio", "s2_video"),
    ),
    "no LoRA in stage 2": (dev_job, lambda job: replace(job, refining_loras=()), ("s2_video", "s2_audio")),
    "the LoRA of stage 2 in both": (
        dev_job,
        lambda job: replace(job, loras=job.refining_loras, refining_loras=()),
        ("s1_video", "s2_video", "s2_audio"),
    ),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_a_recipe_that_is_followed_otherwise_is_seen(wanted, assets, what):
    make, change, names = OTHERWISE[what]
    job = make(assets)
    right, wrong = wanted(job), wanted(change(job))
    found = {name: rel(wrong[name], right[name]) for name in names}
    print({name: f"{distance:.1e}" for name, distance in found.items()})
    assert all(distance > SHOWS for distance in found.values())


def test_the_oracle_without_guidance_is_that_of_the_distilled_recipe(assets):
    """Ties the two oracles: guidance of nothing is one plain pass."""
    job = replace(GUIDED, video=(), audio=(), steps=2)
    assert recipes_oracle.passes(*job.guidance) == ["cond"]
    found = recipes_oracle.generate(assets, job)
    assert torch.equal(found["step0.cond.video"], found["step0.guided.video"])
