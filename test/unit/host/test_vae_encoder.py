"""The video encoder on the host against ltx-core's, with the same weights."""

from functools import partial

import pytest
import torch
from helpers import one_thread, randn, rel  # noqa: F401
from torch import nn
from video_encoders import CHANNELS, OTHER_ORDER, config_of, ltx_encoder, pixels

from ltx_neuron.config.video import video_encoder_config
from ltx_neuron.host.arithmetic import FLOAT32, Arithmetic
from ltx_neuron.host.encoding import encode_tiled
from ltx_neuron.host.vae import HostVideoModel, host_encoder

BOUND = 1e-5  # from ltx-core in float32; a frame, pixel or channel in the wrong place leaves 0.1
BFLOAT16 = Arithmetic(torch.bfloat16)
# Latent frames, rows and columns: one frame, 9 frames, odd sides.
SIZES = [(1, 1, 1), (2, 3, 1), (3, 3, 5)]
# Steps alone: a quick encoder that still sees over the borders of tiles.
STEPS = [
    ["compress_space_res", {"multiplier": 1}],
    ["compress_time_res", {"multiplier": 1}],
    ["compress_all_res", {"multiplier": 1}],
    ["compress_all_res", {"multiplier": 1}],
]


def host_like(encoder: nn.Module, arithmetic: Arithmetic = FLOAT32, **changes) -> HostVideoModel:
    """The host's encoder with the weights of ltx-core's."""
    config = video_encoder_config(config_of(**changes))
    return host_encoder(config, encoder.state_dict(), arithmetic)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_latents_equal_ltx_cores(size):
    encoder, clip = ltx_encoder(), pixels(*size)
    theirs, ours = encoder(clip), host_like(encoder)(clip)
    assert ours.shape == theirs.shape == (1, CHANNELS, *size) and ours.dtype == torch.float32
    assert rel(ours, theirs) < BOUND
    for axis in (2, 3, 4):  # the first frame, which causal convolutions repeat, and borders at zeros
        for end in (0, -1):
            assert rel(ours.select(axis, end), theirs.select(axis, end)) < BOUND, (axis, end)


@pytest.mark.parametrize("frames", [1, 3])
def test_another_order_of_blocks_is_followed(monkeypatch, frames):
    monkeypatch.setattr("ltx_neuron.host.vae.NUMBERS_IN_CACHE", 3000)  # uneven pieces
    encoder = ltx_encoder(encoder_blocks=OTHER_ORDER)
    clip = pixels(frames, 2, 3)
    ours = host_like(encoder, encoder_blocks=OTHER_ORDER)
    assert rel(ours(clip), encoder(clip)) < BOUND


# 14 latent frames are two tiles in time, 25 columns two in width, which overlap.
@pytest.mark.parametrize("size", [(14, 1, 1), (2, 1, 25)], ids=str)
def test_a_clip_in_tiles_is_blended_as_of_ltx_cores_encoder(size):
    encoder, clip = ltx_encoder(encoder_blocks=STEPS), pixels(*size)
    ours, theirs = (
        encode_tiled(partial(map, each), clip) for each in (host_like(encoder, encoder_blocks=STEPS), encoder)
    )
    assert rel(ours, theirs) < BOUND
    whole = encoder(clip)
    assert rel(theirs, whole) > 10 * BOUND, "tiles do not show in this clip"


@pytest.mark.parametrize("size", SIZES[1:], ids=str)  # the first has too few numbers to say
def test_bfloat16_is_no_further_from_float32_than_ltx_cores_own(size):
    half, exact, clip = ltx_encoder().bfloat16(), ltx_encoder(), pixels(*size)
    exact.load_state_dict(half.state_dict())
    expected = exact(clip)
    theirs = rel(half(clip.bfloat16()), expected)
    latents = host_like(half, BFLOAT16)(clip.bfloat16())
    assert latents.dtype == torch.float32
    assert 0 < rel(latents, expected) <= theirs
