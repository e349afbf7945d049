"""The state a stage starts from: noise, latents of an earlier stage, and images held at some
strength.

Sources: ltx-core conditioning/types, components/noisers.py; the later behaviour of both (1.1.2,
1.1.6) is the default.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ltx_neuron.sampling.latents import keyframe_positions, patchify_video, video_positions


@dataclass(frozen=True)
class ImageCondition:
    """An image held at a frame: strength 1 keeps it exactly, 0 ignores it; crf is the H.264 round
    trip before encoding."""

    path: str
    frame_index: int = 0
    strength: float = 1.0
    crf: int = 33


@dataclass(frozen=True)
class VideoState:
    """Tokens of a stage's video, keyframe tokens last.

    latent, clean  (1, T, C): what is noised, and what images hold
    denoise_mask   (T, 1) fp32: 1 denoised freely, 0 kept as in clean
    positions      (1, 3, T) fp32
    """

    latent: Tensor
    clean: Tensor
    denoise_mask: Tensor
    positions: Tensor


def token_count(shape: tuple[int, int, int], images: tuple[ImageCondition, ...]) -> int:
    """Video tokens of a stage: the clip's own and one latent frame more per keyframe."""
    keyframes = sum(image.frame_index != 0 for image in images)
    return (shape[0] + keyframes) * shape[1] * shape[2]


def distinct_masks(images: tuple[ImageCondition, ...]) -> tuple[float, ...]:
    """The denoise masks that occur among the tokens, 1 first: each has its own timestep at every
    step."""
    held = {mask_value(image) for image in images} - {1.0}
    return (1.0, *sorted(held))


def mask_value(image: ImageCondition) -> float:
    return torch.tensor(1.0 - image.strength, dtype=torch.float32).item()


def video_state(
    latent: Tensor,
    frame_rate: float,
    images: list[tuple[ImageCondition, Tensor]],
    compat_1_0_0: bool = False,
    positions_dtype: torch.dtype = torch.float32,
) -> VideoState:
    """State of a stage from its initial latent (1, C, F, h, w) and encoded images (1, C, 1, h, w).

    An image at frame 0 takes the place of the first latent frame's tokens; others are appended as
    keyframe tokens.
    """
    shape = tuple(latent.shape[2:])
    # ltx-core 1.0.0 appends a keyframe's fp32 bounds to the rounded ones, and takes all mid-points
    # in fp32 from then on.
    middles = torch.float32 if any(image.frame_index for image, _ in images) else positions_dtype
    tokens, positions = (
        patchify_video(latent),
        video_positions(shape, frame_rate, positions_dtype, middles),
    )
    clean, mask, per_frame = tokens.clone(), torch.ones(tokens.shape[1], 1), shape[1] * shape[2]
    for image, encoded in images:
        held, value = patchify_video(encoded), mask_value(image)
        if image.frame_index == 0:
            clean[:, :per_frame], mask[:per_frame] = held, value
            if compat_1_0_0:  # later releases leave the latent: the noiser blends with clean
                tokens = torch.cat([held, tokens[:, per_frame:]], dim=1)
        else:
            extent = 8 if compat_1_0_0 else 1
            where = keyframe_positions(shape[1], shape[2], image.frame_index, frame_rate, extent)
            positions, clean = torch.cat([positions, where], dim=2), torch.cat([clean, held], dim=1)
            tokens = torch.cat([tokens, held if compat_1_0_0 else torch.zeros_like(held)], dim=1)
            mask = torch.cat([mask, torch.full((per_frame, 1), value)])
    return VideoState(tokens, clean, mask, positions)


def noised(
    latent: Tensor,
    generator: torch.Generator,
    scale: float,
    clean: Tensor | None = None,
    mask: Tensor | None = None,
    compat_1_0_0: bool = False,
) -> Tensor:
    """Draw noise in the latent's dtype and shape, keyframe tokens included, and mix it in by
    `scale` (1: noise only)."""
    noise = torch.randn(latent.shape, dtype=latent.dtype, generator=generator)
    scale = torch.tensor(scale, dtype=torch.float32)
    if mask is None:
        mask, clean = torch.ones(latent.shape[1], 1), latent
    if compat_1_0_0:
        mixed = noise * (mask * scale) + latent * (1 - mask * scale)
    else:
        mixed = torch.lerp(clean.float(), torch.lerp(latent.float(), noise.float(), scale), mask)
    return mixed.to(latent.dtype)


def timestep_choice(
    mask: Tensor, masks: tuple[float, ...], timesteps: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """For a graph with `timesteps` rows: the rows' masks (U,) fp32, and each token's choice (T, U),
    one-hot."""
    rows = torch.tensor([*masks, *[1.0] * (timesteps - len(masks))], dtype=torch.float32)
    choice = torch.zeros(len(mask), timesteps)
    choice[torch.arange(len(mask)), (mask == rows[: len(masks)]).int().argmax(dim=1)] = 1
    return rows, choice.to(dtype)
