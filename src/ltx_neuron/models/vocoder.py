"""The vocoder for a span of time, cut into graphs by upsampling: from a mel spectrogram to a
waveform, and by a second generator to one of a higher rate (bandwidth extension).

Source: ltx-core model/audio_vae/vocoder.py, without the parts that the released vocoder does not
have. Parameters have ltx-core's names; `arrangement` reorders those that differ from the
checkpoint's layout. Every rank has its own span, without collectives and without knowing its rank.
All tensors are float32. Trainium2 computes float32 products in two passes of halves; the error in
the sound is not measured.

Signals are (1, C, 1, T), so convolutions in time are 2D convolutions of one row. Transposed and
depthwise convolutions would be products with few channels, so the graphs have none. A signal is
filtered in blocks of SIDE samples, which are the channels of a convolution. `reach`, `scale` and
`dropped` of a graph's module are as in audio_decoder.py.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltx_neuron.config.sound import GENERATOR_BINS, RESAMPLING_REACH, GeneratorConfig, VocoderConfig

SIDE = 16  # samples of a block that is filtered at once
FILTER = 12  # taps of an activation's filters
EPS = 1e-9  # of an activation's beta


class Convolution(nn.Conv1d):
    """A convolution in time that keeps the length."""

    def __init__(self, inputs: int, outputs: int, taps: int, dilation: int = 1, bias: bool = True):
        around = taps // 2 * dilation
        super().__init__(inputs, outputs, taps, padding=around, dilation=dilation, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        around, apart = (0, *self.padding), (1, *self.dilation)
        return F.conv2d(x, self.weight.unsqueeze(2), self.bias, padding=around, dilation=apart)


class Upsample(nn.Module):
    """A transposed convolution of `taps` at a stride, computed as a convolution with `stride`
    output samples as channels: sample s q + u - p is the sum over j of tap s j + u of sample q -
    j."""

    def __init__(self, inputs: int, outputs: int, taps: int, stride: int):
        super().__init__()
        self.stride, self.cropped = stride, (taps - stride) // 2
        self.weight = nn.Parameter(torch.empty(outputs * stride, inputs, 1, -(-taps // stride)))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[3] * self.stride
        y = F.conv2d(x, self.weight, padding=(0, self.weight.shape[3] - 1))
        y = y.view(1, len(self.bias), self.stride, -1).transpose(2, 3)
        y = y.reshape(1, len(self.bias), 1, -1)
        return y[..., self.cropped : self.cropped + length] + self.bias.view(-1, 1, 1)


def blocks(x: Tensor, size: int) -> Tensor:
    """A signal (1, C, 1, T) as blocks (C, size, 1, N). Its ends are repeated to fill whole blocks,
    and one more block before and after."""
    length, channels = x.shape[3], x.shape[1]
    before, after = size, size + -length % size
    first, last = x[..., :1], x[..., -1:]
    ends = first.expand(-1, -1, -1, before), last.expand(-1, -1, -1, after)
    x = torch.cat([ends[0], x, ends[1]], dim=3)
    return x.view(channels, 1, -1, size).permute(0, 3, 1, 2)


def signal(x: Tensor, length: int) -> Tensor:
    """Blocks (C, size, 1, N) as a signal (1, C, 1, length)."""
    channels = x.shape[0]
    x = x.permute(0, 2, 3, 1).reshape(1, channels, 1, -1)
    # A slice of everything would be a needless operation.
    return x if x.shape[3] == length else x[..., :length]


class Filter(nn.Module):
    """A low-pass filter from blocks of `inputs` samples to blocks of `outputs` samples. Each output
    block depends on its input block and both neighbours."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.filter = nn.Parameter(torch.empty(outputs, inputs, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.filter)


class Snake(nn.Module):
    """y = x + sin(ax)^2 / b, both with their logarithms as parameters."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(C, size, 1, N) -> (C, size, 1, N), blocks of samples."""
        alpha, beta = (p.exp().view(-1, 1, 1, 1) for p in (self.alpha, self.beta))
        # Trainium2's sine is valid in [-pi, pi] (nki.api.shared); its square repeats every pi.
        # Arguments reach 37 in the demo's vocoder.
        angle = x * alpha
        angle = angle - math.pi * torch.floor(angle * (1 / math.pi) + 0.5)
        return torch.addcmul(x, angle.sin().square(), 1 / (beta + EPS))


