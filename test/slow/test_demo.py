"""The demo's clips show and sound what their prompts say, and are those of ltx-pipelines."""

from dataclasses import replace
from functools import cache

import demo_clips
import pytest
import torch
from config import HEIGHT, WIDTH
from demo_clips import PROMPTS, PSNR, STYLE, assert_is_as_asked_for, made, nearest
from helpers import one_thread  # noqa: F401
from PIL import Image
from records import Record
from torch import Tensor
from world import BLUEPRINT

from ltx_neuron.artifacts import build
from ltx_neuron.sampling.conditions import ImageCondition

engines = demo_clips.engines  # a fixture

FP32 = 1e-5
KEPT = 30.0  # dB of the first frame from the image that it begins with
SHARPER = 1.3


BF16 = 2, "bfloat16"  # ranks and dtype of the runs in it
FIRST, *OTHERS = PROMPTS


@pytest.fixture(scope="module")
def clips(engines):
    """clips(prompt, tp, dtype)"""
    return cache(lambda prompt, *how: made(engines(*how), prompt))


# --- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", OTHERS[:2])
def test_a_clip_shows_and_sounds_what_its_prompt_says(clips, prompt):
    assert_is_as_asked_for(PROMPTS[prompt], clips(prompt))


def test_two_ranks_in_bfloat16_make_what_a_prompt_says(clips):
    assert_is_as_asked_for(PROMPTS[FIRST], clips(FIRST, *BF16))


def test_an_image_is_kept_and_moves_on(engines, tmp_path):
    prompt = FIRST
    course = PROMPTS[prompt].courses()[3]
    drawn = course.frames(HEIGHT, WIDTH, 1)[0]
    path = tmp_path / "image.png"
    Image.fromarray((drawn * 255).round().byte().numpy()).save(path)
    clip = made(engines(), prompt, images=(ImageCondition(str(path), crf=0),))
    kept = float(-10 * (clip.frames[0] - drawn).square().mean().log10())
    found = nearest(prompt, clip)
    print(f"{kept:.1f} dB kept, {found.psnr:.1f} dB in all")
    assert kept > KEPT and found.scene == course and found.psnr > PSNR


def test_stage_2_is_sharper_than_stage_1(engines, clips):
    engine = engines()
    for clip in map(clips, OTHERS[:2]):
        first = torch.cat(list(engine.host.decode_video(clip.tensors["s1_video"])))
        larger = torch.nn.functional.interpolate(
            first.float().permute(0, 3, 1, 2) / 255, scale_factor=2, mode="bilinear"
        )
        assert steepness(clip.frames) > SHARPER * steepness(larger.permute(0, 2, 3, 1))


def test_a_style_changes_the_colours_and_nothing_else(engines):
    prompt, engine = OTHERS[2], engines()
    build.make(engine.workspace, engine.workspace.weight_sets("dit", {(STYLE,)}))
    clip = made(engine, prompt, loras=(STYLE,))
    assert_is_as_asked_for(replace(PROMPTS[prompt], **BLUEPRINT), clip)


def steepness(frames: Tensor) -> float:
    """How fast a row's colours change where they change most."""
    return float(frames.diff(dim=2).abs().amax((1, 2, 3)).mean())


# --- the reference --------------------------------------------------------------------------------


def test_ltx_pipelines_makes_the_same_clips_from_the_file(clips):
    record = Record("demo")
    record.assert_equal(clips(FIRST).tensors, FP32)
    record.assert_as_near_as_upstreams_bfloat16(clips(FIRST, *BF16).tensors)
