"""The Job of a JobSpec: what is said, with what its files say of themselves. Raises UserError where
one thing that is said needs or excludes another."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from ltx_neuron.errors import UserError
from ltx_neuron.host.media import footage, video_size
from ltx_neuron.job import LORA_FIELDS, SAID, Job, Size
from ltx_neuron.sampling.conditions import AttentionMask, ReferenceVideo, Retake, SoundCondition
from ltx_neuron.sampling.guidance import Guidance, check_guidable, default_guidance
from ltx_neuron.sampling.spec import (
    HQ_STRENGTHS,
    SIZES,
    JobSpec,
    LoraFile,
    flag_of,
    guidance_fields,
)
from ltx_neuron.weights.lora import Lora, WeightSet, reference_scale


def job_of(spec: JobSpec, upright: bool = True) -> Job:
    """The job. upright: whether images and videos are taken as they are shown."""
    spec = spec.model_copy(update={"recipe": spec.recipe or Job.recipe})
    masks = spec.conditioning_attention_mask
    if len(masks) > 1:
        raise UserError(
            f"--conditioning-attention-mask is there {len(masks)} times; one is for all references"
        )
    return Job(
        size=size_of(spec, upright),
        guidance=_guidance(spec),
        images=spec.image,
        sound=_sound(spec),
        retake=retake_of(spec),
        references=_references(spec),
        attention_mask=AttentionMask(*masks[0]) if masks else None,
        upright=upright,
        **lora_fields(spec),
        **{name: getattr(spec, name) for name in SAID},
    )


def size_of(spec: JobSpec, upright: bool = True, name: Callable[[str], str] = flag_of) -> Size:
    """What is said, or what the file of video_path has. name: a field's, to who says it."""
    values = {field: getattr(spec, field) for field in SIZES}
    typed = {
        field: value for field, value in values.items() if value is not None and value is not False
    }
    if spec.video_path is None:
        return Size(**typed)
    window = None if spec.extend is None else typed.pop("num_frames", None)
    if typed:
        names = " ".join(map(name, typed))
        raise UserError(
            f"{names} does not go with {name('video_path')}: the video is made at the file's own"
            f" size and rate, in one stage; leave out {names}"
        )
    return video_size(spec.video_path, name("video_path"), spec.extend, window, upright)


def check_resumed(spec: JobSpec) -> None:
    """Raise UserError for a file that an interrupted run began from, and that is gone."""
    named = {flag_of(name): [getattr(spec, name)] for name in ("audio_path", "video_path")}
    for name in ("image", "video_conditioning", "conditioning_attention_mask"):
        named[flag_of(name)] = [each.path for each in getattr(spec, name)]
    for flag, path in ((flag, path) for flag, paths in named.items() for path in paths):
        if path is not None and not os.path.exists(path):  # False of a name that no file may have
            raise UserError(
                f"--resume needs {flag} {path} as well, which is not there: a run is gone on with"
                f" where what it was given is the same. Type {flag} with where that file lies now,"
                " under whatever name, or leave --resume out"
            )


# --- sound, videos and references -----------------------------------------------------------------


def _sound(spec: JobSpec) -> SoundCondition | None:
    _check_owner(spec, "audio_path", ("audio_start_time", "audio_max_duration"))
    if spec.audio_path is None:
        return None
    return SoundCondition(spec.audio_path, spec.audio_start_time or 0.0, spec.audio_max_duration)


def retake_of(spec: JobSpec, name: Callable[[str], str] = flag_of) -> Retake | None:
    """The video that is made anew or longer, where one is. name: a field's, to who says it."""
    part = "start_time", "end_time", "regenerate"
    _check_owner(spec, "video_path", (*part, "extend"), name)
    if spec.video_path is None:
        return None
    start, end, extend = map(name, ("start_time", "end_time", "extend"))
    if spec.extend is not None:
        if excluded := " ".join(map(name, _said(spec, part))):
            raise UserError(
                f"{excluded} does not go with {extend}, which adds to the video and keeps all that"
                f" is there; leave out {excluded}"
            )
        frames = footage(spec.video_path, name("video_path")).num_frames
        return Retake(spec.video_path, extend=spec.extend, source_frames=frames)
    if missing := [each for each in part[:2] if getattr(spec, each) is None]:
        raise UserError(
            f"{name('video_path')} needs {name(missing[0])}: which seconds are made anew? Type for"
            f" example {start} 0.5 {end} 1"
        )
    regenerate = spec.regenerate or Retake.regenerate
    return Retake(spec.video_path, spec.start_time, spec.end_time, regenerate)


