"""ltx-core's video encoder and decoder with random weights, by side, and clips for them."""

import pytest
from helpers import fp32_bound, randn, randomised, rel
from tiny import TinySizes
from tiny.config import merge, tiny_config
from torch import Tensor, nn

BOTH = pytest.mark.parametrize("side", ["decoder", "encoder"])
# Not the released orders, nor their numbers of blocks and factors; two groups of blocks without an upsampling between
# them; groups of 1, 2, 4 and 8 positions that are averaged.
_DECODER = [["res_x", 2], ["compress_space", {"multiplier": 1}], ["compress_all", {"multiplier": 4}]]
_DECODER += [["res_x", {"num_layers": 1}], ["res_x", {"num_layers": 3}], ["compress_time", {}]]
_ENCODER = [["compress_space_res", {"multiplier": 4}], ["res_x", {"num_layers": 2}]]
_ENCODER += [["compress_all_res", {"multiplier": 1}], ["compress_all_res", {"multiplier": 2}]]
OTHER_ORDER = {
    "decoder": {"decoder_blocks": [*_DECODER, ["compress_all", {"multiplier": 2}]]},
    "encoder": {"encoder_blocks": [*_ENCODER, ["compress_time_res", {"multiplier": 1}]]},
}
OTHER_ORDER["decoder"] |= {"patch_size": 4, "decoder_base_channels": 4}


def config_of(side: str, **changes) -> dict:
    """The tiny config with changes; an encoder's has few channels."""
    few = {"latent_channels": 32} if side == "encoder" else {}
    return merge(tiny_config(TinySizes()), {"vae": few | changes})


def ltx_vae(side: str, **changes) -> nn.Module:
    from ltx_core.model.video_vae import VideoDecoderConfigurator, VideoEncoderConfigurator

    configurator = VideoDecoderConfigurator if side == "decoder" else VideoEncoderConfigurator
    return randomised(configurator.from_config(config_of(side, **changes)))


def given_to(side: str, frames: int, rows: int, columns: int) -> Tensor:
    """The latent, or the pixels, which bfloat16 holds, of a clip of so many latents."""
    if side == "decoder":
        return randn(1, 128, frames, rows, columns)
    return randn(1, 3, 8 * frames - 7, 32 * rows, 32 * columns).clip(-1, 1).bfloat16().float()


def bound(model: nn.Module) -> float:
    """Of outputs in float32: convolutions follow one another. A frame, pixel or channel in the wrong place leaves
    0.1."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv3d)]
    return min(1e-5, fp32_bound(*(27 * c.in_channels for c in convolutions)))


def assert_equal(ours: Tensor, theirs: Tensor, model: nn.Module) -> None:
    """Also at the ends: the first frame, which causal convolutions repeat, and borders at zeros."""
    assert ours.shape == theirs.shape and rel(ours, theirs) < bound(model)
    for axis in (2, 3, 4):
        for end in (0, -1):
            assert rel(ours.select(axis, end), theirs.select(axis, end)) < 1e-5, (axis, end)
