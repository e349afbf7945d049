"""Tiles of a clip on the ranks: each rank decodes one of them, all of one shape at a time."""

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ltx_neuron.backends.ranks import NotFiniteError, Ranks
from ltx_neuron.models.programs import tile_program_name


class RankTiles:
    """Decodes tiles on running ranks, which hold the programs of their shapes. `at_once`: how many
    tiles a call takes at most."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.at_once = ranks, ranks.tp

    def __call__(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """Latents (1, 128, f, h, w) of one shape to frames (1, 3, 8f - 7, 32h, 32w). NaN and Inf
        are returned as they are: whoever asked looks at the frames, and knows the file that they
        come from."""
        program = tile_program_name(tuple(latents[0].shape[2:]))
        # Ranks for which there is no tile decode the last one as well.
        idle = [latents[-1]] * (self.at_once - len(latents))
        self.ranks.put(program, tile_latent=torch.cat([*latents, *idle]))
        with suppress(NotFiniteError):
            self.ranks.run(program)
        return list(self.ranks.get(program, "tile_pixels").split(1))[: len(latents)]
