"""A tiled stage on the ranks: the host steps the latents of the whole canvas, and the ranks predict
one tile after another, guidance groups as many at once as there are groups (sampling/tiles.py).
"""

from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from ltx_neuron.backends.ranks import Ranks, indexed
from ltx_neuron.denoise import StageRun
from ltx_neuron.job import Job
from ltx_neuron.models.signatures import LATENTS
from ltx_neuron.sampling.latent_state import LatentState
from ltx_neuron.sampling.samplers import Euler
from ltx_neuron.sampling.tiles import blend_weights


class TiledStageRun(StageRun):
    def _host_sampler(self) -> type[Euler]:
        assert self.stage.sampler == "euler"
        return Euler

    def _put_tokens(self, job: Job, video: LatentState, choice: Tensor) -> None:
        """Keep the state of the canvas, of which a group gets the inputs of its own tiles."""
        self._tiles = job.stage_tiles(self.stage)
        appended = job.appended(self.stage.upsampled, *self.latent_shape[1:])
        self._blend = blend_weights([tile for tile, _ in self._tiles], self.latent_shape, appended)
        self._canvas = video, choice
        self._names: dict[Ranks, dict[int, tuple[str, ...]]] = defaultdict(dict)

    def _input_names(self, number: int, ranks: Ranks) -> tuple[str, ...]:
        """The inputs of a tile's tokens, which are uploaded the first time that the ranks predict
        it, under names with the tile's number."""
        if number not in (names := self._names[ranks]):
            (tile, tokens), compiled = self._tiles[number], self.compiled.tiles[number]
            video, choice = self._canvas
            tensors = self._of_tokens(compiled, video.seen_by(tile, tokens), choice[tokens])
            for name, tensor in tensors.items():
                ranks.put(compiled.bucket.name, name, **{indexed(name, number): tensor})
            names[number] = tuple(tensors)
        return names[number]

    def _pairs(self, sigmas: tuple[float, ...], max_steps: int) -> Tensor:
        pairs = super()._pairs(sigmas, max_steps)
        pairs[:, 1] = 0  # a step to sigma 0 gives the prediction
        return pairs

    def _upload(self, video: Tensor, audio: Tensor) -> None:
        """Nothing: the host has the state."""

    def _predict(self, video: Tensor, audio: Tensor, evaluation: int) -> tuple[Tensor, Tensor]:
        busy = defaultdict[int, float](float)  # milliseconds of each group

        def predict(number: int, ranks: Ranks) -> list[Tensor]:
            tokens, program = self._blend[number][0], self.compiled.tiles[number].bucket.name
            numbers = dict.fromkeys(self._input_names(number, ranks), number) | {"step": evaluation}
            ranks.put(program, None, video_latent=video[:, tokens], audio_latent=audio)
            busy[id(ranks)] += ranks.run(program, "main", **numbers)
            return [ranks.get(program, name) for name in LATENTS]

        tiles = self.ranks.share([partial(predict, number) for number in range(len(self._blend))])
        self._times.append(max(busy.values()))
        picture, sound = torch.zeros(video.shape), torch.zeros(audio.shape)
        # In the tiles' order, so that the sum does not depend on the groups.
        for (tokens, weights), (predicted, predicted_sound) in zip(self._blend, tiles, strict=True):
            picture[:, tokens] += predicted.float() * weights[:, None]
            sound += predicted_sound.float() / len(tiles)
        return picture.to(video.dtype), sound.to(audio.dtype)
