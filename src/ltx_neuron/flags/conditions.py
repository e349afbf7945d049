"""The flags of what a video is made from besides its prompt: images, sound, videos."""

import argparse
import os
from typing import Any

from ltx_neuron.errors import UserError
from ltx_neuron.flags.common import dest
from ltx_neuron.flags.lora import loras
from ltx_neuron.host.media import footage
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ImageCondition,
    ReferenceVideo,
    Retake,
    SoundCondition,
)
from ltx_neuron.sampling.inputs import REGENERATE
from ltx_neuron.weights.lora import reference_scale

# Flag, the name of its value, what it says: of the conditions that no graph depends on.
_DETAILS = (
    ("--audio-start-time", "SECONDS", "where in the sound the video begins (default: 0)"),
    ("--audio-max-duration", "SECONDS", "of the sound (default: the video's)"),
    ("--start-time", "SECONDS", "of --video-path: where what is made anew begins"),
    ("--end-time", "SECONDS", "and where it ends"),
)


def add_conditions(parser: argparse.ArgumentParser, shape_only: bool = False) -> None:
    """What a video is made from besides its prompt and images. shape_only: the flags that graphs
    depend on, of the scripts that compile them."""
    add = parser.add_argument_group("sound, video and guides").add_argument
    add("--audio-path", metavar="FILE", help="make the video for this sound")
    help = "make part of this video anew, at its own size"
    add("--video-path", metavar="FILE", help=help)
    help = "make that video so much longer at its end or, below 0, before its beginning, in windows"
    add("--extend", type=float, metavar="SECONDS", help=f"{help} of --num-frames")
    metavar = ("PATH", "STRENGTH")
    help = "a reference of --ic-lora; repeatable"
    several = dict(action="append", nargs="+", default=[], metavar=metavar)
    add("--video-conditioning", help=help, **several)
    help = "a video, black to white, of how much of the references is attended to"
    add("--conditioning-attention-mask", help=help, **several)
    add("--skip-stage-2", action="store_true", help="of --two-stage: stop at half the size")
    help = "append the image at frame 0 as the others are (dev recipe, two stages)"
    add("--images-as-guides", action="store_true", help=help)
    if shape_only:
        names = [flag for flag, _, _ in _DETAILS]
        parser.set_defaults(**dict.fromkeys(map(dest, names)), regenerate=None, sampler="euler")
        return
    for flag, metavar, help in _DETAILS:
        add(flag, type=float, metavar=metavar, help=help)
    help = "what of --video-path is made anew (default: both)"
    add("--regenerate", choices=REGENERATE, help=help)


