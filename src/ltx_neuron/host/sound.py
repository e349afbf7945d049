"""The released vocoder, run faster on a CPU: ltx-core's modules and weights with another forward.

Signals are rows of channels, (length, C). Two activations and their convolutions are computed in
spans of time, which the cores share: what is made of a span stays in a core's memory. A span is
read with the margin that the filters reach over, so that the parts are those of the whole. Spans
are cut by length and channels alone: the number of cores does not change the bits.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from ltx_core.model.audio_vae import vocoder as ltx
from torch import Tensor, nn

from ltx_neuron.host import direct, fourier, snake
from ltx_neuron.host.fourier import flat, fresh
from ltx_neuron.host.lanes import LANES
from ltx_neuron.host.vocoders import unknown_modules
from ltx_neuron.host.winograd import Workers

REACH = 5  # samples on each side on which an activation's result depends
GROUP = 512  # numbers that an activation computes at a time, about
RING = 3  # rows around a signal that the first filter of an activation reads
# Rows of memory before and after a signal's: what a filter reads there, and where the last of a
# convolution's whole blocks end.
BEFORE, AFTER = 32, 10 * 32
# A span has about this many numbers, which a core's cache holds with what is made of them, but no
# fewer samples than the other number: all of a layer's filters are read for each span.
SPAN_NUMBERS, SPAN_SAMPLES = 2**18, 2048
DIRECT_SAMPLES = 256  # of a direct convolution, which reads its filters in any case every few rows

# By the modules of ltx-core.
Convolutions = dict[nn.Module, "direct.Convolution | fourier.Convolution"]


class FastVocoder(ltx.VocoderWithBWE):
    """A loaded ltx-core vocoder with another forward, which differs in rounding only."""

    def __init__(self, vocoder: ltx.VocoderWithBWE, has_amx: bool = False):
        """Take over the vocoder's modules. Raises ValueError unless `unknown_modules` is empty.

        has_amx  its convolutions are computed by AMX, those with weights of bf16
        """
        if unknown := unknown_modules(vocoder):
            raise ValueError("not the released vocoder:\n  " + "\n  ".join(unknown))
        nn.Module.__init__(self)
        self.__dict__.update(vocoder.__dict__)  # shared and not copied
        self.convolutions = convolutions_of(self, has_amx)

    @torch.no_grad()
    def forward(self, mel_spec: Tensor) -> Tensor:
        """Mel spectrograms (B, 2, T, bins) to waveforms (B, 2, samples) in [-1, 1]."""
        with Workers() as workers:
            return torch.stack([self._waveform(mel, workers) for mel in mel_spec])

    def _waveform(self, mel: Tensor, workers: Workers) -> Tensor:
        low = generate(self.vocoder, mel, workers, self.convolutions)
        length = low.shape[1] * self.output_sampling_rate // self.input_sampling_rate
        low = F.pad(low, (0, -low.shape[1] % self.hop_length))[None]
        mel = _on_one_core(lambda: self._compute_mel(low), workers)[0]
        residual = generate(self.bwe_generator, mel.transpose(1, 2), workers, self.convolutions)
        skip = _on_one_core(lambda: self.resampler(low), workers)[0]
        return residual.add_(skip).clamp_(-1, 1)[:, :length]


def convolutions_of(vocoder: nn.Module, has_amx: bool) -> Convolutions:
    """What computes the convolutions in a vocoder: AMX those that it takes. Of the others those
    between activations, which have most of the work, by the Fourier transform."""
    between = {
        conv
        for block in vocoder.modules()
        if isinstance(block, ltx.AMPBlock1)
        for conv in (*block.convs1, *block.convs2)
    }
    kinds = nn.Conv1d, nn.ConvTranspose1d
    convolutions, (*matrix_units, all_take) = {}, direct.units(has_amx)
    for conv in (layer for layer in vocoder.modules() if isinstance(layer, kinds)):
        unit = next((unit for unit in matrix_units if unit.takes(conv)), all_take)
        by_fourier = unit is all_take and conv in between
        convolutions[conv] = (
            fourier.Convolution(conv) if by_fourier else direct.Convolution(conv, unit)
        )
    return convolutions


def generate(
    generator: ltx.Vocoder, mel: Tensor, workers: Workers, convolutions: Convolutions
) -> Tensor:
    """The waveform (2, samples) that one of the vocoder's two generators makes of mel spectrograms
    (2, T, bins).
    """
    x = mel.transpose(0, 1).flatten(1)
    x = _convolve(x, convolutions[generator.conv_pre], workers)
    blocks = len(generator.resblocks) // len(generator.ups)
    for stage, up in enumerate(generator.ups):
        x = _convolve(x, convolutions[up], workers)
        together = generator.resblocks[stage * blocks : (stage + 1) * blocks]
        x = _mean_of_blocks(x, list(together), workers, convolutions)
    x = _post(x, generator, workers, convolutions)
    return x.clamp_(-1, 1) if generator.apply_final_activation else x


class Span(NamedTuple):
    """A part of a signal, `start` to `stop`, and the rows that are read for it."""

    start: int
    stop: int
    first: int
    last: int


def spans(length: int, channels: int, margin: int, least: int | None = None) -> list[Span]:
    """The spans of a signal: an even number of equal ones, or one. They are read with the margin on
    both sides, where the signal has it.

    least  samples of a span, about; without it SPAN_SAMPLES
    """
    count = -(-length // max(least or SPAN_SAMPLES, SPAN_NUMBERS // channels))
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


def _surrounded(memory: Callable[..., Tensor], *args) -> Tensor:
    """A signal in memory of these arguments, length and channels last, with rows around it that an
    activation of it reads and writes."""
    *name, length, channels = args
    return memory(*name, BEFORE + length + AFTER, channels)[BEFORE : BEFORE + length]


def _repeat_ends(x: Tensor) -> None:
    """Write the first row of a `_surrounded` signal before it and its last one after it, which the
    first filter of an activation reads."""
    (length, channels), begin = x.shape, x.storage_offset()
    for row, at in ((0, begin - RING * channels), (-1, begin + length * channels)):
        x.as_strided((RING, channels), (channels, 1), at).copy_(x[row])


def _convolve(x: Tensor, conv: direct.Convolution, workers: Workers) -> Tensor:
    """A convolution, transposed or not."""
    x = x.contiguous()
    out = _surrounded(fresh, len(x) * conv.stride, conv.outputs)

    def compute(span: Span) -> None:
        conv.convolve_part(x, span.start, span.stop, out, workers)

    workers.run(compute, spans(*x.shape, 0, least=DIRECT_SAMPLES))
    return out


def _mean_of_blocks(
    x: Tensor, blocks: list[ltx.AMPBlock1], workers: Workers, convolutions: Convolutions
) -> Tensor:
    """The mean of what the blocks make of x (length, C)."""
    steps = [zip(b.acts1, b.convs1, b.acts2, b.convs2, strict=True) for b in blocks]
    *before, last = zip(*steps, strict=True)
    signals = [x] * len(blocks)
    _repeat_ends(x)
    for index, modules in enumerate(before):
        pairs = [_Pair(*each, workers, convolutions) for each in modules]
        results = [
            _surrounded(workers.scratch, f"block {block}, {index}", *x.shape)
            for block in range(len(blocks))
        ]
        # All blocks' spans at once, those of the most taps first: no core waits long for another.
        tasks = [
            (block, span)
            for block, pair in reversed([*enumerate(pairs)])
            for span in spans(*x.shape, pair.margin)
        ]

        def compute(task, pairs=pairs, signals=signals, results=results) -> None:
            block, span = task
            pairs[block].add(signals[block], span, results[block], False)

        workers.run(compute, tasks)
        signals = results
        for signal in signals:
            _repeat_ends(signal)
    pairs = [_Pair(*each, workers, convolutions) for each in last]
    total = _surrounded(fresh, *x.shape)

    def add_up(of_blocks: tuple[Span, ...]) -> None:
        for block, span in enumerate(of_blocks):
            pairs[block].add(signals[block], span, total, block > 0)
        total[span.start : span.stop].div_(len(blocks))

    of_all = [spans(*x.shape, pair.margin) for pair in pairs]
    workers.run(add_up, zip(*of_all, strict=True))
    return total


class _Pair:
    """Two activations, each with a convolution after it, whose result is added to what they got."""

    def __init__(
        self,
        act1: ltx.Activation1d,
        conv1: nn.Conv1d,
        act2: ltx.Activation1d,
        conv2: nn.Conv1d,
        workers: Workers,
        convolutions: Convolutions,
    ):
        self.workers = workers
        self.steps = [
            (_Activation(act), convolutions[conv]) for act, conv in ((act1, conv1), (act2, conv2))
        ]
        self.margin = sum(REACH + conv.before for _, conv in self.steps)

    def add(self, x: Tensor, span: Span, out: Tensor, more: bool) -> None:
        """Write a span of x (length, C), and what the pair makes of it, to its place of `out`, or
        add both to what is there. By one core."""
        workers, length = self.workers, span.last - span.first
        (first, conv1), (second, conv2) = self.steps
        active = first.apply(x, span, workers, conv1.reach(length))
        signal = _surrounded(workers.scratch, "x", length, x.shape[1])
        conv1.convolve(active[BEFORE - conv1.before :], length, signal, workers)
        _repeat_ends(signal)
        middle = x[span.start : span.stop]
        begin = BEFORE + span.start - span.first - conv2.before
        read = begin - BEFORE + conv2.reach(len(middle))  # may be more than those of the whole
        active = second.apply(signal, Span(0, length, 0, length), workers, read)
        conv2.add(active[begin:], len(middle), middle, out[span.start :], more, workers)


def _post(
    x: Tensor, generator: ltx.Vocoder, workers: Workers, convolutions: Convolutions
) -> Tensor:
    """The last activation and convolution: (2, length)."""
    activation, result = _Activation(generator.act_post), fresh(*x.shape)
    _repeat_ends(x)

    def compute(span: Span) -> None:
        wanted = slice(BEFORE + span.start - span.first, BEFORE + span.stop - span.first)
        result[span.start : span.stop] = activation.apply(x, span, workers)[wanted]

    workers.run(compute, spans(*x.shape, REACH))
    return _convolve(result, convolutions[generator.conv_post], workers).T.contiguous()


class _Activation:
    """y = x + sin(ax)^2 / b at twice the rate, between low-pass filters."""

    def __init__(self, activation: ltx.Activation1d):
        act = activation.act
        a, b = act.alpha.exp(), 1 / (act.beta.exp() + act.eps)
        # Repeated for whole rows that are a multiple of LANES.
        rows = LANES // math.gcd(len(a), LANES)
        rows *= -(-GROUP // (rows * len(a)))
        self.a, self.b = a.repeat(rows).numpy(), b.repeat(rows).numpy()
        self.up = tuple((2 * activation.upsample.filter).flatten().flip(0).tolist())
        self.down = tuple(activation.downsample.lowpass.filter.flatten().tolist())

    def apply(self, x: Tensor, span: Span, workers: Workers, zeros: int = 0) -> Tensor:
        """The activation of the rows that are read for a span of x, a `_surrounded` signal whose
        ends are repeated. In scratch memory of the calling worker, after BEFORE rows of zeros and
        with zeros after it, up to the row of that number and more."""
        length, channels = span.last - span.first, x.shape[1]
        low = workers.scratch("signal", BEFORE + length + AFTER, channels)
        # Whole groups of numbers, and three rows before and after.
        size = -(-length * channels // len(self.a)) * len(self.a) + 6 * channels
        high = workers.scratch("values", 2, size + LANES)
        whole = flat(x.as_strided((0,), (1,), 0))  # all of its memory
        begin = x.storage_offset() + span.first * channels
        filters = self.up, self.down, self.a, self.b
        snake.activate(
            whole, begin, channels, length, *filters, flat(high), flat(low), BEFORE * channels
        )
        low[:BEFORE].zero_()
        low[BEFORE + length : BEFORE + zeros].zero_()
        return low
