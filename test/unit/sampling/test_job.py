"""What a caller of the Python API passes is checked by one table, a sentence for each mistake."""

import numpy as np
import pytest
from conftest import ROOT
from fuzz import on_random
from jobs import make_job
from typed import said

from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.shapes import audio_latent_frames


def job(**fields) -> Job:
    """A job of the Python API, which converts no text."""
    size = {"height": 64, "width": 64, "num_frames": 9}
    return Job.validated({"prompt": "rain"} | size | fields, strict=True)


def test_whole_numbers_of_numpy_paths_and_all_defaults_are_right():
    job().check()
    job(height=np.int64(64), num_frames=np.int32(9), seed=np.uint64(3), frame_rate=24).check()
    image = ImageCondition(ROOT / "README.md", np.int64(8), np.float32(0.5), np.uint8(3))
    (held,) = job(frame_rate=np.float32(24), image=(image,)).image
    assert (held.frame_index, held.strength, held.crf) == (8, 0.5, 3)


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
