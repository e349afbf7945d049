"""Inputs of a video besides its prompt: images, a sound, a video to retake, references, with the
types and limits of their values."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from ltx_neuron.errors import FieldError, UserError
from ltx_neuron.sampling.shapes import SPACE_SCALE, TIME_SCALE, video_latent_shape
from ltx_neuron.sampling.size import Size


def plain(value: Any) -> Any:
    """A number of numpy as one of Python; anything else but an array as it is."""
    if not hasattr(value, "item"):
        return value
    if hasattr(value, "__setitem__"):  # an array or tensor: of one element, it passes for a number
        raise ValueError("wanted text or a number")
    return value.item()


_PLAIN = BeforeValidator(plain)
FrameIndex = Annotated[int, Field(ge=-1), _PLAIN]
Strength = Annotated[float, Field(ge=0, le=1), _PLAIN]
_CRF = Field(ge=0, le=51)
Crf = Annotated[int, _CRF, _PLAIN]
TailFrames = Annotated[int, Field(ge=0, le=800, multiple_of=TIME_SCALE)]
Keyframes = Annotated[int, Field(ge=0)]
Frames = Annotated[int, Field(ge=1)]
Rounds = Annotated[int, Field(ge=0, le=2)]
TILE = 1024, 1536  # pixels, the default height and width of a tile
WINDOW_FRAMES, CARRY_FRAMES = 97, 25  # of chunked clips, the defaults
TileSide = Annotated[int, Field(ge=64, multiple_of=SPACE_SCALE)]
ANCHOR = 0.95  # strength of the keyframes that a stage of DFR or HDR is given
BedLevel = Annotated[float, Field(ge=-120, lt=0)]


class WeightedFile(NamedTuple):
    """PATH STRENGTH: a reference video, or the attention mask of all references."""

    path: str
    strength: Strength


@dataclass(frozen=True)
class ImageCondition:
    """An image held at a frame, -1: the last one. strength 1 keeps it exactly, 0 ignores it. crf is
    the quality of the H.264 round trip before encoding; None: the release's (Release.image_crf)."""

    path: str | Path
    frame_index: FrameIndex = 0
    strength: Strength = 1.0
    crf: Annotated[int | None, _CRF, _PLAIN] = None

    def check(self, num_frames: int) -> None:
        """Raise FieldError for a frame outside a clip of `num_frames`."""
        if not -1 <= self.frame_index < num_frames:
            raise FieldError(
                "{image} {path}: frame {frame} is outside the clip's 0..{last}; -1 is the last one",
                path=self.path,
                frame=self.frame_index,
                last=num_frames - 1,
            )


@dataclass(frozen=True)
class SoundCondition:
    """The input sound of audio to video: `max_duration` seconds of a file from `start_time`, by
    default the video's length."""

    path: str | Path
    start_time: float = 0.0
    max_duration: float | None = None
    # The level of white noise in what the model hears: its root mean square in dB relative to full
    # scale (1.0), so below 0. The MP4's sound has none
    bed: float | None = None


@dataclass(frozen=True)
class Retake:
    """Regenerates the seconds from `start_time` to `end_time` of a video file: its `regenerate`
    "video", "audio" or "both". The other stream is kept whole."""

    path: str | Path
    start_time: float = 0.0
    end_time: float = 0.0
    regenerate: str = "both"
    extend: float = 0.0  # instead: seconds to add at its end or, below 0, before its beginning
    source_frames: int = 0  # frames of the file, all kept, if it is extended

    def check(self, seconds: float) -> None:
        """Raise UserError for a range outside a file of `seconds`."""
        if self.extend:
            return
        start, end = self.start_time, self.end_time
        if not 0 <= start < end:
            raise UserError(
                f"--start-time {start:g} --end-time {end:g}: wanted a start before the end, in"
                " seconds, as in --start-time 0.5 --end-time 1"
            )
        if end > seconds:
            last = math.floor(seconds * 1000) / 1000
            raise UserError(
                f"--start-time {start:g} --end-time {end:g} reaches beyond the {last:g} s of"
                f" {self.path}; type at most --end-time {last:g}"
            )


