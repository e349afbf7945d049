"""The flags of the scripts, spelled and checked in one place, and what they are turned into.

A script parses its flags once, into a Job, Outputs, RunOptions and a Workspace; nothing below it
sees an argparse.Namespace. A line of a prompts file goes the same way: its keys are job flags.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ltx_neuron.engine import RunOptions
from ltx_neuron.errors import UserError
from ltx_neuron.files import check_folder, read_json
from ltx_neuron.generate import Outputs
from ltx_neuron.host.media import footage, video_size
from ltx_neuron.job import LORA_FIELDS, Job, Size
from ltx_neuron.profiles import HOST_DTYPES, PROFILES, resolve
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ImageCondition,
    ReferenceVideo,
    Retake,
    SoundCondition,
)
from ltx_neuron.sampling.guidance import Guidance, check_guidable, default_guidance
from ltx_neuron.sampling.inputs import REGENERATE
from ltx_neuron.sampling.res_2s import SAMPLERS
from ltx_neuron.sampling.upscaling import UPSCALES
from ltx_neuron.shard import ShardRequest
from ltx_neuron.weights.lora import Lora, WeightSet, reference_scale
from ltx_neuron.workspace import Workspace

HQ_STRENGTHS = 0.25, 0.5  # of the distilled LoRA in stage 1 and stage 2
_LORAS = ("lora", "ic_lora", "distilled_lora")
_A_LORA = {"action": "append", "nargs": "+", "default": [], "metavar": ("PATH", "STRENGTH")}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are short: the mistake and, for an unknown flag, the nearest one."""

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unknown: {' '.join(unknown)}{hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nAll flags: python {sys.argv[0]} --help\n")


# --- parsers --------------------------------------------------------------------------------------


def parser(
    description: str, example: str, gemma: bool, required: bool = True
) -> argparse.ArgumentParser:
    """A parser with the flags common to all the scripts.

    Abbreviations are off, so that a typo is an error.

    gemma     whether the script reads Gemma's folder too
    required  whether the checkpoint (and Gemma's folder) must be named
    """
    parser = _Parser(
        description=description,
        epilog=f"example:\n  {example}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = ("--checkpoint-path", "--distilled-checkpoint-path", "--model-path")
    help = "the single-file LTX-2.3 checkpoint"
    add(*names, type=Path, required=required, metavar="FILE", help=help)
    if gemma:
        help = "Gemma3-12B: weights and tokenizer"
        add("--gemma-root", type=Path, required=required, metavar="DIR", help=help)
    help = "where weights and graphs lie (default: artifacts)"
    add("--artifacts-dir", type=Path, default=Path("artifacts"), metavar="DIR", help=help)
    help = f"hardware: {', '.join(PROFILES)} (default: this machine's own)"
    add("--profile", metavar="NAME", help=help)
    help = "change one value of the profile, as in attention=matmul; repeatable"
    add("--profile-set", action="append", default=[], metavar="KEY=VALUE", help=help)
    help = "tensor-parallel ranks (default: the profile's)"
    add("--tp-degree", type=int, metavar="N", help=help)
    help = "weights and activations"
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help=help)
    return parser


def add_job(parser: argparse.ArgumentParser) -> None:
    """What one generation is asked to make: the flags that a prompts file's line may have too."""
    add = parser.add_argument
    add("--prompt")
    add("--negative-prompt", help="dev recipe only")
    add("--seed", type=int, default=Job.seed)
    add("--num-inference-steps", "--num-steps", type=int, metavar="N", help="dev recipe only")
    add("--upscale", choices=list(UPSCALES), help="after a one-stage run")
    add_sampler(parser)
    add_size(parser)
    add_loras(parser)
    add_conditions(parser)
    add_guidance(parser)


def add_sampler(parser: argparse.ArgumentParser) -> None:
    """Which sampler: of what makes or times a generation. It changes no graph."""
    help = "res_2s: HQ, of --two-stage --recipe dev (default: euler)"
    parser.add_argument("--sampler", choices=list(SAMPLERS), default=Job.sampler, help=help)


def add_size(parser: argparse.ArgumentParser) -> None:
    """The size of the video that comes out, in how many stages, and the images it holds."""
    group = parser.add_argument_group("size")
    add = group.add_argument
    add("--height", type=int, help=f"pixels (default: {Size.height})")
    add("--width", type=int, help=f"pixels (default: {Size.width})")
    add("--num-frames", type=int, help=f"8k+1 (default: {Size.num_frames})")
    help = f"frames per second (default: {Size.frame_rate:g})"
    add("--frame-rate", "--fps", type=float, help=help)
    add("--two-stage", action="store_true", help="half size first, then upsample x2 and refine")
    metavar = ("PATH", "FRAME_IDX [STRENGTH [CRF]]")
    help = "hold an image at a frame (defaults: 0, 1.0, 33); repeatable"
    add("--image", action="append", nargs="+", default=[], metavar=metavar, help=help)
    help = "sampling the checkpoint was made for (default: from the file's name, else distilled)"
    add("--recipe", choices=["distilled", "dev"], help=help)


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
        parser.set_defaults(**dict.fromkeys(map(_dest, names)), regenerate=None, sampler="euler")
        return
    for flag, metavar, help in _DETAILS:
        add(flag, type=float, metavar=metavar, help=help)
    help = "what of --video-path is made anew (default: both)"
    add("--regenerate", choices=REGENERATE, help=help)


def add_graph_cut(parser: argparse.ArgumentParser) -> None:
    """How a denoising step is cut into graphs: of the scripts that compile or run them."""
    help = "transformer blocks in one graph; 0: the whole step (default: the profile's)"
    parser.add_argument("--blocks-per-graph", type=int, metavar="N", help=help)


def add_tuned(parser: argparse.ArgumentParser) -> None:
    """Whether tuned settings are taken: of the scripts that compile or run graphs."""
    help = "ignore what python -m ltx_neuron.tune chose; --profile-set wins over it in any case"
    parser.add_argument("--no-tuned", action="store_true", help=help)


def add_loras(parser: argparse.ArgumentParser) -> None:
    """The LoRAs merged into weight sets; at run time they name the sets."""
    group = parser.add_argument_group("LoRAs (what they name is sharded once, and chosen by a run)")
    add = group.add_argument
    help = "a LoRA in every stage (strength 1.0); repeatable"
    add("--lora", **_A_LORA, help=help)
    add_ic_loras(group)
    help = "dev recipe: the LoRA of stage 2 (strength 1.0); repeatable"
    add("--distilled-lora", **_A_LORA, help=help)
    for stage, strength in zip((1, 2), HQ_STRENGTHS, strict=True):
        help = f"of --distilled-lora in both stages, here in stage {stage} (default: {strength:g})"
        add(f"--distilled-lora-strength-stage-{stage}", type=float, metavar="S", help=help)


def add_ic_loras(parser: argparse._ActionsContainer) -> None:
    """What stage 1 alone runs with, beside a reference."""
    help = "distilled recipe: an IC-LoRA, in stage 1 alone (strength 1.0); repeatable"
    parser.add_argument("--ic-lora", **_A_LORA, help=help)


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


def add_run(parser: argparse.ArgumentParser) -> None:
    """How a generation runs, and the files that it takes besides the checkpoint."""
    help = "one JSON object per line, flags as keys; models are loaded once for all"
    parser.add_argument("--prompts-file", type=Path, metavar="FILE.jsonl", help=help)
    add_models(parser)
    add_fleet(parser)


def add_models(parser: argparse.ArgumentParser) -> None:
    """What an engine takes besides the checkpoint: of whatever runs one."""
    add = parser.add_argument
    help = "needed by --two-stage and --upscale"
    add("--spatial-upsampler-path", type=Path, metavar="FILE", help=help)
    help = "needed by --upscale temporal|both"
    add("--temporal-upsampler-path", type=Path, metavar="FILE", help=help)
    help = "encode the prompt on the profile's device, sharded; without it, on the host CPU"
    add("--neuron-gemma", action="store_true", help=help)
    help = "decode the video on the profile's device, in tiles; without it, on the host CPU"
    add("--neuron-vae", action="store_true", help=help)
    help = (
        "what the host computes video in (default: the profile's; auto: bfloat16 for a run in it"
        " where this CPU is faster in it)"
    )
    add("--host-dtype", choices=HOST_DTYPES, help=help)
    help = "encode the prompt even if an earlier run left its contexts in the artifacts"
    add("--no-prompt-cache", action="store_true", help=help)
    help = "the first release's numerics; or only how it holds images"
    add("--compat", choices=[name for name in COMPAT if name], help=help)
    add("--warmup", action="store_true", help="a discarded first step per stage")


def add_fleet(parser: argparse.ArgumentParser) -> None:
    """Where else the work is done: of what runs many jobs."""
    add = parser.add_argument_group("fleet (pip install -e .[fleet])").add_argument
    help = "run on every chip of this Ray cluster: auto (the one that this machine is in),"
    help += " HOST:PORT, or local (this machine's own chips)"
    add("--ray", metavar="ADDRESS", help=help)
    add("--replicas", type=int, metavar="N", help="at most (default: one a chip)")
    help = "where a machine takes the weights and graphs that it lacks: what python -m"
    help += " ltx_neuron.artifacts push URL has sent"
    add("--artifacts-from", metavar="URL", help=help)


def check_fleet(args: argparse.Namespace, many: object = True) -> None:
    """Raise UserError for flags of a fleet without one, and where Ray is not installed.

    many  false where there is one job alone
    """
    if args.ray and not many:
        raise UserError("--ray goes with --prompts-file: one video is made on one machine")
    for flag in ("replicas", "artifacts_from"):
        if getattr(args, flag) is not None and args.ray is None:
            raise UserError(f"--{flag.replace('_', '-')} goes with --ray ADDRESS")
    if args.replicas is not None and args.replicas < 1:
        raise UserError(f"--replicas {args.replicas}: wanted 1 or more")
    missing = [name for name in ("ray", "sqlalchemy") if args.ray and not find_spec(name)]
    if missing:
        raise UserError(
            f"--ray needs {' and '.join(missing)}, which this Python does not have\nType: pip"
            " install -e .[fleet]"
        )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """What a generation writes, and where it goes on from."""
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--output-path", type=Path, metavar="FILE.mp4")
    help = "of a --prompts-file: 0001.mp4 and so on, results.json"
    add("--output-dir", type=Path, metavar="DIR", help=help)
    add("--save-frames", type=Path, metavar="DIR", help="every frame as PNG as well")
    help = "every named intermediate"
    add("--save-tensors", type=Path, metavar="FILE.safetensors", help=help)
    help = (
        "continue an interrupted run from the latents it kept beside --output-path, or decode those"
        " of a --save-tensors FILE again"
    )
    add("--resume", nargs="?", const=True, metavar="FILE", help=help)
    add("--perf-dump-path", type=Path, metavar="FILE.json", help="the latency report")


def add_sharding(parser: argparse.ArgumentParser) -> None:
    """What the shard scripts share: checking instead of writing, and another source of weights."""
    add = parser.add_argument
    help = (
        "check finished folders against their manifests, and with --checkpoint-path bit for bit"
        " against the source; write nothing"
    )
    add("--verify", action="store_true", help=help)
    help = "instead of --checkpoint-path: a finished folder, to be cut for another tp or dtype"
    add("--from-shards", type=Path, metavar="DIR", help=help)
    help = "writing threads (default: one a file)"
    add("--num-workers", type=int, metavar="N", help=help)


# --- what parsed flags say ------------------------------------------------------------------------


def workspace(args: argparse.Namespace, writes: bool = True) -> Workspace:
    """The checkpoint, profile and artifacts of the common flags.

    writes  whether the script writes into the artifacts folder, which is then checked for it
    """
    host_dtype = getattr(args, "host_dtype", None)
    settings = [*args.profile_set, *([f"host_dtype={host_dtype}"] if host_dtype else [])]
    profile = resolve(args.profile, tuple(settings))
    if writes:
        check_folder(args.artifacts_dir, "--artifacts-dir DIR")
    blocks = getattr(args, "blocks_per_graph", None)
    if blocks is not None and blocks < 0:
        raise UserError(
            f"--blocks-per-graph {blocks} is negative; type 0 for the whole step in one graph"
        )
    opened = Workspace(
        args.checkpoint_path,
        profile,
        args.artifacts_dir,
        profile.degree(args.tp_degree),
        args.dtype,
        getattr(args, "gemma_root", None),
        blocks,
    )
    opened.ignores_tuned = getattr(args, "no_tuned", True)
    if not opened.ignores_tuned:
        opened.take_tuned()
    return opened


def lora_fields(args: argparse.Namespace) -> dict[str, WeightSet]:
    """A Job's LoRAs, by its fields: of all stages, and of stage 1 and 2 besides."""
    distilled = loras(args.distilled_lora, "--distilled-lora")
    given = args.distilled_lora_strength_stage_1, args.distilled_lora_strength_stage_2
    stage_1, stage_2 = loras(args.ic_lora, "--ic-lora"), distilled
    if given != (None, None):
        flag = "--distilled-lora-strength-stage-" + ("1" if given[0] is not None else "2")
        if not distilled:
            raise UserError(f"{flag} is of --distilled-lora; type --distilled-lora PATH as well")
        if any(len(values) > 1 for values in args.distilled_lora):
            raise UserError(
                f"{flag} takes the place of --distilled-lora's own strength: type"
                " --distilled-lora PATH alone"
            )
        strengths = [
            default if strength is None else strength
            for strength, default in zip(given, HQ_STRENGTHS, strict=True)
        ]
        first, stage_2 = (
            tuple(dataclasses.replace(lora, strength=strength) for lora in distilled)
            for strength in strengths
        )
        stage_1 += first
    return dict(zip(LORA_FIELDS, (loras(args.lora, "--lora"), stage_1, stage_2), strict=True))


def lora_keys(fields: dict[str, Any]) -> dict[str, list]:
    """The keys of a prompts file's line that ask for LoRAs, wherever it is read; the reverse of
    `lora_fields`."""
    return {
        key: [[str(lora.path.absolute()), lora.strength] for lora in fields[name]]
        for key, name in zip(_LORAS, LORA_FIELDS, strict=True)
    }


def lora_sets(args: argparse.Namespace) -> dict[str, dict[str, WeightSet]]:
    """What requests may choose by name: the command's own LoRAs as "default", and those of
    --lora-sets. Each as a Job's fields."""
    sets, known = {"default": lora_fields(args)}, ", ".join(_LORAS).replace("_", "-")
    for name, line in (read_json(args.lora_sets) if args.lora_sets else {}).items():
        if not isinstance(line, dict) or {_job_flag(key).dest for key in line} - {*_LORAS}:
            raise UserError(f"--lora-sets {args.lora_sets}: {name!r} is an object of {known}")
        sets[name] = lora_fields(_with_line(args, line))
    return sets


def weight_sets(fields: dict[str, WeightSet]) -> tuple[WeightSet, ...]:
    """The weight sets that a Job's LoRAs name: of stage 1 and of stage 2."""
    every, first, second = fields.values()
    return tuple(dict.fromkeys([every + first, every + second]))


def loras(flag_values: list[list[str]], flag: str) -> WeightSet:
    """PATH [STRENGTH], for each time the flag was given."""
    parsed = []
    for values in flag_values:
        if len(values) > 2:
            raise UserError(
                f"{flag} takes PATH [STRENGTH], got {len(values)} values: {' '.join(values)}"
            )
        try:
            strength = float(values[1]) if len(values) == 2 else 1.0
        except ValueError:
            raise UserError(f"{flag} {' '.join(values)}: STRENGTH is a number") from None
        parsed.append(Lora(Path(values[0]), strength))
    return tuple(parsed)


_SIZES = tuple(field.name for field in dataclasses.fields(Size))  # as the flags are named


def size(args: argparse.Namespace) -> Size:
    """What was typed, or what the file of --video-path has."""
    values = {name: getattr(args, name) for name in _SIZES}
    typed = {
        name: value for name, value in values.items() if value is not None and value is not False
    }
    if (path := getattr(args, "video_path", None)) is None:
        return Size(**typed)
    extend = args.extend
    window = None if extend is None else typed.pop("num_frames", None)
    if typed:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in typed)
        raise UserError(
            f"{flags} does not go with --video-path: the video is made at the file's own size and"
            f" rate, in one stage; leave out {flags}"
        )
    return video_size(path, "--video-path", extend, window)


