"""Jobs from the inputs that they have, without files: the facts of files are arguments."""

import dataclasses
from typing import Any

from ltx_neuron.job import LORA_FIELDS, Job
from ltx_neuron.sampling.conditions import ReferenceAudio, WeightedFile
from ltx_neuron.sampling.inputs import _DESCRIBED, Media
from ltx_neuron.sampling.rules import GUIDANCE
from ltx_neuron.sampling.size import Size
from ltx_neuron.sampling.spec import SIZES, LoraFile

_INPUTS = ("size", *_DESCRIBED, *LORA_FIELDS)
# Fields that these are made of
_OF_INPUTS = {*SIZES, "spatial_scale", *" ".join(_DESCRIBED.values()).split()}


def make_job(prompt: str = "", size: Size | None = None, seed: int = 10, steps: int | None = None, **fields) -> Job:
    """A job of inputs as Job's properties have them, and of fields. Raises UserError."""
    fields = {"prompt": prompt, "seed": seed, "num_inference_steps": steps} | fields
    inputs = {name: fields.pop(name, None) for name in _INPUTS if name != "size"}
    return _job(fields, inputs | {"size": size})


def replace(value: Any, **changes) -> Any:
    """dataclasses.replace, also of a job."""
    if not isinstance(value, Job):
        return dataclasses.replace(value, **changes)
    inputs = {name: changes.pop(name, getattr(value, name)) for name in _INPUTS}
    fields = {name: getattr(value, name) for name in Job.model_fields if name not in _OF_INPUTS}
    return _job(fields | changes, inputs)


def _files(loras) -> tuple[LoraFile, ...]:
    return tuple(LoraFile(str(lora.path), lora.strength) for lora in loras or ())


def _job(fields: dict[str, Any], inputs: dict[str, Any]) -> Job:
    media, values, size = {}, dict(fields), inputs["size"] or Size()
    if retake := inputs["retake"]:
        values |= {"video_path": str(retake.path), "two_stage": size.two_stage}
        media["video"] = size
        if retake.extend:
            values |= {"extend": retake.extend, "num_frames": size.num_frames}
            media["video"] = dataclasses.replace(size, num_frames=retake.source_frames)
        else:
            values |= {name: getattr(retake, name) for name in ("start_time", "end_time", "regenerate")}
    else:
        values |= {name: x for name, x in vars(size).items() if x != getattr(Size(), name)}
        if values.get("tail_frames"):
            values["num_frames"] = size.num_frames - values["tail_frames"]
        if values.get("auto_duration"):
            values.pop("num_frames", None)
        if values.get("sound_only"):
            values |= {"height": None, "width": None}
    if inputs["images"]:
        values["image"] = inputs["images"]
    if sound := inputs["sound"]:
        values |= {"audio_path": str(sound.path), "audio_start_time": sound.start_time or None}
        values |= {"audio_max_duration": sound.max_duration, "audio_bed": sound.bed}
    if references := inputs["references"]:
        values["video_conditioning"] = tuple(WeightedFile(str(video.path), video.strength) for video in references)
        media["references"] = tuple((video.num_frames, video.still) for video in references)
        media["scales"] = references[0].space_scale, references[0].time_scale
    if mask := inputs["attention_mask"]:
        values["conditioning_attention_mask"] = (WeightedFile(str(mask.path), mask.strength),)
    if clip := inputs["dubbing"]:
        values |= {"reference_video": str(clip.path), "num_frames": None, "frame_rate": None}
        values["reference_strength"] = clip.strength
        media |= {"clip": (size.num_frames, size.frame_rate), "scales": (clip.space_scale, 1)}
    if voice := inputs["reference_sound"]:
        media["latents"] = voice.latents
        if not clip:
            values |= {"reference_audio": str(voice.path), "reference_audio_max_duration": voice.max_duration}
            values["identity_guidance_scale"] = voice.identity_scale
    if guidance := inputs["guidance"]:
        absent = bool(values.get("sound_only")), bool(sound)
        for stream, names, none in zip(guidance.streams, GUIDANCE, absent, strict=True):
            if not (none and stream == type(stream)()):
                values |= dict(zip(names, vars(stream).values(), strict=True))
        if values.get("sound_only") and values.get("v2a_guidance_scale") == 1:
            del values["v2a_guidance_scale"]
    first, second = _files(inputs["stage_1_loras"]), _files(inputs["stage_2_loras"])
    values |= {"lora": _files(inputs["loras"]), "ic_lora": first, "distilled_lora": second}
    values["detailing_lora"], media["detailing_scale"] = _files(inputs["detailing_loras"]), inputs["detailing_scale"]
    return Job.validated(values).with_media(Media(**media))


def read_voice(path, **fields) -> ReferenceAudio | None:
    return Job(reference_audio=str(path), **fields).reference_sound


def read_clip(path, loras, **fields) -> dict[str, Any]:
    job = Job(reference_video=str(path), lora=_files(loras), two_stage=True, **fields)
    return {"dubbing": job.dubbing, "reference_sound": job.reference_sound}
