"""Sound decoded in spans of time, on the host or on the ranks: from latents to a mel spectrogram,
and from that to a waveform.

A span is read with what its samples depend on before and after it, so spans put one after the other
are what the whole gives. They are cut by the sound's length alone, and the host computes each on
one thread: the number of threads does not change the bits.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.config import AUDIO_SCALE, AudioDecoderConfig, VocoderConfig
from ltx_neuron.host.background import check_cancelled
from ltx_neuron.host.winograd import Workers
from ltx_neuron.models.programs import Program, spectrogram_program, waveform_program
from ltx_neuron.models.vocoder import arranged, resampling_filters

SECONDS = 10  # of sound, about: what two spans of the host have, so that memory has a bound
ROWS_A_SECOND = 100

# Decodes spans of one shape, (1, ...) each.
Decode = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Span(NamedTuple):
    """A part of a sound, `first` to `last`, and the window start to stop that is read for it."""

    start: int
    stop: int
    first: int
    last: int


def cut(length: int, window: int, reach: tuple[int, int]) -> list[Span]:
    """The spans of a sound, whose windows all have the same length: as many as `window` makes of
    it, or the sound's own, where that is no longer.

    reach  before and after a part: what it depends on
    """
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


def window_of(length: int, count: int, reach: tuple[int, int]) -> int:
    """The least window that makes at most `count` spans of a sound."""
    return min(length, -(-(length + (count - 1) * sum(reach)) // count))


def spectrogram(latent: Tensor, spans: list[Span], decode: Decode) -> Tensor:
    """The mel spectrogram (1, 2, 4T - 3, 64) of latents (1, 8, T, 16)."""
    parts = decode([latent[:, :, span.start : span.stop] for span in spans])
    # Of a latent, the rows that end with its own; the first of all has only that one.
    edges = [
        [max(0, AUDIO_SCALE * (latents - 1) + 1) for latents in (span.first, span.last)]
        for span in spans
    ]
    return torch.cat(
        [
            part[:, :, first - AUDIO_SCALE * span.start : last - AUDIO_SCALE * span.start]
            for part, span, (first, last) in zip(parts, spans, edges, strict=True)
        ],
        dim=2,
    )


def waveform(mel: Tensor, spans: list[Span], decode: Decode) -> Tensor:
    """The waveform (1, 2, samples) of a mel spectrogram (1, 2, T, 64)."""
    parts = decode([mel[:, :, span.start : span.stop] for span in spans])
    each = parts[0].shape[2] // (spans[0].stop - spans[0].start)
    return torch.cat(
        [
            part[:, :, (span.first - span.start) * each : (span.last - span.start) * each]
            for part, span in zip(parts, spans, strict=True)
        ],
        dim=2,
    )


class _OnHost:
    """The program of the ranks' graphs, run by this process, with a model's weights."""

    def __init__(self, program: Program, weights: dict[str, Tensor], **constants: Tensor):
        self.graphs, self.constants = [*program.graphs.values()], constants
        for graph in self.graphs:
            own = {name: weights[name] for name, _ in graph.module.named_parameters()}
            graph.module.load_state_dict(own, assign=True)
            graph.module.eval().requires_grad_(False)

    def __call__(self, spans: Sequence[Tensor]) -> list[Tensor]:
        results = [None] * len(spans)

        def decode(number: int) -> None:
            results[number] = self._run(spans[number])

        with Workers(min(len(spans), torch.get_num_threads())) as workers:
            workers.run(decode, range(len(spans)))
        return results

    def _run(self, span: Tensor) -> Tensor:
        (given,) = self.graphs[0].inputs._fields
        values = {**self.constants, given: span.contiguous()}
        for graph in self.graphs:
            check_cancelled()
            outputs = graph.module(graph.inputs(*map(values.get, graph.inputs._fields)))
            values |= outputs._asdict()
        return outputs[0]


class HostSpectrogram:
    """The mel decoder on the host."""

    def __init__(self, config: AudioDecoderConfig, weights: dict[str, Tensor]):
        """weights: of the checkpoint's mel decoder, under ltx-core's names."""
        self.reach = config.reach
        named = {f"audio_decoder.{name}": weight for name, weight in weights.items()}
        self._decode = _OnHost(spectrogram_program(config, 1), named)

    @torch.no_grad()
    def __call__(self, latent: Tensor) -> Tensor:
        """Latents (1, 8, T, 16) to a mel spectrogram (1, 2, 4T - 3, 64)."""
        spans = _spans(latent.shape[2], SECONDS * ROWS_A_SECOND // AUDIO_SCALE, self.reach)
        return spectrogram(latent, spans, self._decode)


class HostVocoder:
    """The vocoder on the host."""

    def __init__(self, config: VocoderConfig, weights: dict[str, Tensor]):
        """weights: of the checkpoint's vocoder, under ltx-core's names."""
        self.reach = config.reach
        named = {vocoder_name(name): weight for name, weight in weights.items()}
        laid_out = {name: arranged(name, weight, config) for name, weight in named.items()}
        named |= {name: weight for name, weight in laid_out.items() if weight is not None}
        constants = {"resampling": resampling_filters(config)}
        self._decode = _OnHost(waveform_program(config, 1), named, **constants)

    @torch.no_grad()
    def __call__(self, mel: Tensor) -> Tensor:
        """A mel spectrogram (1, 2, T, 64) to a waveform (1, 2, samples)."""
        return waveform(mel, _spans(mel.shape[2], SECONDS * ROWS_A_SECOND, self.reach), self._decode)


def vocoder_name(name: str) -> str:
    """The name in our graphs of a vocoder's tensor."""
    return f"bwe_generator.{name}" if name.startswith("mel_stft.") else name


def _spans(length: int, of_two: int, reach: tuple[int, int]) -> list[Span]:
    """Spans for the host: an even number, of which two have at most so much."""
    return cut(length, window_of(length, 2 * -(-length // of_two), reach), reach)
