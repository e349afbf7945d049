"""Decodes and encodes tiles of a clip, and decodes spans of its sound, on the ranks: each rank has
one at a time, all of the same shape."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor

from ltx_neuron.backends.ranks import NotFiniteError, Ranks
from ltx_neuron.config.diffusion import DiffusionDecoderConfig, shortest
from ltx_neuron.models.programs import call_name, program_name


class _OnRanks:
    """Uses running ranks that have loaded the programs of the shapes.

    tp       ranks for which the clip's tiles are chosen
    at_once  maximum number of tiles or spans per call
    lock     held during a call, because two threads decode pictures and sound
    """

    def __init__(self, ranks: Ranks, lock: AbstractContextManager | None = None):
        self.ranks, self._lock = ranks, lock or threading.Lock()
        self.tp, self.at_once = ranks.tp, ranks.at_once
        # By guidance group, the constants that it holds: one upload serves a whole clip.
        self._held: dict[Ranks, dict[str, Tensor]] = {}

    def _run(
        self,
        program: str,
        output: str,
        parts: Sequence[dict[str, Tensor]],
        sequence: str = "main",
        **constants: Tensor,
    ) -> list[Tensor]:
        """A sequence's outputs for several parts of one shape. Returns NaN and Inf, because the
        caller can name the model's file."""

        def decode(together: Sequence[dict[str, Tensor]]) -> Callable[[Ranks], Sequence[Tensor]]:
            def run(ranks: Ranks) -> Sequence[Tensor]:
                # Idle ranks repeat the last part.
                of_ranks = [*together, *[together[-1]] * (ranks.size - len(together))]
                inputs = {name: torch.cat([x[name] for x in of_ranks]) for name in together[0]}
                held = self._held.setdefault(ranks, {})
                new = {name: x for name, x in constants.items() if held.get(name) is not x}
                ranks.put(program, None, **inputs, **new)
                held |= new
                with suppress(NotFiniteError):
                    ranks.run(program, sequence)
                return ranks.get(program, output).chunk(ranks.size)[: len(together)]

            return run

        size = self.ranks.size
        groups = [parts[first : first + size] for first in range(0, len(parts), size)]
        with self._lock:
            return sum(map(list, self.ranks.share([decode(group) for group in groups])), [])


class RankTiles(_OnRanks):
    def __call__(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """Latents (1, 128, f, h, w) of one shape to frames (1, 3, 8f - 7, 32h, 32w)."""
        program = program_name("vae", *latents[0].shape[2:])
        return self._run(program, "tile_pixels", [{"tile_latent": x} for x in latents])


class RankEncoder(_OnRanks):
    def __call__(self, tiles: Sequence[Tensor]) -> list[Tensor]:
        """Pixels (1, 3, 8f - 7, 32h, 32w) to latents (1, 128, f, h, w), those of one shape
        together."""
        latents: dict[int, Tensor] = {}
        for shape in dict.fromkeys(tile.shape for tile in tiles):
            alike = [number for number, tile in enumerate(tiles) if tile.shape == shape]
            program = program_name("encoder", *shape[2:])
            parts = [{"tile_pixels": tiles[number]} for number in alike]
            latents |= zip(alike, self._run(program, "tile_latent", parts), strict=True)
        return [latents[number] for number in range(len(tiles))]


class RankSpans(_OnRanks):
    """Computes spans of frames of the diffusion decoder, as host.diffusion.HostSpans does."""

    def __init__(
        self,
        ranks: Ranks,
        config: DiffusionDecoderConfig,
        dtype: torch.dtype,
        lock: AbstractContextManager | None = None,
    ):
        super().__init__(ranks, lock)
        self.config, self.dtype = config, dtype

    def run(
        self, clip: tuple[int, int, int], call: tuple[str, int], spans: Sequence[dict[str, Tensor]]
    ) -> list[Tensor]:
        """The output of a call, (graph, first block), for each span of a clip of latents
        (F, h, w)."""
        program, (graph, _) = program_name("vae", *shortest(self.config, clip)), call
        manifest = self.ranks.programs[program]
        divided = {name for name, field in manifest.fields.items() if field.split is not None}
        parts = [{name: x for name, x in span.items() if name in divided} for span in spans]
        constants = {name: x for name, x in spans[0].items() if name not in divided}
        output = manifest.graphs[graph]["outputs"][0]
        return self._run(program, output, parts, call_name(*call), **constants)


class RankSound(_OnRanks):
    def __init__(
        self, ranks: Ranks, resampling: Tensor, lock: AbstractContextManager | None = None
    ):
        """resampling: the vocoder's constant input."""
        super().__init__(ranks, lock)
        self._resampling = resampling

    def spectrogram(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """Latents (1, 8, T, 16) of one length to mel spectrograms (1, 2, 4T - 3, 64)."""
        program = program_name("mel", latents[0].shape[2])
        return self._run(program, "span_mel", [{"span_latent": x} for x in latents])

    def waveform(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Mel spectrograms (1, 2, T, 64) of one length to waveforms (1, 2, samples)."""
        program = program_name("vocoder", mels[0].shape[2])
        parts = [{"span_mel": mel} for mel in mels]
        return self._run(program, "span_waveform", parts, resampling=self._resampling)
