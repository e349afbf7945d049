"""Convert a JobSpec to a Job: read facts from its files. Raises UserError if one field needs or
excludes another."""

import dataclasses
import os
from collections.abc import Iterable

from ltx_neuron import hub
from ltx_neuron.errors import FieldError, UserError, flag_of
from ltx_neuron.host.images import is_image
from ltx_neuron.host.media import footage, video_size
from ltx_neuron.job import LORA_FIELDS, SPEC_FIELDS, Job, Size
from ltx_neuron.sampling.conditions import AttentionMask, ReferenceVideo, Retake, SoundCondition
from ltx_neuron.sampling.guidance import Guidance, check_guidable, default_guidance
from ltx_neuron.sampling.size import NO_PICTURE
from ltx_neuron.sampling.spec import (
    HQ_STRENGTHS,
    PICTURE_FIELDS,
    SIZES,
    JobSpec,
    LoraFile,
    guidance_fields,
)
from ltx_neuron.weights.lora import Lora, WeightSet, reference_scale


def job_of(spec: JobSpec, orientation: str = "shown") -> Job:
    """The job. orientation: see sampling.compat.Compat."""
    spec = spec.model_copy(update={"recipe": spec.recipe or Job.recipe})
    masks = spec.conditioning_attention_mask
    if len(masks) > 1:
        raise FieldError(
            f"got {len(masks)} times {{conditioning_attention_mask}}, wanted one mask for all"
            " references"
        )
    _check_owner(spec, "audio_path", ("audio_start_time", "audio_max_duration"))
    sound = None
    if spec.audio_path:
        start = spec.audio_start_time or 0.0
        sound = SoundCondition(spec.audio_path, start, spec.audio_max_duration)
    return Job(
        size=size_of(spec, orientation == "shown"),
        guidance=_guidance(spec),
        images=spec.image,
        sound=sound,
        retake=retake_of(spec),
        references=references_of(spec),
        attention_mask=AttentionMask(*masks[0]) if masks else None,
        orientation=orientation,
        **lora_fields(spec),
        **{name: getattr(spec, name) for name in SPEC_FIELDS},
    )


def size_of(spec: JobSpec, upright: bool = True, named: str = flag_of("video_path")) -> Size:
    """The size of the fields, or of the file of video_path. named: text before its path in
    errors. upright: apply the file's display matrix."""
    said = {name: getattr(spec, name) for name in SIZES}
    # 0 equals False, but is a given value.
    typed = {name: v for name, v in said.items() if v is not None and v is not False}
    if spec.sound_only:
        if wrong := _said(spec, PICTURE_FIELDS):
            raise FieldError(f"{{sound_only}} makes no picture: leave out {_listed(wrong)}")
        typed |= dict(zip(("height", "width"), NO_PICTURE, strict=True))
    if spec.video_path is None:
        return Size(**typed)
    window = None if spec.extend is None else typed.pop("num_frames", None)
    if typed:
        names = _listed(typed)
        raise FieldError(
            f"{names} cannot be combined with {{video_path}}: the video gets the file's size and"
            f" frame rate, in one stage; leave out {names}"
        )
    return video_size(spec.video_path, named, spec.extend, window, upright)


def check_resumed(spec: JobSpec) -> None:
    """Raise UserError if an input file of an interrupted run is missing."""
    named = {name: [getattr(spec, name)] for name in ("audio_path", "video_path")}
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
    num_frames = Size.num_frames if spec.num_frames is None else spec.num_frames
    return tuple(
        reference_of(path, strength, num_frames, _loras(spec.ic_lora))
        for path, strength in spec.video_conditioning
    )


def reference_of(
    path: str,
    strength: float,
    num_frames: int,
    ic_loras: WeightSet,
    flag: str = flag_of("video_conditioning"),
) -> ReferenceVideo:
    """A reference of a file. num_frames: of the generated video, which an image has as well."""
    still = is_image(path)
    frames = num_frames if still else footage(path, flag).num_frames
    return ReferenceVideo(path, strength, frames, *reference_scale(ic_loras), still)


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


def _guidance(spec: JobSpec) -> Guidance | None:
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
    defaults = default_guidance(spec.sampler, sound, spec.sound_only)
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
        first, stage_2 = (
            _loras(distilled, default if strength is None else strength)
            for strength, default in zip(given, HQ_STRENGTHS, strict=True)
        )
        stage_1 += first
    return dict(zip(LORA_FIELDS, (_loras(spec.lora), stage_1, stage_2), strict=True))


def _loras(given: tuple[LoraFile, ...], strength: float = 1.0) -> WeightSet:
    """strength: the default of files without one."""
    return tuple(
        Lora(hub.local_path(path, "lora"), strength if own is None else own) for path, own in given
    )


def weight_sets(fields: dict[str, WeightSet]) -> tuple[WeightSet, ...]:
    """The weight sets of a Job's LoRAs: for stage 1 and for stage 2."""
    every, first, second = fields.values()
    return tuple(dict.fromkeys([every + first, every + second]))
