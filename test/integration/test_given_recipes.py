"""Audio to video, retake, IC-LoRA and keyframe interpolation against ltx-pipelines
(test/given_oracle.py), latent for latent. What wrong ways to do them make, more of the dev recipe,
and bfloat16: test/slow/test_given_recipes.py."""

import given_runs
import pytest
import torch
from given_oracle import KeptBeginsAsNoise
from given_runs import (
    FP32,
    GUIDED,
    Longer,
    a2v,
    a2v_dev,
    assert_equals_the_oracle,
    assert_longer_equals_the_oracle,
    assert_tail_is_cut,
    ic_lora,
    interpolated,
    longer,
    retake,
    run,
    scaled_ic_lora,
    told,
)
from helpers import STREAMS, one_thread, rel  # noqa: F401
from jobs import replace

files, workspace, opened = given_runs.files, given_runs.workspace, given_runs.opened  # fixtures
contexts, wanted, generate = given_runs.contexts, given_runs.wanted, given_runs.generate


# --- audio to video -------------------------------------------------------------------------------


def test_a_video_for_a_sound_in_one_stage_equals_ltx_pipelines(generate, wanted, files):
    job = a2v(files, two_stage=False, sound=(files / "sound.wav", 0.4, None))
    got = generate(job)
    assert_equals_the_oracle(got, wanted(job))
    assert torch.equal(got["s1_audio"], got["audio_latent"])


def test_a_video_for_a_sound_and_an_image_in_two_stages_equals_ltx_pipelines(generate, wanted, files, tiny):
    """A first frame held in part, and a keyframe, in both stages."""
    job = a2v(files, images=((tiny.image, 0, 0.8), (tiny.image, 8, 0.6)), seed=6)
    got = generate(job)
    assert_equals_the_oracle(got, wanted(job))
    assert torch.equal(got["s2_audio"], got["audio_latent"])


def test_a_guided_video_for_a_sound_equals_ltx_pipelines(generate, wanted, files, tiny):
    job = a2v_dev(files, tiny)
    assert_equals_the_oracle(generate(job), wanted(job), GUIDED)


# --- retake ---------------------------------------------------------------------------------------


def kept_frames(got: dict, stream: str) -> list[int]:
    """Which latent frames are the file's, bit for bit."""
    made, given = got[f"s1_{stream}"], got[f"{stream}_latent"]
    return [i for i in range(made.shape[2]) if torch.equal(made[:, :, i], given[:, :, i])]


def test_a_retake_of_both_streams_equals_ltx_pipelines(generate, wanted, files):
    job = retake(files)
    got = generate(job)
    assert_equals_the_oracle(got, wanted(job))
    assert kept_frames(got, "video") == [0, 2]
    assert kept_frames(got, "audio") == [*range(3), *range(6, 21)]  # 40 ms each, from -30 ms on


@pytest.mark.parametrize("made", STREAMS)
def test_a_retake_of_one_stream_equals_ltx_pipelines_of_each_release(generate, wanted, files, made):
    """By default what is kept begins clean, as in 1.0.0; since 1.1.0 it begins as noise."""
    job = retake(files, made, seed=4)
    kept = {"video": "audio", "audio": "video"}[made]
    got = generate(job)
    assert_equals_the_oracle(got, wanted(job))
    assert torch.equal(got[f"s1_{kept}"], got[f"{kept}_latent"])
    as_noise = generate(job, "ltx-pipelines-1.2.0")
    assert_equals_the_oracle(as_noise, wanted(job, KeptBeginsAsNoise))
    assert rel(as_noise[f"s1_{kept}"], got[f"{kept}_latent"]) < FP32


def test_behind_a_sound_that_ends_early_a_retake_keeps_zeros(generate, wanted, files):
    job = retake(files, film="cut")
    got = generate(job)
    assert (got["audio_latent"][:, :, -1] == 0).all()
    assert_equals_the_oracle(got, wanted(job))


def test_a_retake_of_a_video_without_sound_makes_all_of_its_sound(generate, wanted, files):
    job = retake(files, "video", film="mute")
    got = generate(job)
    assert "audio_latent" not in got
    assert_equals_the_oracle(got, wanted(job))


def test_a_video_made_longer_in_one_window_equals_a_retake_of_the_longer_clip(opened, contexts, wanted, files):
    job = longer(files)
    assert_longer_equals_the_oracle(opened(), contexts, job, wanted(job, Longer), FP32)


# --- IC-LoRA and keyframe interpolation -----------------------------------------------------------


def test_masked_references_behind_a_guide_equal_ltx_pipelines(generate, wanted, files, tiny):
    job = ic_lora(files, tiny)
    assert_equals_the_oracle(generate(job), wanted(job))


def test_what_a_tail_leaves_is_the_beginning_of_the_longer_video(opened, contexts, files, tiny):
    """Of masked references behind a guide in the last kept frame, in two stages."""
    assert_tail_is_cut(opened(), told(ic_lora(files, tiny)), contexts)


def test_references_at_other_scales_equal_ltx_pipelines(generate, wanted, files, tiny):
    job = scaled_ic_lora(files, tiny)
    got = generate(job)
    assert got["reference_latent"].shape == (1, 128, 2, 1, 1)
    assert_equals_the_oracle(got, wanted(job))
    assert "s2_video" not in got


def test_a_tile_that_covers_the_canvas_makes_the_bits_of_no_tiles(opened, generate, contexts, files, tiny):
    job = scaled_ic_lora(files, tiny)
    made = run(opened(), replace(told(job), tile=True, tile_height=64, tile_width=64), contexts)
    assert all(torch.equal(made[name], tensor) for name, tensor in generate(job).items())


def test_images_as_guides_equal_ltx_pipelines(generate, wanted, tiny):
    job = interpolated(tiny)
    assert_equals_the_oracle(generate(job), wanted(job), GUIDED)
