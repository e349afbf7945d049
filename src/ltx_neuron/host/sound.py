"""Decodes sound in spans of time, on the host or on the ranks: latents to a mel spectrogram, and
that to a waveform.

A span is decoded with the neighbouring samples on which it depends, so the joined spans equal the
whole. Each rank decodes a span. On the host, each thread computes a residual block of a graph, or a
span of it if spans add little work. Spans depend only on the length, so the number of threads does
not change the bits.
"""

# To type checkers a module's parts are Tensor | Module, not the types that are built here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltx_neuron.config.sound import AUDIO_SCALE, AudioDecoderConfig, VocoderConfig
from ltx_neuron.host.background import Workers
from ltx_neuron.models import vocoder
from ltx_neuron.models.programs import Part, Program, spectrogram_program, waveform_program

# Rows of a mel spectrogram that the host processes at a time: about 10 s of sound.
WINDOW = 1024
# Maximum additional work of spans of a graph on the host, and their maximum number.
MORE_WORK, MOST_SPANS = 0.05, 16

# Decodes windows of equal length, (1, ...) each.
Decode = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Span(NamedTuple):
    """A part of a sound, `first` to `last`, and its input window, `start` to `stop`."""

    start: int
    stop: int
    first: int
    last: int


def cut(length: int, window: int, reach: tuple[int, int]) -> list[Span]:
    """The spans of a sound, with windows of equal length; one span if the sound fits a window.
    reach: numbers before and after a part on which it depends."""
    before, after = reach
    step = window - before - after
    if length <= window or step <= 0:
        return [Span(0, length, 0, length)]
    count = -(-(length - before - after) // step)
    starts = [min(number * step, length - window) for number in range(count)]
    ends = [0, *(start + before for start in starts[1:]), length]
    return [
        Span(start, start + window, *part)
        for start, part in zip(starts, pairwise(ends), strict=True)
    ]


def join(
    parts: Sequence[Tensor], spans: Sequence[Span], scale: int, dropped: int = 0, axis: int = 2
) -> Tensor:
    """Join the outputs of spans' windows. Each input has `scale` outputs, the first one `dropped`
    fewer."""

    def end(sample: int) -> int:
        return max(0, sample * scale - dropped)

    pieces = [
        part.narrow(axis, end(span.first) - span.start * scale, end(span.last) - end(span.first))
        for part, span in zip(parts, spans, strict=True)
    ]
    return torch.cat(pieces, dim=axis)


def spectrogram(latent: Tensor, spans: list[Span], decode: Decode) -> Tensor:
    """The mel spectrogram (1, 2, 4T - 3, 64) of latents (1, 8, T, 16)."""
    parts = decode([latent[:, :, span.start : span.stop] for span in spans])
    return join(parts, spans, AUDIO_SCALE, AUDIO_SCALE - 1)


def waveform(mel: Tensor, spans: list[Span], decode: Decode) -> Tensor:
    """The waveform (1, 2, samples) of a mel spectrogram (1, 2, T, 64)."""
    parts = decode([mel[:, :, span.start : span.stop] for span in spans])
    return join(parts, spans, parts[0].shape[2] // (spans[0].stop - spans[0].start))


class _OnHost(nn.Module):
    """The ranks' graphs, run by this process with a model's weights."""

    def __init__(
        self, program: Program, axis: int, weights: dict[str, Tensor], **constants: Tensor
    ):
        """axis: the time axis of the graphs' outputs."""
        super().__init__()
        self.graphs: list[Any] = [*program.modules.values()]  # Parts
        self.axis, self.constants = axis, constants
        for graph in self.graphs:
            named = {name: weights[name] for name, _ in graph.named_parameters()}
            graph.load_state_dict(named, assign=True)

    def _decode(self, windows: Sequence[Tensor]) -> list[Tensor]:
        with Workers() as workers:
            return [self._run(window.contiguous(), workers) for window in windows]

    def _run(self, window: Tensor, workers: Workers) -> Tensor:
        (name,) = self.graphs[0].inputs
        values = {**self.constants, name: window}
        for graph in self.graphs:
            values |= self._computed(graph, values, workers)
        return values[graph.outputs[0]]

    def _computed(
        self, graph: Part, values: dict[str, Tensor], workers: Workers
    ) -> dict[str, Tensor]:
        """A graph's outputs, computed by threads on one core each."""
        module, x = graph.module, values[graph.inputs[0]]
        length, is_stage = x.shape[self.axis], isinstance(module, vocoder.Stage)
        spans = [Span(0, length, 0, length)]
        if module.reach:  # as many spans as MORE_WORK allows
            around, least = sum(module.reach), 1 if is_stage else 2
            count = min(MOST_SPANS, max(least, int(MORE_WORK * length / around)))
            spans = cut(length, -(-(length + (count - 1) * around) // count), module.reach)
        if len(spans) == 1 and is_stage:
            (x,) = workers.map(module.upsample, [x])
            # The longest filters first: the others together take as much time.
            results = workers.map(lambda block: block(x), [*module.resblocks.values()][::-1])
            (mean,) = workers.map(module.mean, [results[::-1]])
            return {graph.outputs[0]: mean}

        def compute(span: Span) -> dict[str, Tensor]:
            window = x.narrow(self.axis, span.start, span.stop - span.start)
            return graph(values | {graph.inputs[0]: window})

        results = workers.map(compute, spans)
        if len(spans) == 1:
            return results[0]
        (name,) = graph.outputs
        parts = [result[name] for result in results]
        return {name: join(parts, spans, module.scale, module.dropped, self.axis)}


class HostSpectrogram(_OnHost):
    def __init__(self, config: AudioDecoderConfig, weights: dict[str, Tensor]):
        """weights: of the checkpoint's mel decoder, under ltx-core's names."""
        named = {f"audio_decoder.{name}": weight for name, weight in weights.items()}
        super().__init__(spectrogram_program(config, 1), 2, named)
        self.reach = config.reach

    @torch.no_grad()
    def forward(self, latent: Tensor) -> Tensor:
        """Latents (1, 8, T, 16) to a mel spectrogram (1, 2, 4T - 3, 64)."""
        spans = cut(latent.shape[2], WINDOW // AUDIO_SCALE, self.reach)
        return spectrogram(latent, spans, self._decode)


class HostVocoder(_OnHost):
    def __init__(self, config: VocoderConfig, weights: dict[str, Tensor]):
        """weights: of the checkpoint's vocoder, under ltx-core's names."""
        named = {vocoder_name(name): weight for name, weight in weights.items()}
        for name, weight in named.items():
            if arrange := vocoder.arrangement(name, config):
                named[name] = arrange(weight)
        constants = {"resampling": vocoder.resampling_filters(config)}
        super().__init__(waveform_program(config, 1), 3, named, **constants)
        for graph in self.graphs:
            compute_on_host(graph)
        self.reach = config.reach

    @torch.no_grad()
    def forward(self, mel: Tensor) -> Tensor:
        """A mel spectrogram (1, 2, T, 64) to a waveform (1, 2, samples)."""
        return waveform(mel, cut(mel.shape[2], WINDOW, self.reach), self._decode)


def vocoder_name(name: str) -> str:
    return f"bwe_generator.{name}" if name.startswith("mel_stft.") else name


# The host's functions for the vocoder's modules, with the ranks' weights.
# A signal (1, C, 1, T) has its channels last in memory, so it is also T rows of C. oneDNN's
# convolutions need 0.8 to 0.9 of the time in this layout. A filter is a product with overlapping
# windows of the rows, without a copy; a convolution before upsampling is one product.


@torch.no_grad()
def compute_on_host(graph: nn.Module) -> None:
    """Reorder the weights of a vocoder's graph for the host, and replace its functions."""
    for module in [*graph.modules()]:
        if isinstance(module, vocoder.Convolution):
            module.weight.data = module.weight.transpose(1, 2).contiguous().transpose(1, 2)
        elif isinstance(module, vocoder.Upsample):
            by_sample = module.weight.squeeze(2).unflatten(0, (-1, module.stride))
            module.weight.data = by_sample.permute(1, 0, 3, 2).flatten(2).flatten(0, 1)
            module.forward = partial(upsampled, module)
        elif isinstance(module, vocoder.MelSpectrogram):
            module.least_power = 0.0  # a CPU's square root is valid everywhere
        elif isinstance(module, vocoder.Activation):
            down = module.downsample["lowpass"]
            module.forward = partial(
                activated, RowFilter.of(module.upsample), module.act, RowFilter.of(down)
            )


def rows_of(x: Tensor) -> Tensor:
    """A signal (1, C, 1, T) as rows (T, C), contiguous."""
    return x[0, :, 0].T.contiguous()


def upsampled(module: vocoder.Upsample, x: Tensor) -> Tensor:
    """The output of an Upsample, whose weight is a matrix (stride Cout, taps C)."""
    rows, (matrix, stride) = rows_of(x), (module.weight, module.stride)
    length, channels = rows.shape
    around = matrix.shape[1] // channels - 1
    padded = F.pad(rows, (0, 0, around, around))
    windows = padded.as_strided((length + around, matrix.shape[1]), (channels, 1))
    y = F.linear(windows, matrix, module.bias.repeat(stride)).view(-1, len(module.bias))
    return y[module.cropped : module.cropped + length * stride].T[None, :, None]


class RowFilter(NamedTuple):
    """A Filter of rows: the product of a matrix with windows of `size` rows, plus `before` rows
    before and `after` rows after them."""

    matrix: Tensor
    size: int
    before: int
    after: int

    @classmethod
    def of(cls, module: Any) -> "RowFilter":
        matrix, size = module.filter.squeeze(2).transpose(1, 2).flatten(1), module.filter.shape[1]
        read = matrix.any(dim=0).nonzero().flatten()
        first, last = min(int(read[0]), size), max(int(read[-1]) + 1, 2 * size)
        return cls(matrix[:, first:last].contiguous(), size, size - first, last - 2 * size)

    def __call__(self, rows: Tensor) -> Tensor:
        """Filter rows (T, C) with repeated ends. Returns the rows of whole blocks."""
        (length, channels), size = rows.shape, self.size
        count, strides = -(-length // size), (size * channels, channels, 1)
        y = rows.new_empty(count, len(self.matrix), channels)
        # Only the first and last blocks read beyond the ends and need copies.
        for first, last in pairwise((0, 1, max(1, (length - self.after) // size), count)):
            if first < last:
                read = self._read(rows, first * size - self.before, last * size + self.after)
                shape = last - first, self.matrix.shape[1], channels
                windows = read.as_strided(shape, strides)
                torch.bmm(self.matrix.expand(last - first, -1, -1), windows, out=y[first:last])
        return y.flatten(0, 1)

    def _read(self, rows: Tensor, start: int, stop: int) -> Tensor:
        before, after = max(0, -start), max(0, stop - len(rows))
        read = rows[max(0, start) : stop]
        if before or after:
            read = torch.cat([rows[:1].expand(before, -1), read, rows[-1:].expand(after, -1)])
        return read


def activated(up: RowFilter, snake: vocoder.Snake, down: RowFilter, x: Tensor) -> Tensor:
    """The output of an Activation for a signal (1, C, 1, T)."""
    rows = rows_of(x)
    y = up(rows)[: 2 * len(rows)]
    inverse = 1 / (snake.beta.exp() + vocoder.EPS)
    y.addcmul_((y * snake.alpha.exp()).sin_().square_(), inverse)
    return down(y)[: len(rows)].T[None, :, None]
