"""The released vocoder, run faster on a CPU: ltx-core's modules and weights with another forward.

Every layer is computed in spans of time, which the cores share. A span is read with the margin
that the layer's filters reach over, so that the parts are those of the whole. Spans are cut by a
layer's length and channels alone: the number of cores does not change the bits.
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from ltx_core.model.audio_vae import vocoder as ltx
from torch import Tensor, nn

from ltx_neuron.host.fourier import Filters
from ltx_neuron.host.winograd import Workers

FILTER = 12  # taps of the low-pass filters around an activation
REACH = 6  # samples on each side on which an activation's result depends
UP_REACH = 3  # samples on each side from which upsampling makes a sample's two
BLOCK = 8  # samples that a matrix product resamples
# A span has about this many numbers, which a core's cache holds with what is made of them, but no
# fewer samples than the other number: all of a layer's filters are read for each span.
SPAN_NUMBERS, SPAN_SAMPLES = 2**17, 1280
# Rows after a signal's last, which a convolution of whole blocks writes to.
ROOM = 5 * 32
# The modules of the released vocoder, with the settings that the forward below computes.
_RELEASED_MODULES = {
    ltx.VocoderWithBWE: lambda m: True,
    ltx.Vocoder: lambda m: m.is_amp and not (m.apply_final_activation and m.use_tanh_at_final),
    nn.Conv1d: lambda m: (
        (m.stride, m.groups, m.padding_mode) == ((1,), 1, "zeros")
        and m.kernel_size[0] in (3, 7, 11)
        and 2 * m.padding[0] == (m.kernel_size[0] - 1) * m.dilation[0]
    ),
    nn.ConvTranspose1d: lambda m: (
        (m.dilation, m.groups, m.output_padding) == ((1,), 1, (0,))
        and 2 * m.padding[0] == m.kernel_size[0] - m.stride[0]
    ),
    nn.ModuleList: lambda m: True,
    ltx.AMPBlock1: lambda m: True,
    ltx.Activation1d: lambda m: (
        type(m.act) is ltx.SnakeBeta
        and (m.upsample.ratio, m.upsample.kernel_size) == (2, FILTER)
        and (m.downsample.ratio, m.downsample.kernel_size) == (2, FILTER)
    ),
    ltx.SnakeBeta: lambda m: m.alpha_logscale,
    ltx.UpSample1d: lambda m: True,
    ltx.DownSample1d: lambda m: True,
    ltx.LowPassFilter1d: lambda m: m.padding and m.padding_mode == "replicate",
    ltx.MelSTFT: lambda m: True,
    ltx._STFTFn: lambda m: True,
}


def unknown_modules(vocoder: nn.Module) -> list[str]:
    """Name and type of every module that `FastVocoder` cannot run: those that the released vocoder
    does not have, or that are not in float32. Empty for the released vocoder."""
    return [
        f"{name or 'vocoder'}: {type(module).__name__}({module.extra_repr()})"
        for name, module in vocoder.named_modules()
        if type(module) not in _RELEASED_MODULES
        or not _RELEASED_MODULES[type(module)](module)
        or any(weight.dtype != torch.float32 for weight in module.parameters(recurse=False))
    ]


class FastVocoder(ltx.VocoderWithBWE):
    """A loaded ltx-core vocoder with another forward, which differs in rounding only."""

    def __init__(self, vocoder: ltx.VocoderWithBWE):
        """Take over the vocoder's modules. Raises ValueError unless `unknown_modules` is empty."""
        if unknown := unknown_modules(vocoder):
            raise ValueError("not the released vocoder:\n  " + "\n  ".join(unknown))
        nn.Module.__init__(self)
        self.__dict__.update(vocoder.__dict__)  # shared and not copied

    @torch.no_grad()
    def forward(self, mel_spec: Tensor) -> Tensor:
        """Mel spectrograms (B, 2, T, bins) to waveforms (B, 2, samples) in [-1, 1]."""
        with Workers() as workers:
            return torch.stack([self._waveform(mel, workers) for mel in mel_spec])

    def _waveform(self, mel: Tensor, workers: Workers) -> Tensor:
        low = generate(self.vocoder, mel, workers)
        length = low.shape[1] * self.output_sampling_rate // self.input_sampling_rate
        low = F.pad(low, (0, -low.shape[1] % self.hop_length))[None]
        mel = _on_one_core(lambda: self._compute_mel(low), workers)[0]
        residual = generate(self.bwe_generator, mel.transpose(1, 2), workers)
        skip = _on_one_core(lambda: self.resampler(low), workers)[0]
        return residual.add_(skip).clamp_(-1, 1)[:, :length]


