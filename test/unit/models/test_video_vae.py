"""The video decoder and encoder of the ranks against ltx-core's, and the tiles that they are given."""

import re
from types import SimpleNamespace

import pytest
import torch
from helpers import Convolutions, one_thread, randn, rel, run_program  # noqa: F401
from ltx_core.model.video_vae import SpatialTilingConfig, TemporalTilingConfig
from tiny.config import released_config
from torch import Tensor
from video_vaes import BOTH, OTHER_ORDER, assert_equal, bound, config_of, given_to, ltx_vae

from ltx_neuron.backends.tiles import RankEncoder
from ltx_neuron.config.profiles import PROFILES, resolve
from ltx_neuron.config.video import video_decoder_config, video_encoder_config
from ltx_neuron.errors import UserError
from ltx_neuron.host.tiles import TiledDecoder, TilingConfig, cut, tile_shape, tiling, tiling_for_ranks
from ltx_neuron.models.programs import Program, cut_graphs, encoder_program, tile_program, with_convolution

TILES = [(1, 1, 1), (3, 2, 3)]  # latents
GIVEN = {"decoder": "tile_latent", "encoder": "tile_pixels"}
MADE = {"decoder": "tile_pixels", "encoder": "tile_latent"}


def program_of(side: str, given: Tensor, **changes) -> Program:
    config, sizes = config_of(side, **changes), tuple(given.shape[2:])
    if side == "decoder":
        return tile_program(video_decoder_config(config), sizes, given.dtype)
    return encoder_program(video_encoder_config(config), sizes, given.dtype)


def computed(side: str, weights: dict, given: Tensor, form: str = "conv2d", **changes) -> dict[str, Tensor]:
    """All values of a run of our graphs. weights: by ltx-core's names."""
    program = with_convolution(program_of(side, given, **changes), form)
    weights = {"encoder." * (side == "encoder") + name: tensor for name, tensor in weights.items()}
    assert program.weights() == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    return run_program(program, weights, {GIVEN[side]: given})


