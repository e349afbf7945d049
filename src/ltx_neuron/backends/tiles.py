"""Decodes tiles of a clip and spans of its sound on the ranks: each rank decodes one at a time, all
of the same shape."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor

from ltx_neuron.backends.ranks import NotFiniteError, Ranks
from ltx_neuron.models.programs import (
    spectrogram_program_name,
    tile_program_name,
    waveform_program_name,
)


class _OnRanks:
    """Decodes with running ranks that have loaded the programs of the shapes.

    at_once  maximum number of tiles or spans per call
    lock     held during a call, because two threads decode pictures and sound
    """

    def __init__(self, ranks: Ranks, lock: AbstractContextManager | None = None):
        self.ranks, self.at_once, self._lock = ranks, ranks.size, lock or threading.Lock()

    def _decode(
        self, program: str, given: str, parts: Sequence[Tensor], made: str, **constants: Tensor
    ) -> list[Tensor]:
        """The program's outputs for parts of one shape. NaN and Inf are returned, because the
        caller can name the model's file."""
        decoded = []
        for first in range(0, len(parts), self.at_once):
            together = parts[first : first + self.at_once]
            # Idle ranks repeat the last part.
            idle = [parts[-1]] * (self.at_once - len(together))
            with self._lock:
                self.ranks.put(program, None, **{given: torch.cat([*together, *idle])}, **constants)
                with suppress(NotFiniteError):
                    self.ranks.run(program)
                decoded += self.ranks.get(program, made).split(1)[: len(together)]
        return decoded


class RankTiles(_OnRanks):
    """Decodes tiles of a clip."""

    def __call__(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """Latents (1, 128, f, h, w) of one shape to frames (1, 3, 8f - 7, 32h, 32w)."""
        frames, height, width = latents[0].shape[2:]
        program = tile_program_name((frames, height, width))
        return self._decode(program, "tile_latent", latents, "tile_pixels")


class RankSound(_OnRanks):
    """Decodes spans of sound."""

    def __init__(
        self, ranks: Ranks, resampling: Tensor, lock: AbstractContextManager | None = None
    ):
        """resampling: the vocoder's constant input."""
        super().__init__(ranks, lock)
        self._resampling = resampling

    def spectrogram(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """Latents (1, 8, T, 16) of one length to mel spectrograms (1, 2, 4T - 3, 64)."""
        program = spectrogram_program_name(latents[0].shape[2])
        return self._decode(program, "span_latent", latents, "span_mel")

    def waveform(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Mel spectrograms (1, 2, T, 64) of one length to waveforms (1, 2, samples)."""
        program = waveform_program_name(mels[0].shape[2])
        return self._decode(program, "span_mel", mels, "span_waveform", resampling=self._resampling)
