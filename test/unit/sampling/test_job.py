"""What a job takes, and the sizes that follow from it."""

import numpy as np
import pytest
from conftest import ROOT
from fuzz import on_random
from jobs import make_job

from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.shapes import audio_latent_frames


def test_whole_numbers_of_numpy_paths_and_all_defaults_are_right_in_python():
    image = ImageCondition(ROOT / "README.md", np.int64(8), np.float32(0.5), np.uint8(3))
    numbers = {"height": np.int64(64), "num_frames": np.int32(9), "seed": np.uint64(3), "frame_rate": np.float32(24)}
    for fields in ({}, {"frame_rate": 24}, numbers | {"image": (image,)}):
        job = Job.validated({"prompt": "rain"} | fields, strict=True)
        job.check()
    (held,) = job.image
    assert (held.frame_index, held.strength, held.crf) == (8, 0.5, 3)


def test_a_legal_size_is_taken_whatever_else_is_left_to_its_default():
    """No bound that follows from one field, such as a clip's frames, refuses another's default."""

    def taken(chance) -> None:
        recipe, stages = chance.choice(("distilled", "dev")), chance.choice((1, 2))
        rate = chance.choice((1, 12.5, 24, 25, 30000 / 1001, 60))
        frames = 8 * chance.choice((0, 1, 2, chance.randrange(200))) + 1
        fields = {"num_frames": frames, "frame_rate": rate, "recipe": recipe, "two_stage": stages == 2}
        if recipe == "dev" and stages == 1 and chance.random() < 0.2:
            fields["sound_only"] = True
        else:
            fields |= {side: 32 * stages * chance.randint(1, 40) for side in ("height", "width")}
            fields |= {"tail_frames": 8 * chance.randrange(20)} if chance.random() < 0.3 else {}
            fields |= {"upscale": "both"} if stages == 1 and chance.random() < 0.3 else {}
        fields |= {"sampler": "res_2s"} if stages == 2 and recipe == "dev" and frames % 16 == 1 else {}
        fields |= {"nag_scale": 11.0} if recipe == "distilled" and chance.random() < 0.3 else {}
        if audio_latent_frames(frames, rate):  # as every clip from 0.02 s on has
            made = Job.validated({"prompt": "rain"} | fields)
            made.check()
            assert made.output_size.num_frames == frames and made.buckets

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
    with pytest.raises(UserError, match="height 512 is not a multiple of 96 .* 1.5 .*nearest valid: 480 or 576"):
        Size(512, 768, 9, two_stage=True, spatial_scale=1.5).check()