def shape(args: argparse.Namespace, recipe: str) -> Job:
    """The job of the flags of `add_size`, `add_ic_loras` and `add_conditions(shape_only=True)`:
    what graphs are compiled for. Its prompt is empty."""
    of = size(args)
    if (
        args.video_path is not None and args.extend is None
    ):  # whichever seconds of it: the graphs are the same
        seconds = {"start_time": 0.0, "end_time": of.num_frames / of.frame_rate}
        args = argparse.Namespace(**vars(args) | seconds)
    return Job(
        "", of, recipe=recipe, stage_1_loras=loras(args.ic_lora, "--ic-lora"), **inputs(args)
    )


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
    }


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
        return _extend(args, [flag for flag in part if getattr(args, _dest(flag)) is not None])
    for flag in ("--start-time", "--end-time"):
        if getattr(args, _dest(flag)) is None:
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
    given = [flag for flag in flags if getattr(args, _dest(flag)) is not None]
    if given and getattr(args, _dest(owner)) is None:
        raise UserError(f"{' '.join(given)} goes with {owner} FILE, which is not there")


def _dest(flag: str) -> str:
    """Where argparse keeps a flag's value."""
    return flag.removeprefix("--").replace("-", "_")


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


def shard_request(args: argparse.Namespace) -> ShardRequest:
    """What the flags of a shard script ask for. Raises UserError for flags that exclude others."""
    if args.num_workers is not None and args.num_workers < 1:
        raise UserError(f"--num-workers {args.num_workers}: wanted 1 or more")
    if args.from_shards and (args.checkpoint_path or args.verify):
        raise UserError(
            "--from-shards takes the place of --checkpoint-path and does not go with --verify;"
            " leave one out"
        )
    if not (args.from_shards or args.checkpoint_path or args.verify):
        raise UserError(
            "which weights? Type --checkpoint-path FILE, or --from-shards DIR to cut finished ones"
            " anew"
        )
    if not args.verify:
        check_folder(args.artifacts_dir, "--artifacts-dir DIR")
    profile = resolve(args.profile, tuple(args.profile_set))
    return ShardRequest(
        args.artifacts_dir,
        profile.degree(args.tp_degree),
        args.dtype,
        args.verify,
        args.from_shards,
        args.num_workers,
        weight_sets(lora_fields(args)) if "lora" in args else ((),),
    )


