"""The configuration of the video decoder on the ranks."""

import math
from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True)
class DiffusionDecoderConfig(ModelConfig):
    """The diffusion decoder of the video VAE (vae section of the metadata, CausalDiffusionVAE).

    channels, depths, kernels  of the stages: width, number of blocks, and neighbourhood in frames,
                               rows and columns. The last stage denoises pixels, guided by the
                               others' features
    upsamplings      after each stage but the last
    head_dim         of the attention heads, the same in all stages
    timestep_scale   the noise's timestep 1 is multiplied by it
    gated            whether the file has a gate per channel for the last stage's residuals
    """

    latent_channels: int
    out_channels: int
    patch_size: int
    head_dim: int
    channels: tuple[int, ...]
    depths: tuple[int, ...]
    kernels: tuple[tuple[int, int, int], ...]
    upsamplings: tuple[Upsampling, ...]
    timestep_scale: float
    gated: bool = False

    @property
    def repeats(self) -> int:
        """Copies of the last latent frame that the stages before the last one see after it: in
        place of the border, where windows are shifted."""
        return self.kernels[0][0] // 2 * 2

    @property
    def smallest(self) -> tuple[int, int, int]:
        """The smallest latent (F, h, w) of which every stage has a whole neighbourhood."""
        scales, sides = (1, 1, 1), [self.kernels[0]]
        for upsampling, kernel in zip(self.upsamplings, self.kernels[1:], strict=True):
            scales = tuple(a * b for a, b in zip(scales, upsampling.stride, strict=True))
            sides.append(tuple(-(-k // scale) for k, scale in zip(kernel, scales, strict=True)))
        frames, rows, columns = map(max, zip(*sides, strict=True))
        return frames, rows, columns


DIFFUSION_VAE = "CausalDiffusionVAE"
# Tensors of its file that the decoder does not read: of previews, and an embedding of training.
UNREAD = r"(?:coarse_.+|type_emb)"
# One step from noise to pixels: what the released decoder was distilled to.
_ONE_STEP = {"decoder.default_num_inference_steps": 1, "model_output_type": "x0"}


def is_diffusion_vae(metadata: Mapping[str, Any]) -> bool:
    """Whether the video decoder of a checkpoint's `config` metadata is the diffusion decoder."""
    return (metadata.get("vae") or {}).get("_class_name") == DIFFUSION_VAE


def diffusion_decoder_config(
    metadata: Mapping[str, Any], names: Iterable[str] = ()
) -> DiffusionDecoderConfig:
    """Parse the `config` metadata of a diffusion VAE. names: of the file's tensors. Raises
    UserError for another structure than the released decoder's."""
    vae = metadata["vae"]
    decoder = vae.get("decoder", {})
    flat = vae | {f"decoder.{name}": value for name, value in decoder.items()}
    check_values("vae", flat, _ONE_STEP, "the diffusion decoder")
    try:
        config = DiffusionDecoderConfig(
            latent_channels=decoder["in_channels"],
            out_channels=decoder["out_channels"],
            patch_size=decoder["patch_size"],
            head_dim=decoder["head_dim"],
            channels=tuple(decoder["stage_channels"]),
            depths=tuple(decoder["stage_depths"]),
            kernels=tuple(
                tuple(kernel)
                for kernel in (*decoder["stage_kernels"][:-1], decoder["stage5_kernel"])
            ),
            upsamplings=tuple(
                Upsampling(tuple(stride), divisor) for stride, divisor in decoder["upsamples"]
            ),
            timestep_scale=float(decoder["timestep_scale_multiplier"]),
            gated=any(name.endswith(".gate_msa") for name in names),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint config: vae.decoder does not describe a diffusion decoder:"
            f" {type(error).__name__}: {error}"
        ) from None
    check_numbers(config, "checkpoint config: vae.decoder.")
    _check_stages(config)
    return config


def _check_stages(config: DiffusionDecoderConfig) -> None:
    stages = len(config.channels), len(config.depths), len(config.kernels)
    problem = ""
    if {*stages} != {len(config.upsamplings) + 1}:
        problem = f"{stages} stages and {len(config.upsamplings)} upsamplings"
    elif any(width % config.head_dim for width in config.channels) or config.head_dim % 8:
        problem = f"channels {config.channels} in heads of {config.head_dim}"
    elif any(side % 2 == 0 for kernel in config.kernels for side in kernel):
        problem = f"kernels {config.kernels}, wanted odd sizes"
    else:
        width = config.channels[0]
        for upsampling, wanted in zip(config.upsamplings, config.channels[1:], strict=True):
            width //= upsampling.multiplier
            if width != wanted:
                problem = f"a stage of {wanted} channels after an upsampling to {width}"
                break
        strides = [upsampling.stride for upsampling in config.upsamplings]
        factors = [math.prod(axis) for axis in zip(*strides, strict=True)]
        got = (factors[0], *(factor * config.patch_size for factor in factors[1:]))
        problem = problem or ("" if got == (8, 32, 32) else f"upsamplings by {got}")
    if problem:
        raise UserError(f"checkpoint config: vae.decoder has {problem}")
