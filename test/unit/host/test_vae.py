"""The video decoder on the host against ltx-core's, with the same weights."""

from pathlib import Path

import pytest
import torch
from helpers import fp32_bound, generator, one_thread, randn, randomised, rel  # noqa: F401
from tiny import TinySizes
from tiny.config import merge, tiny_config
from torch import nn

from ltx_neuron.config.video import video_decoder_config
from ltx_neuron.host import vae
from ltx_neuron.host.arithmetic import FLOAT32, Arithmetic, arithmetic, bfloat16_is_faster
from ltx_neuron.host.vae import HostVideoModel, host_decoder
from ltx_neuron.models.video_decoder import DepthToSpace

LATENTS = [(1, 1, 1), (2, 3, 1), (3, 2, 5)]
BFLOAT16 = Arithmetic(torch.bfloat16)
# Not the released order, nor its divisors of the channels.
OTHER = {
    "decoder_blocks": [
        ["res_x", {"num_layers": 2}],
        ["compress_all", {"multiplier": 2}],
        ["compress_space", {"multiplier": 1}],
        ["compress_all", {"multiplier": 4}],
        ["res_x", {"num_layers": 1}],
        ["compress_all", {"multiplier": 2}],
    ],
    "patch_size": 2,
    "decoder_base_channels": 8,
}


def config_of(**changes) -> dict:
    return merge(tiny_config(TinySizes()), {"vae": changes})


def ltx_decoder(**changes) -> nn.Module:
    """ltx-core's decoder of the tiny config with changes, with random weights."""
    from ltx_core.model.video_vae import VideoDecoderConfigurator

    return randomised(VideoDecoderConfigurator.from_config(config_of(**changes)))


def host_like(decoder: nn.Module, arithmetic: Arithmetic = FLOAT32, **changes) -> HostVideoModel:
    """The host's decoder with the weights of ltx-core's."""
    return host_decoder(video_decoder_config(config_of(**changes)), decoder.state_dict(), arithmetic)


def rounding(decoder: nn.Module) -> float:
    """Bound of the decoder's frames: its convolutions follow one another. A frame, pixel or channel in the wrong
    place leaves 0.1."""
    convolutions = [module for module in decoder.modules() if isinstance(module, nn.Conv3d)]
    return fp32_bound(*(27 * c.in_channels for c in convolutions))


@pytest.mark.parametrize("size", LATENTS, ids=str)
def test_frames_equal_ltx_cores(size):
    decoder = ltx_decoder()
    latent = randn(1, 128, *size)
    expected = decoder(latent)
    assert expected.shape == (1, 3, 8 * size[0] - 7, 32 * size[1], 32 * size[2])
    assert rel(host_like(decoder)(latent), expected) < rounding(decoder)


def test_another_order_of_blocks_is_followed():
    decoder = ltx_decoder(**OTHER)
    latent = randn(1, 128, 2, 3, 2)
    got = host_like(decoder, **OTHER)(latent)
    assert rel(got, decoder(latent)) < rounding(decoder)


def test_bfloat16_weights_and_latents_are_computed_with_in_float32():
    decoder, latent = ltx_decoder().bfloat16(), randn(1, 128, 2, 2, 2).bfloat16()
    frames = host_like(decoder)(latent)
    assert frames.dtype == torch.float32
    assert rel(frames, decoder.float()(latent.float())) < rounding(decoder)


@pytest.mark.parametrize("size", LATENTS[1:], ids=str)  # the first has too few numbers to say
def test_bfloat16_is_no_further_from_float32_than_ltx_cores_own(size):
    exact, decoder = ltx_decoder(), ltx_decoder().bfloat16()
    exact.load_state_dict(decoder.state_dict())  # weights that bfloat16 holds
    latent = randn(1, 128, *size)
    expected = exact(latent)
    theirs = rel(decoder(latent.bfloat16()), expected)
    frames = host_like(decoder, BFLOAT16)(latent)
    assert frames.dtype == torch.float32
    assert 0 < rel(frames, expected) <= theirs


def test_weights_are_shared_with_the_decoder_and_laid_out_anew_for_bfloat16():
    decoder = ltx_decoder()
    weights, ours = decoder.state_dict(), host_like(decoder).weights
    assert weights.keys() == ours.keys()
    assert all(ours[name].data_ptr() == tensor.data_ptr() for name, tensor in weights.items())
    half = ltx_decoder().bfloat16().state_dict()
    laid_out = host_decoder(video_decoder_config(config_of()), half, BFLOAT16).weights
    assert all(torch.equal(half[name], laid_out[name]) for name in laid_out)


def test_bfloat16_is_taken_for_a_run_in_it_where_this_cpu_is_faster_in_it():
    bfloat16 = Arithmetic(torch.bfloat16)
    assert arithmetic("auto", torch.bfloat16) == (bfloat16 if bfloat16_is_faster() else FLOAT32)
    assert arithmetic("auto", torch.float32) == FLOAT32
    assert arithmetic("float32", torch.bfloat16) == FLOAT32
    assert arithmetic("bfloat16", torch.float32) == bfloat16


def resident() -> int:
    """Bytes of memory of this process that are no file's."""
    line = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    return int(line.split()[0]) * 1024


def free_between(in_use: list) -> None:
    """Take 131 MB in blocks of 64 KB and free all but every eighth: glibc keeps what lies between used blocks."""
    blocks = [torch.zeros(2**14) for _ in range(2000)]
    in_use += blocks[::8]


def test_memory_that_earlier_tiles_and_stages_freed_is_given_back_before_the_next(monkeypatch):
    decoder, latent = ltx_decoder(), randn(1, 128, 1, 1, 1)
    free_between(in_use := [])
    before = resident()
    host_like(decoder)(latent)
    assert resident() < before - 80e6
    in_use, freed, given_back = [], [], []
    upsampled, last = vae.FUNCTIONS[DepthToSpace], vae.last

    def upsample_and_free(module, features):
        if freed:
            given_back.append(freed[-1] - resident())
        following = upsampled(module, features)
        free_between(in_use)
        freed.append(resident())
        return following

    def at_last(module, features):
        given_back.append(freed[-1] - resident())
        return last(module, features)

    monkeypatch.setitem(vae.FUNCTIONS, DepthToSpace, upsample_and_free)
    monkeypatch.setattr(vae, "last", at_last)
    host_like(decoder)(latent)
    assert len(given_back) == 4 and min(given_back) > 80e6
