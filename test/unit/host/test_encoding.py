"""Clips encoded in tiles: their weights, and which clips are one tile."""

import pytest
import torch
from helpers import one_thread, randn, rel  # noqa: F401

from ltx_neuron.host.tiles import encode_tiled, parts


@pytest.mark.parametrize("length", [1, 10, 11, 17, 18, 24, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_weights_of_tiles_add_up_to_one_and_each_tile_has_its_size(length, causal):
    tiles, total = parts(length, 10, 3, causal), torch.zeros(length)
    for tile in tiles:
        assert len(tile.weights) == tile.stop - tile.start
        total[tile.start : tile.stop] += tile.weights
    assert (total - 1).abs().max() < 1e-6
    assert tiles[0].start == 0 and tiles[-1].stop == length
    assert [tile.start for tile in tiles[1:]] == [7 * i - causal for i in range(1, len(tiles))]


# A clip, and the frames, rows and columns of its tiles
@pytest.mark.parametrize(
    ("clip", "tiles"),
    [
        ((73, 32, 64), [(73, 32, 64)]),
        ((97, 32, 64), [(73, 32, 64), (49, 32, 64)]),
        ((9, 32, 1024), [(9, 32, 768), (9, 32, 320)]),
    ],
)
def test_a_clip_of_eighty_frames_is_encoded_whole_and_a_longer_or_wider_one_in_tiles(clip, tiles):
    def encode(pixels):  # a mean over each latent's pixels
        spaces = torch.nn.functional.avg_pool3d(pixels, (1, 32, 32))
        return torch.cat([spaces[:, :, :1], spaces[:, :, 1:].unflatten(2, (-1, 8)).mean(3)], 2)

    pixels, shapes = randn(1, 3, *clip), []
    got = encode_tiled(lambda each: (shapes.append(tuple(tile.shape[2:])) or encode(tile) for tile in each), pixels)
    assert shapes == tiles and rel(got, encode(pixels)) < 1e-6
