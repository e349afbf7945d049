"""Two stages with a spatial upsampler of 1.5."""

import pytest
from conftest import QUICK
from helpers import rational_upsampler, read_video
from safetensors.torch import load_file

from ltx_neuron.commands import dispatch
from ltx_neuron.errors import UserError


def test_stage_2_is_one_and_a_half_times_stage_1_with_the_upsampler_of_that_factor(tiny, artifacts, tmp_path):
    out, tensors = tmp_path / "out.mp4", tmp_path / "out.safetensors"
    words = ["--checkpoint-path", tiny.checkpoint, "--gemma-root", tiny.gemma_root]
    words += ["--artifacts-dir", artifacts, "--profile", "cpu", "--tp-degree", 1]
    words += ["--dtype", "float32", "--recipe", "distilled", "--num-frames", 9]
    words += [word for setting in QUICK for word in ("--profile-set", setting)]
    words += ["--spatial-upsampler-path", rational_upsampler(tmp_path / "x1.5.safetensors")]
    two = [*map(str, words), "--two-stage", "--width", "192"]
    with pytest.raises(UserError, match="--height 64 is not a multiple of 96 .*; nearest valid: 96"):
        dispatch(["prepare", *two, "--height", "64"])
    dispatch(["prepare", *two, "--height", "96"])
    outputs = ["--prompt", "rain", "--output-path", str(out), "--save-tensors", str(tensors)]
    dispatch(["generate", *two, "--height", "96", *outputs])
    saved = load_file(tensors)
    assert saved["s1_video"].shape == (1, 128, 2, 2, 4)
    assert saved["upsampled"].shape == saved["s2_video"].shape == (1, 128, 2, 3, 6)
    assert (read_video(out)["height"], read_video(out)["width"]) == (96, 192)
    with pytest.raises(UserError, match="enlarges the sides 1.5 times; --upscale spatial needs"):
        dispatch(["prepare", *map(str, words), "--height", "64", "--width", "64", "--upscale", "spatial"])