class Activation(nn.Module):
    """Snake at twice the rate, between low-pass filters."""

    def __init__(self, channels: int):
        super().__init__()
        self.act = Snake(channels)
        self.upsample = Filter(SIDE, 2 * SIDE)
        self.downsample = nn.ModuleDict({"lowpass": Filter(2 * SIDE, SIDE)})

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[3]
        y = signal(self.act(self.upsample(blocks(x, SIDE))), 2 * length)
        return signal(self.downsample["lowpass"](blocks(y, 2 * SIDE)), length)


class AMPBlock(nn.Module):
    """Residual block: pairs of activation and convolution, added to their input."""

    def __init__(self, channels: int, taps: int, dilations: tuple[int, ...]):
        super().__init__()
        self.convs1 = nn.ModuleList(Convolution(channels, channels, taps, d) for d in dilations)
        self.convs2 = nn.ModuleList(Convolution(channels, channels, taps) for _ in dilations)
        self.acts1 = nn.ModuleList(Activation(channels) for _ in dilations)
        self.acts2 = nn.ModuleList(Activation(channels) for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:
        for conv1, conv2, act1, act2 in zip(
            self.convs1, self.convs2, self.acts1, self.acts2, strict=True
        ):
            x = x + conv2(act2(conv1(act1(x))))
        return x


class ConvPre(nn.Module):
    """A generator's first convolution, of the spectrograms of both channels."""

    reach = None  # computed as a whole

    def __init__(self, config: GeneratorConfig):
        super().__init__()
        self.conv_pre = Convolution(2 * GENERATOR_BINS, config.channels, 7)

    def forward(self, mel: Tensor) -> Tensor:
        """(1, 2, T, bins) -> (1, C, 1, T)"""
        return self.conv_pre(mel.transpose(2, 3).flatten(1, 2).unsqueeze(2))


class Stage(nn.Module):
    """A generator's upsampling, and the mean of the residual blocks after it."""

    def __init__(self, config: GeneratorConfig, number: int):
        super().__init__()
        channels, count = config.channels // 2**number, len(config.blocks)
        half, rate, taps = channels // 2, config.rates[number], config.kernels[number]
        before, after = config.stage_reads(number, 0, rate - 1)
        self.reach, self.scale, self.dropped = (-before, after), rate, 0
        self.ups = nn.ModuleDict({str(number): Upsample(channels, half, taps, rate)})
        self.resblocks = nn.ModuleDict(
            {
                str(number * count + block): AMPBlock(half, *described)
                for block, described in enumerate(config.blocks)
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.upsample(x)
        return self.mean([block(x) for block in self.resblocks.values()])

    def upsample(self, x: Tensor) -> Tensor:
        (up,) = self.ups.values()
        return up(x)

    def mean(self, of_blocks: Sequence[Tensor]) -> Tensor:
        first, *others = of_blocks
        for other in others:
            first = first + other
        return first / len(of_blocks)


class ConvPost(nn.Module):
    """A generator's last activation and convolution: a waveform (1, 2, 1, T)."""

    reach = None

    def __init__(self, config: GeneratorConfig):
        super().__init__()
        self.clamped, channels = config.clamped, config.channels // 2 ** len(config.rates)
        self.act_post = Activation(channels)
        self.conv_post = Convolution(channels, 2, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_post(self.act_post(x))
        return x.clamp(-1, 1) if self.clamped else x


class MelSpectrogram(nn.Module):
    """The logarithm of a waveform's mel spectrogram, as a convolution of blocks of a hop."""

    # Trainium2's square root is valid from 2^-116 on (nki.api.shared); silence has power 0.
    least_power = 1e-30

    def __init__(self, config: VocoderConfig):
        super().__init__()
        frequencies, self.hop = config.window // 2 + 1, config.hop
        reach = -(-config.window // config.hop)
        self.stft_fn = nn.Module()
        self.stft_fn.forward_basis = nn.Parameter(
            torch.empty(2 * frequencies, config.hop, 1, reach)
        )
        self.mel_basis = nn.Parameter(torch.empty(config.mel_bins, frequencies))

    def forward(self, waveform: Tensor) -> Tensor:
        """(1, 2, 1, T) -> (1, 2, T // hop, bins). A row depends on samples up to its hop's end."""
        x = waveform.view(2, 1, -1, self.hop).permute(0, 3, 1, 2)  # (2, hop, 1, rows)
        basis, rows = self.stft_fn.forward_basis, x.shape[3]
        spectrum = F.conv2d(x, basis, padding=(0, basis.shape[3] - 1))[:, :, 0, :rows]
        real, imaginary = spectrum.chunk(2, dim=1)
        magnitude = (real.square() + imaginary.square()).clamp_min(self.least_power).sqrt()
        mel = F.linear(magnitude.transpose(1, 2), self.mel_basis)
        return mel.clamp_min(1e-5).log().unsqueeze(0)


class ConvPreOfWaveform(ConvPre):
    """The second generator's first convolution, of the first one's waveform."""

    def __init__(self, config: VocoderConfig):
        super().__init__(config.bwe)
        self.mel_stft = MelSpectrogram(config)

    def forward(self, waveform: Tensor) -> Tensor:
        return super().forward(self.mel_stft(waveform))


class AddWaveform(ConvPost):
    """The end of the second generator: the sum of its waveform and the resampled first one."""

    def __init__(self, config: VocoderConfig):
        super().__init__(config.bwe)

    def forward(self, x: Tensor, low: Tensor, resampling: Tensor) -> tuple[Tensor, Tensor]:
        """low: (1, 2, 1, T); resampling: as `resampling_filters` returns it."""
        residual, around = super().forward(x), resampling.shape[3] // 2
        first, last = (end.expand(-1, -1, -1, around) for end in (low[..., :1], low[..., -1:]))
        padded = torch.cat([first, low, last], dim=3)
        skip = F.conv2d(padded.transpose(0, 1), resampling)  # (2, phases, 1, T)
        waveform = residual + skip.transpose(1, 3).reshape(residual.shape)
        return waveform.clamp(-1, 1).squeeze(2), waveform.mean((1, 2, 3))


def arrangement(name: str, config: VocoderConfig) -> Callable[[Tensor], Tensor] | None:
    """The function that reorders the checkpoint's tensor for a parameter; None if it is
    unchanged."""
    *_, module, kind = name.split(".")
    generator = config.bwe if name.startswith("bwe_generator") else config.vocoder
    if ".ups." in name and kind == "weight":
        return partial(phases, stride=generator.rates[int(module)])
    if kind == "filter":
        return partial(_filter, upwards=module == "upsample")
    if kind == "forward_basis":
        return partial(hops, hop=config.hop)
    return None


def phases(weight: Tensor, stride: int) -> Tensor:
    """A transposed convolution's weight (Cin, Cout, taps) -> (Cout stride, Cin, 1, taps of a
    phase), with reversed taps."""
    inputs, outputs, taps = weight.shape
    weight = F.pad(weight, (0, -taps % stride)).view(inputs, outputs, -1, stride)
    return weight.permute(1, 3, 0, 2).flip(3).reshape(outputs * stride, inputs, 1, -1)


def _filter(taps: Tensor, upwards: bool) -> Tensor:
    """A filter (1, 1, FILTER) as Filter's weight: the coefficients of each output sample for the
    samples of the previous, the same and the next block."""
    inputs, outputs = (SIDE, 2 * SIDE) if upwards else (2 * SIDE, SIDE)
    row = torch.arange(outputs)[:, None]
    sample = torch.arange(-inputs, 2 * inputs)
    # Upwards, taps have twice the samples' rate, and every second one applies to a zero.
    tap = row + FILTER // 2 - 1 - 2 * sample if upwards else sample - 2 * row + FILTER // 2 - 1
    tap = torch.where((tap >= 0) & (tap < FILTER), tap, FILTER).to(taps.device)
    weight = F.pad(taps.flatten() * (2 if upwards else 1), (0, 1))[tap]
    return weight.view(outputs, 3, inputs).transpose(1, 2).unsqueeze(2).contiguous()


def hops(basis: Tensor, hop: int) -> Tensor:
    """Fourier bases (2 frequencies, 1, window) -> (2 frequencies, hop, 1, hops), zeros first."""
    basis = F.pad(basis.squeeze(1), (-basis.shape[2] % hop, 0))
    return basis.view(len(basis), -1, hop).transpose(1, 2).unsqueeze(2).contiguous()


def resampling_filters(config: VocoderConfig) -> Tensor:
    """Filters (phases, 1, 1, taps) that resample a waveform from low_rate to rate: a sinc, windowed
    by a cosine's square, as torchaudio.functional.resample's."""
    ratio, crossings, rolloff = config.rate // config.low_rate, 6, 0.99
    t = (torch.arange(2 * RESAMPLING_REACH * ratio + 1) / ratio - RESAMPLING_REACH) * rolloff
    window = torch.cos(t.clamp(-crossings, crossings) * torch.pi / crossings / 2) ** 2
    taps = ratio * (torch.sinc(t) * window * rolloff / ratio)
    return phases(taps.view(1, 1, -1), ratio)
