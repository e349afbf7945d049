"""Two stages with a spatial upsampler of 1.5."""

import pytest
from conftest import QUICK, words
from helpers import rational_upsampler, read_video
from safetensors.torch import load_file

from ltx_neuron.commands import dispatch
from ltx_neuron.errors import UserError


def test_stage_2_is_one_and_a_half_times_stage_1_with_the_upsampler_of_that_factor(tiny, artifacts, tmp_path):
    out, tensors = tmp_path / "out.mp4", tmp_path / "out.safetensors"
    flags = {"checkpoint_path": tiny.checkpoint, "gemma_root": tiny.gemma_root, "artifacts_dir": artifacts}
    flags |= {"profile": "cpu", "profile_set": QUICK, "tp_degree": 1, "dtype": "float32", "recipe": "distilled"}
    flags |= {"num_frames": 9, "spatial_upsampler_path": rational_upsampler(tmp_path / "x1.5.safetensors")}
    two = words(**flags, two_stage=True, width=192)
    with pytest.raises(UserError, match="--height 64 is not a multiple of 96 .*; nearest valid: 96"):
        dispatch(["prepare", *two, "--height", "64"])
    dispatch(["prepare", *two, "--height", "96"])
    dispatch(["generate", *two, "--height", "96", *words(prompt="rain", output_path=out, save_tensors=tensors)])
    saved = load_file(tensors)
    assert saved["s1_video"].shape == (1, 128, 2, 2, 4)
    assert saved["upsampled"].shape == saved["s2_video"].shape == (1, 128, 2, 3, 6)
    assert (read_video(out)["height"], read_video(out)["width"]) == (96, 192)
    with pytest.raises(UserError, match="enlarges the sides 1.5 times; --upscale spatial needs"):
        dispatch(["prepare", *words(**flags, height=64, width=64, upscale="spatial")])
