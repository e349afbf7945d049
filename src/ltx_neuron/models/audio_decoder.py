"""The mel decoder for a span of time, cut into graphs by level: from normalised latents to a mel
spectrogram.

Source: ltx-core model/audio_vae (audio_vae.py, resnet.py, upsample.py, causal_conv_2d.py), without
the parts that the released decoder does not have. Parameters have ltx-core's names. Every rank
decodes its own span, without collectives and without knowing its rank. All tensors are float32.

Maps are (1, C, T, bins) with T rows in time. A row depends only on earlier rows. A graph's module
has three attributes:

  reach    rows before and after a row on which its output depends
  scale    output rows per input row
  dropped  output rows that are left out for the first input row
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ltx_neuron.config.sound import AudioDecoderConfig
from ltx_neuron.models.video_decoder import Statistics
from ltx_neuron.models.video_decoder import activate as normed_silu

EPS = 1e-6  # of PixelNorm


class AudioConvolution(nn.Module):
    """A 3 x 3 convolution with zeros around a row's bins, and two rows of zeros before the first
    row; or a 1 x 1 convolution."""

    def __init__(self, inputs: int, outputs: int, size: int = 3):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size)

    def forward(self, x: Tensor) -> Tensor:
        """(1, Cin, T, bins) -> (1, Cout, T, bins)"""
        around = self.conv.kernel_size[0] - 1
        y = F.conv2d(x, self.conv.weight, self.conv.bias, padding=(around, around // 2))
        return y[:, :, : x.shape[2]] if around else y


def activate(x: Tensor) -> Tensor:
    return normed_silu(x, EPS)


class Residual(nn.Module):
    """x + conv2(silu(norm(conv1(silu(norm(x)))))), with a 1 x 1 convolution of x if the number of
    channels changes."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv1 = AudioConvolution(inputs, outputs)
        self.conv2 = AudioConvolution(outputs, outputs)
        self.nin_shortcut = (
            AudioConvolution(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        change = self.conv2(activate(self.conv1(activate(x))))
        return self.nin_shortcut(x) + change


class Upsample(nn.Module):
    """Nearest-neighbour upsampling by 2 in time and bins, and a convolution; the first row is
    dropped."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = AudioConvolution(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        _, channels, rows, bins = x.shape
        x = x.view(1, channels, rows, 1, bins, 1).expand(-1, -1, -1, 2, -1, 2)
        return self.conv(x.reshape(1, channels, 2 * rows, 2 * bins))[:, :, 1:]


class AudioConvIn(nn.Module):
    """A span's latents, un-normalised and convolved, and the middle blocks."""

    reach, scale, dropped = (10, 0), 1, 0

    def __init__(self, config: AudioDecoderConfig, channels: int):
        super().__init__()
        self.shape = config.latent_channels, 1, config.latent_bins
        self.per_channel_statistics = Statistics(config.base_channels)
        self.conv_in = AudioConvolution(config.latent_channels, channels)
        self.mid = nn.ModuleDict({f"block_{n}": Residual(channels, channels) for n in (1, 2)})

    def forward(self, latent: Tensor) -> Tensor:
        std, mean = self.per_channel_statistics.viewed(*self.shape)
        x = self.conv_in(latent * std + mean)
        for block in self.mid.values():
            x = block(x)
        return x


class Level(nn.Module):
    """The residual blocks of a level, and the upsampling to the next one."""

    def __init__(self, inputs: int, outputs: int, blocks: int, enlarged: bool):
        super().__init__()
        widths = [inputs, *[outputs] * blocks]
        self.block = nn.ModuleList(
            Residual(*pair) for pair in zip(widths, widths[1:], strict=False)
        )
        self.upsample = Upsample(outputs) if enlarged else nn.Identity()
        self.reach, self.scale, self.dropped = (4 * blocks + enlarged, 0), 1 + enlarged, +enlarged

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return self.upsample(x)


class AudioConvOut(nn.Module):
    """The finest map, normed, activated and convolved: the spectrogram."""

    reach = None  # computed as a whole

    def __init__(self, config: AudioDecoderConfig, channels: int):
        super().__init__()
        self.conv_out = AudioConvolution(channels, config.out_channels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mel = self.conv_out(activate(x))
        return mel, mel.mean((1, 2, 3))
