"""The flags of one generation: what a line of a prompts file may have too."""

import argparse
import dataclasses

from ltx_neuron.errors import UserError
from ltx_neuron.flags.conditions import add_conditions, check_resumed, inputs, upright
from ltx_neuron.flags.guided import add_guidance, guidance
from ltx_neuron.flags.lora import add_loras, lora_fields, loras
from ltx_neuron.host.media import video_size
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.res_2s import SAMPLERS
from ltx_neuron.sampling.upscaling import UPSCALES

SIZES = tuple(field.name for field in dataclasses.fields(Size))  # as the flags are named


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


def size(args: argparse.Namespace) -> Size:
    """What was typed, or what the file of --video-path has."""
    values = {name: getattr(args, name) for name in SIZES}
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
    return video_size(path, "--video-path", extend, window, upright(args))


def shape(args: argparse.Namespace, recipe: str) -> Job:
    """The job of the flags of `add_size`, `add_ic_loras` and `add_conditions(shape_only=True)`:
    what graphs are compiled for. Its prompt is empty."""
    of = size(args)
    if args.video_path is not None and args.extend is None:
        # Whichever seconds of it are made anew: the graphs are the same.
        whole = {"start_time": 0.0, "end_time": of.seconds}
        args = argparse.Namespace(**vars(args) | whole)
    ic_loras = loras(args.ic_lora, "--ic-lora")
    return Job("", of, recipe=recipe, stage_1_loras=ic_loras, **inputs(args))


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


def job(args: argparse.Namespace) -> Job:
    """The job of the flags of `add_job`, whose recipe is settled."""
    check_resumed(args)
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
