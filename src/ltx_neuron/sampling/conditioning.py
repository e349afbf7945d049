"""The state a stage starts from: noise, latents of an earlier stage, and images held at some
strength.

Sources: ltx-core conditioning/types, components/noisers.py; the later behaviour of both (1.1.2,
1.1.6) is the default.

Shapes (the batch is always 1): C latent channels (128), F latent frames, h, w latent rows and
columns, T video tokens: F h w of the clip, then h w for each keyframe; U distinct denoise masks.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.sampling.latents import (
    TIME_SCALE,
    audio_positions,
    keyframe_positions,
    patchify_audio,
    patchify_video,
    reference_positions,
    video_latent_shape,
    video_positions,
)


@dataclass(frozen=True)
class ImageCondition:
    """An image held at a frame: strength 1 keeps it exactly, 0 ignores it; crf is the H.264 round
    trip before encoding."""

    path: str | Path
    frame_index: int = 0
    strength: float = 1.0
    crf: int = 33


@dataclass(frozen=True)
class SoundCondition:
    """A file whose sound the video is made for (audio to video): `max_duration` seconds from
    `start_time` on, by default as long as the video."""

    path: str | Path
    start_time: float = 0.0
    max_duration: float | None = None


@dataclass(frozen=True)
class Retake:
    """A video file of which the seconds from `start_time` to `end_time` are made anew: of
    `regenerate` "video", "audio" or "both". The other stream is kept whole.

    extend  seconds that are made anew at its end or, below 0, before its beginning, in place of
            those; source_frames are what the file has, and all kept
    """

    path: str | Path
    start_time: float = 0.0
    end_time: float = 0.0
    regenerate: str = "both"
    extend: float = 0.0
    source_frames: int = 0


@dataclass(frozen=True)
class ReferenceVideo:
    """A video that an IC-LoRA was trained to take as a reference.

    strength    1 shows it as it is, 0 as noise
    num_frames  frames that the file has
    space_scale, time_scale  how many pixels and frames of the video that is made one of the
                reference's stands for: of the IC-LoRA's metadata
    """

    path: str | Path
    strength: float
    num_frames: int
    space_scale: int = 1
    time_scale: int = 1

    def taken_frames(self, num_frames: int) -> int:
        """How many of its frames are encoded for a clip of so many: 8k+1 of those that are there,
        frame 0, 1, 1 + time_scale, 1 + 2 time_scale, ..."""
        there = min(self.num_frames, num_frames)
        taken = 1 + -(-(there - 1) // self.time_scale)
        return (taken - 1) // TIME_SCALE * TIME_SCALE + 1

    def latent_shape(self, height: int, width: int, num_frames: int) -> tuple[int, int, int]:
        """(F, h, w) of its latent beside a clip of so many pixels and frames."""
        taken = self.taken_frames(num_frames)
        return video_latent_shape(height // self.space_scale, width // self.space_scale, taken)


@dataclass(frozen=True)
class AttentionMask:
    """A video, black to white, of how much each part of a reference is attended to, all of it
    times `strength`."""

    path: str | Path
    strength: float


@dataclass(frozen=True)
class LatentState:
    """Tokens of one stream of a stage, appended ones last (ltx-core's LatentState).

    latent        (1, T, C), what is noised: zeros, the latents of an earlier stage, or a file's
    clean_latent  (1, T, C), what is held: of images, references, the kept part of a retake
    denoise_mask  (T, 1) fp32: 1 denoised freely, 0 kept as in clean_latent
    positions     (1, 3, T) fp32: seconds, pixel row, pixel column; of audio (1, 1, T): seconds
    frozen        the stream is given: its own sigma is 0 at every step
    frozen_noise  how much noise a frozen stream begins with all the same: with 0 it stays as it is,
                  with 1 it is led to what is held (ltx-pipelines 1.2.0, in a retake)
    bias          (T, T), added to the scores of its self-attention; None: all tokens attend to all
    """

    latent: Tensor
    clean_latent: Tensor
    denoise_mask: Tensor
    positions: Tensor
    frozen: bool = False
    frozen_noise: float = 0.0
    bias: Tensor | None = None

    @property
    def masks(self) -> tuple[float, ...]:
        """The denoise masks that occur, 1 first: each has its own timestep at every step."""
        return (1.0, *sorted(set(self.denoise_mask.flatten().tolist()) - {1.0}))

    def retake(self, seconds: Tensor, start: float, end: float) -> "LatentState":
        """With tokens kept but those whose time overlaps that from `start` to `end`.

        seconds  where each latent frame begins, and the last one ends
        """
        inside = (seconds[1:] > start) & (seconds[:-1] < end)
        per_frame = len(self.denoise_mask) // len(inside)
        mask = inside.float().repeat_interleave(per_frame)[:, None]
        return replace(self, denoise_mask=mask)

    def freeze(self, noise: float = 0.0) -> "LatentState":
        """The same, all of it kept."""
        mask = torch.zeros_like(self.denoise_mask)
        return replace(self, denoise_mask=mask, frozen=True, frozen_noise=noise)

    def append(
        self, tokens: Tensor, positions: Tensor, denoise_mask: float, start: Tensor | None = None
    ) -> "LatentState":
        """With tokens (1, N, C) held as strongly as a mask says; noise is added to `start`, else to
        zeros."""
        mask = torch.full((tokens.shape[1], 1), denoise_mask)
        start = torch.zeros_like(tokens) if start is None else start
        return replace(
            self,
            latent=torch.cat([self.latent, start], dim=1),
            clean_latent=torch.cat([self.clean_latent, tokens], dim=1),
            denoise_mask=torch.cat([self.denoise_mask, mask]),
            positions=torch.cat([self.positions, positions], dim=2),
        )


def audio_state(latent: Tensor) -> LatentState:
    """State of a stage from its initial latent (1, 8, Ta, 16)."""
    tokens = patchify_audio(latent)
    mask = torch.ones(tokens.shape[1], 1)
    return LatentState(tokens, tokens.clone(), mask, audio_positions(tokens.shape[1]))


def with_reference(
    state: LatentState, reference: ReferenceVideo, latent: Tensor, frame_rate: float
) -> LatentState:
    """A state with a reference's tokens, of its latent (1, C, F, h, w), appended."""
    scales = reference.space_scale, reference.time_scale
    positions = reference_positions(tuple(latent.shape[2:]), frame_rate, *scales)
    return state.append(patchify_video(latent), positions, held_mask(reference.strength))


def token_count(shape: tuple[int, int, int], images: tuple[ImageCondition, ...]) -> int:
    """Video tokens of a stage of latent shape (F, h, w): the clip's own and one latent frame more
    per keyframe."""
    keyframes = sum(image.frame_index != 0 for image in images)
    return (shape[0] + keyframes) * shape[1] * shape[2]


def distinct_masks(images: tuple[ImageCondition, ...]) -> tuple[float, ...]:
    """The denoise masks that occur among the tokens, 1 first: each has its own timestep at every
    step."""
    of_images = {denoise_mask_of(image) for image in images} - {1.0}
    return (1.0, *sorted(of_images))


def denoise_mask_of(image: ImageCondition) -> float:
    """1 - strength of an image's tokens, as fp32 has it."""
    return held_mask(image.strength)


def held_mask(strength: float) -> float:
    """The denoise mask of what is held so strongly, 1 - strength, as fp32 has it."""
    return torch.tensor(1.0 - strength, dtype=torch.float32).item()


def video_state(
    latent: Tensor,
    frame_rate: float,
    images: list[tuple[ImageCondition, Tensor]],
    compat_1_0_0: bool = False,
    positions_dtype: torch.dtype = torch.float32,
    images_as_guides: bool = False,
) -> LatentState:
    """State of a stage from its initial latent (1, C, F, h, w) and encoded images (1, C, 1, h, w).

    An image at frame 0 takes the place of the first latent frame's tokens, unless images are
    guides; others are appended as keyframe tokens. compat_1_0_0 and positions_dtype: see
    compat.Compat (conditioning, positions).
    """
    shape = frames, rows, columns = tuple(latent.shape[2:])
    # ltx-core 1.0.0 appends a keyframe's fp32 bounds to the rounded ones, and takes all mid-points
    # in fp32 from then on.
    has_keyframes = any(images_as_guides or image.frame_index for image, _ in images)
    midpoints_dtype = torch.float32 if has_keyframes else positions_dtype
    tokens = patchify_video(latent).clone()  # (1, T, C)
    positions = video_positions(shape, frame_rate, positions_dtype, midpoints_dtype)  # (1, 3, T)
    state = LatentState(tokens, tokens.clone(), torch.ones(tokens.shape[1], 1), positions)
    per_frame = rows * columns
    for image, encoded in images:
        image_tokens, mask = patchify_video(encoded), denoise_mask_of(image)  # (1, h w, C)
        # Later releases leave the latent: what an image holds is in clean_latent alone.
        if image.frame_index == 0 and not images_as_guides:
            state.clean_latent[:, :per_frame] = image_tokens
            state.denoise_mask[:per_frame] = mask
            if compat_1_0_0:
                state.latent[:, :per_frame] = image_tokens
        else:
            duration = 8 if compat_1_0_0 else 1
            added = keyframe_positions(rows, columns, image.frame_index, frame_rate, duration)
            state = state.append(image_tokens, added, mask, image_tokens if compat_1_0_0 else None)
    return state


def noised(
    latent: Tensor,
    generator: torch.Generator,
    scale: float,
    clean_latent: Tensor | None = None,
    denoise_mask: Tensor | None = None,
    compat_1_0_0: bool = False,
) -> Tensor:
    """Draw noise in the latent's dtype and shape (1, T, C), keyframe tokens included, and mix it in
    by `scale` (1: noise only). Returns (1, T, C) in the latent's dtype.

    Without a denoise_mask (T, 1) all tokens are free, as the audio's are.
    """
    noise = torch.randn(latent.shape, dtype=latent.dtype, generator=generator)
    scale = torch.tensor(scale, dtype=torch.float32)
    if denoise_mask is None:
        denoise_mask, clean_latent = torch.ones(latent.shape[1], 1), latent
    if compat_1_0_0:
        # One blend by mask * scale: a held token keeps what it started from, which is the image.
        mixed = noise * (denoise_mask * scale) + latent * (1 - denoise_mask * scale)
    else:
        # Noise first, by scale, then the image over it, by the mask (since 1.1.6).
        noisy = torch.lerp(latent.float(), noise.float(), scale)
        mixed = torch.lerp(clean_latent.float(), noisy, denoise_mask)
    return mixed.to(latent.dtype)


def timestep_choice(
    denoise_mask: Tensor, masks: tuple[float, ...], timesteps: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """For a graph with U = `timesteps` rows of modulation: the rows' masks (U,) fp32, and each
    token's row (T, U), one-hot, from denoise_mask (T, 1). Graphs may have more rows than a job has
    distinct masks: the others repeat mask 1, and no token takes them."""
    rows = torch.tensor([*masks, *[1.0] * (timesteps - len(masks))], dtype=torch.float32)
    timestep_mask = torch.zeros(len(denoise_mask), timesteps)
    row_of_token = (denoise_mask == rows[: len(masks)]).int().argmax(dim=1)
    timestep_mask[torch.arange(len(denoise_mask)), row_of_token] = 1
    return rows, timestep_mask.to(dtype)
