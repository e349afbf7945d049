"""A stage so small that ltx-core steps through it as well: what tests of a step compare with."""

from functools import cache

import torch
from helpers import SIZES, STREAMS, block_summands, fp32_bound, ltx_model, made_config, rel
from torch import Tensor

SHAPE, FPS, AUDIO_TOKENS = (3, 2, 3), 24.0, 18
# Up to three blocks of a width of up to 80; the Euler steps of a schedule are weighted averages of
# what the model predicts, and add nothing to it
EQUAL = fp32_bound(*block_summands(80) * 3)
SHOWS = 1e-3  # fifty times that and more: what a wrong timestep, sigma, mask or bias changes


@cache
def model_of(name: str = "4 heads of 8", **changes):
    """ltx-core's random model of a size, our config of it, and its weights."""
    content, config = made_config(SIZES[name], **changes)
    model = ltx_model(content)
    return model, config, model.state_dict()


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(rel(ours[stream], theirs[stream]) for stream in STREAMS)


def ltx_state(latent, denoise_mask, positions, clean_latent, attention_mask=None):
    """ltx-core's state of a stream; positions are the tokens' middles."""
    from ltx_core.types import LatentState

    bounds = torch.stack([positions, positions], dim=-1)  # ltx-core takes the middle of these
    return LatentState(latent, denoise_mask[None], bounds, clean_latent, attention_mask)


def ltx_loop(sigmas, video, audio, denoise) -> dict[str, Tensor]:
    """The latents after all steps of a schedule, by ltx-pipelines' own loop."""
    from ltx_core.components.diffusion_steps import EulerDiffusionStep
    from ltx_pipelines.utils.samplers import euler_denoising_loop

    after = euler_denoising_loop(torch.tensor(sigmas), video, audio, EulerDiffusionStep(), denoise)
    return dict(zip(STREAMS, (each.latent for each in after), strict=True))