def _references(spec: JobSpec) -> tuple[ReferenceVideo, ...]:
    """The references, with what their files and the IC-LoRAs' metadata say of them."""
    given = spec.video_conditioning
    scales = reference_scale(_loras(spec.ic_lora)) if given else ()
    return tuple(
        ReferenceVideo(path, strength, footage(path, "--video-conditioning").num_frames, *scales)
        for path, strength in given
    )


def _said(spec: JobSpec, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(spec, name) is not None]


def _check_owner(
    spec: JobSpec, owner: str, fields: tuple[str, ...], name: Callable[[str], str] = flag_of
) -> None:
    """Raise UserError for what says something of another field that is not there."""
    said = " ".join(map(name, _said(spec, fields)))
    if said and getattr(spec, owner) is None:
        raise UserError(f"{said} goes with {name(owner)} FILE, which is not there")


# --- guidance -------------------------------------------------------------------------------------


def _guidance(spec: JobSpec) -> Guidance | None:
    """The guidance that is said, on top of the version's defaults; None without any."""
    said = {stream: _said(spec, tuple(guidance_fields(stream))) for stream in ("video", "audio")}
    if not (names := said["video"] + said["audio"]):
        return None
    check_guidable(", ".join(map(flag_of, names)), spec.recipe)
    sound = spec.audio_path is not None
    if sound and said["audio"]:
        raise UserError(
            f"{', '.join(map(flag_of, said['audio']))} does not go with --audio-path: the sound is"
            " given, so nothing of it is guided; leave it out (the --video-* and --a2v-* scales"
            " guide the video)"
        )
    defaults = default_guidance(spec.sampler, sound)
    changes = {
        stream: {guidance_fields(stream)[name]: getattr(spec, name) for name in names}
        for stream, names in said.items()
    }
    return Guidance(
        video=dataclasses.replace(defaults.video, **changes["video"]),
        audio=dataclasses.replace(defaults.audio, **changes["audio"]),
    )


# --- LoRAs ----------------------------------------------------------------------------------------


def lora_fields(spec: JobSpec) -> dict[str, WeightSet]:
    """A Job's LoRAs, by its fields: of all stages, and of stage 1 and 2 besides."""
    distilled = spec.distilled_lora
    given = spec.distilled_lora_strength_stage_1, spec.distilled_lora_strength_stage_2
    stage_1, stage_2 = _loras(spec.ic_lora), _loras(distilled)
    if given != (None, None):
        flag = "--distilled-lora-strength-stage-" + ("1" if given[0] is not None else "2")
        if not distilled:
            raise UserError(f"{flag} is of --distilled-lora; type --distilled-lora PATH as well")
        if any(lora.strength is not None for lora in distilled):
            raise UserError(
                f"{flag} takes the place of --distilled-lora's own strength: type"
                " --distilled-lora PATH alone"
            )
        first, stage_2 = (
            _loras(distilled, default if strength is None else strength)
            for strength, default in zip(given, HQ_STRENGTHS, strict=True)
        )
        stage_1 += first
    return dict(zip(LORA_FIELDS, (_loras(spec.lora), stage_1, stage_2), strict=True))


def _loras(given: tuple[LoraFile, ...], strength: float = 1.0) -> WeightSet:
    """strength  of those that do not say their own"""
    return tuple(
        Lora(Path(lora.path), strength if lora.strength is None else lora.strength)
        for lora in given
    )


def weight_sets(fields: dict[str, WeightSet]) -> tuple[WeightSet, ...]:
    """The weight sets that a Job's LoRAs name: of stage 1 and of stage 2."""
    every, first, second = fields.values()
    return tuple(dict.fromkeys([every + first, every + second]))
