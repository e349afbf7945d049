"""The gradient estimation sampler against upstream's loop, which no pipeline calls."""

import pytest
import torch
from helpers import randn, rel
from jobs import make_job
from ltx_core.components.diffusion_steps import EulerDiffusionStep
from ltx_core.types import LatentState
from ltx_pipelines.utils.samplers import gradient_estimating_euler_denoising_loop

from ltx_neuron.job import Size
from ltx_neuron.sampling.samplers import GradientEstimation, Stream
from ltx_neuron.sampling.schedules import ltx2_schedule

SIGMAS = ltx2_schedule(6, 4096)
HELD = torch.tensor([0.0, 0.4, 1, 1, 1])[:, None]
EQUAL = 0.0  # the same operations in the same order


def prediction(latent: torch.Tensor, number: int) -> torch.Tensor:
    """A stand-in of the model, whose velocity changes from step to step."""
    return torch.tanh(latent * (1.1 - 0.2 * number)) + 0.1 * number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stages_latents_are_those_of_upstreams_loop(dtype):
    starts = [randn(1, 5, 4, seed=seed).to(dtype) for seed in (1, 2)]
    cleans = [randn(1, 5, 4, seed=seed).to(dtype) for seed in (3, 4)]
    sampler = GradientEstimation(SIGMAS, *(Stream(x, clean, HELD) for x, clean in zip(starts, cleans, strict=True)))

    def predict(video, audio, number):
        streams = zip(sampler.streams, (video, audio), strict=True)
        return tuple(stream.held(prediction(x, number)) for stream, x in streams)

    for number in range(len(SIGMAS) - 1):
        sampler.step(number, predict)

    def denoise(video, audio, sigmas, number):
        return prediction(video.latent, number), prediction(audio.latent, number)

    states = [LatentState(x, HELD[None], torch.zeros(1, 1, 5), clean) for x, clean in zip(starts, cleans, strict=True)]
    loop = gradient_estimating_euler_denoising_loop
    wanted = loop(torch.tensor(SIGMAS), *states, EulerDiffusionStep(), denoise)
    for stream, state in zip(sampler.streams, wanted, strict=True):
        assert rel(stream.latent, state.latent) <= EQUAL
        assert torch.equal(stream.latent[:, 0], stream.clean_latent[:, 0])  # held


def test_it_is_of_stage_1_of_the_dev_recipe_without_an_input():
    dev = make_job("rain", Size(128, 192, 17, two_stage=True), recipe="dev", sampler="gradient_estimation")
    dev.check()
    assert [stage.sampler for stage in dev.stages] == ["gradient_estimation", "euler"]
