"""What a video may be made from besides its prompt: images, a sound, a video to change, references.
What follows from it for the graphs, what is wrong before a model loads, and the flags for it.

Shapes: F latent frames, h, w latent rows and columns.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import torch
from pydantic import Field

from ltx_neuron.errors import FieldError, UserError, flag_of
from ltx_neuron.files import check_readable
from ltx_neuron.sampling.extension import Extension
from ltx_neuron.sampling.fields import check_fields
from ltx_neuron.sampling.latents import SPACE_SCALE, TIME_SCALE, video_latent_shape
from ltx_neuron.sampling.size import Size

# Field of Inputs -> its field of a JobSpec, what that takes, and the flag's values.
_FILES = {
    "images": ("image", "an image", "FILE [FRAME_IDX [STRENGTH [CRF]]]"),
    "references": ("video_conditioning", "a video", "FILE STRENGTH"),
    "sound": ("audio_path", "a sound", "FILE"),
    "retake": ("video_path", "a video", "FILE"),
    "attention_mask": ("conditioning_attention_mask", "a video", "FILE STRENGTH"),
}
# Field -> those that it needs.
_NEEDS = {
    "{ic_lora}": ("{video_conditioning}", "{two_stage}", "{recipe} distilled"),
    "{video_conditioning}": ("{ic_lora}", "{two_stage}", "{recipe} distilled"),
    "{conditioning_attention_mask}": ("{video_conditioning}",),
    "{images_as_guides}": ("{two_stage}", "{recipe} dev"),
    "{sampler} res_2s": ("{two_stage}", "{recipe} dev"),
    "{skip_stage_2}": ("{two_stage}",),
}
# Field -> those that it cannot be combined with.
_EXCLUDES = {
    "{video_path}": (
        "{audio_path}",
        "{image}",
        "{two_stage}",
        "{upscale}",
        # They need what it excludes.
        "{ic_lora}",
        "{video_conditioning}",
        "{conditioning_attention_mask}",
        "{skip_stage_2}",
        "{images_as_guides}",
        "{sampler} res_2s",
    ),
    "{sampler} res_2s": ("{audio_path}",),
}

FrameIndex = Annotated[int, Field(ge=0)]
Strength = Annotated[float, Field(ge=0, le=1)]
Crf = Annotated[int, Field(ge=0, le=51)]


class WeightedFile(NamedTuple):
    """PATH STRENGTH: a reference video, or the mask of all."""

    path: str
    strength: Strength


@dataclass(frozen=True)
class ImageCondition:
    """An image held at a frame: strength 1 keeps it exactly, 0 ignores it; crf is the H.264 round
    trip before encoding."""

    path: str | Path
    frame_index: FrameIndex = 0
    strength: Strength = 1.0
    crf: Crf = 33

    def check(self, num_frames: int) -> None:
        """Raise FieldError for a frame that a clip of so many does not have."""
        if self.frame_index >= num_frames:
            raise FieldError(
                "{image} {path}: frame {frame} is outside the clip's 0..{last}",
                path=self.path,
                frame=self.frame_index,
                last=num_frames - 1,
            )


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

    def check(self, seconds: float) -> None:
        """Raise UserError for what cannot be made of a file of so many seconds."""
        start, end = self.start_time, self.end_time
        if self.extend:
            if (start, end, self.regenerate) != (0, 0, "both"):
                raise UserError(
                    "--extend cannot be combined with --start-time, --end-time or --regenerate: it"
                    " generates both streams of what it adds; leave them out"
                )
            return
        if not 0 <= start < end:
            raise UserError(
                f"--start-time {start:g} --end-time {end:g}: wanted seconds of which the first"
                " comes before the second, as in --start-time 0.5 --end-time 1"
            )
        if end > seconds:
            last = math.floor(seconds * 1000) / 1000
            raise UserError(
                f"--start-time {start:g} --end-time {end:g} reaches beyond the {last:g} s of"
                f" {self.path}; type at most --end-time {last:g}"
            )


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

    def pixels(self, size: Size) -> tuple[int, int, int]:
        """Frames, height and width that are encoded beside a clip of a size: 8k+1 of the frames
        that are there, frame 0, 1, 1 + time_scale, 1 + 2 time_scale, ..."""
        there = min(self.num_frames, size.num_frames)
        taken = 1 + -(-(there - 1) // self.time_scale)
        frames = (taken - 1) // TIME_SCALE * TIME_SCALE + 1
        return frames, size.height // self.space_scale, size.width // self.space_scale

    def latent_shape(self, size: Size) -> tuple[int, int, int]:
        """(F, h, w) of its latent beside a clip of a size."""
        frames, height, width = self.pixels(size)
        return video_latent_shape(height, width, frames)

    def check(self, stage_1: Size) -> None:
        """Raise UserError for a reference that cannot stand beside stage 1."""
        flag = f"--video-conditioning {self.path}"
        counts = self.num_frames, self.space_scale, self.time_scale
        if min(counts) < 1:
            raise UserError(
                f"{flag}: num_frames, space_scale and time_scale are {counts}, wanted 1 or more"
            )
        unit = SPACE_SCALE * self.space_scale
        if any(side % unit for side in stage_1.sides):
            lower, upper = (
                "x".join(str(2 * round_to(side / unit) * unit) for side in stage_1.sides)
                for round_to in (lambda count: max(1, math.floor(count)), math.ceil)
            )
            raise UserError(
                f"{flag}: the IC-LoRA takes references of 1/{self.space_scale} of stage 1's size,"
                f" {stage_1.height}x{stage_1.width}, whose sides must be multiples of {unit}; type"
                f" a --height and --width that are multiples of {2 * unit}: {lower} or {upper}"
            )


@dataclass(frozen=True)
class AttentionMask:
    """A video, black to white, of how much each part of a reference is attended to, all of it
    times `strength`."""

    path: str | Path
    strength: float = 1.0


Condition = ImageCondition | SoundCondition | Retake | ReferenceVideo | AttentionMask


class EncodedClip(NamedTuple):
    """A video as it is encoded: 8k+1 frames of so many rows and columns, `whole` or in tiles."""

    pixels: tuple[int, int, int]
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Inputs(ABC):
    """What a video is made from besides its prompt, and how it is taken.

    skip_stage_2      of a two-stage run: the half-size result is decoded
    images_as_guides  an image at frame 0 is a keyframe as the others are
    sampler           "euler" or "res_2s", which HQ uses
    upright           images and videos are taken as they are shown, not as they are stored
    """

    images: tuple[ImageCondition, ...] = ()
    sound: SoundCondition | None = None
    retake: Retake | None = None
    references: tuple[ReferenceVideo, ...] = ()
    attention_mask: AttentionMask | None = None
    skip_stage_2: bool = False
    images_as_guides: bool = False
    sampler: str = "euler"
    upright: bool = True

    @property
    @abstractmethod
    def size(self) -> Size:
        """Of the video that is made."""

    # --- what follows from them -------------------------------------------------------------------

    @property
    def has_media(self) -> bool:
        """Whether there is a sound or a video among them."""
        return bool(self.sound or self.retake or self.references)

    def appended_references(self, upsampled: bool) -> tuple[ReferenceVideo, ...]:
        """The references whose tokens a stage appends: stage 1 alone has them."""
        return () if upsampled else self.references

    def appended_tokens(self, upsampled: bool, rows: int, columns: int) -> int:
        """Tokens of a stage, of so many latent rows and columns, behind the clip's own: those of
        images that do not take a frame's place, and of references."""
        guides = sum(self.images_as_guides or image.frame_index != 0 for image in self.images)
        references = self.appended_references(upsampled)
        shapes = (reference.latent_shape(self.size.first) for reference in references)
        return guides * rows * columns + sum(map(math.prod, shapes))

    def timesteps(self, upsampled: bool) -> int:
        """Distinct timesteps among a stage's video tokens, one for each denoise mask and one for
        what is free. Of a retake tokens are made anew or kept: 2, whatever is asked for."""
        if self.retake:
            return 2
        conditions = (*self.images, *self.appended_references(upsampled))
        return len({1.0, *(held_mask(each.strength) for each in conditions)})

    @property
    def fixes_timesteps(self) -> bool:
        """Whether a graph is compiled for these inputs alone; else it is text to video's, and
        another one of an image at frame 0."""
        return bool(self.images or self.references or self.retake)

    @property
    def extension(self) -> Extension | None:
        """How the retaken video is made longer, where it is; the size is that of a window."""
        if self.retake is None or not self.retake.extend:
            return None
        frames, rate = self.size.num_frames, self.size.frame_rate
        return Extension(self.retake.extend, self.retake.source_frames, frames, rate)

    @property
    def encoded_clips(self) -> list[EncodedClip]:
        """The videos that are encoded before the first stage, see host.conditions."""
        stage_1, clips = self.size.first, []
        if self.retake:
            frames = self.size.num_frames
            if longer := self.extension:  # what windows see, and a frame where they are before it
                frames = TIME_SCALE * (longer.known_latents + longer.before - 1) + 1
            clips.append(EncodedClip((frames, *stage_1.sides)))
        return clips + [EncodedClip(each.pixels(stage_1), whole=True) for each in self.references]

    # --- the files and fields ---------------------------------------------------------------------

    def _conditions(self) -> list[tuple[str, str, Condition]]:
        """Each condition with its field, and its name: numbered where there may be several."""
        found = []
        for field in _FILES:
            value = getattr(self, field)
            if isinstance(value, tuple):
                found += [(field, f"{field}[{index}]", each) for index, each in enumerate(value)]
            elif value:
                found.append((field, field, value))
        return found

    @property
    def files(self) -> dict[str, Path]:
        """What is read, by flag."""
        paths = [(_FILES[field][0], each.path) for field, _, each in self._conditions()]
        return {f"{flag_of(name)} {path}": Path(path) for name, path in paths}

    def with_paths(self, rename: Callable[[Path], str]) -> Self:
        """The same with every file under another name."""

        def renamed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(renamed, value))
            return value and dataclasses.replace(value, path=rename(Path(value.path)))

        renamed_fields = {field: renamed(getattr(self, field)) for field in _FILES}
        return dataclasses.replace(self, **renamed_fields)

    @property
    def given(self) -> dict[str, bool]:
        """Whether each field of a JobSpec, in braces, is given."""
        return {f"{{{_FILES[field][0]}}}": True for field, _, _ in self._conditions()} | {
            "{images_as_guides}": self.images_as_guides,
            "{skip_stage_2}": self.skip_stage_2,
            f"{{sampler}} {self.sampler}": True,
        }

    @property
    def spec_fields(self) -> dict[str, Any]:
        """The fields of a JobSpec that ask for the files."""
        fields: dict[str, Any] = {
            "image": self.images,
            "video_conditioning": tuple(
                WeightedFile(str(each.path), each.strength) for each in self.references
            ),
        }
        if sound := self.sound:
            fields |= {"audio_path": str(sound.path), "audio_start_time": sound.start_time}
            fields["audio_max_duration"] = sound.max_duration
        if retake := self.retake:
            fields["video_path"] = str(retake.path)
            names = ("extend",) if retake.extend else ("start_time", "end_time", "regenerate")
            fields |= {name: getattr(retake, name) for name in names}
        if mask := self.attention_mask:
            masks = (WeightedFile(str(mask.path), mask.strength),)
            fields["conditioning_attention_mask"] = masks
        return fields

    # --- what is wrong ----------------------------------------------------------------------------

    def check_types(self) -> None:
        """Raise UserError for what is of another type than is annotated."""
        check_fields(self)
        for _, name, condition in self._conditions():
            check_fields(condition, f"{name}.")

    def check_inputs(self) -> None:
        """Raise UserError for a file that is not there and for what cannot be made of it."""
        for field, _, condition in self._conditions():
            name, what, values = _FILES[field]
            flag = flag_of(name)
            check_readable(condition.path, flag, f"; pass {what} as {flag} {values}")
        for image in self.images:
            image.check(self.size.num_frames)
        for reference in self.references:
            reference.check(self.size.first)
        if self.retake:
            self.retake.check(self.size.seconds)


def check_together(given: dict[str, bool]) -> None:
    """Raise FieldError for fields that need or exclude others; `given`: whether each is there."""
    for field, excluded in _EXCLUDES.items():
        wrong = [other for other in excluded if given.get(other)]
        if given.get(field) and wrong:
            raise FieldError(
                f"{field} cannot be combined with {' '.join(wrong)}; leave one of them out"
            )
    for field, needed in _NEEDS.items():
        missing = [other for other in needed if not given.get(other)]
        if given.get(field) and missing:
            raise FieldError(
                f"{field} needs {' '.join(needed)}, got no {' '.join(missing)}; type"
                f" {' '.join(missing)} as well, or leave out {field}"
            )


def held_mask(strength: float) -> float:
    """The denoise mask of what is held so strongly, 1 - strength, as fp32 has it."""
    return torch.tensor(1.0 - strength, dtype=torch.float32).item()
