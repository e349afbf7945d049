"""The configuration of the video decoder on the ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ltx_neuron.config.common import HOST_DECODES, ModelConfig, check_numbers, check_values
from ltx_neuron.errors import UserError


@dataclass(frozen=True)
class Upsampling:
    """Depth-to-space upsampling in the video decoder: a convolution whose channels become
    positions.

    stride      factors of frames, rows and columns
    multiplier  the channels are divided by it
    """

    stride: tuple[int, int, int]
    multiplier: int


@dataclass(frozen=True)
class VideoDecoderConfig(ModelConfig):
    """The video decoder (vae section of the metadata).

    up_blocks  in execution order: an Upsampling, or the number of residual blocks of a stage
    """

    latent_channels: int
    base_channels: int
    out_channels: int
    patch_size: int
    up_blocks: tuple[int | Upsampling, ...]


# The released decoder's values. For absent values ltx-core's defaults count, which differ.
_REQUIRED = {
    "dims": 3,
    "norm_layer": "pixel_norm",
    "causal_decoder": False,
    "timestep_conditioning": False,
    "spatial_padding_mode": "zeros",
}
_DEFAULTS = {"dims": 3, "norm_layer": "pixel_norm", "causal_decoder": False}
_STRIDES = {"compress_time": (2, 1, 1), "compress_space": (1, 2, 2), "compress_all": (2, 2, 2)}


def video_decoder_config(metadata: Mapping[str, Any]) -> VideoDecoderConfig:
    """Parse the checkpoint's `config` metadata. Raises UserError for another structure than the
    released decoder's; the host may still be able to decode."""
    values = metadata.get("vae")
    if not isinstance(values, dict):
        raise UserError("the checkpoint's config metadata has no 'vae' section")
    check_values("vae", _DEFAULTS | values, _REQUIRED, "decoding on the ranks", HOST_DECODES)
    config = VideoDecoderConfig(
        latent_channels=values.get("latent_channels", 128),
        base_channels=values.get("decoder_base_channels", 128),
        out_channels=values.get("out_channels", 3),
        patch_size=values.get("patch_size", 4),
        up_blocks=tuple(map(_up_block, reversed(values.get("decoder_blocks", [])))),
    )
    check_numbers(config, "checkpoint config: vae.")
    strides = [block.stride for block in config.up_blocks if isinstance(block, Upsampling)]
    factors = [math.prod(axis) for axis in zip((1, 1, 1), *strides, strict=True)]
    got = (factors[0], *(factor * config.patch_size for factor in factors[1:]))
    if got != (8, 32, 32):
        raise UserError(
            f"checkpoint config: vae.decoder_blocks upsample by {got} in time, height and"
            f" width, wanted (8, 32, 32){HOST_DECODES}"
        )
    return config


def _up_block(described: Any) -> int | Upsampling:
    """Parse an entry of the config's decoder_blocks: [name, number or settings]."""
    try:
        name, settings = described
        settings = {"num_layers": settings} if isinstance(settings, int) else {**settings}
        if name == "res_x" and not settings.get("inject_noise", False):
            return settings["num_layers"]
        if name in _STRIDES and not settings.get("residual", False):
            return Upsampling(_STRIDES[name], settings.get("multiplier", 1))
    except (KeyError, TypeError, ValueError):
        pass
    raise UserError(
        f"checkpoint config: vae.decoder_blocks has {described!r}, decoding on the ranks implements"
        f" only res_x, {', '.join(_STRIDES)}, without noise and residuals{HOST_DECODES}"
    )
