"""The released audio decoder, run faster on a CPU with AMX: ltx-core's module and weights, which
makes mel spectrograms of latents, with another forward.

Maps are (time, bins, C). What a convolution reads of a map is cut into parts, as lines of bins, by
all cores: after the norm and SiLU before it, or twice along both axes where the map is enlarged.
Convolutions are causal: two lines of zeros come first. A line begins with one row of zeros, which
is also what follows the line before it.

Importing this module compiles it: only where `products.has_amx`, as host/amx.py says.
"""

import itertools
import math

import numpy as np
import torch
from ltx_core.model.audio_vae.audio_vae import AudioDecoder
from ltx_core.model.audio_vae.causal_conv_2d import CausalConv2d
from ltx_core.model.audio_vae.causality_axis import CausalityAxis
from ltx_core.model.audio_vae.ops import PerChannelStatistics
from ltx_core.model.audio_vae.resnet import ResnetBlock
from ltx_core.model.audio_vae.upsample import Upsample
from ltx_core.model.common.normalization import PixelNorm
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor, nn

from ltx_neuron.host.amx_convolution import Filters, cut, parts_memory, row_offsets, takes
from ltx_neuron.host.fourier import flat, fresh
from ltx_neuron.host.lanes import LANES, ROUND, Lanes, Memory, kernel, splat
from ltx_neuron.host.vocoders import SMALL
from ltx_neuron.host.winograd import Workers

ABOVE = 2  # lines of zeros
ROWS = 512  # of a result that a core computes at a time, about

_ARRAY, _INDEX, _PARTS = types.float32[::1], types.intp, types.uint16[:, :, :, ::1]
_EPSILON = np.float32(1e-6)
# exp(r) for r up to half a logarithm of 2, and that logarithm.
EXP = [1 / math.factorial(n) for n in range(7, -1, -1)]
LOG = 0.693359375, -2.12194440e-4  # with few digits and the rest: products are exact


@njit(nogil=True, fastmath={"reassoc"})  # for vectors
def _mean_square(x, at, count):
    total = np.float32(0)
    for i in range(count):
        total += x[at + i] * x[at + i]
    return total / np.float32(count)


def exp(x: Lanes) -> Lanes:
    """e^x, as of 80 where x is larger, and of -80 where it is smaller."""
    x = x.at_most(80).at_least(-80)
    shifted = x * (1 / math.log(2)) + ROUND
    whole = shifted - ROUND
    rest = x - whole * LOG[0] - whole * LOG[1]
    result = rest * EXP[0] + EXP[1]
    for coefficient in EXP[2:]:
        result = result * rest + coefficient
    return result * shifted.power()


@intrinsic
def _silu(typing, x, at, norm, out, to):
    """Write SiLU of LANES numbers of x[at:], divided by the norm, to out[to:]."""

    def write(context, builder, signature, values):
        kinds = signature.args
        x = Memory(context, builder, kinds[0], *values[:2]).load()
        x = x / splat(builder, values[2])
        Memory(context, builder, kinds[3], *values[3:]).store(x / (exp(x * -1) + 1))
        return context.get_dummy_value()

    return types.void(_ARRAY, _INDEX, types.float32, _ARRAY, _INDEX), write


@njit(nogil=True)
def activate(x, at, count, out):
    """The norm over a row's channels, and SiLU."""
    norm = np.float32(math.sqrt(_mean_square(x, at, count) + _EPSILON))
    for i in range(0, count, LANES):
        _silu(x, at + i, norm, out, i)