def recipe(args: argparse.Namespace) -> str:
    """The recipe asked for; without one, what the file's name says, else distilled.

    The checkpoint's metadata cannot tell them apart.
    """
    if args.recipe:
        return args.recipe
    name = args.checkpoint_path.name.lower()
    guess = "dev" if "dev" in name and "distilled" not in name else "distilled"
    reason = "from the file name" if guess in name else "by default"
    print(f"recipe: {guess} ({reason}; --recipe says otherwise)")
    return guess


def guidance(
    args: argparse.Namespace, recipe: str, sampler: str = Job.sampler, sound: bool = False
) -> Guidance | None:
    """The guidance the flags ask for on top of the version's defaults; None without any. sound:
    whether it is given."""
    changes, given = {"video": {}, "audio": {}}, {"video": [], "audio": []}
    for flag, stream, field, _ in _GUIDANCE_FLAGS:
        value = getattr(args, _dest(flag))
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


def job(args: argparse.Namespace) -> Job:
    """The job of the flags of `add_job`, whose recipe is settled."""
    _check_resumed(args)
    return Job(
        prompt=args.prompt or "",
        size=size(args),
        seed=args.seed,
        num_inference_steps=args.num_inference_steps,
        negative_prompt=args.negative_prompt,
        recipe=args.recipe,
        guidance=guidance(args, args.recipe, args.sampler, args.audio_path is not None),
        upscale=args.upscale,
        **lora_fields(args),
        **inputs(args),
    )


