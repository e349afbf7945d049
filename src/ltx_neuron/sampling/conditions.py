"""Inputs of a video besides its prompt: images, a sound, a video to retake, references. Checks them
before a model loads; gives their effects on the graphs' shapes and their fields of a JobSpec.

Shapes: F latent frames, h, w latent rows and columns.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import torch
from pydantic import Field

from ltx_neuron.errors import FieldError, UserError, flag_of
from ltx_neuron.files import check_readable
from ltx_neuron.sampling import dfr
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.dfr import Rendering, TemporalWindow
from ltx_neuron.sampling.extension import Extension
from ltx_neuron.sampling.fields import check_fields
from ltx_neuron.sampling.guidance import NAG_ALPHA, NAG_TAU
from ltx_neuron.sampling.latents import (
    SPACE_SCALE,
    TIME_SCALE,
    between_keyframes,
    video_latent_shape,
)
from ltx_neuron.sampling.size import Size
from ltx_neuron.sampling.tiles import Appended, Tile, tiles

# Field of Inputs -> field of JobSpec, its kind of file, and the flag's values.
_FILES = {
    "images": ("image", "an image", "FILE [FRAME_IDX [STRENGTH [CRF]]]"),
    "references": ("video_conditioning", "a video or an image", "FILE STRENGTH"),
    "sound": ("audio_path", "a sound", "FILE"),
    "retake": ("video_path", "a video", "FILE"),
    "attention_mask": ("conditioning_attention_mask", "a video", "FILE STRENGTH"),
    "dubbing": ("reference_video", "a video with sound", "FILE"),
    "reference_audio": ("reference_audio", "a sound", "FILE"),
}
# Fields that a job's description leaves out at their defaults
LATER_FIELDS = ("num_generated_keyframes", "compat", "motion_speed", "stage_2_ic_lora")
LATER_FIELDS += ("tile", "tile_height", "tile_width")
LATER_FIELDS += ("dfr", "temporal_upsample_rounds", "temporal")
LATER_FIELDS += ("detailing_loras", "detailing_scale", "decode_with_keyframes")
# Field -> required fields.
_NEEDS = {
    "{ic_lora}": ("{video_conditioning}",),
    "{video_conditioning}": ("{ic_lora}",),
    "{conditioning_attention_mask}": ("{video_conditioning}",),
    "{images_as_guides}": ("{two_stage}", "{recipe} dev"),
    "{sampler} res_2s": ("{two_stage}", "{recipe} dev"),
    "{sampler} gradient_estimation": ("{recipe} dev",),
    "{skip_stage_2}": ("{two_stage}",),
    "{stage_2_ic_lora}": ("{video_conditioning}", "{two_stage}", "{recipe} distilled"),
    "{tile}": ("{video_conditioning}", "{recipe} distilled"),
    "{tile_height}": ("{tile}",),
    "{tile_width}": ("{tile}",),
    "{dfr}": ("{two_stage}",),
    "{dfr} {recipe} distilled": ("{detailing_lora}",),
    "{detailing_lora}": ("{dfr}",),
    "{decode_with_keyframes}": ("{num_generated_keyframes}",),
    "{temporal_upsample_rounds}": ("{dfr}",),
    "{nag_alpha}": ("{nag_scale}",),
    "{nag_tau}": ("{nag_scale}",),
    "{reference_video}": ("{two_stage}", "{recipe} distilled"),
    "{sound_only}": ("{recipe} dev",),
}
# Field -> excluded fields.
_EXCLUDES = {
    "{video_path}": (
        "{audio_path}",
        "{image}",
        "{two_stage}",
        "{upscale}",
        "{tail_frames}",
        # These need one of the fields above.
        "{ic_lora}",
        "{video_conditioning}",
        "{conditioning_attention_mask}",
        "{skip_stage_2}",
        "{images_as_guides}",
        "{sampler} res_2s",
    ),
    "{sampler} res_2s": ("{audio_path}", "{video_conditioning}"),
    # Upstream has no pipeline of this sampler with an input.
    "{sampler} gradient_estimation": (
        "{audio_path}",
        "{video_path}",
        "{video_conditioning}",
        "{reference_audio}",
        "{sound_only}",
    ),
    "{stage_2_ic_lora}": ("{skip_stage_2}",),
    "{nag_scale}": ("{recipe} dev",),  # whose guidance reads the negative prompt
    "{reference_audio}": ("{video_path}", "{sound_only}"),
    # These files have a length. Sound alone has one context, and the duration head reads two.
    "{auto_duration}": ("{audio_path}", "{video_path}", "{reference_video}", "{sound_only}"),
    "{reference_video}": (
        "{audio_path}",
        "{video_path}",
        "{ic_lora}",
        "{video_conditioning}",
        "{conditioning_attention_mask}",
        "{skip_stage_2}",
        "{tail_frames}",
    ),
    "{motion_speed}": ("{video_path}", "{reference_video}", "{sound_only}"),
    "{sound_only}": (
        "{audio_path}",
        "{video_path}",
        "{reference_video}",
        "{image}",
        "{two_stage}",
        "{upscale}",
        "{ic_lora}",
        "{video_conditioning}",
        "{tail_frames}",
    ),
    "{dfr}": (
        "{video_path}",
        "{audio_path}",
        "{reference_video}",
        "{reference_audio}",
        "{ic_lora}",
        "{video_conditioning}",
        "{num_generated_keyframes}",
        "{upscale}",
        "{skip_stage_2}",
        "{images_as_guides}",
        "{tail_frames}",
        "{motion_speed}",
        "{sound_only}",
        "{sampler} res_2s",
        "{sampler} gradient_estimation",
        "{guidance}",
        "{negative_prompt}",
    ),
    "{num_generated_keyframes}": ("{video_path}", "{sound_only}"),
    "{decode_with_keyframes}": ("{upscale}", "{dfr}"),  # DFR's are always read
}

FrameIndex = Annotated[int, Field(ge=-1)]
Strength = Annotated[float, Field(ge=0, le=1)]
_CRF = Field(ge=0, le=51)
Crf = Annotated[int, _CRF]
TailFrames = Annotated[int, Field(ge=0, le=800, multiple_of=TIME_SCALE)]
Keyframes = Annotated[int, Field(ge=0)]
Rounds = Annotated[int, Field(ge=0, le=2)]
TILE = 1024, 1536  # pixels, the default height and width of a tile
TileSide = Annotated[int, Field(ge=64, multiple_of=SPACE_SCALE)]
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
    crf: Annotated[int | None, _CRF] = None

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
    default the video's length.

    bed  the level of white noise in what the model hears: its root mean square in dB relative to
         full scale (1.0), so below 0. The MP4's sound has none
    """

    path: str | Path
    start_time: float = 0.0
    max_duration: float | None = None
    bed: float | None = None


