"""The video encoder for one tile, cut into graphs by stage: from pixels to normalised latents.

Source: ltx-core model/video_vae (video_vae.py, sampling.py, ops.py), without the parts that the
released encoder does not have. As in the video decoder, every rank encodes its own tile, a graph
serves all residual blocks of a stage, features are (F, C, H, W), and parameters have ltx-core's
names. Convolutions are causal in time.
"""

import math

import torch
from torch import Tensor, nn

from ltx_neuron.config.video import Resampling, VideoEncoderConfig
from ltx_neuron.models.video_decoder import Stage as _Stage
from ltx_neuron.models.video_decoder import Statistics, VideoConvolution


class ConvIn(nn.Module):
    """A tile's pixels (1, colours, F, H, W) in patches, convolved: the first stage's features."""

    def __init__(self, config: VideoEncoderConfig):
        super().__init__()
        self.patch = config.patch_size
        self.conv_in = VideoConvolution(
            config.in_channels * self.patch**2, config.latent_channels, causal=True
        )

    def forward(self, pixels: Tensor) -> Tensor:
        _, colours, frames, height, width = pixels.shape
        height, width = height // self.patch, width // self.patch
        x = pixels.view(colours, frames, height, self.patch, width, self.patch)
        # The finest axis of the channels is of rows, the next one of columns: ltx-core's patchify
        x = x.permute(1, 0, 5, 3, 2, 4).reshape(frames, -1, height, width)
        return self.conv_in(x).to(pixels.dtype)


class Stage(_Stage):
    """A stage's residual block, causal in time."""

    def __init__(self, channels: int):
        super().__init__(channels, causal=True)


class SpaceToDepth(nn.Module):
    """The sum of a convolution whose positions become channels, and of the features, whose
    positions become channels averaged in groups. If it halves the frames, the first frame counts
    twice."""

    def __init__(self, channels: int, resampling: Resampling):
        super().__init__()
        self.stride = resampling.stride
        self.channels = channels * resampling.multiplier
        outputs = self.channels // math.prod(self.stride)
        self.conv = VideoConvolution(channels, outputs, causal=True)

    def forward(self, features: Tensor) -> Tensor:
        averaged = self._to_channels(features.float())
        frames, _, height, width = averaged.shape
        averaged = averaged.view(frames, self.channels, -1, height, width).mean(2)
        return (self._to_channels(self.conv(features)) + averaged).to(features.dtype)

    def _to_channels(self, x: Tensor) -> Tensor:
        """(F, C, H, W) -> (ceil(F / time), C * time * down * across, H / down, W / across)"""
        time, down, across = self.stride
        x = torch.cat([*[x[:1]] * (time - 1), x])
        frames, channels, height, width = x.shape
        frames, height, width = frames // time, height // down, width // across
        x = x.view(frames, time, channels, height, down, width, across)
        return x.permute(0, 2, 1, 4, 6, 3, 5).reshape(frames, -1, height, width)


class ConvOut(nn.Module):
    """The last stage's features, normed, activated, convolved, and normalised as latents
    (1, C, F, H, W). The convolution's last channel, a variance, is not used."""

    def __init__(self, config: VideoEncoderConfig, channels: int):
        super().__init__()
        self.per_channel_statistics = Statistics(config.latent_channels)
        self.channels = config.latent_channels
        self.conv_out = VideoConvolution(channels, self.channels + 1, causal=True, active=True)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        means = self.conv_out(features)[:, : self.channels]
        std, mean = (each.float() for each in self.per_channel_statistics.viewed(-1, 1, 1))
        latent = ((means - mean) / std).transpose(0, 1).unsqueeze(0)
        # The mean is NaN or Inf if a latent is: one number for the host to check.
        return latent.to(features.dtype), latent.mean((1, 2, 3, 4))
