"""--tile: how a canvas is cut, which tokens a tile sees, and how predictions are joined."""

import math
from pathlib import Path

import pytest
import torch
from jobs import make_job, replace

from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import ReferenceVideo
from ltx_neuron.sampling.tiles import Appended, blend_weights, cut, tiles
from ltx_neuron.weights.lora import Lora

ROUNDING = 1e-6  # of sums of up to nine fp32 products of unit size
CANVAS, HALF = (2, 5, 6), 2


def test_a_canvas_is_cut_as_upstream_cuts_it():
    # As ltx-pipelines 1.4 prints it: rows and columns, and latent cells that neighbours share
    for pixels, tile, counts, shared in (
        ((1088, 1920), (576, 1024), (2, 2), (2, 4)),
        ((2176, 3840), (576, 1024), (6, 6), (8, 14)),
        ((512, 768), (1024, 1536), (1, 1), (0, 0)),
    ):
        sides = [cut(side // 32, size // 32) for side, size in zip(pixels, tile, strict=True)]
        assert (tuple(map(len, sides)), tuple(side[0].right for side in sides)) == (counts, shared)


@pytest.mark.parametrize(("length", "size"), [(5, 3), (33, 8), (120, 32), (7, 7), (8, 7)])
def test_the_weights_of_a_side_add_up_to_one_and_no_cell_is_in_three_tiles(length, size):
    total, tiles_of_cell = torch.zeros(length), torch.zeros(length)
    for tile in cut(length, size):
        assert tile.end - tile.start <= size
        total[tile.start : tile.end] += tile.weights()
        tiles_of_cell[tile.start : tile.end] += 1
    assert torch.allclose(total, torch.ones(length), atol=ROUNDING)
    assert tiles_of_cell.min() >= 1 and tiles_of_cell.max() <= 2


def test_a_tile_sees_its_own_cells_and_the_appended_ones_that_touch_them():
    first, *_, last = tiles(*CANVAS[1:], 96, 96)
    appended = [Appended((1, *CANVAS[1:])), Appended((1, 3, 3), HALF)]
    own, tokens = math.prod(CANVAS), first.tokens(CANVAS, appended)
    rows, columns = (tokens[tokens < own] % 30) // 6, tokens[tokens < own] % 6
    assert (rows.max(), columns.max(), (tokens < own).sum()) == (2, 2, 2 * 9)
    held = tokens[(tokens >= own) & (tokens < own + 30)] - own
    assert torch.equal(held, tokens[:9])  # the keyframe's cells are the first frame's
    assert (tokens[tokens >= own + 30] - own - 30).tolist() == [0, 1, 3, 4]
    assert (last.tokens(CANVAS, appended)[-4:] - own - 30).tolist() == [4, 5, 7, 8]


def test_joined_predictions_are_each_cells_mean_by_the_weights_of_its_tiles():
    own, grid = math.prod(CANVAS), tiles(*CANVAS[1:], 96, 96)
    weighted = blend_weights(grid, CANVAS, [Appended((1, 3, 3), HALF)])
    shares, joined = torch.zeros(2, own + 9, len(grid))  # of predictions that name their tile
    for number, (tile, (tokens, weights)) in enumerate(zip(grid, weighted, strict=True)):
        joined[tokens, number] += weights
        for token in tokens.tolist():
            row, column = token % 30 // 6 - tile.rows.start, token % 6 - tile.columns.start
            canvas = token < own  # an appended token has an equal share in each tile that sees it
            shares[token, number] = tile.rows.weights()[row] * tile.columns.weights()[column] if canvas else 1
    assert torch.allclose(shares[:own].sum(1), torch.ones(own), atol=ROUNDING)
    assert torch.allclose(joined, shares / shares.sum(1, keepdim=True), atol=ROUNDING)


def test_each_tile_shape_of_a_stage_has_graphs_and_a_canvas_of_one_tile_is_the_job_without_tiles():
    reference, loras = ReferenceVideo("guide.mp4", 1.0, 17), (Lora(Path("ic.safetensors")),)
    inputs = dict(references=(reference,), stage_1_loras=loras, stage_2_ic_lora=True, tile=True)
    tiled = make_job("", Size(128, 256, 17, two_stage=True), **inputs, tile_height=64, tile_width=96)
    first, second = tiled.stages
    assert [len(tiled.stage_tiles(stage)) for stage in tiled.stages] == [2, 9]
    assert {bucket.video_tokens for bucket in tiled.stage_buckets(second)} == {3 * 6 * 2}
    scaled = replace(tiled, references=(replace(reference, space_scale=2),))
    assert len({bucket.video_tokens for bucket in scaled.stage_buckets(second)}) > 1
    assert set(tiled.buckets) == {*tiled.stage_buckets(first), *tiled.stage_buckets(second)}
    assert second.loras == first.loras  # one weight set
    whole = replace(tiled, tile_height=None, tile_width=None)
    assert not any(map(whole.stage_tiles, whole.stages)) and whole.buckets == replace(whole, tile=False).buckets
