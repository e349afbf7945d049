"""The flags of how generations run: models, fleet, outputs."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from ltx_neuron.engine import RunOptions
from ltx_neuron.errors import UserError
from ltx_neuron.generate import Outputs
from ltx_neuron.profiles import HOST_DTYPES
from ltx_neuron.sampling.compat import COMPAT


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
    help = "decode video and sound on the profile's device; without it, on the host CPU"
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
    if args.ray and not find_spec("ray"):
        raise UserError(
            "--ray needs ray, which this Python does not have\nType: pip install -e .[fleet]"
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
