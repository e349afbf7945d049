"""The flags of guidance, of the dev recipe."""

import argparse
import dataclasses
from typing import Any

from ltx_neuron.errors import UserError
from ltx_neuron.flags.common import dest
from ltx_neuron.job import Job
from ltx_neuron.sampling.guidance import Guidance, check_guidable, default_guidance

# Flag, the stream it is for, the field of StreamGuidance it sets, its type. Named as in
# ltx-pipelines: the modality flags after the direction of attention that they weaken.
_GUIDANCE_FLAGS = (
    ("--video-cfg-guidance-scale", "video", "cfg_scale", float),
    ("--video-stg-guidance-scale", "video", "stg_scale", float),
    ("--video-stg-blocks", "video", "stg_blocks", int),
    ("--video-rescale-scale", "video", "rescale_scale", float),
    ("--a2v-guidance-scale", "video", "modality_scale", float),
    ("--video-skip-step", "video", "skip_step", int),
    ("--audio-cfg-guidance-scale", "audio", "cfg_scale", float),
    ("--audio-stg-guidance-scale", "audio", "stg_scale", float),
    ("--audio-stg-blocks", "audio", "stg_blocks", int),
    ("--audio-rescale-scale", "audio", "rescale_scale", float),
    ("--v2a-guidance-scale", "audio", "modality_scale", float),
    ("--audio-skip-step", "audio", "skip_step", int),
)


def add_guidance(parser: argparse.ArgumentParser) -> None:
    """Guidance of the dev recipe."""
    group = parser.add_argument_group("guidance (dev recipe only; default: the model version's)")
    for flag, _, field, kind in _GUIDANCE_FLAGS:
        several = {"nargs": "*"} if field == "stg_blocks" else {}
        group.add_argument(flag, type=kind, **several)


def guidance(
    args: argparse.Namespace, recipe: str, sampler: str = Job.sampler, sound: bool = False
) -> Guidance | None:
    """The guidance the flags ask for on top of the version's defaults; None without any. sound:
    whether it is given."""
    changes, given = {"video": {}, "audio": {}}, {"video": [], "audio": []}
    for flag, stream, field, _ in _GUIDANCE_FLAGS:
        value = getattr(args, dest(flag))
        if value is not None:
            changes[stream][field] = tuple(value) if field == "stg_blocks" else value
            given[stream].append(flag)
    if not (flags := [*given["video"], *given["audio"]]):
        return None
    check_guidable(", ".join(flags), recipe)
    if sound and given["audio"]:
        raise UserError(
            f"{', '.join(given['audio'])} does not go with --audio-path: the sound is given, so"
            " nothing of it is guided; leave it out (the --video-* and --a2v-* scales guide the"
            " video)"
        )
    defaults = default_guidance(sampler, sound)
    return Guidance(
        video=dataclasses.replace(defaults.video, **changes["video"]),
        audio=dataclasses.replace(defaults.audio, **changes["audio"]),
    )


def guidance_keys(job: Job) -> dict[str, Any]:
    """The keys of a prompts file's line that ask for a job's guidance; the reverse of
    `guidance`."""
    keys = {}
    for flag, stream, field, _ in _GUIDANCE_FLAGS if job.guidance else ():
        if stream == "audio" and job.sound:
            continue  # it has none
        value = getattr(getattr(job.guidance, stream), field)
        keys[flag.removeprefix("--")] = list(value) if field == "stg_blocks" else value
    return keys