def _check_resumed(args: argparse.Namespace) -> None:
    """Raise UserError for a file that an interrupted run began from, and that is gone."""
    named = {flag: [getattr(args, _dest(flag))] for flag in ("--audio-path", "--video-path")}
    for flag in ("--image", "--video-conditioning", "--conditioning-attention-mask"):
        named[flag] = [values[0] for values in getattr(args, _dest(flag))]
    gone = [
        (flag, path)
        for flag, paths in named.items()
        for path in paths
        if path is not None and not Path(path).exists()
    ]
    if gone and getattr(args, "resume", None):
        flag, path = gone[0]
        raise UserError(
            f"--resume needs {flag} {path} as well, which is not there: a run is gone on with where"
            f" what it was given is the same. Type {flag} with where that file lies now, under"
            " whatever name, or leave --resume out"
        )


def run_options(args: argparse.Namespace) -> RunOptions:
    return RunOptions(
        neuron_gemma=args.neuron_gemma,
        neuron_vae=args.neuron_vae,
        compat=args.compat,
        spatial_upsampler_path=args.spatial_upsampler_path,
        temporal_upsampler_path=args.temporal_upsampler_path,
        warmup=args.warmup,
        # The cache keeps no hidden states, which --save-tensors writes.
        cache_prompts=not (args.no_prompt_cache or getattr(args, "save_tensors", None)),
    )


