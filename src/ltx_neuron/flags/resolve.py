"""Convert a JobSpec to a Job: read facts from its files. Raises UserError if one field needs or
excludes another."""

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from ltx_neuron import hub
from ltx_neuron.errors import FieldError, UserError, flag_of
from ltx_neuron.files import check_readable
from ltx_neuron.host.images import is_still
from ltx_neuron.host.media import footage, video_size
from ltx_neuron.job import LORA_FIELDS, SPEC_FIELDS, VOICE_WITHOUT_LORA, Job, Size
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ReferenceAudio,
    ReferenceVideo,
    Retake,
    SoundCondition,
)
from ltx_neuron.sampling.duration import AutoDuration
from ltx_neuron.sampling.guidance import Guidance, check_guidable, default_guidance
from ltx_neuron.sampling.latents import TIME_SCALE, sound_latent_frames
from ltx_neuron.sampling.size import NO_PICTURE
from ltx_neuron.sampling.spec import (
    DETAILING,
    HQ_STRENGTHS,
    PICTURE_FIELDS,
    SIZES,
    JobSpec,
    LoraFile,
    guidance_fields,
)
from ltx_neuron.weights.lora import Lora, WeightSet, detailing_scale, dubbing_scale, reference_scale


def job_of(spec: JobSpec, orientation: str = "shown") -> Job:
    """The job. orientation: see sampling.compat.Compat."""
    spec = spec.model_copy(update={"recipe": spec.recipe or Job.recipe})
    masks = spec.conditioning_attention_mask
    if len(masks) > 1:
        raise FieldError(
            f"got {len(masks)} times {{conditioning_attention_mask}}, wanted one mask for all"
            " references"
        )
    _check_owner(spec, "audio_path", ("audio_start_time", "audio_max_duration", "audio_bed"))
    sound = None
    if spec.audio_path:
        start = spec.audio_start_time or 0.0
        sound = SoundCondition(spec.audio_path, start, spec.audio_max_duration, spec.audio_bed)
    voice = {"reference_audio": voice_of(spec)}
    size, loras = size_of(spec, orientation == "shown"), lora_fields(spec)
    return Job(
        size=size,
        guidance=guidance_of(spec),
        images=spec.image,
        sound=sound,
        retake=retake_of(spec),
        references=references_of(spec),
        attention_mask=AttentionMask(*masks[0]) if masks else None,
        detailing_scale=detailing_scale(loras["detailing_loras"]),
        orientation=orientation,
        **voice | dubbing_of(spec, size, loras["loras"]),
        **loras,
        **{name: getattr(spec, name) for name in SPEC_FIELDS},
    )


def size_of(spec: JobSpec, upright: bool = True, named: str = flag_of("video_path")) -> Size:
    """The generated size of the fields, with the tail, or that of the file of video_path;
    reference_video's file has the length. named: text before video_path's path in errors. upright:
    apply the file's display matrix."""
    said = {name: getattr(spec, name) for name in SIZES}
    # 0 equals False, but is a given value.
    typed = {name: v for name, v in said.items() if v is not None and v is not False}
    if spec.reference_video is not None:
        typed |= _dubbed_length(spec.reference_video, typed)
    if spec.sound_only:
        if wrong := _said(spec, PICTURE_FIELDS):
            raise FieldError(f"{{sound_only}} makes no picture: leave out {_listed(wrong)}")
        typed |= dict(zip(("height", "width"), NO_PICTURE, strict=True))
    if spec.video_path is None:
        if spec.auto_duration:
            if "num_frames" in typed:
                raise FieldError(
                    "{num_frames} cannot be combined with {auto_duration}; leave one of them out"
                )
            rate = typed.get("frame_rate", Size.frame_rate)
            longest = spec.auto_duration.max_seconds
            typed["num_frames"] = spec.auto_duration.num_frames(longest, rate)
        size = Size(**typed)
        if spec.tail_frames:
            size.check()
            size = dataclasses.replace(size, num_frames=size.num_frames + spec.tail_frames)
        return size
    window = None if spec.extend is None else typed.pop("num_frames", None)
    if typed:
        names = _listed(typed)
        raise FieldError(
            f"{names} cannot be combined with {{video_path}}: the video gets the file's size and"
            f" frame rate, in one stage; leave out {names}"
        )
    return video_size(spec.video_path, named, spec.extend, window, upright)


def with_auto_duration(spec: JobSpec) -> JobSpec:
    """The fields with auto_duration, unless a field or an input file determines the length."""
    if any((spec.num_frames, spec.audio_path, spec.video_path, spec.reference_video)):
        return spec
    if spec.auto_duration or spec.sound_only:
        return spec
    return spec.model_copy(update={"auto_duration": AutoDuration()})