@dataclass(frozen=True)
class ReferenceVideo:
    """A reference for an IC-LoRA: a video, or an image that all frames of a video show. A clip to
    dub is one too."""

    path: str | Path
    strength: float  # 1: clean reference, 0: noise
    num_frames: int  # of the file
    # Pixels and frames of the generated video per pixel and frame of the reference, from the
    # IC-LoRA's metadata
    space_scale: int = 1
    time_scale: int = 1
    still: bool = False  # the file is an image
    # Of a window of a chunked clip: its first frame in the file, and the frames of its carry, which
    # have no reference
    start: int = 0
    carry: int = 0

    def frames(self, size: Size) -> int:
        """The frames that a clip of this size takes, before time_scale."""
        left = self.num_frames - self.start
        return size.num_frames if self.still else min(left, size.num_frames)

    @property
    def dropped_latents(self) -> int:
        """Its first latents, which touch the carry: the model does not see them."""
        scale = TIME_SCALE * self.time_scale
        return 1 + (self.carry + scale - 2) // scale if self.carry else 0

    def pixels(self, size: Size) -> tuple[int, int, int]:
        """The encoded frames, height and width for a clip of this size: 8k+1 of the file's frames
        0, 1, 1 + time_scale, 1 + 2 time_scale, ..."""
        taken = 1 + -(-(self.frames(size) - 1) // self.time_scale)
        frames = (taken - 1) // TIME_SCALE * TIME_SCALE + 1
        return frames, size.height // self.space_scale, size.width // self.space_scale

    def latent_shape(self, size: Size) -> tuple[int, int, int]:
        """(F, h, w) of its latent for a clip of this size."""
        frames, height, width = self.pixels(size)
        return video_latent_shape(height, width, frames)

    def seen_shape(self, size: Size) -> tuple[int, int, int]:
        """(F, h, w) of the latents that the model sees."""
        frames, rows, columns = self.latent_shape(size)
        return frames - self.dropped_latents, rows, columns

    def check(self, size: Size, flag: str = "--video-conditioning") -> None:
        """Raise UserError for a reference that does not fit stage 1, and so stage 2, of a video of
        this size."""
        unit = SPACE_SCALE * self.space_scale
        stage_1, multiple = size.first, size.unit * self.space_scale
        if any(side % unit for side in stage_1.sides):
            lower, upper = (
                "x".join(str(round_to(side / multiple) * multiple) for side in size.sides)
                for round_to in (lambda count: max(1, math.floor(count)), math.ceil)
            )
            raise UserError(
                f"{flag} {self.path}: the IC-LoRA takes references of 1/{self.space_scale} of stage"
                f" 1's size, {stage_1.height}x{stage_1.width}, whose sides must be multiples of"
                f" {unit}; type a --height and --width that are multiples of {multiple}: {lower} or"
                f" {upper}"
            )


@dataclass(frozen=True)
class ReferenceAudio:
    """The sound of a file whose voice an IC-LoRA gives to the speaker."""

    path: str | Path
    latents: int  # number of its audio latents
    max_duration: float | None = None  # seconds of the file to use, by default all of them
    # Of identity guidance in the dev recipe; 0: off, None: the default
    identity_scale: float | None = None


@dataclass(frozen=True)
class AttentionMask:
    """A video, black (0) to white (1), of the attention weights of references' tokens, times
    `strength`."""

    path: str | Path
    strength: float = 1.0


class EncodedClip(NamedTuple):
    """A video to encode: (8k+1 frames, rows, columns), `whole` or in tiles."""

    pixels: tuple[int, int, int]
    whole: bool = False


def held_mask(strength: float) -> float:
    """The denoise mask of a condition, 1 - strength, rounded to fp32."""
    return struct.unpack("f", struct.pack("f", 1.0 - strength))[0]
