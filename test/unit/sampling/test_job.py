"""What a caller of the Python API passes is checked by one table, a sentence for each mistake."""

import numpy as np
import pytest
import torch
from conftest import ROOT
from fuzz import on_random
from jobs import make_job
from typed import said

from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.shapes import audio_latent_frames

MISTAKES = {
    "--prompt: got None, wanted a valid string": dict(prompt=None),
    "--height: got '64', wanted a valid integer": dict(height="64"),
    "--width: got 64.0, wanted a valid integer": dict(width=64.0),
    "--num-frames: got True, wanted text or a number": dict(num_frames=True),
    "--frame-rate: got '24', wanted a valid number": dict(frame_rate="24"),
    "--two-stage: got 1, wanted a valid boolean": dict(two_stage=1),
    "--seed: got 1.5, wanted a valid integer": dict(seed=1.5),
    "--seed: got False, wanted text or a number": dict(seed=False),
    "--num-inference-steps: got '8', wanted a valid integer": dict(num_inference_steps="8"),
    "--negative-prompt: got ['a'], wanted a valid string": dict(negative_prompt=["a"]),
    "--audio-cfg-guidance-scale: got '7', wanted a valid number": dict(audio_cfg_guidance_scale="7"),
    "--image: got [['a.png']], wanted a valid tuple": dict(image="a.png"),
    "--image: got 'a.png', wanted an instance of ImageCondition": dict(image=(ImageCondition(__file__), "a.png")),
    "--image: got 5, wanted a valid string": dict(image=(ImageCondition(5),)),
    "strength '1', wanted a valid number": dict(image=(ImageCondition(__file__, strength="1"),)),
    "--upscale: got ['spatial'], wanted 'spatial', 'temporal' or 'both'": dict(upscale=["spatial"]),
    "--upscale: got 'foo', wanted 'spatial', 'temporal' or 'both'": dict(upscale="foo"),
    "--recipe: got 'slow', wanted 'distilled' or 'dev'": dict(recipe="slow"),
    "--seed: got 18446744073709551616, wanted less than 18446744073709551616": dict(seed=2**64),
    "--frame-rate: got 0.5, wanted at least 1": dict(frame_rate=0.5),
    "--frame-rate: got nan, wanted a finite number": dict(frame_rate=float("nan")),
    "--num-inference-steps: got 65, wanted at most 64": dict(num_inference_steps=65),
    "--image b.png: strength 2.0, wanted at most 1; type --image PATH [FRAME_IDX [STRENGTH": dict(
        image=(ImageCondition("a.png"), ImageCondition("b.png", strength=2.0))
    ),
}


def job(**fields) -> Job:
    """A job of the Python API, which converts no text."""
    size = {"height": 64, "width": 64, "num_frames": 9}
    return Job.validated({"prompt": "rain"} | size | fields, strict=True)


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_a_sentence_with_what_was_got_and_wanted(message):
    with pytest.raises(UserError) as error:
        job(**MISTAKES[message])
    assert message in str(error.value)


@pytest.mark.parametrize("rate", [0, 0.5, 1001, float("nan"), float("inf")])
def test_the_rate_of_a_size_is_checked_wherever_it_comes_from(rate):
    Size(64, 64, 121, 1000).check()
    with pytest.raises(UserError, match="--frame-rate: got .*, wanted 1 to 1000"):
        Size(64, 64, 121, rate).check()


VALUES = {
    "--image a.png: strength '2', wanted at most 1": {"image": ["a.png", "0", "2"]},
    "--image b.png: frame index 'x', wanted": {"image": [["a.png"], ["b.png", "x"]]},
    "--image a.png: crf 52, wanted at most 51": {"image": ["a.png", 0, 1, 52]},
    "--image a.png: crf 53, wanted at most 51": {"image": {"path": "a.png", "crf": 53}},
    "--image a.png: got 5, unexpected": {"image": ["a.png", 0, 1, 33, 5]},
    "--image: got 5, wanted": {"image": [[5]]},
    "--lora b: strength 'x', wanted": {"lora": [["a"], ["b", "x"]]},
    "--video-conditioning a: got ['a'], field required": {"video_conditioning": ["a"]},
}