def check_resumed(spec: JobSpec) -> None:
    """Raise UserError if an input file of an interrupted run is missing."""
    files = "audio_path", "video_path", "reference_video", "reference_audio"
    named = {name: [getattr(spec, name)] for name in files}
    for name in ("image", "video_conditioning", "conditioning_attention_mask"):
        named[name] = [each.path for each in getattr(spec, name)]
    for flag, path in ((flag_of(name), path) for name, paths in named.items() for path in paths):
        if path is not None and not os.path.exists(path):  # False of a name that no file may have
            raise UserError(
                f"--resume needs {flag} {path}, and there is no such file: a resumed run needs the"
                f" same inputs. Type {flag} with the present path of this file, or leave --resume"
                " out"
            )


# --- videos and references ------------------------------------------------------------------------


def retake_of(spec: JobSpec, named: str = flag_of("video_path")) -> Retake | None:
    """The video to regenerate or extend, if any. named: text before its path in errors."""
    part = "start_time", "end_time", "regenerate"
    _check_owner(spec, "video_path", (*part, "extend"))
    if spec.video_path is None:
        return None
    if spec.extend is not None:
        if said := _said(spec, part):
            excluded = _listed(said)
            raise FieldError(
                f"{excluded} cannot be combined with {{extend}}, which keeps the whole video; leave"
                f" out {excluded}"
            )
        frames = footage(spec.video_path, named).num_frames
        return Retake(spec.video_path, extend=spec.extend, source_frames=frames)
    for name in part[:2]:
        if getattr(spec, name) is None:
            raise FieldError(
                f"{{video_path}} needs {{{name}}}: type the seconds to regenerate, for example"
                " {start_time} 0.5 {end_time} 1"
            )
    assert spec.start_time is not None and spec.end_time is not None
    regenerate = spec.regenerate or Retake.regenerate
    return Retake(spec.video_path, spec.start_time, spec.end_time, regenerate)


def references_of(spec: JobSpec) -> tuple[ReferenceVideo, ...]:
    """The references, with facts from their files and the IC-LoRAs' metadata."""
    return tuple(
        reference_of(path, strength, _loras(spec.ic_lora))
        for path, strength in spec.video_conditioning
    )


def reference_of(
    path: str, strength: float, ic_loras: WeightSet, flag: str = flag_of("video_conditioning")
) -> ReferenceVideo:
    """A reference of a file."""
    still = is_still(path)
    frames = 1 if still else footage(path, flag).num_frames
    return ReferenceVideo(path, strength, frames, *reference_scale(ic_loras), still)


def dubbing_of(spec: JobSpec, size: Size, loras: WeightSet) -> dict[str, Any]:
    """A Job's fields for the video to dub, if any: a reference of both stages, and its sound.
    Raises UserError unless there is one LoRA.

    size   of the job, whose length is the video's
    loras  of all stages: the dubbing LoRA
    """
    _check_owner(spec, "reference_video", ("reference_strength",))
    if (path := spec.reference_video) is None:
        return {}
    if len(loras) != 1:
        count = f"{len(loras)}; leave all but one out" if loras else "none; type {lora} PATH"
        raise FieldError(
            "{reference_video} needs one {lora}, the dubbing LoRA (it is in both stages), got"
            f" {count}"
        )
    strength = 1.0 if spec.reference_strength is None else spec.reference_strength
    return {
        "dubbing": ReferenceVideo(path, strength, size.num_frames, dubbing_scale(loras[0])),
        "reference_audio": _reference_audio(path, flag_of("reference_video")),
    }


def voice_of(spec: JobSpec) -> ReferenceAudio | None:
    """The reference voice, if any, with the number of its latents."""
    _check_owner(
        spec, "reference_audio", ("reference_audio_max_duration", "identity_guidance_scale")
    )
    if (path := spec.reference_audio) is None:
        return None
    if spec.reference_video is not None:
        raise FieldError(
            "{reference_audio} does not go with {reference_video}, whose own voice is kept; leave"
            " one of them out"
        )
    flag = flag_of("reference_audio")
    check_readable(path, flag, f"; pass a sound as {flag} FILE")
    voice = _reference_audio(path, flag, spec.reference_audio_max_duration)
    return dataclasses.replace(voice, identity_scale=spec.identity_guidance_scale)


def _reference_audio(path: str, flag: str, seconds: float | None = None) -> ReferenceAudio:
    from ltx_neuron.host.conditions import read_reference_audio  # imports ltx-core

    sound = read_reference_audio(path, seconds, flag)
    return ReferenceAudio(path, sound_latent_frames(sound.samples.shape[1], sound.rate), seconds)


