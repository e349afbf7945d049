"""Tiles of a stage's canvas for --tile: the model predicts one overlapping tile after another, and
the sampler steps one latent of the whole canvas.

Sources: ltx-pipelines 1.4 utils/tiled_diffusion.py, ltx-core 1.2.0 modality_tiling.py.

Shapes: F latent frames, h, w latent rows and columns of the canvas. Tiles have all frames.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Interval(NamedTuple):
    """Rows or columns start..end of a tile, of which `left` and `right` are shared with the
    neighbours."""

    start: int
    end: int
    left: int = 0
    right: int = 0

    def weights(self) -> Tensor:
        """(end - start,): 1, and ramps over the shared ones that add up to 1 with the
        neighbour's."""
        weights = torch.ones(self.end - self.start)
        weights[: self.left] = torch.linspace(0, 1, self.left + 2)[1:-1]
        weights[len(weights) - self.right :] = torch.linspace(1, 0, self.right + 2)[1:-1]
        return weights

    def overlaps(self, count: int, scale: int) -> Tensor:
        """(count,) bool: which of `count` rows, each of `scale` of the canvas's, are seen."""
        starts = torch.arange(count) * scale
        return (starts < self.end) & (starts + scale > self.start)


def cut(length: int, size: int) -> list[Interval]:
    """The intervals of `size` cells that cover `length`, of which half should be shared. No cell
    has three, so less may be shared."""
    if length <= size:
        return [Interval(0, length)]
    most, count = max(2, 1 + (length - size) // math.ceil(size / 2)), 2
    while count < most and count * size - length < size // 2 * (count - 1):
        count += 1
    gap, rest = divmod(length - size, count - 1)
    starts = [number * gap + min(number, rest) for number in range(count)]
    shared = [start + size - after for start, after in zip(starts, starts[1:], strict=False)]
    sides = zip(starts, [0, *shared], [*shared, 0], strict=True)
    return [Interval(start, start + size, left, right) for start, left, right in sides]


class Appended(NamedTuple):
    """Tokens appended to the canvas's: (F, h, w), each of scale x scale of the canvas's cells."""

    shape: tuple[int, int, int]
    scale: int = 1


class Tile(NamedTuple):
    rows: Interval
    columns: Interval

    def tokens(self, canvas: Sequence[int], appended: Iterable[Appended]) -> Tensor:
        """Indices of the tokens that the tile sees: its own of the canvas (F, h, w), in their
        order, then the appended ones that overlap it."""
        overlaps = [self._seen(canvas, 1), *(self._seen(*tokens) for tokens in appended)]
        return torch.cat(overlaps).nonzero().flatten()

    def _seen(self, shape: Sequence[int], scale: int) -> Tensor:
        frames, rows, columns = shape
        overlap = self.rows.overlaps(rows, scale)[:, None] & self.columns.overlaps(columns, scale)
        return overlap.expand(frames, -1, -1).flatten()

    def weights(self) -> Tensor:
        """(h, w) of the tile: each cell's share of the canvas's prediction."""
        return self.rows.weights()[:, None] * self.columns.weights()


def tiles(rows: int, columns: int, height: int, width: int) -> list[Tile]:
    """The tiles of at most height x width pixels of a canvas, row by row; none if it is one
    tile."""
    sides = [cut(count, side // 32) for count, side in ((rows, height), (columns, width))]
    grid = [Tile(row, column) for row in sides[0] for column in sides[1]]
    return grid if len(grid) > 1 else []


def blend_weights(
    tiles: Sequence[Tile], canvas: Sequence[int], appended: Sequence[Appended]
) -> list[tuple[Tensor, Tensor]]:
    """For each tile its tokens' indices, and their weights in the prediction of all tokens: those
    of an appended token are equal."""
    tokens_of = [tile.tokens(canvas, appended) for tile in tiles]
    count, counts = math.prod(canvas), torch.cat(tokens_of).bincount()
    weighted = []
    for tile, tokens in zip(tiles, tokens_of, strict=True):
        weights = tile.weights().expand(canvas[0], -1, -1).flatten()
        shares = 1 / counts[tokens[tokens >= count]]
        weighted.append((tokens, torch.cat([weights, shares])))
    return weighted
