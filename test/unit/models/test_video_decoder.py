"""The video decoder of the ranks against ltx-core's, and the tiles that it is given."""

import pytest
import torch
from helpers import (
    Convolutions,
    convolutions_bound,
    one_thread,  # noqa: F401
    randn,
    randomised,
    rel,
    run_program,
)
from ltx_core.model.video_vae import SpatialTilingConfig, TemporalTilingConfig
from tiny import TinySizes
from tiny.config import merge, released_config, tiny_config
from torch import Tensor, nn

from ltx_neuron.config.profiles import PROFILES, resolve
from ltx_neuron.config.video import video_decoder_config
from ltx_neuron.errors import UserError
from ltx_neuron.host.tiles import TiledDecoder, TilingConfig, cut, tile_shape, tiling, tiling_for_ranks
from ltx_neuron.models.programs import cut_graphs, tile_program, with_convolution

TILES = [(1, 1, 1), (3, 2, 3)]
# Not the released order, nor its numbers of blocks; two groups of blocks without an upsampling
# between them.
OTHER_ORDER = [
    ["res_x", 2],
    ["compress_space", {"multiplier": 1}],
    ["compress_all", {"multiplier": 4}],
    ["res_x", {"num_layers": 1}],
    ["res_x", {"num_layers": 3}],
    ["compress_time", {}],
    ["compress_all", {"multiplier": 2}],
]


def config_of(**changes) -> dict:
    return merge(tiny_config(TinySizes()), {"vae": changes})


def ltx_decoder(content: dict) -> nn.Module:
    from ltx_core.model.video_vae import VideoDecoderConfigurator

    return randomised(VideoDecoderConfigurator.from_config(content))


def decode(content: dict, weights: dict, latent: Tensor, form: str = "conv2d") -> dict[str, Tensor]:
    """All values of a run of our graphs."""
    program = tile_program(video_decoder_config(content), latent.shape[2:], latent.dtype)
    program = with_convolution(program, form)
    assert program.weights().keys() == weights.keys()
    return run_program(program, weights, {"tile_latent": latent})


@pytest.mark.parametrize("form", ["conv2d", "conv3d"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_pixels_equal_ltx_cores(tile, form):
    decoder, latent = ltx_decoder(content := config_of()), randn(1, 128, *tile)
    with Convolutions() as convolutions:
        values = decode(content, decoder.state_dict(), latent, form)
    wanted = decoder(latent)
    assert convolutions.dimensions == {int(form[4])}
    assert values["tile_pixels"].shape == wanted.shape
    assert rel(values["tile_pixels"], wanted) < min(convolutions_bound(decoder), 1e-5)
    assert values["finite"].shape == (1,) and values["finite"].isfinite()
    latent[0, 5, 0, -1, 0] = torch.nan
    assert not decode(content, decoder.state_dict(), latent, form)["finite"].isfinite()


def test_another_order_of_blocks_is_followed_and_a_stages_blocks_share_a_graph():
    content = config_of(decoder_blocks=OTHER_ORDER, patch_size=4, decoder_base_channels=4)
    decoder, latent = ltx_decoder(content), randn(1, 128, 2, 1, 2)
    values = decode(content, decoder.state_dict(), latent)
    assert rel(values["tile_pixels"], decoder(latent)) < convolutions_bound(decoder)
    program = tile_program(video_decoder_config(content), (2, 1, 2), torch.float32)
    assert cut_graphs(program.runs) == {"residual_2", "residual_6"}


def test_bfloat16_is_no_further_from_float32_than_ltx_cores_bfloat16():
    content = config_of(decoder_base_channels=16)
    decoder, latent = ltx_decoder(content).bfloat16(), randn(1, 128, 2, 3, 2).bfloat16()
    weights = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    theirs = decoder(latent)
    exact = decoder.float()(latent.float())
    ours = decode(content, weights, latent)["tile_pixels"]
    assert ours.dtype == torch.bfloat16
    assert rel(ours.float(), exact) <= rel(theirs.float(), exact)


def test_the_released_decoder_is_eleven_graphs_for_twenty_four_calls():
    program = tile_program(video_decoder_config(released_config()), (16, 9, 13), torch.bfloat16)
    assert len(program.graphs) == 11 and len(program.runs["main"]) == 24
    assert program.fields["tile_pixels"].shape == (1, 3, 121, 288, 416)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"causal_decoder": True}, "vae.causal_decoder is True"),
        ({"norm_layer": "group_norm"}, "vae.norm_layer is 'group_norm'"),
        ({"decoder_blocks": [["res_x", {"num_layers": 1, "inject_noise": True}]]}, "inject_noise"),
        ({"decoder_blocks": [["compress_all", {"residual": True}]]}, "'residual': True"),
        ({"decoder_blocks": [["res_x_y", {"multiplier": 2}]]}, "'res_x_y'"),
        ({"decoder_blocks": ["res_x"]}, "'res_x'"),
        ({"patch_size": 2}, "upsample by (8, 16, 16)"),
        ({"decoder_base_channels": 0}, "vae.base_channels is 0"),
    ],
)
def test_a_decoder_that_is_not_built_as_the_released_one_is_refused_by_what_differs(changes, named):
    with pytest.raises(UserError) as error:
        video_decoder_config(config_of(**changes))
    assert named in str(error.value)


