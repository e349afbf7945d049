"""Decodes and encodes clips in tiles, several at once, on the host and on the ranks alike.

To decode, cutting and blending are ltx-core's, so both give the same frames. Only the time at which
frames are passed on differs. To encode, the tiles are those of ltx-pipelines.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from ltx_core.model.video_vae import (
    SpatialTilingConfig,
    TemporalTilingConfig,
    TilingConfig,
    VideoDecoder,
)
from ltx_core.model.video_vae.tiling import Tile
from ltx_core.types import VIDEO_SCALE_FACTORS
from torch import Tensor, nn

from ltx_neuron.config.profiles import Profile
from ltx_neuron.host.background import check_cancelled
from ltx_neuron.sampling.shapes import SPACE_SCALE, TIME_SCALE, video_latent_shape

Shape = tuple[int, int, int]  # latent frames, rows, columns
# The cost of a further tile shape, which needs another set of graphs.
_SHAPE_COST = 0.1
# How far ahead tiles of one shape are decoded, in calls: they stay in memory until blended.
_LOOK_AHEAD = 4


def tiling(profile: Profile | type[Profile] = Profile, compat_1_0_0: bool = False) -> TilingConfig:
    """The profile's tiles, or the defaults of all profiles. compat_1_0_0: ltx-core 1.0.0's, unless
    --profile-set has changed the profile's."""
    if compat_1_0_0 and not any(setting.startswith("vae_") for setting in profile.settings):
        return TilingConfig.default()
    return _config(
        profile.vae_tile, profile.vae_tile_frames, profile.vae_overlap, profile.vae_overlap_frames
    )


