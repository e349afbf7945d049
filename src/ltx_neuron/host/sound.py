"""The released vocoder, run faster on a CPU: ltx-core's modules and weights with another forward.

Signals are rows of channels, (length, C). Two activations and their convolutions are computed in
spans of time, which the cores share: what is made of a span stays in a core's memory. A span is
read with the margin that the filters reach over, so that the parts are those of the whole. Spans
are cut by length and channels alone: the number of cores does not change the bits.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from ltx_core.model.audio_vae import vocoder as ltx
from torch import Tensor, nn

from ltx_neuron.host.fourier import prepare
from ltx_neuron.host.winograd import Workers

FILTER = 12  # taps of the low-pass filters around an activation
REACH = 6  # samples on each side on which an activation's result depends
UP_REACH = 3  # samples on each side from which upsampling makes a sample's two
BLOCK = 8  # samples that a matrix product resamples
# Rows of memory before and after a signal's: what a filter reads there, and where the last of a
# convolution's whole blocks end.
BEFORE, AFTER = 32, 10 * 32
# A span has about this many numbers, which a core's cache holds with what is made of them, but no
# fewer samples than the other number: all of a layer's filters are read for each span.
SPAN_NUMBERS, SPAN_SAMPLES = 2**18, 2048
# Weights of a vocoder that ltx-core runs fast enough.
SMALL = 2**22
# The modules of the released vocoder, with the settings that the forward below computes.
_RELEASED_MODULES = {
    ltx.VocoderWithBWE: lambda m: True,
    ltx.Vocoder: lambda m: m.is_amp and not (m.apply_final_activation and m.use_tanh_at_final),
    nn.Conv1d: lambda m: (
        (m.stride, m.groups, m.padding_mode) == ((1,), 1, "zeros")
        and m.kernel_size[0] in (3, 7, 11)
        and m.dilation[0] <= 5
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


def pays(vocoder: nn.Module) -> bool:
    """Whether `FastVocoder` can run the vocoder and saves time worth having. A small one keeps
    ltx-core's own forward, and its bits: it takes a second or less for 5 s of sound."""
    size = sum(weight.numel() for weight in vocoder.parameters())
    return size >= SMALL and not unknown_modules(vocoder)


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
    x = mel.transpose(0, 1).flatten(1)
    x = _convolve(x, generator.conv_pre, workers)
    blocks = len(generator.resblocks) // len(generator.ups)
    for stage, up in enumerate(generator.ups):
        x = _convolve(x, up, workers)
        total = torch.zeros_like(x)
        for block in generator.resblocks[stage * blocks : (stage + 1) * blocks]:
            _add_block(x, block, total, workers)
        x = total.div_(blocks)
    x = _post(x, generator, workers)
    return x.clamp_(-1, 1) if generator.apply_final_activation else x


class Span(NamedTuple):
    """A part of a signal, `start` to `stop`, and the rows that are read for it."""

    start: int
    stop: int
    first: int
    last: int