@kernel(_ARRAY, *[_INDEX] * 5, types.boolean, _PARTS)
def cut_lines(x, first, last, width, channels, scale, active, parts):
    """Write the parts of lines `first` to `last` of x, `width` rows of channels each, to their
    places between zeros: lines and their rows `scale` times; `active`: of their norm's SiLU."""
    pitch, row = width * scale + 1, np.zeros(channels, np.float32)
    if first == 0:
        for zero in range(ABOVE * pitch + 1):
            cut(row, 0, 1, channels, parts, zero)
    for line in range(first, last):
        to = (ABOVE + line) * pitch + 1
        for i in range(width):
            at = (line // scale * width + i) * channels
            if active:
                activate(x, at, channels, row)
            for again in range(scale):
                if active:
                    cut(row, 0, 1, channels, parts, to + i * scale + again)
                else:
                    cut(x, at, 1, channels, parts, to + i * scale + again)
        row[:] = 0
        cut(row, 0, 1, channels, parts, to + width * scale)


def pays(decoder: nn.Module) -> bool:
    """Whether `FastAudioDecoder` can run the decoder and saves time worth having: it is built as
    the released one, in float32 with weights of bf16, and not small."""
    size = sum(weight.numel() for weight in decoder.parameters())
    return size >= SMALL and not unknown_modules(decoder)


def unknown_modules(decoder: AudioDecoder) -> list[str]:
    """Name and type of every module that `FastAudioDecoder` cannot run."""
    released = {
        CausalConv2d: lambda m: m.causality_axis == CausalityAxis.HEIGHT,
        nn.Conv2d: lambda m: (
            m.kernel_size in ((3, 3), (1, 1))
            and (m.stride, m.dilation, m.groups) == ((1, 1), (1, 1), 1)
            and m.weight.dtype == torch.float32
            and takes(m)
        ),
        ResnetBlock: lambda m: (
            not hasattr(m, "temb_proj")
            and m.in_channels % LANES == m.out_channels % LANES == 0
            and (m.in_channels == m.out_channels or hasattr(m, "nin_shortcut"))
        ),
        PixelNorm: lambda m: (m.dim, m.eps) == (1, 1e-6),
        Upsample: lambda m: m.with_conv and m.causality_axis == CausalityAxis.HEIGHT,
        AudioDecoder: lambda m: not (m.tanh_out or m.give_pre_end),
        **dict.fromkeys(
            (PerChannelStatistics, nn.SiLU, nn.Dropout, nn.Identity, nn.ModuleList, nn.Module),
            lambda m: not m.training,
        ),
    }
    return [
        f"{name or 'decoder'}: {type(module).__name__}({module.extra_repr()})"
        for name, module in decoder.named_modules()
        if type(module) not in released or not released[type(module)](module)
    ]


class FastAudioDecoder(AudioDecoder):
    """A loaded ltx-core audio decoder with another forward, which differs in rounding only."""

    def __init__(self, decoder: AudioDecoder):
        """Take over the decoder's modules. Raises ValueError unless `unknown_modules` is empty."""
        if unknown := unknown_modules(decoder):
            raise ValueError("not the released audio decoder:\n  " + "\n  ".join(unknown))
        nn.Module.__init__(self)
        self.__dict__.update(decoder.__dict__)  # shared and not copied
        self.filters = {
            conv: Filters(conv.weight.flatten(2), conv.bias)
            for conv in self.modules()
            if isinstance(conv, nn.Conv2d)
        }

    @torch.no_grad()
    def forward(self, sample: Tensor) -> Tensor:
        """Latents (B, 8, T, bins) to mel spectrograms (B, 2, time, mel bins)."""
        with Workers() as workers:
            return torch.cat([self._decode(latent[None], workers) for latent in sample])

    def _decode(self, latent: Tensor, workers: Workers) -> Tensor:
        latent, shape = self._denormalize_latents(latent)
        x = self._convolve(self.conv_in, latent[0].permute(1, 2, 0).contiguous(), workers)
        for block in (self.mid.block_1, self.mid.block_2):
            x = self._run(block, x, workers)
        for stage in reversed(self.up):
            for block in stage.block:
                x = self._run(block, x, workers)
            if hasattr(stage, "upsample"):
                x = self._convolve(stage.upsample.conv, x, workers, scale=2)[1:]
        x = self._convolve(self.conv_out, x, workers, active=True)
        return self._adjust_output_shape(x.permute(2, 0, 1)[None], shape)

    def _run(self, block: ResnetBlock, x: Tensor, workers: Workers) -> Tensor:
        """What a block makes of x, which is overwritten."""
        hidden = workers.scratch("hidden", *x.shape[:2], block.out_channels)
        self._convolve(block.conv1, x, workers, active=True, out=hidden)
        if block.in_channels != block.out_channels:
            x = self._convolve(block.nin_shortcut, x, workers)
        return self._convolve(block.conv2, hidden, workers, active=True, x=x, out=x)

    def _convolve(
        self,
        causal: CausalConv2d,
        source: Tensor,
        workers: Workers,
        active: bool = False,
        scale: int = 1,
        x: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """A convolution of a map (T, bins, Cin), written to `out` where it is given.

        active  of the map's norm and its SiLU
        scale   how often each line and each of its rows comes
        x       is added
        """
        lines, width, channels = source.shape
        lines, wide = scale * lines, scale * width
        filters, pitch = self.filters[causal.conv], wide + 1
        parts = parts_memory(workers, channels, (ABOVE + lines) * pitch + 1)
        pieces = pieces_of(lines, wide)

        def cut_piece(piece: tuple[int, int]) -> None:
            cut_lines(flat(source), *piece, width, channels, scale, active, parts)

        workers.run(cut_piece, pieces)
        taps = (
            [(ABOVE, 1)]
            if causal.conv.kernel_size == (1, 1)
            else itertools.product(range(3), range(3))
        )
        offsets = row_offsets(line * pitch + row for line, row in taps)
        if out is None:
            out = fresh(lines, wide, causal.conv.out_channels)

        def convolve_piece(piece: tuple[int, int]) -> None:
            start, stop = piece
            added = None if x is None else x[start:stop]
            place = {"lines": stop - start, "first": start * pitch, "pitch": pitch}
            filters.convolve(parts, offsets, out[start:stop], workers, wide, **place, x=added)

        workers.run(convolve_piece, pieces)
        return out


def pieces_of(lines: int, width: int) -> list[tuple[int, int]]:
    """Lines in pieces of about as many rows."""
    step = max(1, ROWS // width)
    return [(start, min(lines, start + step)) for start in range(0, lines, step)]