def outputs(args: argparse.Namespace) -> Outputs:
    return Outputs(
        video=args.output_path,
        folder=args.output_dir,
        frames=args.save_frames,
        tensors=args.save_tensors,
        report=args.perf_dump_path,
        resume=args.resume,
    )


# --- prompts files --------------------------------------------------------------------------------


def job_of_line(args: argparse.Namespace) -> Callable[[dict[str, Any]], Job]:
    """What makes a Job of a prompts file's line, on top of the command's own flags.

    The line's keys are flags without their dashes; a list is several values, a list of lists the
    flag several times; false and null are a flag that is not given.
    """

    return lambda line: job(_with_line(args, line))


def _with_line(args: argparse.Namespace, line: dict[str, Any]) -> argparse.Namespace:
    values, given = dict(vars(args)), {}
    for key, value in line.items():
        action = _job_flag(key)
        if value is not None and value is not False:
            if (other := given.setdefault(action.dest, key)) != key:
                raise UserError(f"{other!r} and {key!r} are the same flag; leave one out")
            values[action.dest] = _flag_value(action, value, values[action.dest])
    if "video_path" in given:  # it takes the place of the command's own size
        values |= {name: None for name in _SIZES if name not in given}
    return argparse.Namespace(**values)


@cache
def _job_flags() -> dict[str, argparse.Action]:
    """Every flag that a line may have, by its spelling without dashes at the front."""
    parser = argparse.ArgumentParser(add_help=False)
    add_job(parser)
    options = parser._option_string_actions
    return {name.removeprefix("--"): action for name, action in options.items()}