@dataclass(frozen=True)
class Retake:
    """Regenerates the seconds from `start_time` to `end_time` of a video file: its `regenerate`
    "video", "audio" or "both". The other stream is kept whole.

    extend         instead: seconds to add at its end or, below 0, before its beginning
    source_frames  frames of the file, all kept, if it is extended
    """

    path: str | Path
    start_time: float = 0.0
    end_time: float = 0.0
    regenerate: str = "both"
    extend: float = 0.0
    source_frames: int = 0

    def check(self, seconds: float) -> None:
        """Raise UserError for a range outside a file of `seconds`."""
        start, end = self.start_time, self.end_time
        if self.extend:
            if (start, end, self.regenerate) != (0, 0, "both"):
                raise UserError(
                    "--extend cannot be combined with --start-time, --end-time or --regenerate: it"
                    " generates both streams of the new part; leave them out"
                )
            return
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
    dub is one too.

    strength    1: clean reference, 0: noise
    num_frames  frames of the file
    space_scale, time_scale  pixels and frames of the generated video per pixel and frame of the
                reference, from the IC-LoRA's metadata
    """

    path: str | Path
    strength: float
    num_frames: int
    space_scale: int = 1
    time_scale: int = 1
    still: bool = False  # the file is an image

    def frames(self, size: Size) -> int:
        """The frames that a clip of this size takes, before time_scale."""
        return size.num_frames if self.still else min(self.num_frames, size.num_frames)

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

    def check(self, size: Size, flag: str = "--video-conditioning") -> None:
        """Raise UserError for a reference that does not fit stage 1, and so stage 2, of a video of
        this size."""
        flag = f"{flag} {self.path}"
        counts = self.num_frames, self.space_scale, self.time_scale
        if min(counts) < 1:
            raise UserError(
                f"{flag}: num_frames, space_scale and time_scale are {counts}, wanted 1 or more"
            )
        unit = SPACE_SCALE * self.space_scale
        stage_1, wanted = size.first, size.unit * self.space_scale
        if any(side % unit for side in stage_1.sides):
            lower, upper = (
                "x".join(str(round_to(side / wanted) * wanted) for side in size.sides)
                for round_to in (lambda count: max(1, math.floor(count)), math.ceil)
            )
            raise UserError(
                f"{flag}: the IC-LoRA takes references of 1/{self.space_scale} of stage 1's size,"
                f" {stage_1.height}x{stage_1.width}, whose sides must be multiples of {unit}; type"
                f" a --height and --width that are multiples of {wanted}: {lower} or {upper}"
            )


@dataclass(frozen=True)
class ReferenceAudio:
    """The sound of a file whose voice an IC-LoRA gives to the speaker.

    latents         number of its audio latents
    max_duration    seconds of the file to use, by default all of them
    identity_scale  of identity guidance in the dev recipe; 0: off, None: the default
    """

    path: str | Path
    latents: int
    max_duration: float | None = None
    identity_scale: float | None = None


@dataclass(frozen=True)
class AttentionMask:
    """A video, black (0) to white (1), of the attention weights of references' tokens, times
    `strength`."""

    path: str | Path
    strength: float = 1.0


Condition = (
    ImageCondition | SoundCondition | Retake | ReferenceVideo | ReferenceAudio | AttentionMask
)


class EncodedClip(NamedTuple):
    """A video to encode: (8k+1 frames, rows, columns), `whole` or in tiles."""

    pixels: tuple[int, int, int]
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Inputs(ABC):
    """Inputs of a video besides its prompt, and their settings.

    dubbing           a clip to dub: a reference of both stages, whose sound is reference_audio
    skip_stage_2      of a two-stage run: decode the half-size result
    images_as_guides  append an image at frame 0 as a keyframe, like the others
    sampler           one of res_2s.SAMPLERS
    orientation       what to apply of images' EXIF and of videos' display matrices: see
                      compat.Compat
    compat            a key of compat.COMPAT
    stage_2_ic_lora   stage 2 has the IC-LoRAs and the references of stage 1
    tile              the model sees tiles of tile_height x tile_width pixels
    motion_speed      factor of the time of the video's positions, for Slow-Motion-Control
    nag_*             normalized attention guidance of all stages of the distilled recipe; a scale
                      of None or 1: off
    sound_only        make no video; `size` has no picture
    tail_frames       last frames of `size` that are generated and not in the file
    num_generated_keyframes  number of keyframes that are generated beside the clip, between its
                      first and last frame; needs a model with a keyframe embedding
    decode_with_keyframes  the diffusion decoder reads them
    dfr               diffusion fidelity rendering (sampling/dfr.py)
    temporal_upsample_rounds  of dfr
    detailing_scale   of dfr: the ratio of stage 2's sides to stage 1's video as a reference; None:
                      there is no detailing LoRA
    temporal          of a job that is one window of dfr: the window
    """

    images: tuple[ImageCondition, ...] = ()
    sound: SoundCondition | None = None
    retake: Retake | None = None
    references: tuple[ReferenceVideo, ...] = ()
    attention_mask: AttentionMask | None = None
    reference_audio: ReferenceAudio | None = None
    dubbing: ReferenceVideo | None = None
    skip_stage_2: bool = False
    images_as_guides: bool = False
    sampler: str = "euler"
    orientation: str = "shown"
    nag_scale: float | None = None
    nag_alpha: float = NAG_ALPHA
    nag_tau: float = NAG_TAU
    sound_only: bool = False
    tail_frames: int | None = None
    num_generated_keyframes: int | None = None
    decode_with_keyframes: bool = False
    compat: str | None = None
    motion_speed: float = 1.0
    stage_2_ic_lora: bool = False
    tile: bool = False
    tile_height: int | None = None
    tile_width: int | None = None
    dfr: bool = False
    temporal_upsample_rounds: int | None = None
    detailing_scale: int | None = None
    temporal: TemporalWindow | None = None

    @property
    @abstractmethod
    def size(self) -> Size:
        """Of the generated video; for an extended one, of a window."""

    def scaled(self, spatial_scale: float) -> Self:
        """These inputs, or a copy, whose stages, if there are two, are so many times apart."""
        scale = spatial_scale if self.size.two_stage else Size.spatial_scale
        if scale == self.size.spatial_scale:  # runs know a job by its identity
            return self
        return dataclasses.replace(self, size=dataclasses.replace(self.size, spatial_scale=scale))

    @property
    @abstractmethod
    def recipe(self) -> str:
        """One of spec.RECIPES."""

    @property
    def guided(self) -> bool:
        """Whether stage 1 is guided."""
        return self.recipe == "dev" and not self.dfr

    @property
    def rendering(self) -> Rendering:
        """The clips and windows of DFR, which release 1.2.0 has for the dev checkpoint and 1.4 for
        the distilled."""
        rounds, holds = self.temporal_upsample_rounds or 0, self.recipe == "distilled"
        return Rendering(self.size, rounds, holds)

    @property
    def upright(self) -> bool:
        """Whether to apply the display matrices of videos."""
        return self.orientation == "shown"

    @property
    def output_size(self) -> Size:
        """Of the file's video, before --upscale: without the tail, or extended."""
        frames = self.size.num_frames - (self.tail_frames or 0)
        longer = self.extension
        return dataclasses.replace(self.size, num_frames=longer.num_frames if longer else frames)

    @property
    def placed(self) -> list[ImageCondition]:
        """The images with the last frame's number for -1."""
        last = self.output_size.num_frames - 1
        return [
            dataclasses.replace(each, frame_index=last) if each.frame_index == -1 else each
            for each in self.images
        ]

    @property
    def voice(self) -> ReferenceAudio | None:
        """The reference's sound, if it has a file of its own."""
        return None if self.dubbing else self.reference_audio

    # --- shapes of graphs -------------------------------------------------------------------------

    @property
    def nag(self) -> torch.Tensor | None:
        """Scale, alpha and tau of normalized attention guidance, (3,) fp32; None without it."""
        if self.nag_scale in (None, 1):
            return None
        return torch.tensor([self.nag_scale, self.nag_alpha, self.nag_tau])

    def has_media(self, upsampled: bool = False) -> bool:
        """Whether the inputs include a sound or a video for a stage."""
        if upsampled:
            return self.dubbing is not None or self.stage_2_ic_lora
        return bool(self.sound or self.retake or self.references or self.reference_audio)

    def stage_size(self, upsampled: bool) -> Size:
        """A stage's size."""
        return self.size if upsampled else self.size.first

    def appended_references(self, upsampled: bool) -> tuple[ReferenceVideo, ...]:
        """The reference videos of a stage; stage 2 has a dubbed clip, or those of
        stage_2_ic_lora."""
        if self.dubbing:
            return (self.dubbing,)
        return () if upsampled and not self.stage_2_ic_lora else self.references

    def generated_keyframes(self, upsampled: bool) -> tuple[int, ...]:
        """The frames of a stage's generated keyframes."""
        if self.dfr:
            return self.temporal.generated if self.temporal else dfr.keyframes(self.size.num_frames)
        without = upsampled and COMPAT[self.compat].plain_stage_2
        count = 0 if without else self.num_generated_keyframes or 0
        return between_keyframes(count, self.size.num_frames)

    @property
    def reads_keyframes(self) -> bool:
        """Whether the host's diffusion decoder reads the generated keyframes."""
        return self.decode_with_keyframes or (self.dfr and self.rendering.holds)

    def decoded_keyframes(self, tensors: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The keyframes (1, 128, 1, h, w) that it reads, by their frames. tensors: of the run."""
        if not self.reads_keyframes:
            return {}
        if self.dfr:  # without those that fill the last segment
            render = self.rendering
            planes = render.planes(tensors, render.rounds)
            return {frame: planes[frame] for frame in sorted(planes) if frame < render.frames}
        upsampled = self.size.two_stage and not self.skip_stage_2
        planes = tensors[f"s{1 + upsampled}_generated_keyframes"].split(1, dim=2)
        return dict(zip(self.generated_keyframes(upsampled), planes, strict=True))

    def appended_audio(self, upsampled: bool) -> int:
        """Audio tokens appended to the clip's in a stage: in stage 1 those of the reference's
        sound, and in stage 2 of dubbing those of stage 1's sound."""
        if self.reference_audio is None:
            return 0
        if upsampled:
            return self.size.audio_frames if self.dubbing else 0
        return self.reference_audio.latents

    def audio_timesteps(self, upsampled: bool) -> int:
        """Distinct timesteps among a stage's audio tokens: 2 where some are held."""
        return 2 if self.retake or (self.reference_audio and not upsampled) else 1

    def freezes_sound(self, upsampled: bool) -> bool:
        """Whether a stage does not change the sound: an input, or stage 1's with a reference or in
        a window."""
        return bool(self.sound or self.temporal or (upsampled and self.reference_audio))

    def appended(self, upsampled: bool, rows: int, columns: int) -> list[Appended]:
        """The tokens appended to the clip's in a stage with these latent rows and columns, in their
        order: given keyframes, references, generated keyframes, stage 1's video."""
        size, keyframe = self.stage_size(upsampled), Appended((1, rows, columns))
        guides = sum(self.images_as_guides or image.frame_index != 0 for image in self.placed)
        guides += len(self.temporal.given) if self.temporal else 0
        references = self.appended_references(upsampled)
        half = video_latent_shape(*self.size.first.sides, size.num_frames)
        detailed = [Appended(half, self.detailing_scale or 1)] * self.details(upsampled)
        return [
            *[keyframe] * guides,
            *(Appended(each.latent_shape(size), each.space_scale) for each in references),
            *[keyframe] * len(self.generated_keyframes(upsampled)),
            *detailed,
        ]

    def details(self, upsampled: bool) -> bool:
        """Whether a stage has stage 1's video as a reference."""
        return upsampled and self.detailing_scale is not None and not self.temporal

    def tiles(self, rows: int, columns: int) -> list[Tile]:
        """The tiles of a stage with these latent rows and columns; none if it is not tiled."""
        if not self.tile:
            return []
        return tiles(rows, columns, self.tile_height or TILE[0], self.tile_width or TILE[1])

    def timesteps(self, upsampled: bool) -> int:
        """Distinct timesteps among a stage's video tokens: one for each distinct denoise mask. A
        retake always has 2, for free and kept tokens, and a dubbed clip one of its own, so that no
        graph depends on its strength."""
        if self.retake:
            return 2
        dubbed = self.dubbing is not None
        conditions = self.images if dubbed else (*self.images, *self.appended_references(upsampled))
        strengths = [each.strength for each in conditions] + [1.0] * self.details(upsampled)
        if window := self.temporal:
            strengths += [dfr.ANCHOR] * bool(window.given)
            strengths += [1.0] * bool(window.holds and window.shared)
        return len({1.0, *map(held_mask, strengths)}) + dubbed

    @property
    def fixes_timesteps(self) -> bool:
        """Whether the inputs determine the number of timesteps. Otherwise graphs with 1 and with 2
        are compiled, for text to video and for an image at frame 0."""
        files = self.images or self.references or self.dubbing or self.retake
        return bool(files or self.sound_only or self.dfr)

    @property
    def extension(self) -> Extension | None:
        """The extension of the video, if the job extends one; `size` is then a window's."""
        if self.retake is None or not self.retake.extend:
            return None
        frames, rate = self.size.num_frames, self.size.frame_rate
        return Extension(self.retake.extend, self.retake.source_frames, frames, rate)

    @property
    def encoded_clips(self) -> list[EncodedClip]:
        """The videos that host.conditions encodes before the first stage."""
        stage_1, clips = self.size.first, []
        if self.retake:
            frames = self.size.num_frames
            if longer := self.extension:  # the known part; one frame more if it comes last
                frames = TIME_SCALE * (longer.known_latents + longer.before - 1) + 1
            clips.append(EncodedClip((frames, *stage_1.sides)))
        if clip := self.dubbing:
            clips += [EncodedClip(clip.pixels(size)) for size in (stage_1, self.size)]
        sizes = (stage_1, self.size) if self.stage_2_ic_lora else (stage_1,)
        referred = (each.pixels(size) for size in sizes for each in self.references)
        return clips + [EncodedClip(pixels, whole=True) for pixels in referred]

    @property
    def own_graphs(self) -> list[str]:
        """The JobSpec fields of the inputs that need graphs of their own. Those of text to video
        also serve a sound and an image at frame 0."""
        inputs = {
            "image": any(image.frame_index for image in self.images),
            "video_path": self.retake,
            "video_conditioning": self.references,
            "conditioning_attention_mask": self.attention_mask,
            "reference_video": self.dubbing,
            "reference_audio": self.voice,
            "nag_scale": self.nag is not None,
            "num_generated_keyframes": self.num_generated_keyframes,
        }
        more = ("skip_stage_2", "images_as_guides", "stage_2_ic_lora", "tile", "dfr")
        inputs |= {name: getattr(self, name) for name in more}
        return [name for name, given in inputs.items() if given]

    # --- files and fields -------------------------------------------------------------------------

    def _conditions(self) -> list[tuple[str, str, Condition]]:
        """(field, name, condition) of each condition; names in lists are numbered."""
        found = []
        for field in _FILES:
            value = getattr(self, field)
            if field == "reference_audio" and self.dubbing:  # the same file
                continue
            if isinstance(value, tuple):
                found += [(field, f"{field}[{index}]", each) for index, each in enumerate(value)]
            elif value:
                found.append((field, field, value))
        return found

    @property
    def files(self) -> dict[str, Path]:
        """The input files by flag."""
        paths = [(_FILES[field][0], each.path) for field, _, each in self._conditions()]
        return {f"{flag_of(name)} {path}": Path(path) for name, path in paths}

    def with_paths(self, rename: Callable[[Path], str]) -> Self:
        """A copy with every file's path renamed."""
        rename = cache(rename)  # a dubbed clip is a voice as well

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
            "{sound_only}": self.sound_only,
            "{tail_frames}": bool(self.tail_frames),
            "{num_generated_keyframes}": bool(self.num_generated_keyframes),
            "{decode_with_keyframes}": self.decode_with_keyframes,
            "{dfr}": self.dfr,
            "{temporal_upsample_rounds}": bool(self.temporal_upsample_rounds),
            f"{{sampler}} {self.sampler}": True,
            "{nag_scale}": self.nag_scale is not None,
            "{nag_alpha}": self.nag_alpha != NAG_ALPHA,
            "{nag_tau}": self.nag_tau != NAG_TAU,
            "{motion_speed}": self.motion_speed != 1,
            "{stage_2_ic_lora}": self.stage_2_ic_lora,
            "{tile}": self.tile,
            "{tile_height}": self.tile_height is not None,
            "{tile_width}": self.tile_width is not None,
        }

    @property
    def spec_fields(self) -> dict[str, Any]:
        """The fields of a JobSpec for the files."""
        fields: dict[str, Any] = {
            "image": self.images,
            "video_conditioning": tuple(
                WeightedFile(str(each.path), each.strength) for each in self.references
            ),
        }
        if sound := self.sound:
            fields |= {"audio_path": str(sound.path), "audio_start_time": sound.start_time}
            fields |= {"audio_max_duration": sound.max_duration, "audio_bed": sound.bed}
        if retake := self.retake:
            fields["video_path"] = str(retake.path)
            names = ("extend",) if retake.extend else ("start_time", "end_time", "regenerate")
            fields |= {name: getattr(retake, name) for name in names}
        if clip := self.dubbing:
            fields |= {"reference_video": str(clip.path), "reference_strength": clip.strength}
            fields |= {"num_frames": None, "frame_rate": None}  # the clip's
        if voice := self.voice:
            fields |= {"reference_audio": str(voice.path)}
            fields["reference_audio_max_duration"] = voice.max_duration
            fields["identity_guidance_scale"] = voice.identity_scale
        if mask := self.attention_mask:
            masks = (WeightedFile(str(mask.path), mask.strength),)
            fields["conditioning_attention_mask"] = masks
        return fields

    # --- checks -----------------------------------------------------------------------------------

    def check_types(self) -> None:
        """Raise UserError for a field with a wrong type."""
        check_fields(self)
        for _, name, condition in self._conditions():
            check_fields(condition, f"{name}.")

    def check_inputs(self) -> None:
        """Raise UserError for an unreadable file, or for a condition that does not fit the clip."""
        for field, _, condition in self._conditions():
            name, what, values = _FILES[field]
            flag = flag_of(name)
            check_readable(condition.path, flag, f"; pass {what} as {flag} {values}")
        for image in self.images:
            image.check(self.output_size.num_frames)
        frames, count = self.size.num_frames, self.num_generated_keyframes or 0
        if self.dfr and frames == 1:
            raise FieldError("{num_frames} 1: {dfr} renders motion, wanted 9 or more")
        if count > (most := max(0, frames - 2)):
            raise FieldError(
                f"{{num_generated_keyframes}} {count}: wanted at most {most}, one for each frame"
                f" between the first and the last of {frames}"
            )
        if self.decode_with_keyframes and COMPAT[self.compat].plain_stage_2:
            raise FieldError(
                f"{{decode_with_keyframes}}: {self.compat} decodes without keyframes; leave out one"
                " of {decode_with_keyframes} {compat}"
            )
        for reference in self.references:
            reference.check(self.size)
        height, width = self.size.sides
        tiled = self.tiles(height // SPACE_SCALE, width // SPACE_SCALE)
        if tiled and self.size.two_stage and not (self.stage_2_ic_lora or self.skip_stage_2):
            raise FieldError(
                f"{{tile}}: stage 2 of {height}x{width} has {len(tiled)} tiles, which need the"
                " reference; type {stage_2_ic_lora} as well"
            )
        if self.dubbing:
            self.dubbing.check(self.size, "--reference-video")
        if self.retake:
            self.retake.check(self.size.seconds)


def check_together(given: dict[str, bool]) -> None:
    """Raise FieldError for missing or conflicting fields. given: whether each field is given."""
    if given.get("{reference_audio}") and given.get("{audio_path}"):
        raise FieldError(
            "{reference_audio} does not go with {audio_path}: that sound is what is heard, nothing"
            " is spoken; leave one of them out"
        )
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
                f"{field} goes with {' '.join(needed)}, got no {' '.join(missing)}; type"
                f" {' '.join(missing)} as well, or leave out {field}"
            )


def held_mask(strength: float) -> float:
    """The denoise mask of a condition, 1 - strength, rounded to fp32."""
    return torch.tensor(1.0 - strength, dtype=torch.float32).item()
