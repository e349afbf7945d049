"""--upscale-video: one flag for the job that an upscaler's IC-LoRA wants, from the facts of a file."""

import pytest
import torch
from helpers import picture_frames, tone, write_film
from safetensors.torch import save_file

from ltx_neuron.host import input_files
from ltx_neuron.job import Job
from ltx_neuron.sampling.conditions import WeightedFile


@pytest.fixture
def upscaled(tmp_path, monkeypatch):
    """upscaled(frames, rate, sound, **fields): the job of a clip of 50x60 pixels by an upscaler of 2."""
    monkeypatch.chdir(tmp_path)  # the user's folder
    save_file({"a": torch.zeros(1)}, "x2.safetensors", {"reference_downscale_factor": "2"})

    def job(frames=20, rate=25, sound=None, **fields) -> Job:
        write_film("clip.mkv", picture_frames(frames, 50, 60, 1), rate, sound=sound)
        return Job(upscale_video="clip.mkv", ic_lora=["x2.safetensors"], **fields).with_upscaling()

    return job


def test_a_clip_of_any_size_and_length_has_what_the_model_can_have_of_both_and_says_so(upscaled, capsys):
    job = upscaled(sound=tone(48000, 0.5))  # a little shorter than 17 frames
    assert job.size.sides == (128, 128) and (job.size.num_frames, job.size.frame_rate) == (17, 25)
    assert (job.video_conditioning, job.audio_path) == ((WeightedFile("clip.mkv", 1.0),), "clip.mkv")
    assert job.tile and job.upscale_video is None and job.with_upscaling() is job
    assert "17 of 20 frames (8k+1) of 50x60 become 128x128" in capsys.readouterr().out
    (reference,) = job.references
    assert reference.pixels(job.size) == (17, 64, 64)
    job.check()
    input_files.check(job)  # with silence after its sound


def test_a_typed_size_replaces_the_clips_and_a_clip_without_sound_gets_one(upscaled, capsys):
    job = upscaled(height=192, width=256, tile_height=64)
    assert job.size.sides == (192, 256) and job.audio_path is None and job.tile_height == 64
    assert "clip.mkv has no sound: the model generates one" in capsys.readouterr().out


def test_a_clip_past_the_models_positions_is_upscaled_in_windows(upscaled, capsys):
    job = upscaled(frames=42, rate=2)
    assert (job.size.num_frames, job.holds("chunked"), job.windows) == (41, True, ())  # it fits one of 97 frames
    assert "become 128x128, in windows" in capsys.readouterr().out
    assert not upscaled(frames=38, rate=2).holds("chunked")
    windows = upscaled(frames=42, rate=25, chunk_pixel_frames=25, chunk_carry_frames=17, chunk_blend_frames=0).windows
    assert [window.references[0].start for window in windows] == [0, 8, 16]