def generate(generator: ltx.Vocoder, mel: Tensor, workers: Workers) -> Tensor:
    """The waveform (2, samples) that one of the vocoder's two generators makes of mel spectrograms
    (2, T, bins)."""
    x = Signal(mel.shape[1], mel.shape[0] * mel.shape[2])
    x.rows.view(mel.shape[1], mel.shape[0], -1).copy_(mel.transpose(0, 1))
    x = _convolve(x, generator.conv_pre, workers)
    blocks = len(generator.resblocks) // len(generator.ups)
    for stage, up in enumerate(generator.ups):
        x = _convolve(x, up, workers)
        middle, total = Signal.like(x), None
        for block in generator.resblocks[stage * blocks : (stage + 1) * blocks]:
            result = Signal.like(x)
            result.rows.copy_(x.rows)
            _amp_block(result, middle, block, workers)
            total = result if total is None else total
            if total is not result:
                total.rows.add_(result.rows)
        x = total
        x.rows.div_(blocks)
    x = _post(x, generator, workers)
    return x.clamp_(-1, 1) if generator.apply_final_activation else x


class Signal:
    """Samples in time, float32.

    rows    the samples, (length, C)
    padded  the same with ROOM rows of anything after them
    """

    def __init__(self, length: int, channels: int):
        self.padded = torch.empty(length + ROOM, channels)
        self.rows = self.padded[:length]

    @staticmethod
    def like(other: "Signal") -> "Signal":
        return Signal(*other.rows.shape)


