"""The res_2s sampler is ltx-pipelines' own loop, bit for bit, with a predictor made up for it; its
schedule and its run over ranks."""

import pytest
import torch
from helpers import STREAMS, one_thread, randn, rel  # noqa: F401

from ltx_neuron.sampling.res_2s import Res2s, Stream, evaluation_pairs
from ltx_neuron.sampling.schedules import STAGE_2_SIGMAS, ltx2_schedule

TOKENS = {"video": 12, "audio": 7}
GUIDED = ltx2_schedule(5, tokens=18)
SCHEDULES = {"stage 1": GUIDED, "15 steps": ltx2_schedule(15), "stage 2": STAGE_2_SIGMAS}
MASKS = {
    "nothing held": {"video": torch.ones(12, 1), "audio": torch.ones(7, 1)},
    "guides and a first frame in part": {
        "video": torch.tensor([0.3] * 3 + [1.0] * 6 + [0.0] * 3)[:, None],
        "audio": torch.ones(7, 1),
    },
    "sound in part": {
        "video": torch.linspace(0, 1, 12)[:, None],
        "audio": torch.tensor([0.0, 0.0, 0.4, 1.0, 1.0, 0.9, 1.0])[:, None],
    },
}
SHOWS = 1e-3  # what a wrong formula changes at least


def predicted(video, audio, sigma):
    """A made-up model of both streams, in their dtype: each is moved by the other and by sigma."""
    means = video.float().mean(), audio.float().mean()
    x0 = [
        (torch.tanh(x.float() * (1.2 - sigma) + other) * 0.8 + sigma * 0.1).to(x.dtype)
        for x, other in zip((video, audio), reversed(means), strict=True)
    ]
    return tuple(x0)


def starts(dtype):
    """Latents and clean latents of both streams."""
    return {
        stream: [randn(1, count, 8, seed=seed + count).to(dtype) for seed in (1, 2)]
        for stream, count in TOKENS.items()
    }


def ours(schedule, masks, dtype, sigmas=None):
    """Both latents at the end, and the sigma of every evaluation. sigmas: the model's, if others
    than the graphs'."""
    rows = evaluation_pairs(schedule, 64)[:, 0] if sigmas is None else sigmas
    streams = [Stream(*starts(dtype)[stream], masks[stream]) for stream in STREAMS]
    sampler, seen = Res2s(schedule, *streams), []

    def predict(video, audio, evaluation):
        assert video.dtype == audio.dtype == dtype
        seen.append(rows[evaluation].item())
        x0 = predicted(video, audio, seen[-1])
        return tuple(stream.held(x) for stream, x in zip(streams, x0, strict=True))

    for number in range(len(schedule) - 1):
        sampler.step(number, predict)
    return [stream.latent for stream in streams], seen


def theirs(schedule, masks, dtype, **options):
    """The same of ltx-pipelines' loop, and the sigmas it calls the model with, in float64."""
    from ltx_core.components.diffusion_steps import Res2sDiffusionStep
    from ltx_core.types import LatentState
    from ltx_pipelines.utils.samplers import res2s_audio_video_denoising_loop

    seen, steps = [], []

    def denoise(video_state, audio_state, sigmas, step_index):
        seen.append(sigmas[step_index].item())
        steps.append(step_index)
        return predicted(video_state.latent, audio_state.latent, seen[-1])

    states = [
        LatentState(
            latent=latent, clean_latent=clean, denoise_mask=masks[stream][None], positions=None
        )
        for stream, (latent, clean) in starts(dtype).items()
    ]
    states = res2s_audio_video_denoising_loop(
        torch.tensor(schedule), *states, Res2sDiffusionStep(), denoise, model_dtype=dtype, **options
    )
    return [state.latent for state in states], seen, steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_sampler_is_that_of_ltx_pipelines_bit_for_bit(schedule, masks, dtype):
    wanted, sigmas, _ = theirs(SCHEDULES[schedule], MASKS[masks], dtype)
    got, _ = ours(
        SCHEDULES[schedule], MASKS[masks], dtype, torch.tensor(sigmas, dtype=torch.float64)
    )
    for stream, ours_, theirs_ in zip(STREAMS, got, wanted, strict=True):
        assert ours_.dtype == theirs_.dtype == dtype
        assert torch.equal(ours_, theirs_), (stream, rel(ours_, theirs_))
