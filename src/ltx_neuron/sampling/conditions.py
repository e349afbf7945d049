"""What a video may be conditioned on besides its prompt: images, a sound, videos.

Shapes: F latent frames, h, w latent rows and columns.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from ltx_neuron.sampling.latents import TIME_SCALE, video_latent_shape

FrameIndex = Annotated[int, Field(ge=0)]
Strength = Annotated[float, Field(ge=0, le=1)]
Crf = Annotated[int, Field(ge=0, le=51)]


@dataclass(frozen=True)
class ImageCondition:
    """An image held at a frame: strength 1 keeps it exactly, 0 ignores it; crf is the H.264 round
    trip before encoding."""

    path: str | Path
    frame_index: FrameIndex = 0
    strength: Strength = 1.0
    crf: Crf = 33


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

    def sides(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in which it is encoded for a clip of so many pixels."""
        return height // self.space_scale, width // self.space_scale

    def latent_shape(self, height: int, width: int, num_frames: int) -> tuple[int, int, int]:
        """(F, h, w) of its latent beside a clip of so many pixels and frames."""
        return video_latent_shape(*self.sides(height, width), self.taken_frames(num_frames))


@dataclass(frozen=True)
class AttentionMask:
    """A video, black to white, of how much each part of a reference is attended to, all of it
    times `strength`."""

    path: str | Path
    strength: float


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