@cache  # of a large picture there are many sizes
def tiling_for_ranks(profile: Profile, clip: Shape, tp: int) -> TilingConfig:
    """The profile's tiles or, with vae_tile_latents, of all sizes up to that limit the one with the
    least work per rank. A further tile shape counts as a tenth more work."""
    limit = profile.vae_tile_latents
    if not limit:
        return tiling(profile)
    best, least = tiling(profile), float("inf")
    for config in _sizes(profile, clip, limit):
        counts = Counter(map(tile_shape, cut(clip, config)))
        if max(map(prod, counts)) > limit:
            continue
        work = sum(-(-count // tp) * prod(shape) for shape, count in counts.items())
        if (cost := work * (1 + _SHAPE_COST * (len(counts) - 1))) < least:
            best, least = config, cost
    return best


def _sizes(profile: Profile, clip: Shape, limit: int) -> Iterator[TilingConfig]:
    """Every tile size from the overlap up to `limit` latents."""
    scale, overlap, shared = VIDEO_SCALE_FACTORS, profile.vae_overlap, profile.vae_overlap_frames
    frames, short, long = clip[0], *sorted(clip[1:])
    for side in range(max(2, overlap // scale.width + 1), max(3, long + 1)):
        for length in reversed(range(max(2, shared // scale.time + 1), max(3, frames + 1))):
            # ltx-core's tiles have the clip's aspect ratio.
            if min(length, frames) * side * (side * short // long) <= limit:
                yield _config(side * scale.width, length * scale.time, overlap, shared)


def _config(tile: int, frames: int, overlap: int, overlap_frames: int) -> TilingConfig:
    return TilingConfig(
        SpatialTilingConfig(tile, overlap), TemporalTilingConfig(frames, overlap_frames)
    )


def cut(clip: Shape, config: TilingConfig) -> list[Tile]:
    """The tiles of a clip's latents, in the order in which they are blended."""
    return TiledDecoder()._prepare_tiles(torch.empty(1, 1, *clip, device="meta"), config)


def tile_shape(tile: Tile) -> Shape:
    """Latent frames, rows and columns of a tile."""
    return tuple(part.stop - part.start for part in tile.in_coords[2:])


def _add_before(shared: Sequence[Tensor], *blended: Tensor) -> None:
    """Add the previous span's part to the first frames of a span."""
    for part, before in zip(blended, shared, strict=False):
        part[:, :, : before.shape[2]] += before


class TiledDecoder(VideoDecoder):
    """ltx-core's tiled decoding, with a function that decodes several tiles of one shape at once.
    Frames are passed on as soon as no later tile changes them; ltx-core's keeps a whole time span
    until the next one is decoded. decode: takes at most `at_once` latents of one shape,
    (1, 128, f, h, w) each, and returns their frames, (1, 3, 8f - 7, 32h, 32w) each."""

    def __init__(
        self, decode: Callable[[Sequence[Tensor]], Iterable[Tensor]] = list, at_once: int = 1
    ):
        nn.Module.__init__(self)  # without a model, because only ltx-core's tiling is used
        self.video_downscale_factors = VIDEO_SCALE_FACTORS
        self._decode, self._at_once = decode, at_once
        self._decoded: Iterator[Tensor] = iter(())

    def tiled_decode(
        self, latent: Tensor, tiling_config: TilingConfig | None = None, *how, **more
    ) -> Iterator[Tensor]:
        """As ltx-core's, with bit-identical chunks of frames; blended in float32."""
        tiles = self._prepare_tiles(latent, tiling_config)
        self._decoded, latent = self._in_order(latent, tiles), latent.float()
        spans = self._group_tiles_by_temporal_slice(tiles)
        slices = [span[0].out_coords[2] for span in spans]
        ends = [*(later.start for later in slices[1:]), slices[-1].stop]
        scale, (batch, _, _, height, width) = self.video_downscale_factors, latent.shape
        picture, shared = (height * scale.height, width * scale.width), ()
        for span, time, end in zip(spans, slices, ends, strict=True):
            sums = torch.zeros(batch, 3, time.stop - time.start, *picture)
            weights = self._accumulate_temporal_group_into_buffer(span, sums, latent, None, None)
            _add_before(shared, sums, weights)
            done = end - time.start
            shared = sums[:, :, done:].clone(), weights[:, :, done:].clone()
            chunk = sums[:, :, :done] / weights[:, :, :done].clamp(min=1e-8)
            del sums, weights  # only shared frames are kept while the next tiles are decoded
            yield chunk
            del chunk

    def forward(self, sample: Tensor, *how) -> Tensor:
        """The next tile's frames, float32; ltx-core calls this in the order of the tiles."""
        return next(self._decoded).float()

    def _in_order(self, latent: Tensor, tiles: list[Tile]) -> Iterator[Tensor]:
        """The frames of every tile, each decoded together with the next ones of its shape."""
        waiting: dict[int, Tensor] = {}
        for number, tile in enumerate(tiles):
            if number not in waiting:
                check_cancelled()
                ahead = range(number, min(len(tiles), number + _LOOK_AHEAD * self._at_once))
                alike = [n for n in ahead if tile_shape(tiles[n]) == tile_shape(tile)]
                batch = [n for n in alike if n not in waiting][: self._at_once]
                frames = self._decode([latent[tiles[n].in_coords] for n in batch])
                waiting.update(zip(batch, frames, strict=True))
            yield waiting.pop(number)


# --- encoding -------------------------------------------------------------------------------------

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
    cuts = [_tile_pixels(pixels, *tile) for tile in tiles]
    for (time, row, column), encoded in zip(tiles, encode(cuts), strict=True):
        if total is None:
            total = encoded.new_zeros(1, encoded.shape[1], *latent)
        weights = time.weights[:, None, None] * row.weights[:, None] * column.weights
        place = total[:, :, time.start : time.stop, row.start : row.stop]
        place[..., column.start : column.stop] += encoded * weights
    assert total is not None  # a clip has a tile
    return total


def _tile_pixels(pixels: Tensor, time: TileSpan, row: TileSpan, column: TileSpan) -> Tensor:
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


def _tiles(latent: Shape) -> Iterator[tuple[TileSpan, TileSpan, TileSpan]]:
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
