"""Flags that the scripts share, spelled and checked in one place."""

import argparse
import dataclasses
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from ltx_neuron.errors import UserError
from ltx_neuron.files import check_folder
from ltx_neuron.job import UPSCALES, Job, Size, check_guidable
from ltx_neuron.profiles import PROFILES, resolve
from ltx_neuron.sampling.conditioning import ImageCondition
from ltx_neuron.sampling.guidance import DEFAULTS, Guidance
from ltx_neuron.weights.lora import Lora
from ltx_neuron.workspace import Workspace


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are short: the mistake and, for an unknown flag, the nearest known
    one."""

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1)
            self.error(
                f"unknown: {' '.join(unknown)}" + (f"; did you mean {near[0]}?" if near else "")
            )
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nAll flags: python {sys.argv[0]} --help\n")


def parser(
    description: str, example: str, gemma: bool, required: bool = True
) -> argparse.ArgumentParser:
    """A parser with the flags common to all five scripts; abbreviations are off, so a typo is an
    error."""
    made = _Parser(
        description=description,
        epilog=f"example:\n  {example}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--checkpoint-path",
        "--distilled-checkpoint-path",
        "--model-path",
        type=Path,
        required=required,
        metavar="FILE",
        help="the single-file LTX-2.3 checkpoint",
    )
    if gemma:
        made.add_argument(
            "--gemma-root",
            type=Path,
            required=required,
            metavar="DIR",
            help="Gemma3-12B: weights and tokenizer",
        )
    made.add_argument(
        "--artifacts-dir",
        type=Path,
        default=Path("artifacts"),
        metavar="DIR",
        help="where weights and graphs lie (default: artifacts)",
    )
    made.add_argument(
        "--profile",
        metavar="NAME",
        help=f"hardware: {', '.join(PROFILES)} (default: this machine's own)",
    )
    made.add_argument(
        "--profile-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one value of the profile, as in attention=matmul; repeatable",
    )
    made.add_argument(
        "--tp-degree", type=int, metavar="N", help="tensor-parallel ranks (default: the profile's)"
    )
    made.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="weights and activations",
    )
    return made


def add_job(made: argparse.ArgumentParser) -> None:
    """What one generation is asked to make: the flags that a line of a prompts file may have as
    well."""
    made.add_argument("--prompt")
    made.add_argument("--negative-prompt", help="dev recipe only")
    made.add_argument("--seed", type=int, default=Job.seed)
    made.add_argument(
        "--num-inference-steps", "--num-steps", type=int, metavar="N", help="dev recipe only"
    )
    made.add_argument("--upscale", choices=list(UPSCALES), help="after a one-stage run")
    add_size(made)
    add_guidance(made)


def add_size(made: argparse.ArgumentParser) -> None:
    """The size of the video that comes out, in how many stages, and the images it holds."""
    size = made.add_argument_group("size")
    size.add_argument("--height", type=int, default=Size.height, help="pixels (default: 512)")
    size.add_argument("--width", type=int, default=Size.width, help="pixels (default: 768)")
    size.add_argument("--num-frames", type=int, default=Size.num_frames, help="8k+1 (default: 121)")
    size.add_argument(
        "--frame-rate",
        "--fps",
        type=float,
        default=Size.frame_rate,
        help="frames per second (default: 24)",
    )
    size.add_argument(
        "--two-stage", action="store_true", help="half size first, then upsample x2 and refine"
    )
    size.add_argument(
        "--image",
        action="append",
        nargs="+",
        default=[],
        metavar=("PATH", "FRAME_IDX [STRENGTH [CRF]]"),
        help="hold an image at a frame (defaults: 0, 1.0, 33); repeatable",
    )
    size.add_argument(
        "--recipe",
        choices=["distilled", "dev"],
        help="sampling the checkpoint was made for (default: from the file's name, else distilled)",
    )
    size.add_argument(
        "--blocks-per-graph",
        type=int,
        metavar="N",
        help="transformer blocks in one graph; 0: the whole step (default: the profile's)",
    )


def add_loras(made: argparse.ArgumentParser) -> None:
    """The LoRAs merged into a weight set; at run time they name the set."""
    for flag, meaning in (
        ("--lora", "a LoRA in every stage"),
        ("--distilled-lora", "dev recipe: the LoRA of stage 2"),
    ):
        made.add_argument(
            flag,
            action="append",
            nargs="+",
            default=[],
            metavar=("PATH", "STRENGTH"),
            help=f"{meaning} (strength 1.0); repeatable",
        )


def loras(args: argparse.Namespace, flag: str) -> tuple[Lora, ...]:
    found = []
    for values in getattr(args, flag.strip("-").replace("-", "_"), []):
        try:
            path, strength = values[0], float(values[1]) if len(values) == 2 else 1.0
        except ValueError:
            raise UserError(f"{flag} {' '.join(values)}: STRENGTH is a number") from None
        if len(values) > 2:
            raise UserError(
                f"{flag} takes PATH [STRENGTH], got {len(values)} values: {' '.join(values)}"
            )
        found.append(Lora(Path(path), strength))
    return tuple(found)


def workspace(args: argparse.Namespace, writes: bool = True) -> Workspace:
    """The workspace of parsed common flags, whose artifacts a script `writes` or only reads."""
    profile = resolve(args.profile, tuple(args.profile_set))
    if writes and not getattr(args, "verify", False):
        check_folder(args.artifacts_dir, "--artifacts-dir DIR")
    blocks = getattr(args, "blocks_per_graph", None)
    if blocks is not None and blocks < 0:
        raise UserError(
            f"--blocks-per-graph {blocks} is negative; type 0 for the whole step in one graph"
        )
    tp = profile.degree(args.tp_degree)
    return Workspace(
        args.checkpoint_path,
        profile,
        args.artifacts_dir,
        tp,
        args.dtype,
        getattr(args, "gemma_root", None),
        blocks,
        loras(args, "--lora"),
        loras(args, "--distilled-lora"),
    )


def size(args: argparse.Namespace) -> Size:
    return Size(args.height, args.width, args.num_frames, args.frame_rate, args.two_stage)


def images(args: argparse.Namespace) -> tuple[ImageCondition, ...]:
    """--image PATH [FRAME_IDX [STRENGTH [CRF]]], each."""
    found = []
    for values in args.image:
        if len(values) > 4:
            raise UserError(
                f"--image takes PATH [FRAME_IDX [STRENGTH [CRF]]], got {len(values)} values:"
                f" {' '.join(values)}"
            )
        try:
            numbers = [
                kind(value) for kind, value in zip((int, float, int), values[1:], strict=False)
            ]
        except ValueError:
            raise UserError(
                f"--image {' '.join(values)}: FRAME_IDX and CRF are whole numbers, STRENGTH is a"
                " number"
            ) from None
        found.append(ImageCondition(values[0], *numbers))
    return tuple(found)


def recipe(args: argparse.Namespace) -> str:
    """The recipe asked for; without one, what the file's name says, else distilled. The metadata
    cannot tell them apart."""
    if args.recipe:
        return args.recipe
    name = args.checkpoint_path.name.lower()
    guess = "dev" if "dev" in name and "distilled" not in name else "distilled"
    print(
        f"recipe: {guess} ({'from the file name' if guess in name else 'by default'}; --recipe says"
        " otherwise)"
    )
    return guess


def add_sharding(made: argparse.ArgumentParser) -> None:
    """What the shard scripts share: to check instead of to write, and where else weights may come
    from."""
    made.add_argument(
        "--verify",
        action="store_true",
        help=(
            "check finished folders against their manifests, and with --checkpoint-path bit for bit"
            " against the source; write nothing"
        ),
    )
    made.add_argument(
        "--from-shards",
        type=Path,
        metavar="DIR",
        help="instead of --checkpoint-path: a finished folder, to be cut for another tp or dtype",
    )
    made.add_argument(
        "--num-workers", type=int, metavar="N", help="writing threads (default: one a file)"
    )


# Flag of each stream -> the field of StreamGuidance it sets. The modality flag is named after the
# direction it weakens.
_GUIDANCE = {
    "{stream}-cfg-guidance-scale": ("cfg_scale", float),
    "{stream}-stg-guidance-scale": ("stg_scale", float),
    "{stream}-stg-blocks": ("stg_blocks", int),
    "{stream}-rescale-scale": ("rescale_scale", float),
    "{other}-guidance-scale": ("modality_scale", float),
    "{stream}-skip-step": ("skip_step", int),
}
_STREAMS = (("video", "a2v"), ("audio", "v2a"))


def add_guidance(made: argparse.ArgumentParser) -> None:
    """Guidance of the dev recipe, named as in ltx-pipelines."""
    group = made.add_argument_group("guidance (dev recipe only; defaults: the model version's)")
    for stream, other in _STREAMS:
        for flag, (field, kind) in _GUIDANCE.items():
            many = {"nargs": "*"} if field == "stg_blocks" else {}
            group.add_argument("--" + flag.format(stream=stream, other=other), type=kind, **many)


def guidance(args: argparse.Namespace, version: str, recipe: str) -> Guidance | None:
    """The guidance the flags ask for on top of the version's defaults; None without any such
    flag."""
    given, flags = {stream: {} for stream, _ in _STREAMS}, []
    for stream, other in _STREAMS:
        for flag, (field, _) in _GUIDANCE.items():
            name = flag.format(stream=stream, other=other)
            value = getattr(args, name.replace("-", "_"))
            if value is not None:
                given[stream][field] = tuple(value) if field == "stg_blocks" else value
                flags.append(f"--{name}")
    if not flags:
        return None
    check_guidable(", ".join(flags), recipe)
    streams = {
        stream: dataclasses.replace(getattr(DEFAULTS[version], stream), **fields)
        for stream, fields in given.items()
    }
    return Guidance(**streams)
