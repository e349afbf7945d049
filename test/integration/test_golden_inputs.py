"""Audio to video, retake, extension, references and keyframe interpolation against records of ltx-pipelines
(records.py). More of the dev recipe, dubbing, voices, and bfloat16: test/slow/test_golden_inputs.py."""

import golden_runs
import pytest
import torch
from golden_jobs import FP32
from golden_runs import assert_is_recorded, assert_tail_is_cut
from helpers import STREAMS, one_thread, rel  # noqa: F401
from jobs import replace

runs = golden_runs.runs  # a fixture


@pytest.mark.parametrize(
    "name",
    [
        *("audio_to_video", "audio_to_video_images", "audio_to_video_guided"),
        *("retake", "retake_video", "retake_audio", "retake_video_of_1_2_0", "retake_audio_of_1_2_0"),
        *("retake_short_sound", "retake_without_sound", "extend"),
        *("ic_lora", "ic_lora_scaled", "keyframe_interpolation"),
    ],
)
def test_a_job_equals_ltx_pipelines(runs, name):
    assert_is_recorded(name, runs.generate(name))


@pytest.mark.parametrize("name", ["audio_to_video", "audio_to_video_images", "audio_to_video_guided"])
def test_an_input_sound_is_kept_in_every_stage(runs, name):
    got = runs.generate(name)
    for stage in {"s1_audio", "s2_audio"} & got.keys():
        assert torch.equal(got[stage], got["audio_latent"])


def source_frames(got: dict, stream: str) -> list[int]:
    """Which latent frames are the file's, bit for bit."""
    latent, source = got[f"s1_{stream}"], got[f"{stream}_latent"]
    return [i for i in range(latent.shape[2]) if torch.equal(latent[:, :, i], source[:, :, i])]


def test_a_retake_keeps_the_frames_and_the_sound_outside_its_seconds(runs):
    got = runs.generate("retake")
    assert source_frames(got, "video") == [0, 2]
    assert source_frames(got, "audio") == [*range(3), *range(6, 21)]  # 40 ms each, from -30 ms on


@pytest.mark.parametrize(("stream", "other"), [STREAMS, STREAMS[::-1]])
def test_a_retake_of_one_stream_keeps_the_other(runs, stream, other):
    """It begins clean by default, as in 1.0.0, and as noise in 1.1.0 to 1.2.0, where it ends within
    rounding."""
    got, as_noise = runs.generate(f"retake_{stream}"), runs.generate(f"retake_{stream}_of_1_2_0")
    assert torch.equal(got[f"s1_{other}"], got[f"{other}_latent"])
    assert rel(as_noise[f"s1_{other}"], got[f"{other}_latent"]) < FP32


def test_a_retake_keeps_zeros_behind_a_sound_that_ends_early_and_makes_one_where_there_is_none(runs):
    assert (runs.generate("retake_short_sound")["audio_latent"][:, :, -1] == 0).all()
    assert "audio_latent" not in runs.generate("retake_without_sound")


def test_an_extension_by_one_window_has_one_stage(runs):
    (stage,) = runs.job("extend").stages
    assert stage.window


def test_a_scaled_reference_has_fewer_tokens_and_stage_2_is_skipped(runs):
    got = runs.generate("ic_lora_scaled")
    assert got["reference_latent"].shape == (1, 128, 2, 1, 1) and "s2_video" not in got


def test_a_tile_that_covers_the_canvas_makes_the_bits_of_no_tiles(runs):
    job = replace(runs.job("ic_lora_scaled"), tile=True, tile_height=64, tile_width=64)
    tiled = runs.run(runs.engine(), job)
    assert all(torch.equal(tiled[name], tensor) for name, tensor in runs.generate("ic_lora_scaled").items())


def test_what_a_tail_leaves_is_the_beginning_of_the_longer_video(runs):
    """Of masked references behind a guide in the last kept frame, in two stages."""
    assert_tail_is_cut(runs.engine(), runs.job("ic_lora"))
