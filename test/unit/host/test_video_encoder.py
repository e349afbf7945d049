"""The video encoder of the ranks against ltx-core's, and the tiles that it is given."""

import pytest
import torch
from helpers import (
    Convolutions,
    convolutions_bound,
    one_thread,  # noqa: F401
    randn,
    rel,
    run_program,
)
from tiny import TinySizes
from tiny.config import merge, released_config, tiny_config
from torch import Tensor
from video_encoders import CHANNELS, OTHER_ORDER, ltx_encoder, pixels

from ltx_neuron.backends.tiles import RankEncoder
from ltx_neuron.config.video import video_encoder_config
from ltx_neuron.errors import UserError
from ltx_neuron.models.programs import cut_graphs, encoder_program, with_convolution

TILES = [(1, 1, 1), (3, 2, 3)]  # latents


def config_of(**changes):
    vae = {"latent_channels": CHANNELS} | changes
    return video_encoder_config(merge(tiny_config(TinySizes()), {"vae": vae}))


def encode(weights: dict, clip: Tensor, form: str = "conv2d", **changes) -> dict[str, Tensor]:
    """All values of a run of our graphs. weights: by ltx-core's names."""
    program = encoder_program(config_of(**changes), tuple(clip.shape[2:]), clip.dtype)
    program = with_convolution(program, form)
    weights = {f"encoder.{name}": tensor for name, tensor in weights.items()}
    assert program.weights() == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    return run_program(program, weights, {"tile_pixels": clip})


@pytest.mark.parametrize("form", ["conv2d", "conv3d"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_latents_equal_ltx_cores(tile, form):
    encoder, clip = ltx_encoder(), pixels(*tile)
    with Convolutions() as convolutions:
        values = encode(encoder.state_dict(), clip, form)
    expected = encoder(clip)
    assert convolutions.dimensions == {int(form[4])}
    assert values["tile_latent"].shape == expected.shape == (1, CHANNELS, *tile)
    assert rel(values["tile_latent"], expected) < min(convolutions_bound(encoder), 1e-5)
    for axis in (2, 3, 4):  # the first frame, which convolutions repeat, and borders at zeros
        for end in (0, -1):
            ours, theirs = (x.select(axis, end) for x in (values["tile_latent"], expected))
            assert rel(ours, theirs) < 1e-5, (axis, end)
    assert values["finite"].shape == (1,) and values["finite"].isfinite()
    clip[0, 1, 0, 5, -20] = torch.nan
    assert not encode(encoder.state_dict(), clip, form)["finite"].isfinite()


@pytest.mark.parametrize("frames", [1, 3])
def test_another_order_of_blocks_is_followed_and_a_stages_blocks_share_a_graph(frames):
    blocks = {"encoder_blocks": OTHER_ORDER}
    encoder, clip = ltx_encoder(**blocks), pixels(frames, 2, 1)
    values = encode(encoder.state_dict(), clip, **blocks)
    assert rel(values["tile_latent"], encoder(clip)) < convolutions_bound(encoder)
    program = encoder_program(config_of(**blocks), (1, 32, 32), torch.float32)
    assert cut_graphs(program.runs) == {"residual_1"}


def test_bfloat16_is_no_further_from_float32_than_ltx_cores_bfloat16():
    encoder, clip = ltx_encoder().bfloat16(), pixels(2, 3, 1)
    weights = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    theirs = encoder(clip.bfloat16())
    exact = encoder.float()(clip)
    ours = encode(weights, clip.bfloat16())["tile_latent"]
    assert ours.dtype == torch.bfloat16
    assert rel(ours.float(), exact) <= rel(theirs.float(), exact)


def test_the_released_encoder_is_eleven_graphs_for_twenty_four_calls():
    config = video_encoder_config(released_config())
    program = encoder_program(config, (73, 512, 768), torch.bfloat16)
    assert (len(program.graphs), len(program.runs["main"])) == (11, 24)
    assert program.fields["tile_latent"].shape == (1, 128, 10, 16, 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_layer": "group_norm"}, "vae.norm_layer is 'group_norm', encoding on the ranks"),
        ({"encoder_blocks": [["compress_all", {}]]}, r"vae.encoder_blocks has \['compress_all'"),
        ({"encoder_blocks": [["res_x", 1]]}, r"encoder_blocks downsample by \(1, 4, 4\)"),
        ({"patch_size": 0}, "vae.patch_size is 0, wanted a whole number above 0"),
    ],
)
def test_an_encoder_that_the_ranks_cannot_run_is_refused_by_name(changes, message):
    with pytest.raises(UserError, match=message):
        config_of(**changes)


class Seen(RankEncoder):
    """Encodes tiles with a function; notes how many it gets together, and of which program."""

    def __init__(self):
        self.calls = []

    def _run(self, program, output, parts, sequence="main", **constants):
        self.calls.append((program, len(parts)))
        return [part["tile_pixels"].mean((2, 3, 4)) for part in parts]


def test_tiles_of_one_shape_are_encoded_together_and_keep_their_order():
    tiles = [randn(1, 3, 9, 32, columns, seed=columns) for columns in (64, 32, 64)]
    seen = Seen()
    latents = seen(tiles)
    assert seen.calls == [("encoder-9x32x64", 2), ("encoder-9x32x32", 1)]
    assert all(torch.equal(got, tile.mean((2, 3, 4))) for got, tile in zip(latents, tiles, strict=True))