def _job_flag(key: str) -> argparse.Action:
    name = key.replace("_", "-")
    if name not in _job_flags():
        raise UserError(f"unknown key {key!r}; known: {', '.join(sorted(_job_flags()))}")
    return _job_flags()[name]


def _flag_value(action: argparse.Action, value: Any, before: Any) -> Any:
    """What argparse would have made of a JSON value; `before` is the command's own value."""
    flag = action.option_strings[0]
    if action.nargs == 0:  # --two-stage
        if value is not True:
            raise UserError(f"{flag}: got {value!r}, wanted true or false")
        return True
    if action.nargs == "+":  # --image and --lora: repeatable, each with several values
        nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        repeats = value if nested else [value]
        each = [one if isinstance(one, list) else [one] for one in repeats]
        # A line's LoRAs take the place of the command's: [] is none.
        before = [] if action.dest in _LORAS else before
        return [*before, *([_scalar(action, one) for one in values] for values in each if values)]
    if action.nargs == "*":
        return [_scalar(action, one) for one in (value if isinstance(value, list) else [value])]
    return _scalar(action, value)


def _scalar(action: argparse.Action, value: Any) -> Any:
    """A JSON value as a flag's type; numbers may be spelled as text, as on a command line."""
    flag, kind = action.option_strings[0], action.type
    if kind is None:
        if not isinstance(value, str) and action.nargs != "+":
            raise UserError(f"{flag}: got {type(value).__name__} {value!r}, wanted text")
        if isinstance(value, dict | list | bool):
            raise UserError(f"{flag}: got {value!r}, wanted text and numbers")
        if action.choices and value not in action.choices:
            raise UserError(f"{flag}: got {value!r}, choose from {', '.join(action.choices)}")
        return str(value)
    try:
        if isinstance(value, dict | list | bool):
            raise ValueError
        return kind(str(value))
    except ValueError:
        raise UserError(f"{flag}: invalid {kind.__name__} value: {value!r}") from None