@BOTH
@pytest.mark.parametrize("form", ["conv2d", "conv3d"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_outputs_equal_ltx_cores(side, tile, form):
    model, given = ltx_vae(side), given_to(side, *tile)
    with Convolutions() as convolutions:
        values = computed(side, model.state_dict(), given, form)
    assert convolutions.dimensions == {int(form[4])}
    assert_equal(values[MADE[side]], model(given), model)
    assert values["finite"].shape == (1,) and values["finite"].isfinite()
    given[0, 1, 0, -1, 0] = torch.nan
    assert not computed(side, model.state_dict(), given, form)["finite"].isfinite()


@pytest.mark.parametrize(
    ("side", "size", "shared"),
    [
        ("decoder", (2, 1, 2), {"residual_2", "residual_6"}),
        ("encoder", (1, 2, 1), {"residual_1"}),
        ("encoder", (3, 2, 1), {"residual_1"}),
    ],
)
def test_another_order_of_blocks_is_followed_and_a_stages_blocks_share_a_graph(side, size, shared):
    model, given, changes = ltx_vae(side, **OTHER_ORDER[side]), given_to(side, *size), OTHER_ORDER[side]
    values = computed(side, model.state_dict(), given, **changes)
    assert rel(values[MADE[side]], model(given)) < bound(model)
    assert cut_graphs(program_of(side, given, **changes).runs) == shared


@pytest.mark.parametrize(
    ("side", "size", "changes"), [("decoder", (2, 3, 2), {"decoder_base_channels": 16}), ("encoder", (2, 3, 1), {})]
)
def test_bfloat16_is_no_further_from_float32_than_ltx_cores_bfloat16(side, size, changes):
    model, given = ltx_vae(side, **changes).bfloat16(), given_to(side, *size).bfloat16()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    theirs, exact = model(given), model.float()(given.float())
    ours = computed(side, weights, given, **changes)[MADE[side]]
    assert ours.dtype == torch.bfloat16 and rel(ours.float(), exact) <= rel(theirs.float(), exact)


def test_the_released_models_are_eleven_graphs_for_twenty_four_calls():
    decoder = tile_program(video_decoder_config(released_config()), (16, 9, 13), torch.bfloat16)
    encoder = encoder_program(video_encoder_config(released_config()), (73, 512, 768), torch.bfloat16)
    assert decoder.fields["tile_pixels"].shape == (1, 3, 121, 288, 416)
    assert encoder.fields["tile_latent"].shape == (1, 128, 10, 16, 24)
    assert [(len(made.graphs), len(made.runs["main"])) for made in (decoder, encoder)] == [(11, 24)] * 2


@pytest.mark.parametrize(
    ("side", "changes", "named"),
    [
        ("decoder", {"causal_decoder": True}, "vae.causal_decoder is True"),
        ("decoder", {"decoder_blocks": [["res_x", {"num_layers": 1, "inject_noise": True}]]}, "inject_noise"),
        ("decoder", {"decoder_blocks": [["compress_all", {"residual": True}]]}, "'residual': True"),
        ("decoder", {"decoder_blocks": [["res_x_y", {"multiplier": 2}]]}, "'res_x_y'"),
        ("decoder", {"decoder_blocks": ["res_x"]}, "'res_x'"),
        ("decoder", {"patch_size": 2}, "upsample by (8, 16, 16)"),
        ("decoder", {"decoder_base_channels": 0}, "vae.base_channels is 0"),
        ("encoder", {"norm_layer": "group_norm"}, "vae.norm_layer is 'group_norm', encoding on the ranks"),
        ("encoder", {"encoder_blocks": [["compress_all", {}]]}, "vae.encoder_blocks has ['compress_all'"),
        ("encoder", {"encoder_blocks": [["res_x", 1]]}, "encoder_blocks downsample by (1, 4, 4)"),
    ],
)
def test_a_model_that_is_not_built_as_the_released_one_is_refused_by_what_differs(side, changes, named):
    with pytest.raises(UserError, match=re.escape(named)):
        program_of(side, given_to(side, 1, 1, 1), **changes)


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


@pytest.mark.parametrize("at_once", [1, 4])
def test_tiles_decoded_together_make_the_frames_of_ltx_cores_tiled_decode(at_once):
    # Borders in rows, columns and time; the last tiles are smaller.
    config = TilingConfig(SpatialTilingConfig(64, 32), TemporalTilingConfig(24, 8))
    latent, decoder, counts = randn(1, 128, 6, 2, 4), ltx_vae("decoder", decoder_base_channels=2), []

    def decode(latents: list[Tensor]) -> list[Tensor]:
        counts.append(len(latents))
        assert len({latent.shape for latent in latents}) == 1
        return [decoder(latent) for latent in latents]

    chunks = TiledDecoder(decode, at_once).tiled_decode(latent, config)
    first, tiles = next(chunks), decoder._prepare_tiles(latent, config)
    assert sum(counts) < len(tiles)  # frames come before the last tiles are decoded
    chunks, wanted = [first, *chunks], list(decoder.tiled_decode(latent, config))
    assert len(chunks) == len(wanted) > 1
    assert all(torch.equal(got, want) for got, want in zip(chunks, wanted, strict=True))
    assert sum(counts) == len(tiles) and max(counts) == at_once


def test_tiles_of_one_shape_are_encoded_together_and_keep_their_order():
    calls, tiles = [], [randn(1, 3, 9, 32, columns, seed=columns) for columns in (64, 32, 64)]

    def run(program, output, parts):
        calls.append((program, len(parts)))
        return [part["tile_pixels"].mean((2, 3, 4)) for part in parts]

    latents = RankEncoder.__call__(SimpleNamespace(_run=run), tiles)
    assert calls == [("encoder-9x32x64", 2), ("encoder-9x32x32", 1)]
    assert all(torch.equal(got, tile.mean((2, 3, 4))) for got, tile in zip(latents, tiles, strict=True))
