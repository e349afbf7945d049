"""Inputs: a job's settings with the facts of its files, and their effects on the graphs' shapes.

Shapes: F latent frames, h, w latent rows and columns.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from ltx_neuron.errors import FieldError, flag_of
from ltx_neuron.files import check_readable
from ltx_neuron.sampling import chunks, dfr, rules
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import (
    ANCHOR,
    CARRY_FRAMES,
    TILE,
    WINDOW_FRAMES,
    AttentionMask,
    EncodedClip,
    ImageCondition,
    ReferenceAudio,
    ReferenceVideo,
    Retake,
    SoundCondition,
    held_mask,
)
from ltx_neuron.sampling.dfr import Rendering, TemporalWindow
from ltx_neuron.sampling.extension import Extension, default_window
from ltx_neuron.sampling.guidance import MATTE, Guidance, StreamGuidance, default_guidance
from ltx_neuron.sampling.latents import between_keyframes
from ltx_neuron.sampling.shapes import SPACE_SCALE, TIME_SCALE, video_latent_shape
from ltx_neuron.sampling.size import NO_PICTURE, AutoDuration, Size
from ltx_neuron.sampling.spec import INPUT_FILES, SIZES, JobFields, LoraFields
from ltx_neuron.sampling.tiles import Appended, Tile, tiles

# Fields that Media depends on.
_OF_FILES = {"video_path", "extend", "orientation", "video_conditioning", "reference_video"}
_OF_FILES |= {"reference_audio", "reference_audio_max_duration", "text_embeddings"}
_OF_FILES |= {"high_quality", "input_colorspace"}
_OF_FILES |= {"lora", "ic_lora", "detailing_lora"}
# Inputs that a description has in place of their fields.
_DESCRIBED = {
    "images": "image",
    "sound": "audio_path audio_start_time audio_max_duration audio_bed",
    "retake": "video_path start_time end_time regenerate extend",
    "references": "video_conditioning",
    "attention_mask": "conditioning_attention_mask",
    "reference_sound": "reference_audio reference_audio_max_duration identity_guidance_scale",
    "dubbing": "reference_video reference_strength",
    "guidance": " ".join(rules.VIDEO_GUIDANCE + rules.AUDIO_GUIDANCE),
    "detailing_scale": " ".join(LoraFields.model_fields),
}
# Fields that need graphs of their own.
_OWN_GRAPHS = (
    *("image", "video_path", "video_conditioning", "conditioning_attention_mask"),
    *("reference_video", "reference_audio", "nag_scale", "num_generated_keyframes"),
    *("skip_stage_2", "images_as_guides", "stage_2_ic_lora", "tile", "dfr", "chunked"),
    *("text_embeddings", "high_quality", "no_keyframes", "alpha_gen"),
)
# Fields that a description leaves out at their defaults.
_LATER_FIELDS = (
    *("num_generated_keyframes", "compat", "motion_speed", "stage_2_ic_lora", "tile"),
    *("tile_height", "tile_width", "dfr", "temporal_upsample_rounds", "temporal"),
    *("auto_duration", "spatial_scale", "ancestral", "decode_with_keyframes", "prompts"),
    *("chunked", "chunk_pixel_frames", "chunk_carry_frames", "chunk_blend_frames", "chunk"),
    *("text_embeddings", "high_quality", "no_keyframes", "alpha_gen", "input_colorspace"),
    "exr_colorspace",
)


@dataclass(frozen=True)
class Media:
    """Facts of a job's files."""

    video: Size | None = None  # size of the file of video_path
    # Frames (8k+1) and frame rate of the file of reference_video
    clip: tuple[int, float] | None = None
    # (frames, whether it is an image) of each file of video_conditioning
    references: tuple[tuple[int, bool], ...] = ()
    # Ratios of stage 1's sides and frames to a reference's, from the LoRAs' metadata; of sides
    # alone to a clip to dub
    scales: tuple[int, int] = (1, 1)
    # Ratio of stage 2's sides to stage 1's video as a reference, from the detailing LoRA's metadata
    detailing_scale: int | None = None
    latents: int = 0  # audio latents of the sound of reference_audio or reference_video
    hdr: Size | None = None  # size of the input of HDR