def _dubbed_length(path: str, typed: dict[str, Any]) -> dict[str, Any]:
    """The frames and the frame rate of a video to dub. typed: the given fields of a Size."""
    flag = flag_of("reference_video")
    check_readable(path, flag, f"; pass a video with sound as {flag} FILE")
    video = footage(path, flag)
    frames, rate = video.num_frames, video.frame_rate
    used = max(1, (frames - 1) // TIME_SCALE * TIME_SCALE + 1)
    if given := [name for name in ("num_frames", "frame_rate") if name in typed]:
        named = " ".join(f"{{{name}}} {typed[name]:g}" for name in given)
        raise FieldError(
            f"{named} does not go with {{reference_video}}: {{path}} says how many ({{counts}});"
            " leave it out",
            path=path,
            counts=f"{used} of its {frames} frames, {rate:g} fps",
        )
    if used == 1:
        raise UserError(
            f"{flag} {path} has {frames} frames, wanted {TIME_SCALE + 1} or more; pass a longer one"
        )
    return {"num_frames": used, "frame_rate": rate}


def _said(spec: JobSpec, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(spec, name) is not None]


def _listed(fields: Iterable[str], separator: str = " ") -> str:
    """Fields for the text of a FieldError."""
    return separator.join(f"{{{name}}}" for name in fields)


def _check_owner(spec: JobSpec, owner: str, fields: tuple[str, ...]) -> None:
    """Raise FieldError if one of `fields` is set without the field that it details."""
    said = _said(spec, fields)
    if said and getattr(spec, owner) is None:
        raise FieldError(f"{_listed(said)} needs {{{owner}}} FILE")


# --- guidance -------------------------------------------------------------------------------------


def guidance_of(spec: JobSpec) -> Guidance | None:
    """The guidance of the fields, with the sampler's defaults; None without such fields."""
    said = {stream: _said(spec, tuple(guidance_fields(stream))) for stream in ("video", "audio")}
    if not (names := said["video"] + said["audio"]):
        return None
    check_guidable(names, spec.recipe)
    sound = spec.audio_path is not None
    if sound and said["audio"]:
        raise FieldError(
            f"{_listed(said['audio'], ', ')} cannot be combined with {{audio_path}}: guidance does"
            " not apply to a given sound; leave it out"
        )
    voiced = spec.reference_audio is not None
    defaults = default_guidance(spec.sampler, sound, spec.sound_only, voiced)
    changed = {
        stream: dataclasses.replace(
            getattr(defaults, stream),
            **{guidance_fields(stream)[name]: getattr(spec, name) for name in names},
        )
        for stream, names in said.items()
    }
    return Guidance(**changed)


# --- LoRAs ----------------------------------------------------------------------------------------


def lora_fields(spec: JobSpec) -> dict[str, WeightSet]:
    """A Job's LoRAs by its fields: of all stages, of stage 1 and of stage 2."""
    distilled = spec.distilled_lora
    given = spec.distilled_lora_strength_stage_1, spec.distilled_lora_strength_stage_2
    stage_1, stage_2 = _loras(spec.ic_lora), _loras(distilled)
    if given != (None, None):
        field = f"{{distilled_lora_strength_stage_{1 if given[0] is not None else 2}}}"
        if not distilled:
            raise FieldError(f"{field} needs {{distilled_lora}} PATH")
        if any(lora.strength is not None for lora in distilled):
            raise FieldError(
                f"{field} replaces the strength of {{distilled_lora}}: type {{distilled_lora}} PATH"
                " without a strength"
            )
        if spec.reference_audio and not stage_1:  # a Job takes the distilled LoRA for the voice's
            raise FieldError(VOICE_WITHOUT_LORA)
        first, stage_2 = (
            _loras(distilled, default if strength is None else strength)
            for strength, default in zip(given, HQ_STRENGTHS, strict=True)
        )
        stage_1 += first
    detailing = _loras(spec.detailing_lora, DETAILING)
    return dict(zip(LORA_FIELDS, (_loras(spec.lora), stage_1, stage_2, detailing), strict=True))


def _loras(given: tuple[LoraFile, ...], strength: float = 1.0) -> WeightSet:
    """strength: the default of files without one."""
    return tuple(
        Lora(hub.local_path(path, "lora"), strength if own is None else own) for path, own in given
    )


def weight_sets(fields: dict[str, WeightSet]) -> tuple[WeightSet, ...]:
    """The weight sets of a Job's LoRAs: for stage 1 and for stage 2."""
    every, first, second, detailing = fields.values()
    if detailing:  # DFR has the distilled LoRA in all stages
        return every + second, every + second + detailing
    return tuple(dict.fromkeys([every + first, every + second]))
