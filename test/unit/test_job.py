"""What a caller of the Python API passes is checked by one table, a sentence for each mistake."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import ROOT

from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.fields import check_type
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.sampling.spec import validated

MISTAKES = {
    "prompt=None is of type NoneType; wanted text": dict(prompt=None),
    "height='64' is of type str; wanted a whole number, as in height=512": dict(height="64"),
    "width=64.0 is of type float; wanted a whole number": dict(width=64.0),
    "num_frames=True is of type bool; wanted a whole number": dict(num_frames=True),
    "frame_rate='24' is of type str; wanted a number, as in frame_rate=24.0": dict(frame_rate="24"),
    "frame_rate=None is of type NoneType": dict(frame_rate=None),
    "two_stage=1 is of type int; wanted True or False": dict(two_stage=1),
    "seed=1.5 is of type float; wanted a whole number, as in seed=10": dict(seed=1.5),
    "seed=False is of type bool": dict(seed=False),
    "num_inference_steps='8' is of type str; wanted a whole number or None": dict(
        num_inference_steps="8"
    ),
    "negative_prompt=['a'] is of type list; wanted text or None": dict(negative_prompt=["a"]),
    "guidance=3.0 is of type float; wanted Guidance or None": dict(guidance=3.0),
    "images='a.png' is of type str; wanted tuple": dict(images="a.png"),
    "images[1]='a.png' is of type str; wanted ImageCondition": dict(
        images=(ImageCondition(__file__), "a.png")
    ),
    "images[0].path=5 is of type int; wanted text or a path": dict(images=(ImageCondition(5),)),
    "images[0].strength='1' is of type str; wanted a number": dict(
        images=(ImageCondition(__file__, strength="1"),)
    ),
    "upscale=['spatial'] is of type list; wanted text or None": dict(upscale=["spatial"]),
    "--upscale: got 'foo', wanted 'spatial', 'temporal' or 'both'": dict(upscale="foo"),
    "--recipe: got 'slow', wanted 'distilled' or 'dev'": dict(recipe="slow"),
    "--seed: got 18446744073709551616, wanted less than 18446744073709551616": dict(seed=2**64),
    "--frame-rate: got 0.5, wanted at least 1": dict(frame_rate=0.5),
    "--frame-rate: got nan, wanted a finite number": dict(frame_rate=float("nan")),
    "--num-inference-steps: got 65, wanted at most 64": dict(num_inference_steps=65),
    "--image b.png: strength 2.0, wanted at most 1; type --image PATH [FRAME_IDX [STRENGTH": dict(
        images=(ImageCondition("a.png"), ImageCondition("b.png", strength=2.0))
    ),
}


def job(**given) -> Job:
    """A job that is right but for what is given."""
    sizes = {field.name for field in dataclasses.fields(Size)}
    size = {"height": 64, "width": 64, "num_frames": 9}
    size |= {name: given.pop(name) for name in sizes & given.keys()}
    return Job(**{"prompt": "rain", "size": Size(**size)} | given)


@pytest.mark.parametrize("said", MISTAKES)
def test_a_mistake_is_a_sentence_with_what_was_got_and_wanted(said):
    with pytest.raises(UserError) as error:
        job(**MISTAKES[said]).check()
    assert said in str(error.value)


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
        validated(VALUES[said])
    assert said in str(error.value)


def test_whole_numbers_of_numpy_paths_and_all_defaults_are_right():
    job().check()
    job(height=np.int64(64), num_frames=np.int32(9), seed=np.uint64(3), frame_rate=24).check()
    job(frame_rate=np.float32(24), images=(ImageCondition(ROOT / "README.md"),)).check()


def test_scales_of_guidance_are_checked_with_their_stream():
    wrong = Guidance(StreamGuidance(), StreamGuidance(cfg_scale="7"))
    with pytest.raises(
        UserError, match=r"guidance\.audio\.cfg_scale='7' is of type str; wanted a nu"
    ):
        wrong.check(2)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(UserError) as error:
        check_type("height", list(range(10_000)), int)
    assert len(str(error.value)) < 100


@pytest.mark.parametrize("value", [torch.ones(1), np.ones(1), 1j])
def test_what_only_looks_like_a_number_is_none(value):
    with pytest.raises(UserError, match="wanted a number"):
        check_type("frame_rate", value, float)


def test_twice_the_frames_are_shown_at_twice_the_rate():
    rates = {None: 24.0, "spatial": 24.0, "temporal": 48.0, "both": 48.0}
    assert {kind: Job("", upscale=kind).output_frame_rate for kind in rates} == rates
