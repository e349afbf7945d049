"""The configuration of the video VAE's diffusion decoder, and the parts of its features.

All parts of a stage have one size, so that one graph serves all of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ltx_neuron.config.common import ModelConfig, check_numbers, check_values
from ltx_neuron.config.video import SCALE, Resampling, scale_of
from ltx_neuron.errors import UserError

TIME_FACTOR = 8  # frames of pixels per latent frame


@dataclass(frozen=True)
class DiffusionDecoderConfig(ModelConfig):
    """The diffusion decoder of the video VAE (vae section of the metadata, CausalDiffusionVAE). The
    last stage denoises pixels, conditioned on the features of the others."""

    latent_channels: int
    out_channels: int
    patch_size: int
    head_dim: int  # of the attention heads, the same in all stages
    channels: tuple[int, ...]  # of the stages, like the next two
    depths: tuple[int, ...]  # numbers of blocks
    kernels: tuple[tuple[int, int, int], ...]  # neighbourhoods in frames, rows and columns
    upsamplings: tuple[Resampling, ...]  # after each stage but the last
    timestep_scale: float  # factor of the noise's timestep, 1
    gated: bool = False  # whether the file has a gate per channel for the last stage's residuals
    # Frames that a block computes at once. Short spans compute more keys and values again; long
    # spans compute more masked scores
    span: int = 4
    # Rows and columns of queries that attend to one window, which contains all their keys. Small
    # tiles compute fewer masked scores; large tiles copy fewer keys
    tile: int = 8

    @property
    def patch_channels(self) -> int:
        return self.out_channels * self.patch_size**2

    @property
    def rope_split(self) -> tuple[int, int, int]:
        """The channels of a head that are rotated by frame, row and column."""
        time = self.head_dim // 4 // 2 * 2
        if (self.head_dim - time) // 2 % 2:
            time -= 2
        return time, (self.head_dim - time) // 2, (self.head_dim - time) // 2

    @property
    def repeats(self) -> int:
        """Number of copies of the last latent frame that the stages before the last one append to
        it. They replace the border, at which windows would be shifted."""
        return self.kernels[0][0] // 2 * 2

    @property
    def smallest(self) -> tuple[int, int, int]:
        """The smallest latent (F, h, w) that contains a whole neighbourhood in every stage."""
        scales: tuple[int, ...] = (1, 1, 1)
        sides: list[tuple[int, ...]] = [self.kernels[0]]
        for upsampling, kernel in zip(self.upsamplings, self.kernels[1:], strict=True):
            scales = tuple(a * b for a, b in zip(scales, upsampling.stride, strict=True))
            sides.append(tuple(-(-k // scale) for k, scale in zip(kernel, scales, strict=True)))
        frames, rows, columns = map(max, zip(*sides, strict=True))
        return frames, rows, columns


DIFFUSION_VAE = "CausalDiffusionVAE"
# Tensors of its file that the decoder does not read: those for previews, and an embedding, which it
# adds to keyframes alone.
UNREAD = r"(?:coarse_.+|type_emb)"
EMBEDDING = "vae.decoder.type_emb"
# The released decoder was distilled to one step, from noise to pixels.
_ONE_STEP = {"decoder.default_num_inference_steps": 1, "model_output_type": "x0"}


def is_diffusion_vae(metadata: Mapping[str, Any]) -> bool:
    """Whether the video decoder of a checkpoint's `config` metadata is the diffusion decoder."""
    return (metadata.get("vae") or {}).get("_class_name") == DIFFUSION_VAE


def diffusion_decoder_config(
    metadata: Mapping[str, Any], names: Iterable[str] = ()
) -> DiffusionDecoderConfig:
    """Parse the `config` metadata of a diffusion VAE. names: those of the file's tensors. Raises
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
                Resampling(tuple(stride), divisor) for stride, divisor in decoder["upsamples"]
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
        for upsampling, channels in zip(config.upsamplings, config.channels[1:], strict=True):
            width //= upsampling.multiplier
            if width != channels:
                problem = f"a stage of {channels} channels after an upsampling to {width}"
                break
        got = scale_of(config.upsamplings, config.patch_size)
        problem = problem or ("" if got == SCALE else f"upsamplings by {got}")
    if problem:
        raise UserError(f"checkpoint config: vae.decoder has {problem}")


class Volume(NamedTuple):
    frames: int
    rows: int
    columns: int


def volumes(config: DiffusionDecoderConfig, clip: tuple[int, int, int]) -> list[Volume]:
    """The features of every stage for a clip of latents (F, h, w), which is enlarged if it is
    smaller than `config.smallest`. The last stage has only the video's frames."""
    frames, rows, columns = map(max, clip, config.smallest)
    sizes = [Volume(frames + config.repeats, rows, columns)]
    for upsampling in config.upsamplings:
        time, down, across = upsampling.stride
        frames, rows, columns = sizes[-1]
        sizes.append(Volume(frames * time - (time - 1), rows * down, columns * across))
    last = sizes.pop()
    required = max(last.frames - config.repeats * TIME_FACTOR, config.kernels[-1][0])
    return [*sizes, last._replace(frames=min(last.frames, required))]


def shortest(config: DiffusionDecoderConfig, clip: tuple[int, int, int]) -> tuple[int, int, int]:
    """The shortest clip of latents (F, h, w) that uses the graphs of `clip`. Graphs depend on the
    length only if a stage has fewer frames than a region."""

    def shapes(frames: int) -> list[tuple[int, int]]:
        pairs = zip(volumes(config, (frames, *clip[1:])), config.kernels, strict=True)
        cuts = [cut(volume.frames, config.span, kernel[0]) for volume, kernel in pairs]
        return [(axis_cut.size, axis_cut.window) for axis_cut in cuts]

    frames, rows, columns = map(max, clip, config.smallest)
    expected = shapes(frames)
    return next(n for n in range(1, frames + 1) if shapes(n) == expected), rows, columns


class AxisCut(NamedTuple):
    """An axis in parts of equal size. Each part has a window with the keys of its queries.

    length, kernel   number of positions of the axis, and of neighbours of a position
    size, window     number of positions of a part, and of its window
    starts, windows  first positions of parts and of windows. The last part may overlap the one
                     before it
    """

    length: int
    kernel: int
    size: int
    window: int
    starts: list[int]
    windows: list[int]

    @property
    def new(self) -> list[int]:
        """For each part, the number of positions that no earlier part has: its last ones."""
        ends = [start + self.size for start in self.starts]
        return [end - before for before, end in zip([0, *ends], ends, strict=False)]


def cut(length: int, size: int, kernel: int) -> AxisCut:
    """Cut an axis of at least `kernel` positions into parts of at most `size`."""
    size = min(size, length)
    window = min(size + kernel - 1, length)
    starts = [*range(0, length - size, size), length - size]
    windows = [clamped(start - kernel // 2, length - window) for start in starts]
    return AxisCut(length, kernel, size, window, starts, windows)


def clamped(position: int, last: int) -> int:
    return min(max(position, 0), last)