def spans(length: int, channels: int, margin: int) -> list[Span]:
    """The spans of a signal: an even number of equal ones, or one. They are read with the margin on
    both sides, where the signal has it."""
    count = -(-length // max(SPAN_SAMPLES, SPAN_NUMBERS // channels))
    count += count % 2 if count > 1 else 0
    ends = [length * i // count for i in range(count + 1)]
    return [
        Span(start, stop, max(0, start - margin), min(length, stop + margin))
        for start, stop in itertools.pairwise(ends)
    ]


def _on_one_core(function: Callable[[], Tensor], workers: Workers) -> Tensor:
    """What the function returns, with the bits that one thread gives: for what is small."""
    result = []
    workers.run(lambda run: result.append(run()), [function])
    return result[0]


def _share(workers: Workers, compute: Callable[[Span], None], items: list[Span]) -> None:
    """Call the function with every span. A worker is handed several at once, which takes less time
    than to hand out each."""
    groups = [items[i :: 4 * workers.count] for i in range(4 * workers.count)]

    def several(group: list[Span]) -> None:
        for item in group:
            compute(item)

    workers.run(several, filter(None, groups))


def _convolve(x: Tensor, conv: nn.Conv1d | nn.ConvTranspose1d, workers: Workers) -> Tensor:
    """A convolution, transposed or not, by a matrix product for every tap."""
    length, inputs = x.shape
    (stride,), (padding,), (count,) = conv.stride, conv.padding, conv.kernel_size
    transposed = isinstance(conv, nn.ConvTranspose1d)
    taps = torch.empty(count, inputs, conv.out_channels)
    out = torch.empty(length * stride, conv.out_channels)

    def turn(tap: int) -> None:
        taps[tap] = conv.weight[:, :, tap] if transposed else conv.weight[:, :, tap].T

    def compute(part: tuple[Span, int]) -> None:
        (start, stop, *_), phase = part
        wanted = out[start * stride + phase : stop * stride : stride]
        wanted.copy_(conv.bias.expand_as(wanted)) if conv.bias is not None else wanted.zero_()
        for tap, weight in enumerate(taps):
            reach = phase + padding - tap if transposed else tap - padding
            if reach % stride == 0:
                shift = reach // stride
                first, last = max(start, -shift), min(stop, length - shift)
                if first < last:
                    rows = x[first + shift : last + shift]
                    wanted[first - start : last - start].addmm_(rows, weight)

    workers.run(turn, range(count))
    workers.run(compute, itertools.product(spans(length, inputs, 0), range(stride)))
    return out


def _add_block(x: Tensor, block: ltx.AMPBlock1, total: Tensor, workers: Workers) -> None:
    """Add to `total` what the block makes of x (length, C)."""
    pairs = list(zip(block.acts1, block.convs1, block.acts2, block.convs2, strict=True))
    for index, modules in enumerate(pairs):
        pair = _Pair(*modules, workers)
        if index + 1 == len(pairs):
            pair.add(x, total, True)
        else:
            result = workers.scratch(("even", "odd")[index % 2], *x.shape)
            pair.add(x, result, False)
            x = result


class _Pair:
    """Two activations, each with a convolution after it, whose result is added to what they got."""

    def __init__(
        self,
        act1: ltx.Activation1d,
        conv1: nn.Conv1d,
        act2: ltx.Activation1d,
        conv2: nn.Conv1d,
        workers: Workers,
    ):
        first, second = _Snake(act1), _Snake(act2)
        # Each activation is given its input times its own a.
        ones = torch.ones(conv2.out_channels)
        self.scale, self.workers = first.scale, workers
        self.steps = [
            (first, prepare(conv1, first.scale, second.scale, workers, "first")),
            (second, prepare(conv2, second.scale, ones, workers, "second")),
        ]
        self.margin = sum(REACH + conv.before for _, conv in self.steps)

    def add(self, x: Tensor, out: Tensor, more: bool) -> None:
        """Write x (length, C) and what the pair makes of it to `out`, or add both to what is there.
        The workers share spans of time."""

        def compute(span: Span) -> None:
            change = self._change(x[span.first : span.last])[span.start - span.first :]
            change = change[: span.stop - span.start]
            part = slice(span.start, span.stop)
            if more:
                out[part].add_(x[part]).add_(change)
            else:
                torch.add(x[part], change, out=out[part])

        _share(self.workers, compute, spans(*x.shape, self.margin))

    def _change(self, x: Tensor) -> Tensor:
        """What is to be added to x, by one core; some samples more than x has."""
        length, channels = x.shape
        signal = self.workers.scratch("x", BEFORE + length + AFTER, channels)
        torch.mul(x, self.scale, out=signal[BEFORE : BEFORE + length])
        for snake, conv in self.steps:
            active = snake.activate(signal, length, self.workers)[BEFORE - conv.before :]
            conv.convolve(active, length, signal[BEFORE:], self.workers)
        return signal[BEFORE:]


def _post(x: Tensor, generator: ltx.Vocoder, workers: Workers) -> Tensor:
    """The last activation and convolution: (2, length)."""
    length, channels = x.shape
    snake, result = _Snake(generator.act_post), torch.empty_like(x)

    def compute(span: Span) -> None:
        rows = span.last - span.first
        signal = workers.scratch("x", BEFORE + rows + AFTER, channels)
        torch.mul(x[span.first : span.last], snake.scale, out=signal[BEFORE : BEFORE + rows])
        wanted = slice(BEFORE + span.start - span.first, BEFORE + span.stop - span.first)
        active = snake.activate(signal, rows, workers)[wanted]
        torch.div(active, snake.scale, out=result[span.start : span.stop])

    _share(workers, compute, spans(length, channels, REACH))
    return _convolve(result, generator.conv_post, workers).T.contiguous()


class _Snake:
    """An activation, y = x + sin(ax)^2 / b at twice the rate, between low-pass filters.

    The filters are matrices that make BLOCK samples at a time. Signals before and after it are
    multiplied by `scale`, a: the sum is then ax + (root sin(ax))^2, root = sqrt(a / b).
    """

    def __init__(self, activation: ltx.Activation1d):
        snake = activation.act
        self.scale = snake.alpha.exp()
        # Repeated for all rows of a block: operations on long rows take less time.
        root = (self.scale / (snake.beta.exp() + snake.eps)).sqrt()
        self.root = root.repeat(2 * BLOCK)
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

    def activate(self, x: Tensor, length: int, workers: Workers) -> Tensor:
        """The activation of x, `length` rows after the BEFORE first ones, with zeros around it, in
        scratch memory of the calling worker. Overwrites what is around x."""
        channels, blocks = x.shape[1], -(-length // BLOCK)
        end = BEFORE + length
        _repeat_ends(x[BEFORE - REACH : end + 3 * BLOCK], REACH, REACH + length)
        # From UP_REACH samples before x.
        high = workers.scratch("values", blocks + 1, 2 * BLOCK, channels)
        _resample(self.up, x[BEFORE - REACH :], high, BLOCK)
        rows = high.view(blocks + 1, -1)
        sine = torch.sin(rows, out=workers.scratch("products", *rows.shape)).mul_(self.root)
        rows.addcmul_(sine, sine)
        # The second filter, too, reads the ends again and again where x ends.
        high = high.flatten(0, 1)
        _repeat_ends(high, 2 * UP_REACH, 2 * (UP_REACH + length))
        low = workers.scratch("signal", BEFORE + blocks * BLOCK + AFTER, channels)
        # A sample is made of 5 before its two and 5 after; the first ones here are 6 before it.
        _resample(self.down, high[1:], low[BEFORE:-AFTER].view(blocks, BLOCK, channels), 2 * BLOCK)
        low[:BEFORE].zero_()
        low[end:].zero_()
        return low


def _resample(matrix: Tensor, x: Tensor, out: Tensor, step: int) -> None:
    """Write the matrix (O, I) times every I rows of x, `step` apart, to `out` (blocks, O, C)."""
    blocks, _, channels = out.shape
    views = x.as_strided((blocks, matrix.shape[1], channels), (step * channels, channels, 1))
    torch.bmm(matrix.expand(blocks, -1, -1), views, out=out)


def _repeat_ends(x: Tensor, first: int, last: int) -> None:
    """Overwrite all rows outside of first to last by the nearest row inside."""
    x[:first] = x[first]
    x[last:] = x[last - 1]
