"""Encodes clips to latents, in upstream's tiles."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.sampling.latents import SPACE_SCALE, TIME_SCALE, video_latent_shape

# Latents of a tile, and its overlap with the next one: 80 and 24 frames, 768 and 64 pixels.
TIME_TILE, TIME_OVERLAP = 80 // TIME_SCALE, 24 // TIME_SCALE
SPACE_TILE, SPACE_OVERLAP = 768 // SPACE_SCALE, 64 // SPACE_SCALE


class TileSpan(NamedTuple):
    """A tile's latents along an axis, and their weights for blending."""

    start: int
    stop: int
    weights: Tensor


def encode_tiled(encode: Callable[[list[Tensor]], Iterable[Tensor]], pixels: Tensor) -> Tensor:
    """The latent (1, 128, F, h, w) of pixels (1, 3, 8F-7, 32h, 32w) in [-1, 1], encoded in blended
    tiles. A clip of at most 80 frames and 768 pixels per side is one tile. encode: the tiles'
    pixels to their latents. Source: ltx-pipelines 1.2.0, VideoEncoder.tiled_encode with its default
    tiles."""
    frames, height, width = pixels.shape[2:]
    latent = video_latent_shape(height, width, frames)
    tiles = [*_tiles(latent)]
    total = None
    cut = [_cut(pixels, *tile) for tile in tiles]
    for (time, row, column), encoded in zip(tiles, encode(cut), strict=True):
        if total is None:
            total = encoded.new_zeros(1, encoded.shape[1], *latent)
        weights = time.weights[:, None, None] * row.weights[:, None] * column.weights
        place = total[:, :, time.start : time.stop, row.start : row.stop]
        place[..., column.start : column.stop] += encoded * weights
    assert total is not None  # a clip has a tile
    return total


def _cut(pixels: Tensor, time: TileSpan, row: TileSpan, column: TileSpan) -> Tensor:
    """A tile's pixels. The first latent of a tile, like that of a clip, is one frame."""
    return pixels[
        :,
        :,
        TIME_SCALE * time.start : TIME_SCALE * (time.stop - 1) + 1,
        SPACE_SCALE * row.start : SPACE_SCALE * row.stop,
        SPACE_SCALE * column.start : SPACE_SCALE * column.stop,
    ]


def tile_counts(pixels: Sequence[int]) -> Counter[tuple[int, int, int]]:
    """The number of tiles of each size (frames, rows, columns) for a clip of `pixels`."""
    frames, height, width = pixels
    tiles = _tiles(video_latent_shape(height, width, frames))
    lengths = ([part.stop - part.start for part in tile] for tile in tiles)
    return Counter(
        ((f - 1) * TIME_SCALE + 1, h * SPACE_SCALE, w * SPACE_SCALE) for f, h, w in lengths
    )


def _tiles(latent: tuple[int, int, int]) -> Iterator[tuple[TileSpan, TileSpan, TileSpan]]:
    times = parts(latent[0], TIME_TILE, TIME_OVERLAP, causal=True)
    rows, columns = (parts(length, SPACE_TILE, SPACE_OVERLAP) for length in latent[1:])
    return itertools.product(times, rows, columns)


def parts(length: int, tile: int, overlap: int, causal: bool = False) -> list[TileSpan]:
    """The tiles along an axis of `length` latents. In overlaps, weights add up to 1. causal: later
    tiles begin one latent earlier, with weight 0, because a first latent has one frame."""
    if length <= tile:
        return [TileSpan(0, length, torch.ones(length))]
    earlier, spans = int(causal), []
    for start in range(0, length - overlap, tile - overlap):
        first, last = start == 0, start + tile >= length
        stop = length if last else start + tile
        begin = start if first else start - earlier
        weights = torch.ones(stop - begin)
        if not first:
            ramp = torch.linspace(0, 1, overlap + 2)[:-1]
            weights[: overlap + earlier] = ramp[1 - earlier :]
        if not last:
            weights[len(weights) - overlap :] *= torch.linspace(1, 0, overlap + 2)[1:-1]
        spans.append(TileSpan(begin, stop, weights))
    return spans