class JobInputs(JobFields):
    """The settings of one generation, with what follows from them and from the input files."""

    # What to apply of images' EXIF and of videos' display matrices: see compat.Compat
    orientation: str = "shown"
    compat: str | None = None  # a key of compat.COMPAT
    spatial_scale: float = Size.spatial_scale  # of Size
    # The stages use the ancestral Euler sampler; the checkpoint's release determines this
    ancestral: bool = False
    temporal: TemporalWindow | None = None  # of a job that is one window of dfr: the window
    chunk: chunks.Chunk | None = None  # of a job that is one window of a chunked one: the window

    @cached_property
    def media(self) -> Media:
        """The facts of the files, read once."""
        raise NotImplementedError

    def with_media(self, media: Media) -> Self:
        """This job, of whose files these facts are known."""
        vars(self)["media"] = media
        return self

    def replaced(self, **values: Any) -> Self:
        copy = super().replaced(**values)
        known = "media" in vars(self) and not values.keys() & _OF_FILES
        return copy.with_media(self.media) if known else copy

    def with_paths(self, rename: Callable[[Path], str]) -> Self:
        """A copy with other names of the same input files."""
        return self.moved(rename).with_media(self.media)

    # --- size -------------------------------------------------------------------------------------

    @cached_property
    def size(self) -> Size:
        """The generated size, with the tail; for an extended video, that of a window. The file of
        video_path has the size, that of reference_video the length."""
        if video := self.media.video:
            if self.extend is None:
                return video
            frames = self.num_frames
            if frames is None:
                frames = default_window(self.extend, video.num_frames, video.frame_rate)
            return dataclasses.replace(video, num_frames=frames)
        if source := self.media.hdr:  # reflected beyond its sides to whole latents
            height, width = (-(-side // SPACE_SCALE) * SPACE_SCALE for side in source.sides)
            frames = 2 * source.num_frames - 1 if self.high_quality else source.num_frames
            return Size(height, width, frames, source.frame_rate)
        values = {name: getattr(self, name) for name in SIZES}
        size = Size(**{name: value for name, value in values.items() if value is not None})
        frames, rate = self.media.clip or (size.num_frames, size.frame_rate)
        if self.auto_duration:  # until it is predicted
            frames = self.auto_duration.num_frames(self.auto_duration.max_seconds, rate)
        height, width = NO_PICTURE if self.sound_only else size.sides
        scale = self.spatial_scale if self.two_stage else Size.spatial_scale
        size = Size(height, width, frames, rate, self.two_stage, scale)
        if not self.tail_frames:
            return size
        size.check()  # as typed, without the tail
        return dataclasses.replace(size, num_frames=frames + self.tail_frames)

    def resized(self, size: Size) -> Self:
        """A copy that generates this size, of windows if it extends a video."""
        frames = size.num_frames - (self.tail_frames or 0)
        if self.media.video:
            if self.extend is not None:
                return self.replaced(num_frames=frames)
            return self.replaced().with_media(dataclasses.replace(self.media, video=size))
        values = {name: getattr(size, name) for name in (*SIZES, "spatial_scale")}
        values |= {"num_frames": frames, "auto_duration": None}
        if self.sound_only:
            values |= {"height": None, "width": None}
        if not self.media.clip:
            return self.replaced(**values)
        media = dataclasses.replace(self.media, clip=(frames, size.frame_rate))
        return self.replaced(**values | {"num_frames": None, "frame_rate": None}).with_media(media)

    def scaled(self, spatial_scale: float) -> Self:
        """These inputs, or a copy, whose stages, if there are two, are so many times apart."""
        scale = spatial_scale if self.two_stage else Size.spatial_scale
        if scale == self.spatial_scale:  # runs know a job by its identity
            return self
        return self.replaced(spatial_scale=scale)

    def with_auto_duration(self) -> Self:
        """This job, or a copy with auto_duration if neither a field nor a file determines the
        length."""
        files = self.audio_path, self.video_path, self.reference_video
        if any((self.num_frames, self.auto_duration, self.sound_only, *files)):
            return self
        return self.replaced(auto_duration=AutoDuration())

    @property
    def output_size(self) -> Size:
        """Of the file's video, before --upscale: without the tail, extended, or the input's."""
        if self.media.hdr:
            return self.media.hdr
        frames = self.size.num_frames - (self.tail_frames or 0)
        longer = self.extension
        return dataclasses.replace(self.size, num_frames=longer.num_frames if longer else frames)

    # --- windows ----------------------------------------------------------------------------------

    @property
    def window_frames(self) -> tuple[int, int, int]:
        """Of chunked: the frames of a window, of its carry and of a blend."""
        carry, blend = self.chunk_carry_frames or CARRY_FRAMES, self.chunk_blend_frames
        return self.chunk_pixel_frames or WINDOW_FRAMES, carry, carry if blend is None else blend

    @cached_property
    def windows(self) -> tuple[Self, ...]:
        """The jobs of a chunked clip's windows; none if it fits one."""
        if self.chunk or not self.holds("chunked"):
            return ()
        frames, keyframes = self.size.num_frames, self.num_generated_keyframes or 0
        return tuple(map(self._window, chunks.layout(frames, *self.window_frames, keyframes)))

    def _window(self, chunk: chunks.Chunk) -> Self:
        job = self.resized(dataclasses.replace(self.size, num_frames=chunk.frames))
        images = (
            dataclasses.replace(image, frame_index=image.frame_index - chunk.start)
            for image in self.placed
            if chunk.taken <= image.frame_index - chunk.start < chunk.frames
        )
        first, count = chunk.sound(self.size.frame_rate)  # of the sound of a clip to dub
        left = max(0, min(count, self.media.latents - first))
        media = dataclasses.replace(job.media, latents=left)
        prompt = self.texts_of_windows[chunk.share(len(self.texts_of_windows))]
        return job.replaced(chunk=chunk, image=tuple(images), prompt=prompt).with_media(media)

    @property
    def carried_names(self) -> list[str]:
        """The names of what a window has of the one before."""
        if not (self.chunk and self.chunk.taken):
            return []
        stages = ("s1", "s2")[: 1 + (self.size.two_stage and not self.skip_stage_2)]
        kinds = "video", "audio", *["generated_keyframes"] * bool(self.chunk.held)
        return [f"{chunks.CARRIED}{stage}_{kind}" for stage in stages for kind in kinds]

    @property
    def texts_of_windows(self) -> tuple[str, ...]:
        """The prompts that are dealt out to the windows: usually one, for all of them."""
        return self.prompts or (self.prompt,)

    @property
    def clips(self) -> tuple[Self, ...]:
        """The jobs whose latents are decoded: its windows, or the job itself."""
        return self.windows or (self,)

    # --- inputs -----------------------------------------------------------------------------------

    @property
    def images(self) -> tuple[ImageCondition, ...]:
        return self.image

    @property
    def placed(self) -> list[ImageCondition]:
        """The images with the last frame's number for -1."""
        last = self.output_size.num_frames - 1
        return [
            dataclasses.replace(image, frame_index=last) if image.frame_index == -1 else image
            for image in self.image
        ]

    @cached_property
    def sound(self) -> SoundCondition | None:
        if self.audio_path is None:
            return None
        start = self.audio_start_time or 0.0
        return SoundCondition(self.audio_path, start, self.audio_max_duration, self.audio_bed)

    @cached_property
    def retake(self) -> Retake | None:
        if self.video_path is None:
            return None
        if self.extend is not None:
            frames = self.media.video.num_frames if self.media.video else 0
            return Retake(self.video_path, extend=self.extend, source_frames=frames)
        start, end = self.start_time or 0.0, self.end_time or 0.0
        return Retake(self.video_path, start, end, self.regenerate or Retake.regenerate)

    @cached_property
    def references(self) -> tuple[ReferenceVideo, ...]:
        files = zip(self.video_conditioning, self.media.references, strict=True)
        place = (self.chunk.start, self.chunk.taken) if self.chunk else (0, 0)
        return tuple(
            ReferenceVideo(path, strength, frames, *self.media.scales, still, *place)
            for (path, strength), (frames, still) in files
        )

    @property
    def attention_mask(self) -> AttentionMask | None:
        masks = self.conditioning_attention_mask
        return AttentionMask(*masks[0]) if masks else None

    @cached_property
    def dubbing(self) -> ReferenceVideo | None:
        """The clip to dub: a reference of both stages, whose sound is reference_sound."""
        if self.reference_video is None:
            return None
        strength = 1.0 if self.reference_strength is None else self.reference_strength
        frames, (scale, _) = self.size.num_frames, self.media.scales
        place = (self.chunk.start, self.chunk.taken) if self.chunk else (0, 0)
        video = ReferenceVideo(self.reference_video, strength, place[0] + frames, scale)
        return dataclasses.replace(video, start=place[0], carry=place[1])

    @cached_property
    def reference_sound(self) -> ReferenceAudio | None:
        """The sound that is appended to the clip's: of a voice, or of the clip to dub."""
        path = self.reference_audio if self.reference_video is None else self.reference_video
        if path is None:
            return None
        seconds, scale = self.reference_audio_max_duration, self.identity_guidance_scale
        return ReferenceAudio(path, self.media.latents, seconds, scale)

    @property
    def voice(self) -> ReferenceAudio | None:
        """The reference's sound, if it has a file of its own."""
        return None if self.dubbing else self.reference_sound

    @property
    def detailing_scale(self) -> int | None:
        """Of dfr: the ratio of stage 2's sides to stage 1's video as a reference; None: there is no
        detailing LoRA."""
        return self.media.detailing_scale

    @property
    def silent(self) -> bool:
        """Whether the video is generated alone, without a sound."""
        return self.alpha_gen or self.text_embeddings is not None

    @property
    def hdr_seams(self) -> tuple[int, ...]:
        """The frames of HDR's keyframes, each given and generated: the ends of DFR's segments."""
        if self.text_embeddings is None or self.no_keyframes:
            return ()
        frames, times = self.output_size.num_frames, 1 + self.high_quality
        return tuple(times * at for at in dfr.keyframes(frames) if at < frames)

    @property
    def given_keyframes(self) -> tuple[int, ...]:
        """The frames of the given keyframes, tensors of that name, after the references."""
        return self.temporal.given if self.temporal else self.hdr_seams

    @property
    def position_rate(self) -> float:
        """Frames per second of the video's positions."""
        rate = self.size.frame_rate / self.motion_speed
        return min(rate, dfr.TRAINED_RATE) if self.media.hdr else rate

    @property
    def upright(self) -> bool:
        """Whether to apply the display matrices of videos."""
        return self.orientation == "shown"

    @property
    def guided(self) -> bool:
        """Whether stage 1 is guided."""
        return self.recipe == "dev" and not self.dfr

    @property
    def guidance(self) -> Guidance | None:
        """The guidance of the fields; None without such fields."""
        return self.resolved_guidance if self.holds("guidance") else None

    @property
    def resolved_guidance(self) -> Guidance:
        """The guidance of the fields, and the dev recipe's for these inputs."""
        voiced = self.reference_audio is not None or self.reference_video is not None
        sound = self.audio_path is not None
        default = default_guidance(self.sampler, sound, self.sound_only, voiced)
        default = MATTE if self.alpha_gen else default
        names, streams = [field.name for field in dataclasses.fields(StreamGuidance)], []
        for stream, fields in zip(default.streams, rules.GUIDANCE, strict=True):
            values = zip(names, map(self.__getattribute__, fields), strict=True)
            streams.append(
                dataclasses.replace(stream, **{n: x for n, x in values if x is not None})
            )
        return Guidance(*streams)

    @property
    def distilled_strengths(self) -> tuple[float | None, float | None]:
        return self.distilled_lora_strength_stage_1, self.distilled_lora_strength_stage_2

    @property
    def rendering(self) -> Rendering:
        """The clips and windows of DFR, which release 1.2.0 has for the dev checkpoint and 1.4 for
        the distilled."""
        rounds, holds = self.temporal_upsample_rounds or 0, self.recipe == "distilled"
        return Rendering(self.size, rounds, holds)

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
        return bool(self.sound or self.retake or self.references or self.reference_sound)

    def stage_size(self, upsampled: bool) -> Size:
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
        if self.chunk:
            return self.chunk.generated
        if self.media.hdr:
            return self.hdr_seams
        without = upsampled and COMPAT[self.compat].plain_stage_2
        count = 0 if without else self.num_generated_keyframes or 0
        return between_keyframes(count, self.size.num_frames)

    @property
    def reads_keyframes(self) -> bool:
        """Whether the host's diffusion decoder reads the generated keyframes."""
        of_dfr = self.dfr and self.rendering.holds
        return self.decode_with_keyframes or of_dfr or bool(self.hdr_seams)

    def decoded_keyframes(self, tensors: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The keyframes (1, 128, 1, h, w) that it reads, by their frames. tensors: of the run."""
        if not self.reads_keyframes:
            return {}
        if self.dfr:  # without those that fill the last segment
            render = self.rendering
            planes = render.planes(tensors, render.rounds)
            return {frame: planes[frame] for frame in sorted(planes) if frame < render.frames}
        upsampled = self.size.two_stage and not self.skip_stage_2
        name, frames = f"s{1 + upsampled}_generated_keyframes", self.generated_keyframes(upsampled)
        planes = tensors[name].split(1, dim=2)
        if self.chunk and self.chunk.held:
            frames = self.chunk.held + frames
            planes = tensors[chunks.CARRIED + name].split(1, dim=2) + planes
        return dict(zip(frames, planes, strict=True))

    def appended_audio(self, upsampled: bool) -> int:
        """Audio tokens appended to the clip's in a stage: in stage 1 those of the reference's
        sound, and in stage 2 of dubbing those of stage 1's sound."""
        if self.reference_sound is None:
            return 0
        if upsampled:
            return self.size.audio_frames if self.dubbing else 0
        return self.reference_sound.latents

    def audio_timesteps(self, upsampled: bool) -> int:
        """Distinct timesteps among a stage's audio tokens: 2 where some are held."""
        carries = self.chunk and not self.freezes_sound(upsampled)
        return 2 if self.retake or carries or (self.reference_sound and not upsampled) else 1

    def freezes_sound(self, upsampled: bool) -> bool:
        """Whether a stage does not change the sound: an input, or stage 1's with a reference or in
        a window."""
        return bool(self.sound or self.temporal or (upsampled and self.reference_sound))

    def appended(self, upsampled: bool, rows: int, columns: int) -> list[Appended]:
        """The tokens appended to the clip's in a stage with these latent rows and columns, in their
        order: images, references, given and generated keyframes, those of the window before, stage
        1's video."""
        size, keyframe = self.stage_size(upsampled), Appended((1, rows, columns))
        guides = sum(self.images_as_guides or image.frame_index != 0 for image in self.placed)
        references = self.appended_references(upsampled)
        half = video_latent_shape(*self.size.first.sides, size.num_frames)
        detailed = [Appended(half, self.detailing_scale or 1)] * self.details(upsampled)
        return [
            *[keyframe] * guides,
            *(Appended(video.seen_shape(size), video.space_scale) for video in references),
            *[keyframe] * len(self.given_keyframes),
            *[keyframe] * len(self.generated_keyframes(upsampled)),
            *[keyframe] * len(self.chunk.held if self.chunk else ()),
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

    def encodes_whole(self, size: Size) -> bool:
        """Whether a stage of this size has its references encoded in one piece: a tiled one, of
        which that would take most of the host's memory, has them in the encoder's tiles."""
        rows, columns = (side // SPACE_SCALE for side in size.sides)
        return self.dubbing is None and not self.tiles(rows, columns)

    def timesteps(self, upsampled: bool) -> int:
        """Distinct timesteps among a stage's video tokens: one for each distinct denoise mask. A
        retake always has 2, for free and kept tokens, and a dubbed clip one of its own, so that no
        graph depends on its strength."""
        if self.retake:
            return 2
        dubbed = self.dubbing is not None
        conditions = self.images if dubbed else (*self.images, *self.appended_references(upsampled))
        strengths = [condition.strength for condition in conditions]
        strengths += [1.0] * self.details(upsampled)
        strengths += [ANCHOR] * bool(self.given_keyframes)
        if window := self.temporal:
            strengths += [1.0] * bool(window.holds and window.shared)
        strengths += [1.0] * bool(self.chunk)  # in the first window too, for one graph of all
        return len({1.0, *map(held_mask, strengths)}) + dubbed

    @property
    def fixes_timesteps(self) -> bool:
        """Whether the inputs determine the number of timesteps. Otherwise graphs with 1 and with 2
        are compiled, for text to video and for an image at frame 0."""
        files = self.images or self.references or self.dubbing or self.retake
        return bool(files or self.sound_only or self.dfr or self.chunk)

    @property
    def extension(self) -> Extension | None:
        """The extension of the video, if the job extends one; `size` is then a window's."""
        if self.retake is None or not self.retake.extend:
            return None
        frames, rate = self.size.num_frames, self.size.frame_rate
        return Extension(self.retake.extend, self.retake.source_frames, frames, rate)

    @property
    def encoded_clips(self) -> list[EncodedClip]:
        """The videos that host.encode_inputs encodes before the first stage."""
        if self.windows:
            return list(dict.fromkeys(clip for job in self.windows for clip in job.encoded_clips))
        stage_1, clips = self.size.first, []
        if self.retake:
            frames = self.size.num_frames
            if longer := self.extension:  # the known part; one frame more if it comes last
                frames = TIME_SCALE * (longer.known_latents + longer.before - 1) + 1
            clips.append(EncodedClip((frames, *stage_1.sides)))
        if clip := self.dubbing:
            clips += [EncodedClip(clip.pixels(size)) for size in (stage_1, self.size)]
        sizes = (stage_1, self.size) if self.stage_2_ic_lora else (stage_1,)
        referred = [(video, size) for size in sizes for video in self.references]
        whole = self.encodes_whole
        return clips + [EncodedClip(video.pixels(size), whole(size)) for video, size in referred]

    @property
    def own_graphs(self) -> list[str]:
        """The fields of the inputs that need graphs of their own. Those of text to video
        also serve a sound and an image at frame 0."""
        without = {
            "image": not any(image.frame_index for image in self.images),
            "nag_scale": self.nag is None,
            "chunked": not self.windows,
        }
        return [name for name in _OWN_GRAPHS if self.holds(name) and not without.get(name)]

    def describe(self) -> dict[str, Any]:
        """The settings for the sidecar and the report."""
        fields = type(self).model_fields
        described = vars(self.size) | {name: getattr(self, name) for name in fields}
        for inputs, names in _DESCRIBED.items():
            for name in names.split():
                del described[name]
            described[inputs] = getattr(self, inputs)
        described["reference_audio"] = described.pop("reference_sound")
        described |= vars(self.size)
        for name in _LATER_FIELDS:  # the identity of earlier versions
            if described[name] == fields[name].default:
                del described[name]
        if not described["detailing_scale"]:
            del described["detailing_scale"]
        described["num_frames"] -= self.tail_frames or 0  # as typed
        if self.sound_only:
            del described["height"], described["width"]
        return described

    # --- files and checks -------------------------------------------------------------------------

    @property
    def files(self) -> dict[str, Path]:
        return {f"{flag_of(name)} {path}": Path(path) for name, path in self.input_paths}

    def check_rules(self, graphs: bool = False) -> None:
        """Raise FieldError for fields that need or exclude each other. graphs: only where graphs
        depend on them."""
        if (count := len(self.conditioning_attention_mask)) > 1:
            raise FieldError(
                f"got {count} times {{conditioning_attention_mask}},"
                " wanted one mask for all references"
            )
        if self.video_conditioning and self.lora and not self.ic_lora:
            files = {
                f"file_{n}": f"{path} {1.0 if strength is None else strength:g}"
                for n, (path, strength) in enumerate(self.lora)
            }
            named = " ".join(f"{{ic_lora}} {{{name}}}" for name in files)
            raise FieldError(
                "{video_conditioning} needs an {ic_lora}, and got {lora} alone, for every stage and"
                f" without references; type {named} in its place, or leave out"
                " {video_conditioning}",
                **files,
            )
        rules.check(self.holds, graphs)
        self.check_strengths()

    def check_strengths(self) -> None:
        """Raise FieldError for two strengths of the distilled LoRA."""
        field = "{distilled_lora_strength_stage_1}"
        if self.distilled_strengths[0] is None:
            field = "{distilled_lora_strength_stage_2}"
        typed = any(lora.strength is not None for lora in self.distilled_lora)
        if typed and self.distilled_strengths != (None, None):
            raise FieldError(
                f"{field} replaces the strength of {{distilled_lora}}: type {{distilled_lora}}"
                " PATH without a strength"
            )

    def check_inputs(self) -> None:
        """Raise UserError for an unreadable file, or for a condition that does not fit the clip."""
        for name, path in self.input_paths:
            kind, values = INPUT_FILES[name]
            flag = flag_of(name)
            if self.media.hdr and Path(path).is_dir():
                continue  # of EXR files
            check_readable(path, flag, f"; pass {kind} as {flag} {values}")
        for image in self.images:
            image.check(self.output_size.num_frames)
        frames, count = self.size.num_frames, self.num_generated_keyframes or 0
        if self.holds("chunked"):
            self._check_windows()
        if self.dfr and frames == 1:
            raise FieldError("{num_frames} 1: {dfr} renders motion, wanted 9 or more")
        if not self.windows and count > (most := max(0, frames - 2)):
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

    def _check_windows(self) -> None:
        if COMPAT[self.compat].plain_stage_2:
            raise FieldError(
                f"{{chunked}} does not go with {{compat}} {self.compat}; leave one out"
            )
        windows, frames = len(self.clips), self.size.num_frames
        if (count := len(self.prompts or ())) > windows:
            raise FieldError(
                f"{{prompts}}: got {count} for {windows} windows; type fewer, or a larger"
                " {num_frames}"
            )
        moving = [video.num_frames for video in self.references if not video.still]
        if windows > 1 and (got := min(moving, default=frames)) < frames:
            raise FieldError(
                f"{{video_conditioning}}: got {got} frames, wanted {frames}, for every window;"
                f" type {{num_frames}} {got}, or pass a longer video"
            )