@pytest.mark.parametrize("said", VALUES)
def test_a_mistake_in_a_repeatable_flag_names_its_file_and_value(said):
    with pytest.raises(UserError) as error:
        Job.validated(VALUES[said])
    assert said in str(error.value)


def test_whole_numbers_of_numpy_paths_and_all_defaults_are_right():
    job().check()
    job(height=np.int64(64), num_frames=np.int32(9), seed=np.uint64(3), frame_rate=24).check()
    image = ImageCondition(ROOT / "README.md", np.int64(8), np.float32(0.5), np.uint8(3))
    (held,) = job(frame_rate=np.float32(24), image=(image,)).image
    assert (held.frame_index, held.strength, held.crf) == (8, 0.5, 3)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(UserError) as error:
        job(height=list(range(10_000)))
    assert len(str(error.value)) < 100


@pytest.mark.parametrize("value", [torch.ones(1), np.ones(1), 1j])
def test_what_only_looks_like_a_number_is_none(value):
    with pytest.raises(UserError, match="wanted (a valid number|text or a number)"):
        job(frame_rate=value)


def test_twice_the_frames_are_shown_at_twice_the_rate():
    rates = {None: 24.0, "spatial": 24.0, "temporal": 48.0, "both": 48.0}
    assert {kind: make_job("", upscale=kind).output_frame_rate for kind in rates} == rates


def test_a_legal_size_is_taken_whatever_else_is_left_to_its_default():
    """No bound that follows from one field, such as a clip's frames, refuses another's default."""

    def taken(chance) -> None:
        recipe, stages = chance.choice(("distilled", "dev")), chance.choice((1, 2))
        unit, rate = 32 * stages, chance.choice((1, 12.5, 24, 25, 30000 / 1001, 60))
        frames = 8 * chance.choice((0, 1, 2, chance.randrange(200))) + 1
        words = ["--num-frames", frames, "--frame-rate", rate, "--recipe", recipe]
        if recipe == "dev" and stages == 1 and chance.random() < 0.2:
            words += ["--sound-only"]
        else:
            words += ["--height", unit * chance.randint(1, 40)]
            words += ["--width", unit * chance.randint(1, 40)]
            words += ["--tail-frames", 8 * chance.randrange(20)] * (chance.random() < 0.3)
            words += ["--upscale", "both"] * (stages == 1 and chance.random() < 0.3)
        words += ["--two-stage"] * (stages - 1)
        words += ["--sampler", "res_2s"] * (stages == 2 and recipe == "dev" and frames % 16 == 1)
        words += ["--nag-scale", 11] * (recipe == "distilled" and chance.random() < 0.3)
        if audio_latent_frames(frames, rate):  # as every clip from 0.02 s on has
            job = said(*words)
            job.check()
            assert job.output_size.num_frames == frames and job.buckets

    on_random(taken)


def test_the_bound_of_generated_keyframes_is_said_to_who_typed_them():
    said("--num-frames", 9, "--num-generated-keyframes", 7).check()
    for frames, most in ((9, 7), (1, 0)):
        with pytest.raises(UserError, match=f"keyframes 8: wanted at most {most}, one for each"):
            said("--num-frames", frames, "--num-generated-keyframes", 8).check()


def test_the_upsampler_of_one_and_a_half_makes_stage_1_two_thirds_of_the_size():
    size = Size(96, 192, 9, two_stage=True, spatial_scale=1.5)
    size.check()
    job = make_job("rain", size)
    assert size.first == Size(64, 128, 9)
    assert job.scaled(1.5) is job and job.scaled(2.0).size == Size(96, 192, 9, two_stage=True)
    assert [(stage.height, stage.width) for stage in job.stages] == [(64, 128), (96, 192)]
    assert (job.height, job.two_stage) == (96, True)
    assert job.describe()["spatial_scale"] == 1.5
    assert "spatial_scale" not in make_job("rain", Size(two_stage=True)).describe()
    said = "height {} is not a multiple of 96 .two stages, the second 1.5 times the first.; "
    with pytest.raises(UserError, match=said.format(512) + "nearest valid: 480 or 576"):
        Size(512, 768, 9, two_stage=True, spatial_scale=1.5).check()