# --- tiles ----------------------------------------------------------------------------------------


def tiles_of(profile: str, clip: tuple, *settings: str):
    return [tile_shape(tile) for tile in cut(clip, tiling_for_ranks(resolve(profile, settings), clip, 4))]


def test_on_trainium_a_clip_of_the_default_size_is_one_tile_a_rank_and_others_are_small_and_of_few_shapes():
    assert tiles_of("trn2.3xlarge", (16, 16, 24)) == [(16, 9, 13)] * 4
    assert tiles_of("trn2.3xlarge", (16, 24, 16)) == [(16, 13, 9)] * 4
    limit = PROFILES["trn2.3xlarge"].vae_tile_latents
    for clip in ((4, 12, 16), (31, 16, 24), (16, 24, 40), (1, 2, 2)):
        tiles = tiles_of("trn2.3xlarge", clip)
        assert all(f * h * w <= limit for f, h, w in tiles) and len(set(tiles)) <= 4, clip


def test_elsewhere_tiles_are_ltx_cores_or_those_of_1_0_0_unless_the_profile_says_otherwise():
    assert tiles_of("cpu", (16, 32, 48))[0] == (10, 16, 24)
    assert tiles_of("cpu", (1, 3, 3), "vae_tile=64", "vae_overlap=32") == [(1, 2, 2)] * 4
    plain, own = resolve("cpu"), resolve("cpu", ("vae_tile=256",))
    assert tiling(plain, compat_1_0_0=True) == TilingConfig.default() != tiling(plain)
    assert tiling(own, compat_1_0_0=True) == tiling(own)


@pytest.mark.parametrize("setting", ["vae_tile=65", "vae_overlap=768", "vae_tile_frames=8", "vae_overlap_frames=4"])
def test_tiles_that_ltx_core_would_not_take_are_refused(setting):
    with pytest.raises(UserError, match=f"{setting.partition('=')[0]} is a multiple of"):
        resolve("cpu", (setting,))


class Seen:
    """Decodes tiles with ltx-core's decoder, and notes how many at a time and of which shape."""

    def __init__(self):
        self.decoder, self.calls = ltx_decoder(config_of(decoder_base_channels=2)), []

    def __call__(self, latents: list[Tensor]) -> list[Tensor]:
        (shape,) = {tuple(latent.shape[2:]) for latent in latents}
        self.calls.append((len(latents), shape))
        return [self.decoder(latent) for latent in latents]


@pytest.mark.parametrize("at_once", [1, 4])
def test_tiles_decoded_together_make_the_frames_of_ltx_cores_tiled_decode(at_once):
    # Borders in rows, columns and time; the last tiles are smaller.
    config = TilingConfig(SpatialTilingConfig(64, 32), TemporalTilingConfig(24, 8))
    latent, seen = randn(1, 128, 6, 2, 4), Seen()
    chunks = TiledDecoder(seen, at_once).tiled_decode(latent, config)
    first = next(chunks)
    tiles = seen.decoder._prepare_tiles(latent, config)
    assert sum(count for count, _ in seen.calls) < len(tiles)  # frames come before the last tiles are decoded
    chunks, wanted = [first, *chunks], list(seen.decoder.tiled_decode(latent, config))
    assert len(chunks) == len(wanted) > 1
    assert all(torch.equal(got, want) for got, want in zip(chunks, wanted, strict=True))
    assert sum(count for count, _ in seen.calls) == len(tiles)
    assert max(count for count, _ in seen.calls) == at_once
