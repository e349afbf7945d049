"""The video decoder for one tile, cut into graphs by stage: from normalised latents to pixels.

Source: ltx-core model/video_vae (video_vae.py, resnet.py, sampling.py, convolution.py), without the
parts that the released decoder does not have. Parameters have ltx-core's names, so that rank files
hold the checkpoint's tensors as they are. Every rank decodes a tile of its own: there are no
collectives, and no rank in the model.

A stage lies between two upsamplings. Its residual blocks are alike, so one graph serves all of them
and takes a block's weights with each call.

Shapes: F frames, C channels, H rows, W columns; features are (F, C, H, W), frames as the batch of
2D convolutions. Norms and sums are fp32 whatever the graph's dtype.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltx_neuron.config.video import Upsampling, VideoDecoderConfig

EPS = 1e-8  # of PixelNorm


class Convolution(nn.Module):
    """A 3x3x3 convolution: zeros around a frame, the first and the last frame once more in time.

    Three 2D convolutions over all frames, one for each tap in time, whose results are shifted by a
    frame and summed. No window of one buffer overlaps another one: neuronx-cc fused such windows
    wrongly (published for trn2), and 3D convolutions are not among what its documents list.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv = nn.Conv3d(inputs, outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(F, Cin, H, W) -> (F, Cout, H, W) fp32."""
        weight, bias = self.conv.weight, self.conv.bias
        x = x.to(weight.dtype)
        before, here, after = (F.conv2d(x, tap, padding=1).float() for tap in weight.unbind(2))
        return earlier(before) + here + later(after) + bias.float().unflatten(0, (-1, 1, 1))


def earlier(x: Tensor) -> Tensor:
    """Frame f - 1 in the place of frame f; the first one stays."""
    if len(x) == 1:
        return x
    first, middle = x[:1], x[1:-1]
    return torch.cat([first, first, middle] if len(x) > 2 else [first, first])


def later(x: Tensor) -> Tensor:
    """Frame f + 1 in the place of frame f; the last one stays."""
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

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = Convolution(channels, channels)
        self.conv2 = Convolution(channels, channels)

    def forward(self, features: Tensor) -> Tensor:
        change = self.conv2(activate(self.conv1(activate(features))))
        return (features.float() + change).to(features.dtype)


class DepthToSpace(nn.Module):
    """A convolution, whose output channels become positions; of two frames for each, the first one
    of all is dropped."""

    def __init__(self, channels: int, upsampling: Upsampling):
        super().__init__()
        time, down, across = self.stride = upsampling.stride
        self.conv = Convolution(channels, time * down * across * channels // upsampling.multiplier)

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
        """The deviation and the mean, in a shape that fits latents."""
        return tuple(each.view(shape) for each in self.parameters())


class ConvIn(nn.Module):
    """A tile's latents (1, C, f, h, w), un-normalised and convolved: the first stage's features."""

    def __init__(self, config: VideoDecoderConfig):
        super().__init__()
        self.per_channel_statistics = Statistics(config.latent_channels)
        self.conv_in = Convolution(config.latent_channels, 8 * config.base_channels)

    def forward(self, latent: Tensor) -> Tensor:
        std, mean = (each.float() for each in self.per_channel_statistics.viewed(-1, 1, 1))
        x = latent[0].transpose(0, 1).float() * std + mean
        return self.conv_in(x).to(latent.dtype)


class Stage(nn.Module):
    """One residual block in the place of all those of a stage, under the first one's name."""

    def __init__(self, channels: int):
        super().__init__()
        self.res_blocks = nn.ModuleList([Residual(channels)])

    def forward(self, features: Tensor) -> Tensor:
        return self.res_blocks[0](features)


class ConvOut(nn.Module):
    """The last stage's features, normed, activated, convolved, and laid out as pixels."""

    def __init__(self, config: VideoDecoderConfig, channels: int):
        super().__init__()
        self.patch, self.colours = config.patch_size, config.out_channels
        self.conv_out = Convolution(channels, config.out_channels * config.patch_size**2)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv_out(activate(features))
        frames, _, height, width = x.shape
        # The finest axis of the channels is of rows, the next one of columns: ltx-core's unpatchify
        x = x.view(frames, self.colours, self.patch, self.patch, height, width)
        x = x.permute(1, 0, 4, 3, 5, 2)  # (colours, F, H, patch, W, patch)
        pixels = x.reshape(1, self.colours, frames, height * self.patch, width * self.patch)
        # A mean is NaN or Inf where a pixel is: one number for the host to look at.
        return pixels.to(features.dtype), pixels.mean((1, 2, 3, 4))