def spans(length: int, channels: int, unit: int = 1) -> list[tuple[int, int]]:
    """Where the spans of a signal start and stop: a whole number of units each. The last one may
    be longer than what is left."""
    count = -(-length // max(SPAN_SAMPLES, SPAN_NUMBERS // channels))
    count += count % 2 if count > 1 else 0
    size = -(-length // (count * unit)) * unit
    return [(start, start + size) for start in range(0, length, size)]


def _on_one_core(function: Callable[[], Tensor], workers: Workers) -> Tensor:
    """What the function returns, with the bits that one thread gives: for what is small."""
    result = []
    workers.run(lambda run: result.append(run()), [function])
    return result[0]


def _convolve(x: Signal, conv: nn.Conv1d | nn.ConvTranspose1d, workers: Workers) -> Signal:
    """A convolution, transposed or not, by a matrix product for every tap."""
    length, inputs = x.rows.shape
    (stride,), (padding,) = conv.stride, conv.padding
    transposed = isinstance(conv, nn.ConvTranspose1d)
    taps = conv.weight.permute(2, 0, 1) if transposed else conv.weight.permute(2, 1, 0)
    taps = taps.contiguous()
    margin = len(taps)
    source = F.pad(x.rows, (0, 0, margin, margin))
    out = Signal(length * stride, conv.out_channels)

    def span(part: tuple[tuple[int, int], int]) -> None:
        (start, stop), phase = part
        stop = min(stop, length)
        wanted = out.rows[start * stride + phase : stop * stride : stride]
        if conv.bias is None:
            wanted.zero_()
        else:
            wanted.copy_(conv.bias.expand_as(wanted))
        for tap, weight in enumerate(taps):
            reach = phase + padding - tap if transposed else tap - padding
            if reach % stride == 0:
                first = start + margin + reach // stride
                wanted.addmm_(source[first : first + stop - start], weight)

    workers.run(span, itertools.product(spans(length, inputs), range(stride)))
    return out


def _amp_block(x: Signal, middle: Signal, block: ltx.AMPBlock1, workers: Workers) -> None:
    """Add to x what the block's three pairs of convolutions make of it. Overwrites `middle`."""
    pairs = zip(block.acts1, block.convs1, block.acts2, block.convs2, strict=True)
    for act1, conv1, act2, conv2 in pairs:
        _activate_and_convolve(x, act1, conv1, middle, False, workers)
        _activate_and_convolve(middle, act2, conv2, x, True, workers)


def _activate_and_convolve(
    x: Signal,
    activation: ltx.Activation1d,
    conv: nn.Conv1d,
    out: Signal,
    add: bool,
    workers: Workers,
) -> None:
    """Write conv(activation(x)) to `out`, or add it."""
    length, channels = x.rows.shape
    snake, margin = _Snake(activation), conv.padding[0]
    filters = Filters(conv.weight, conv.bias, conv.dilation[0], workers)

    def span(ends: tuple[int, int]) -> None:
        start, stop = ends
        stop = start + -(-(min(stop, length) - start) // filters.unit) * filters.unit
        samples = filters.reads((stop - start) // filters.unit)
        signal = snake.activate(x.rows, start - margin, samples, workers)
        filters.convolve(signal, out.padded[start:stop], add, workers)

    workers.run(span, spans(length, channels, filters.unit))


def _post(x: Signal, generator: ltx.Vocoder, workers: Workers) -> Tensor:
    """The last activation and convolution: (2, length)."""
    length, channels = x.rows.shape
    snake, active = _Snake(generator.act_post), Signal.like(x)

    def span(ends: tuple[int, int]) -> None:
        start, stop = ends[0], min(ends[1], length)
        active.rows[start:stop] = snake.activate(x.rows, start, stop - start, workers)[:stop - start]

    workers.run(span, spans(length, channels))
    return _convolve(active, generator.conv_post, workers).rows.T.contiguous()


class _Snake:
    """An activation: y = x + sin(ax)^2 / b at twice the rate, between low-pass filters.

    The filters are matrices that make BLOCK samples at a time. The sum is x + (root sin(ax))^2,
    root = sqrt(1 / b).
    """

    def __init__(self, activation: ltx.Activation1d):
        snake = activation.act
        # Repeated for all rows of a block: operations on long rows take less time.
        self.scale = snake.alpha.exp().repeat(2 * BLOCK)
        self.root = (1 / (snake.beta.exp() + snake.eps)).sqrt().repeat(2 * BLOCK)
        self.up = torch.zeros(BLOCK, 2, BLOCK + 2 * UP_REACH)
        self.down = torch.zeros(BLOCK, 2 * BLOCK + FILTER - 2)
        up = 2 * activation.upsample.filter.flatten().flip(0)
        # A sample's two have every second tap, of samples -3 to 2 and -2 to 3 around it.
        diagonals = self.up.stride(0) + 1, 1
        self.up.as_strided((BLOCK, FILTER // 2), diagonals).copy_(up[0::2])
        second = self.up.stride(1) + 1
        self.up.as_strided((BLOCK, FILTER // 2), diagonals, second).copy_(up[1::2])
        diagonals = self.down.stride(0) + 2, 1
        down = activation.downsample.lowpass.filter.flatten()
        self.down.as_strided((BLOCK, FILTER), diagonals).copy_(down)
        self.up = self.up.flatten(0, 1)

    def activate(self, x: Tensor, start: int, samples: int, workers: Workers) -> Tensor:
        """The activation of x (length, C) from `start`, at least that many samples of it, in
        scratch memory of the calling worker. What is outside of x is zeros."""
        length, channels = x.shape
        blocks = -(-samples // BLOCK)
        high = self._high(x, start, blocks + 1, workers)
        low = workers.scratch("signal", blocks * BLOCK, channels)
        # A sample is made of 5 before its two and 5 after; the first ones here are 6 before it.
        _resample(self.down, high[1:], low, 2 * BLOCK)
        low[: max(0, -start)] = 0
        low[max(0, length - start) :] = 0
        return low

    def _high(self, x: Tensor, start: int, blocks: int, workers: Workers) -> Tensor:
        """The snake at twice the rate, (2 * BLOCK * blocks, C), from UP_REACH samples before
        `start`."""
        length, channels = x.shape
        source = _samples(x, start - REACH, blocks * BLOCK + 2 * UP_REACH, workers)
        high = workers.scratch("values", 2 * BLOCK * blocks, channels)
        _resample(self.up, source, high, BLOCK)
        sine = workers.scratch("products", blocks, 2 * BLOCK * channels)
        torch.mul(high.view(sine.shape), self.scale, out=sine)
        sine.sin_().mul_(self.root)
        high.view(sine.shape).addcmul_(sine, sine)
        # The second filter, too, reads the ends again and again where x ends.
        origin = start - UP_REACH
        _repeat_ends(high, max(0, -2 * origin), min(len(high), 2 * (length - origin)))
        return high


def _resample(matrix: Tensor, x: Tensor, out: Tensor, step: int) -> None:
    """Write the matrix (O, I) times every I rows of x, `step` apart, to the next O rows of `out`."""
    (outputs, inputs), channels = matrix.shape, x.shape[1]
    blocks = len(out) // outputs
    views = x.as_strided((blocks, inputs, channels), (step * channels, channels, 1))
    out = out.view(blocks, outputs, channels)
    torch.bmm(matrix.expand(blocks, -1, -1), views, out=out)


def _samples(x: Tensor, start: int, size: int, workers: Workers) -> Tensor:
    """Rows of x (length, C) from `start`, with the nearest one of x for each outside of it."""
    length, channels = x.shape
    first, last = max(0, start), min(length, start + size)
    if last - first == size:
        return x[first:last]
    source = workers.scratch("source", size, channels)
    source[first - start : last - start] = x[first:last]
    _repeat_ends(source, first - start, last - start)
    return source


def _repeat_ends(x: Tensor, first: int, last: int) -> None:
    """Overwrite all rows outside of first to last by the nearest row inside."""
    x[:first] = x[first].clone()
    x[last:] = x[last - 1].clone()
