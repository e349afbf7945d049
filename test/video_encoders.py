"""ltx-core's video encoders with random weights, and clips for them."""

import torch
from helpers import randn, randomised
from tiny import TinySizes
from tiny.config import merge, tiny_config
from torch import nn

# Not the released order, nor its factors: groups of 1, 2, 4 and 8 positions are averaged.
OTHER_ORDER = [
    ["compress_space_res", {"multiplier": 4}],
    ["res_x", {"num_layers": 2}],
    ["compress_all_res", {"multiplier": 1}],
    ["compress_all_res", {"multiplier": 2}],
    ["compress_time_res", {"multiplier": 1}],
]
CHANNELS = 32  # of a latent, and of the first stage


def config_of(**changes) -> dict:
    return merge(tiny_config(TinySizes()), {"vae": {"latent_channels": CHANNELS} | changes})


def ltx_encoder(**changes) -> nn.Module:
    from ltx_core.model.video_vae import VideoEncoderConfigurator

    return randomised(VideoEncoderConfigurator.from_config(config_of(**changes)))


def pixels(frames: int, rows: int, columns: int) -> torch.Tensor:
    """A clip of so many latents, whose pixels bfloat16 holds."""
    clip = randn(1, 3, 8 * frames - 7, 32 * rows, 32 * columns)
    return clip.clip(-1, 1).bfloat16().float()
