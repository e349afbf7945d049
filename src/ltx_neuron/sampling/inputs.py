"""What a video is made from besides its prompt: images, a sound, a video to change, references. All
that is known to be wrong before a model loads, and the flags that ask for it."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ltx_neuron.errors import FieldError, UserError, flag_of
from ltx_neuron.files import check_readable
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ImageCondition,
    ReferenceVideo,
    Retake,
    SoundCondition,
    distinct_masks,
)
from ltx_neuron.sampling.extension import Extension, extension_of
from ltx_neuron.sampling.fields import check_fields
from ltx_neuron.sampling.latents import SPACE_SCALE
from ltx_neuron.sampling.size import Size
from ltx_neuron.sampling.spec import WeightedFile

# Field -> those that it goes with.
_NEEDS = {
    "{ic_lora}": ("{video_conditioning}", "{two_stage}", "{recipe} distilled"),
    "{video_conditioning}": ("{ic_lora}", "{two_stage}", "{recipe} distilled"),
    "{conditioning_attention_mask}": ("{video_conditioning}",),
    "{images_as_guides}": ("{two_stage}", "{recipe} dev"),
    "{sampler} res_2s": ("{two_stage}", "{recipe} dev"),
    "{skip_stage_2}": ("{two_stage}",),
}
# Field -> those that it does not go with.
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
_TAKES = {
    "image": ("an image", "FILE [FRAME_IDX [STRENGTH [CRF]]]"),
    "audio_path": ("a sound", "FILE"),
    "video_path": ("a video", "FILE"),
    "video_conditioning": ("a video", "FILE STRENGTH"),
    "conditioning_attention_mask": ("a video", "FILE STRENGTH"),
}
Condition = ImageCondition | SoundCondition | Retake | ReferenceVideo | AttentionMask


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

    # --- what they are to a graph -----------------------------------------------------------------

    @property
    def keyframes(self) -> int:
        """How many images are appended to the clip's tokens, instead of taking a frame's place."""
        return sum(self.images_as_guides or image.frame_index != 0 for image in self.images)

    @property
    def has_media(self) -> bool:
        """Whether there is a sound or a video among them."""
        return bool(self.sound or self.retake or self.references)

    def appended_references(self, upsampled: bool) -> tuple[ReferenceVideo, ...]:
        """The references whose tokens a stage appends: stage 1 alone has them."""
        return () if upsampled else self.references

    def timesteps(self, upsampled: bool) -> int:
        """Distinct timesteps among a stage's video tokens. Of a retake they are made anew or kept:
        2, whatever is asked for."""
        if self.retake:
            return 2
        return len(distinct_masks((*self.images, *self.appended_references(upsampled))))

    @property
    def fixes_timesteps(self) -> bool:
        """Whether a graph is compiled for these inputs alone; else it is text to video's, and
        another one of an image at frame 0."""
        return bool(self.images or self.references or self.retake)

    @property
    def extension(self) -> Extension | None:
        """How the retaken video is made longer, where it is; the size is that of a window."""
        return extension_of(self.retake, self.size.num_frames, self.size.frame_rate)

    # --- the files --------------------------------------------------------------------------------

    def _named(self) -> list[tuple[str, str, Condition]]:
        """Each condition with its field of a JobSpec and its name."""
        several = {
            "image": ("images", self.images),
            "video_conditioning": ("references", self.references),
        }
        single = {
            "audio_path": ("sound", self.sound),
            "video_path": ("retake", self.retake),
            "conditioning_attention_mask": ("attention_mask", self.attention_mask),
        }
        return [
            (field, f"{name}[{index}]", condition)
            for field, (name, conditions) in several.items()
            for index, condition in enumerate(conditions)
        ] + [(field, name, condition) for field, (name, condition) in single.items() if condition]

    @property
    def files(self) -> dict[str, Path]:
        """What is read, by flag."""
        named = self._named()
        return {f"{flag_of(field)} {given.path}": Path(given.path) for field, _, given in named}

    def with_paths(self, rename: Callable[[Path], str]) -> Self:
        """The same with every file under another name."""

        def renamed(condition: Condition | None) -> Condition | None:
            if condition is None:
                return None
            return dataclasses.replace(condition, path=rename(Path(condition.path)))

        return dataclasses.replace(
            self,
            images=tuple(map(renamed, self.images)),
            references=tuple(map(renamed, self.references)),
            sound=renamed(self.sound),
            retake=renamed(self.retake),
            attention_mask=renamed(self.attention_mask),
        )

    # --- the fields -------------------------------------------------------------------------------

    @property
    def asked(self) -> dict[str, bool]:
        """Whether each field is given."""
        return {f"{{{field}}}": True for field, _, _ in self._named()} | {
            "{images_as_guides}": self.images_as_guides,
            "{skip_stage_2}": self.skip_stage_2,
            f"{{sampler}} {self.sampler}": True,
        }

    @property
    def said(self) -> dict[str, Any]:
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
        for _, name, condition in self._named():
            check_fields(condition, f"{name}.")

    def check_inputs(self) -> None:
        """Raise UserError for a file that is not there and for what cannot be made of it."""
        for field, _, condition in self._named():
            flag, (what, values) = flag_of(field), _TAKES[field]
            check_readable(condition.path, flag, f"; pass {what} as {flag} {values}")
        for image in self.images:
            if image.frame_index >= self.size.num_frames:
                raise FieldError(
                    "{image} {path}: frame {frame} is outside the clip's 0..{last}",
                    path=image.path,
                    frame=image.frame_index,
                    last=self.size.num_frames - 1,
                )
        for reference in self.references:
            _check_reference(reference, self.size.first)
        if self.retake:
            if self.extension:
                self.extension.check()
            _check_retake(self.retake, self.size.seconds)


def check_together(asked: dict[str, bool]) -> None:
    """Raise FieldError for fields that need or exclude others; `asked`: whether each is given."""
    for field, excluded in _EXCLUDES.items():
        wrong = [other for other in excluded if asked.get(other)]
        if asked.get(field) and wrong:
            raise FieldError(f"{field} does not go with {' '.join(wrong)}; leave one of them out")
    for field, needed in _NEEDS.items():
        missing = [other for other in needed if not asked.get(other)]
        if asked.get(field) and missing:
            raise FieldError(
                f"{field} goes with {' '.join(needed)}, got no {' '.join(missing)}; type"
                f" {' '.join(missing)} as well, or leave out {field}"
            )


def _check_retake(retake: Retake, seconds: float) -> None:
    start, end = retake.start_time, retake.end_time
    if retake.extend:
        if (start, end, retake.regenerate) != (0, 0, "both"):
            raise UserError(
                "--extend does not go with --start-time, --end-time and --regenerate: both streams"
                " of what is added are made; leave them out"
            )
        return
    if not 0 <= start < end:
        raise UserError(
            f"--start-time {start:g} --end-time {end:g}: wanted seconds of which the first comes"
            " before the second, as in --start-time 0.5 --end-time 1"
        )
    if end > seconds:
        last = math.floor(seconds * 1000) / 1000
        raise UserError(
            f"--start-time {start:g} --end-time {end:g} reaches beyond the {last:g} s of"
            f" {retake.path}; type at most --end-time {last:g}"
        )


def _check_reference(reference: ReferenceVideo, stage_1: Size) -> None:
    flag = f"--video-conditioning {reference.path}"
    counts = reference.num_frames, reference.space_scale, reference.time_scale
    if min(counts) < 1:
        raise UserError(
            f"{flag}: num_frames, space_scale and time_scale are {counts}, wanted 1 or more"
        )
    unit = SPACE_SCALE * reference.space_scale
    if any(side % unit for side in stage_1.sides):
        lower, upper = (
            "x".join(str(2 * round_to(side / unit) * unit) for side in stage_1.sides)
            for round_to in (lambda count: max(1, math.floor(count)), math.ceil)
        )
        raise UserError(
            f"{flag}: the IC-LoRA takes references of 1/{reference.space_scale} of stage 1's size,"
            f" {stage_1.height}x{stage_1.width}, whose sides must be multiples of {unit}; type a"
            f" --height and --width that are multiples of {2 * unit}: {lower} or {upper}"
        )
