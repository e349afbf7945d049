"""The video decoder for one tile, cut into graphs by stage: from normalised latents to pixels.

Source: ltx-core model/video_vae (video_vae.py, resnet.py, sampling.py, convolution.py), without the
parts that the released decoder does not have. Parameters have ltx-core's names, so rank files hold
the checkpoint's tensors unchanged. Every rank decodes its own tile, without collectives and without
knowing its rank.

A stage is the part between two upsamplings. Its residual blocks have equal shapes, so one graph
serves all of them and takes a block's weights with each call.

Shapes: F frames, C channels, H rows, W columns; features are (F, C, H, W), frames as the batch of
2D convolutions. Norms and sums are fp32 in graphs of every dtype.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltx_neuron.config.video import Resampling, VideoDecoderConfig

EPS = 1e-8  # of PixelNorm


class VideoConvolution(nn.Module):
    """A 3x3x3 convolution that pads with zeros in space and repeats the first and last frame in
    time.

    It is computed as three 2D convolutions over all frames, one per tap in time, whose results are
    shifted by a frame and summed. Windows of a buffer do not overlap, because neuronx-cc was
    reported to fuse such windows wrongly on trn2. Or it is one 3D convolution, which others run
    there (vllm-omni-neuron) and which writes the result once; neither is measured.

    causal  read a frame and the two before it, not one before and one after it
    active  of the activated input
    whole   one 3D convolution
    """

    whole = False

    def __init__(self, inputs: int, outputs: int, causal: bool = False, active: bool = False):
        super().__init__()
        self.conv, self.causal, self.active = nn.Conv3d(inputs, outputs, 3), causal, active

    def forward(self, x: Tensor) -> Tensor:
        """(F, Cin, H, W) -> (F, Cout, H, W) fp32."""
        weight, bias = self.conv.weight, self.conv.bias
        x = (activate(x) if self.active else x).to(weight.dtype)
        if self.whole:
            ends = [x[:1]] * (1 + self.causal), [x[-1:]] * (not self.causal)
            x = torch.cat([*ends[0], x, *ends[1]]).transpose(0, 1).unsqueeze(0)
            summed = F.conv3d(x, weight, padding=(0, 1, 1))[0].transpose(0, 1).float()
            return summed + bias.float().unflatten(0, (-1, 1, 1))
        first, second, third = (F.conv2d(x, tap, padding=1).float() for tap in weight.unbind(2))
        if self.causal:
            summed = earlier(earlier(first) + second) + third
        else:
            summed = earlier(first) + second + later(third)
        return summed + bias.float().unflatten(0, (-1, 1, 1))


def earlier(x: Tensor) -> Tensor:
    """Frames shifted by one: frame f is the input's f - 1; the first one is repeated."""
    if len(x) == 1:
        return x
    first, middle = x[:1], x[1:-1]
    return torch.cat([first, first, middle] if len(x) > 2 else [first, first])


def later(x: Tensor) -> Tensor:
    """Frames shifted by one: frame f is the input's f + 1; the last one is repeated."""
    if len(x) == 1:
        return x
    middle, last = x[1:-1], x[-1:]
    return torch.cat([middle, last, last] if len(x) > 2 else [last, last])


def activate(x: Tensor, eps: float = EPS) -> Tensor:
    """SiLU of PixelNorm, an RMS norm over the channels without weight: (F, C, H, W) -> fp32."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
    return x * torch.sigmoid(x)


class Residual(nn.Module):
    """features + conv2(silu(norm(conv1(silu(norm(features))))))"""

    def __init__(self, channels: int, causal: bool = False):
        super().__init__()
        self.conv1 = VideoConvolution(channels, channels, causal, active=True)
        self.conv2 = VideoConvolution(channels, channels, causal, active=True)

    def forward(self, features: Tensor) -> Tensor:
        change = self.conv2(self.conv1(features))
        return (features.float() + change).to(features.dtype)


class DepthToSpace(nn.Module):
    """A convolution whose output channels become positions. If it doubles the frames, the first
    frame is dropped."""

    def __init__(self, channels: int, upsampling: Resampling):
        super().__init__()
        self.stride, self.channels = upsampling.stride, channels // upsampling.multiplier
        self.conv = VideoConvolution(channels, math.prod(self.stride) * self.channels)

    def forward(self, features: Tensor) -> Tensor:
        time, down, across = self.stride
        x = self.conv(features).to(features.dtype)
        frames, channels, height, width = x.shape
        channels //= time * down * across
        x = x.view(frames, channels, time, down, across, height, width)
        x = x.permute(0, 2, 1, 5, 3, 6, 4)  # (F, time, C, H, down, W, across)
        x = x.reshape(frames * time, channels, height * down, width * across)
        return x[time - 1 :]


class Statistics(nn.Module):
    """The mean and the standard deviation of latents, under ltx-core's names."""

    def __init__(self, channels: int):
        super().__init__()
        for name in ("std-of-means", "mean-of-means"):
            self.register_parameter(name, nn.Parameter(torch.empty(channels)))

    def viewed(self, *shape: int) -> tuple[Tensor, ...]:
        """The deviation and the mean, in a shape that broadcasts over latents."""
        return tuple(parameter.view(shape) for parameter in self.parameters())


class ConvIn(nn.Module):
    """A tile's latents (1, C, f, h, w), un-normalised and convolved: the first stage's features."""

    def __init__(self, config: VideoDecoderConfig):
        super().__init__()
        self.per_channel_statistics = Statistics(config.latent_channels)
        self.conv_in = VideoConvolution(config.latent_channels, 8 * config.base_channels)

    def forward(self, latent: Tensor) -> Tensor:
        std, mean = (each.float() for each in self.per_channel_statistics.viewed(-1, 1, 1))
        x = latent[0].transpose(0, 1).float() * std + mean
        return self.conv_in(x).to(latent.dtype)


class Stage(nn.Module):
    """A stage's residual block, under the name of its first one."""

    def __init__(self, channels: int, causal: bool = False):
        super().__init__()
        self.res_blocks = nn.ModuleList([Residual(channels, causal)])

    def forward(self, features: Tensor) -> Tensor:
        return self.res_blocks[0](features)


class ConvOut(nn.Module):
    """The last stage's features, normed, activated, convolved, and laid out as pixels."""

    def __init__(self, config: VideoDecoderConfig, channels: int):
        super().__init__()
        self.patch, self.colours = config.patch_size, config.out_channels
        outputs = config.out_channels * config.patch_size**2
        self.conv_out = VideoConvolution(channels, outputs, active=True)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv_out(features)
        frames, _, height, width = x.shape
        # The finest axis of the channels is of rows, the next one of columns: ltx-core's unpatchify
        x = x.view(frames, self.colours, self.patch, self.patch, height, width)
        x = x.permute(1, 0, 4, 3, 5, 2)  # (colours, F, H, patch, W, patch)
        pixels = x.reshape(1, self.colours, frames, height * self.patch, width * self.patch)
        # The mean is NaN or Inf if a pixel is: one number for the host to check.
        return pixels.to(features.dtype), pixels.mean((1, 2, 3, 4))
