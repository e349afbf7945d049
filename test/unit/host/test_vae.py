"""The video decoder and encoder on the host against ltx-core's, with the same weights."""

from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import one_thread, randn, rel  # noqa: F401
from torch import nn
from video_vaes import BOTH, OTHER_ORDER, assert_equal, bound, config_of, given_to, ltx_vae

from ltx_neuron import machine
from ltx_neuron.config.video import video_decoder_config, video_encoder_config
from ltx_neuron.host import dtypes, vae
from ltx_neuron.host.tiles import encode_tiled
from ltx_neuron.host.vae import HostVideoModel, host_decoder, host_encoder
from ltx_neuron.models.video_decoder import DepthToSpace

# Latent frames, rows and columns: one frame, odd sides.
SIZES = [(1, 1, 1), (2, 3, 1), (3, 3, 5)]
# Steps alone: a quick encoder that still sees over the borders of tiles.
STEPS = [[f"compress_{kind}_res", {"multiplier": 1}] for kind in ("space", "time", "all", "all")]


def host_like(side: str, model: nn.Module, dtype: torch.dtype = torch.float32, **changes) -> HostVideoModel:
    """The host's model with the weights of ltx-core's."""
    config, weights = config_of(side, **changes), model.state_dict()
    if side == "decoder":
        return host_decoder(video_decoder_config(config), weights, dtype)
    return host_encoder(video_encoder_config(config), weights, dtype)


@BOTH
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_outputs_equal_ltx_cores(side, size):
    model, given = ltx_vae(side), given_to(side, *size)
    ours = host_like(side, model)(given)
    assert ours.dtype == torch.float32
    assert_equal(ours, model(given), model)


@pytest.mark.parametrize(("side", "size"), [("decoder", (2, 3, 2)), ("encoder", (1, 2, 3)), ("encoder", (3, 2, 3))])
def test_another_order_of_blocks_is_followed(monkeypatch, side, size):
    if side == "encoder":
        monkeypatch.setattr(vae, "NUMBERS_IN_CACHE", 3000)  # uneven pieces
    model, given, changes = ltx_vae(side, **OTHER_ORDER[side]), given_to(side, *size), OTHER_ORDER[side]
    assert rel(host_like(side, model, **changes)(given), model(given)) < bound(model)


@BOTH
@pytest.mark.parametrize("size", SIZES[1:], ids=str)  # the first has too few numbers to say
def test_bfloat16_is_no_further_from_float32_than_ltx_cores_own(side, size):
    exact, half, given = ltx_vae(side), ltx_vae(side).bfloat16(), given_to(side, *size)
    exact.load_state_dict(half.state_dict())  # weights that bfloat16 holds
    expected, ours = exact(given), host_like(side, half, torch.bfloat16)(given)
    assert ours.dtype == torch.float32
    assert 0 < rel(ours, expected) <= rel(half(given.bfloat16()), expected)


@BOTH
def test_weights_are_shared_with_the_model_that_they_are_of(side):
    model = ltx_vae(side)
    ours, prefix = host_like(side, model).weights, "encoder." * (side == "encoder")
    given = {prefix + name: weight for name, weight in model.state_dict().items()}
    assert ours.keys() == given.keys()
    assert all(ours[name].data_ptr() == weight.data_ptr() for name, weight in given.items())


def test_bfloat16_weights_are_laid_out_anew_for_bfloat16_and_computed_with_in_float32():
    decoder, latent = ltx_vae("decoder").bfloat16(), randn(1, 128, 2, 2, 2).bfloat16()
    half, laid_out = decoder.state_dict(), host_like("decoder", decoder, torch.bfloat16).weights
    assert all(torch.equal(half[name], laid_out[name]) for name in laid_out)
    frames = host_like("decoder", decoder)(latent)
    assert frames.dtype == torch.float32 and rel(frames, decoder.float()(latent.float())) < bound(decoder)


# 14 latent frames are two tiles in time, 25 columns two in width, which overlap.
@pytest.mark.parametrize("size", [(14, 1, 1), (2, 1, 25)], ids=str)
def test_a_clip_in_tiles_is_blended_as_of_ltx_cores_encoder(size):
    encoder, clip = ltx_vae("encoder", encoder_blocks=STEPS), given_to("encoder", *size)
    models = host_like("encoder", encoder, encoder_blocks=STEPS), encoder
    ours, theirs = (encode_tiled(partial(map, each), clip) for each in models)
    assert rel(ours, theirs) < 1e-5
    assert rel(theirs, encoder(clip)) > 1e-4, "tiles do not show in this clip"


def test_a_bfloat16_run_decodes_in_it_where_the_cpu_multiplies_it(monkeypatch):
    for instructions, fast in ((["avx512f"], False), (["avx512_bf16"], True), (["amx_tile", "amx_bf16"], True)):
        monkeypatch.setattr(machine, "instructions", lambda names=instructions: names)
        assert dtypes.of_video("auto", torch.bfloat16) == (torch.bfloat16 if fast else torch.float32)
        assert dtypes.of_video("auto", torch.float32) == dtypes.of_video("float32", torch.bfloat16) == torch.float32
        assert dtypes.of_video("bfloat16", torch.float32) == torch.bfloat16


def resident() -> int:
    """Bytes of memory of this process that are no file's."""
    line = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    return int(line.split()[0]) * 1024


def free_between(in_use: list) -> int:
    """Take 131 MB in blocks of 64 KB and free all but every eighth: glibc keeps what lies between used blocks."""
    blocks = [torch.zeros(2**14) for _ in range(2000)]
    in_use += blocks[::8]
    del blocks
    return resident()


def test_memory_that_earlier_tiles_and_stages_freed_is_given_back_before_the_next(monkeypatch):
    decoder, latent = ltx_vae("decoder"), randn(1, 128, 1, 1, 1)
    before = free_between(in_use := [])
    host_like("decoder", decoder)(latent)
    assert resident() < before - 80e6
    freed, given_back, upsampled, last = [], [], vae.FUNCTIONS[DepthToSpace], vae.last

    def upsample_and_free(module, features):
        given_back.extend(each - resident() for each in freed[-1:])
        following = upsampled(module, features)
        freed.append(free_between(in_use))
        return following

    def at_last(module, features):
        given_back.append(freed[-1] - resident())
        return last(module, features)

    monkeypatch.setitem(vae.FUNCTIONS, DepthToSpace, upsample_and_free)
    monkeypatch.setattr(vae, "last", at_last)
    host_like("decoder", decoder)(latent)
    assert len(given_back) == 4 and min(given_back) > 80e6
