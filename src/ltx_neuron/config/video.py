"""The configurations of the video decoder and encoder on the ranks."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ltx_neuron.config import common
from ltx_neuron.errors import UserError


@dataclass(frozen=True)
class Resampling:
    """A change of resolution: in the decoder a convolution whose channels become positions (depth
    to space), in the encoder one whose positions become channels (space to depth)."""

    stride: tuple[int, int, int]  # factors of frames, rows and columns
    multiplier: int  # the decoder divides the channels by it, the encoder multiplies them


SCALE = 8, 32, 32  # frames, rows and columns of pixels per latent


def scale_of(resamplings: Iterable[Resampling], patch_size: int) -> tuple[int, ...]:
    """By how much changes of resolution and patches scale frames, rows and columns."""
    time, *sides = map(math.prod, zip((1, 1, 1), *(x.stride for x in resamplings), strict=True))
    return time, *(side * patch_size for side in sides)


@dataclass(frozen=True)
class VideoDecoderConfig(common.ModelConfig):
    """The video decoder (vae section of the metadata)."""

    latent_channels: int
    base_channels: int
    out_channels: int
    patch_size: int
    # In execution order: a Resampling, or the number of residual blocks of a stage
    up_blocks: tuple[int | Resampling, ...]


@dataclass(frozen=True)
class VideoEncoderConfig(common.ModelConfig):
    """The video encoder (vae section of the metadata)."""

    latent_channels: int
    in_channels: int
    patch_size: int
    # In execution order: a Resampling, or the number of residual blocks of a stage
    down_blocks: tuple[int | Resampling, ...]


# The released models' values. For absent values ltx-core's defaults count, which differ.
_PIXEL_NORM = {"dims": 3, "norm_layer": "pixel_norm"}
_DECODER = _PIXEL_NORM | {
    "causal_decoder": False,
    "timestep_conditioning": False,
    "spatial_padding_mode": "zeros",
}
_ENCODER = _PIXEL_NORM | {"latent_log_var": "uniform", "spatial_padding_mode": "zeros"}
_STRIDES = {"compress_time": (2, 1, 1), "compress_space": (1, 2, 2), "compress_all": (2, 2, 2)}


def video_decoder_config(metadata: Mapping[str, Any]) -> VideoDecoderConfig:
    """Parse the checkpoint's `config` metadata. Raises UserError for another structure than the
    released decoder's; the host may still be able to decode."""
    defaults = _PIXEL_NORM | {"causal_decoder": False}
    values = _checked(metadata, defaults, _DECODER, "decoding on the ranks", common.HOST_DECODES)
    blocks = reversed(values.get("decoder_blocks", []))
    config = VideoDecoderConfig(
        latent_channels=values.get("latent_channels", 128),
        base_channels=values.get("decoder_base_channels", 128),
        out_channels=values.get("out_channels", 3),
        patch_size=values.get("patch_size", 4),
        up_blocks=tuple(_block(block, "decoder", "", common.HOST_DECODES) for block in blocks),
    )
    _check_scale(config, config.up_blocks, "decoder_blocks upsample", common.HOST_DECODES)
    return config


def video_encoder_config(metadata: Mapping[str, Any]) -> VideoEncoderConfig:
    # Both have one channel of variance, which no latent depends on.
    variance = (metadata.get("vae") or {}).get("latent_log_var")
    allowed = _ENCODER | ({"latent_log_var": variance} if variance == "constant" else {})
    values = _checked(metadata, _ENCODER, allowed, "encoding on the ranks", common.HOST_ENCODES)
    blocks = values.get("encoder_blocks", [])
    config = VideoEncoderConfig(
        latent_channels=values.get("latent_channels", 128),
        in_channels=values.get("in_channels", 3),
        patch_size=values.get("patch_size", 4),
        down_blocks=tuple(
            _block(block, "encoder", "_res", common.HOST_ENCODES) for block in blocks
        ),
    )
    _check_scale(config, config.down_blocks, "encoder_blocks downsample", common.HOST_ENCODES)
    return config


def _checked(
    metadata: Mapping[str, Any], defaults: dict, allowed: dict, by: str, advice: str
) -> dict[str, Any]:
    values = metadata.get("vae")
    if not isinstance(values, dict):
        raise UserError("the checkpoint's config metadata has no 'vae' section")
    common.check_values("vae", defaults | values, allowed, by, advice)
    return values


def _check_scale(
    config: VideoDecoderConfig | VideoEncoderConfig,
    blocks: tuple[int | Resampling, ...],
    what: str,
    advice: str,
) -> None:
    """Raise UserError for a number that is none, or another scale than the released one."""
    common.check_numbers(config, "checkpoint config: vae.")
    got = scale_of([block for block in blocks if isinstance(block, Resampling)], config.patch_size)
    if got != SCALE:
        raise UserError(
            f"checkpoint config: vae.{what} by {got} in time, height and width, wanted"
            f" {SCALE}{advice}"
        )


def _block(described: Any, part: str, suffix: str, advice: str) -> int | Resampling:
    """Parse an entry of the config's {part}_blocks: [name, number or settings]. suffix: of the
    names of changes of resolution; "_res" adds the resampled features."""
    strides = {name + suffix: stride for name, stride in _STRIDES.items()}
    try:
        name, settings = described
        settings = {"num_layers": settings} if isinstance(settings, int) else {**settings}
        if name == "res_x" and not settings.get("inject_noise", False):
            return settings["num_layers"]
        if name in strides and not settings.get("residual", False):
            # ltx-core's default differs between decoder and encoder.
            return Resampling(strides[name], settings.get("multiplier", 2 if suffix else 1))
    except (KeyError, TypeError, ValueError):
        pass
    raise UserError(
        f"checkpoint config: vae.{part}_blocks has {described!r}, {part[:-2]}ing on the ranks"
        f" implements only res_x, {', '.join(strides)}, without noise and residuals{advice}"
    )