def inputs(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a Job that `add_conditions` and --image say."""
    masks = _with_strength(args.conditioning_attention_mask, "--conditioning-attention-mask")
    if len(masks) > 1:
        raise UserError(
            f"--conditioning-attention-mask is there {len(masks)} times; one is for all references"
        )
    return {
        "images": images(args),
        "sound": _sound(args),
        "retake": _retake(args),
        "references": _references(args),
        "attention_mask": AttentionMask(*masks[0]) if masks else None,
        "skip_stage_2": args.skip_stage_2,
        "images_as_guides": args.images_as_guides,
        "sampler": args.sampler,
        "upright": upright(args),
    }


def upright(args: argparse.Namespace) -> bool:
    """Whether images and videos are taken as they are shown: as --compat's releases do not."""
    return not COMPAT[getattr(args, "compat", None)].as_stored


def check_resumed(args: argparse.Namespace) -> None:
    """Raise UserError for a file that an interrupted run began from, and that is gone."""
    if not getattr(args, "resume", None):
        return
    named = {flag: [getattr(args, dest(flag))] for flag in ("--audio-path", "--video-path")}
    for flag in ("--image", "--video-conditioning", "--conditioning-attention-mask"):
        named[flag] = [values[0] for values in getattr(args, dest(flag))]
    for flag, path in ((flag, path) for flag, paths in named.items() for path in paths):
        if path is not None and not os.path.exists(path):  # False of a name that no file may have
            raise UserError(
                f"--resume needs {flag} {path} as well, which is not there: a run is gone on with"
                f" where what it was given is the same. Type {flag} with where that file lies now,"
                " under whatever name, or leave --resume out"
            )


def _sound(args: argparse.Namespace) -> SoundCondition | None:
    _check_owner(args, "--audio-path", ("--audio-start-time", "--audio-max-duration"))
    if args.audio_path is None:
        return None
    return SoundCondition(args.audio_path, args.audio_start_time or 0.0, args.audio_max_duration)


def _retake(args: argparse.Namespace) -> Retake | None:
    part = "--start-time", "--end-time", "--regenerate"
    _check_owner(args, "--video-path", (*part, "--extend"))
    if args.video_path is None:
        return None
    if args.extend is not None:
        return _extend(args, [flag for flag in part if getattr(args, dest(flag)) is not None])
    for flag in ("--start-time", "--end-time"):
        if getattr(args, dest(flag)) is None:
            raise UserError(
                f"--video-path needs {flag}: which seconds are made anew? Type for example"
                " --start-time 0.5 --end-time 1"
            )
    regenerate = args.regenerate or Retake.regenerate
    return Retake(args.video_path, args.start_time, args.end_time, regenerate)


def _extend(args: argparse.Namespace, excluded: list[str]) -> Retake:
    if excluded:
        raise UserError(
            f"{' '.join(excluded)} does not go with --extend, which adds to the video and keeps all"
            f" that is there; leave out {' '.join(excluded)}"
        )
    if args.extend == 0:
        raise UserError(
            "--extend 0 adds nothing; type seconds, as in --extend 2, or --extend -2 before the"
            " beginning"
        )
    frames = footage(args.video_path, "--video-path").num_frames
    return Retake(args.video_path, extend=args.extend, source_frames=frames)


def _references(args: argparse.Namespace) -> tuple[ReferenceVideo, ...]:
    """The references, with what their files and the IC-LoRAs' metadata say of them."""
    flag = "--video-conditioning"
    given = _with_strength(args.video_conditioning, flag)
    scales = reference_scale(loras(args.ic_lora, "--ic-lora")) if given else ()
    return tuple(
        ReferenceVideo(path, strength, footage(path, flag).num_frames, *scales)
        for path, strength in given
    )


def _with_strength(flag_values: list[list[str]], flag: str) -> list[tuple[str, float]]:
    """PATH STRENGTH, for each time the flag was given."""
    parsed = []
    for values in flag_values:
        try:
            path, strength = values
            parsed.append((path, float(strength)))
        except ValueError:
            raise UserError(
                f"{flag} {' '.join(values)}: wanted PATH STRENGTH, as in {flag} {values[0]} 1.0"
            ) from None
    return parsed


def _check_owner(args: argparse.Namespace, owner: str, flags: tuple[str, ...]) -> None:
    """Raise UserError for flags that say something of another one that is not there."""
    given = [flag for flag in flags if getattr(args, dest(flag)) is not None]
    if given and getattr(args, dest(owner)) is None:
        raise UserError(f"{' '.join(given)} goes with {owner} FILE, which is not there")


def images(args: argparse.Namespace) -> tuple[ImageCondition, ...]:
    """PATH [FRAME_IDX [STRENGTH [CRF]]], for each --image."""
    parsed = []
    for values in args.image:
        words = " ".join(map(str, values))
        if len(values) > 4:
            raise UserError(
                f"--image takes PATH [FRAME_IDX [STRENGTH [CRF]]], got {len(values)} values:"
                f" {words}"
            )
        kinds = zip((int, float, int), values[1:], strict=False)
        try:
            numbers = [kind(value) for kind, value in kinds]
        except ValueError:
            raise UserError(
                f"--image {words}: FRAME_IDX and CRF are whole numbers, STRENGTH is a number"
            ) from None
        parsed.append(ImageCondition(values[0], *numbers))
    return tuple(parsed)
