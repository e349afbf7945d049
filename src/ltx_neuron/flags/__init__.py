"""The flags of the scripts, spelled and checked in one place, and what they are turned into.

A script parses its flags once, into a Job, Outputs, RunOptions and a Workspace; nothing below it
sees an argparse.Namespace. A job's flags are the fields of sampling.spec.JobSpec, as are the keys
of a prompts file's line and, some of them, the fields of a request.
"""

import argparse
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from ltx_neuron import hub
from ltx_neuron.engine import RunOptions
from ltx_neuron.errors import UserError, flag_of, require
from ltx_neuron.files import check_folder, read_json
from ltx_neuron.flags.resolve import check_resumed, job_of, lora_fields, size_of, weight_sets
from ltx_neuron.generate import Outputs
from ltx_neuron.job import Job, Size
from ltx_neuron.profiles import HOST_DTYPES, PROFILES, resolve
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.spec import (
    LORAS,
    ConditionFields,
    DetailFields,
    GuidanceFields,
    JobSpec,
    LoraFields,
    SamplingFields,
    SizeFields,
    names_of,
    validated,
)
from ltx_neuron.weights.lora import WeightSet
from ltx_neuron.workspace import Workspace, reshard, verify_finished

# --- of all scripts -------------------------------------------------------------------------------


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
        self.exit(2, f"error: {message}\nAll flags: {self.prog} --help\n")


def parser(
    description: str | None, example: str, gemma: bool, required: bool = True
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
    help = "the single-file LTX-2.3 checkpoint, or a name on the Hub: Lightricks/LTX-2.3[/FILE]"
    add(*names, type=Path, required=required, metavar="FILE", help=help)
    if gemma:
        help = "Gemma3-12B: weights and tokenizer, a folder or a repository of the Hub"
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


def add_graph_cut(parser: argparse.ArgumentParser) -> None:
    """How a denoising step is cut into graphs: of the scripts that compile or run them."""
    help = "transformer blocks in one graph; 0: the whole step (default: the profile's)"
    parser.add_argument("--blocks-per-graph", type=int, metavar="N", help=help)


def add_tuned(parser: argparse.ArgumentParser) -> None:
    """Whether tuned settings are taken: of the scripts that compile or run graphs."""
    help = "ignore what ltx-neuron tune chose; --profile-set wins over it in any case"
    parser.add_argument("--ignore-tuned", action="store_true", help=help)
    parser.add_argument(  # its earlier name
        "--no-tuned", dest="ignore_tuned", action="store_true", help=argparse.SUPPRESS
    )


MODEL_FILES = {  # flags, and what hub.local_path calls their files
    "checkpoint_path": None,  # of a recipe
    "gemma_root": "gemma",
    "spatial_upsampler_path": "spatial",
    "temporal_upsampler_path": "temporal",
}


def local(args: argparse.Namespace, flag: str) -> Any:
    """The local Path of one of MODEL_FILES, None where it was not typed. What a Hub name stands for
    is downloaded, at the first call. Raises UserError."""
    name, kind = getattr(args, flag, None), MODEL_FILES[flag]
    recipe = getattr(args, "recipe", None) or Job.recipe
    return name and hub.local_path(name, kind or recipe)


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
        local(args, "checkpoint_path"),
        profile,
        args.artifacts_dir,
        profile.degree(args.tp_degree),
        args.dtype,
        local(args, "gemma_root"),
        blocks,
    )
    opened.ignores_tuned = getattr(args, "ignore_tuned", True)
    if not opened.ignores_tuned:
        opened.take_tuned()
    return opened


# --- of a job -------------------------------------------------------------------------------------


def add_job(parser: argparse.ArgumentParser) -> None:
    """What one generation is asked to make: the flags that a prompts file's line may have too."""
    _add(parser, ["prompt", *SamplingFields.model_fields])
    add_sampler(parser)
    add_size(parser)
    add_loras(parser)
    add_conditions(parser)
    title = "guidance (dev recipe only; default: the model version's)"
    _add(parser.add_argument_group(title), GuidanceFields.model_fields)


def add_sampler(parser: argparse.ArgumentParser) -> None:
    """Which sampler: of what makes or times a generation. It changes no graph."""
    _add(parser, ["sampler"])


def add_size(parser: argparse.ArgumentParser) -> None:
    """The size of the video that comes out, in how many stages, and the images it holds."""
    _add(parser.add_argument_group("size"), SizeFields.model_fields)


def add_loras(parser: argparse.ArgumentParser) -> None:
    """The LoRAs merged into weight sets; at run time they name the sets."""
    title = "LoRAs (what they name is sharded once, and chosen by a run)"
    _add(parser.add_argument_group(title), LoraFields.model_fields)


def add_conditions(parser: argparse.ArgumentParser, shape_only: bool = False) -> None:
    """What a video is made from besides its prompt and images. shape_only: the flags that graphs
    depend on, of the scripts that compile them."""
    group = parser.add_argument_group("sound, video and guides")
    _add(group, ConditionFields.model_fields)
    _add(group, ["ic_lora"] if shape_only else DetailFields.model_fields)


def _add(parser: argparse._ActionsContainer, fields: Iterable[str]) -> None:
    for name in fields:
        field = JobSpec.model_fields[name]
        options = {"default": field.default, "help": field.description, **_options(field)}
        parser.add_argument(*map(flag_of, names_of(name)), **options)


def _options(field: FieldInfo) -> dict[str, Any]:
    """What argparse takes for a field. Values stay text: the field says what may be in it."""
    if field.default is False:
        return {"action": "store_true"}
    if field.default == ():  # PATH [FRAME_IDX [STRENGTH [CRF]]]
        path, _, rest = (field.title or "").partition(" ")
        metavar = path, rest.removeprefix("[").removesuffix("]")
        return {"action": "append", "nargs": "+", "metavar": metavar, "default": []}
    options: dict[str, Any] = {"metavar": field.title} if field.title else {}
    for kind in (field.annotation, *get_args(field.annotation)):
        if get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        if get_origin(kind) is tuple:
            options["nargs"] = "*"
    return options


# --- jobs -----------------------------------------------------------------------------------------


def spec(args: argparse.Namespace) -> JobSpec:
    """What the flags of a job say, those of them that a script has. Raises UserError."""
    values = {name: getattr(args, name, None) for name in JobSpec.model_fields}
    return validated({name: value for name, value in values.items() if value is not None})


def job(args: argparse.Namespace) -> Job:
    """The job of the flags of `add_job`, whose recipe is settled."""
    return _job(args, spec(args))


def job_of_line(args: argparse.Namespace) -> Callable[[dict[str, Any]], Job]:
    """What makes a Job of a prompts file's line, on top of the command's own flags."""
    command = spec(args)
    return lambda line: _job(args, command.with_line(line))


def _job(args: argparse.Namespace, said: JobSpec) -> Job:
    if getattr(args, "resume", None):
        check_resumed(said)
    return job_of(said, _upright(args))


def shape(args: argparse.Namespace, recipe: str) -> Job:
    """The job of the flags of `add_size` and `add_conditions(shape_only=True)`: what graphs are
    compiled for. Its prompt is empty."""
    said = spec(args).model_copy(update={"recipe": recipe})
    if said.video_path is not None and said.extend is None:
        # Whichever seconds of it are made anew: the graphs are the same.
        seconds = size_of(said, _upright(args)).seconds
        said = said.model_copy(update={"start_time": 0.0, "end_time": seconds})
    return job_of(said, _upright(args))


def size(args: argparse.Namespace) -> Size:
    """What was typed, or what the file of --video-path has."""
    return size_of(spec(args), _upright(args))


def lora_sets(args: argparse.Namespace) -> dict[str, dict[str, WeightSet]]:
    """What requests may choose by name: the command's own LoRAs as "default", and those of
    --lora-sets. Each as a Job's fields."""
    command, known = spec(args), ", ".join(LORAS).replace("_", "-")
    sets = {"default": lora_fields(command)}
    for name, line in (read_json(args.lora_sets) if args.lora_sets else {}).items():
        if not isinstance(line, dict) or {key.replace("-", "_") for key in line} - {*LORAS}:
            raise UserError(f"--lora-sets {args.lora_sets}: {name!r} is an object of {known}")
        sets[name] = lora_fields(command.with_line(line))
    return sets


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


def _upright(args: argparse.Namespace) -> bool:
    """Whether images and videos are taken as they are shown: as --compat's releases do not."""
    return not COMPAT[getattr(args, "compat", None)].as_stored


# --- of runs --------------------------------------------------------------------------------------


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
    add = parser.add_argument_group('fleet (pip install "ltx-neuron[fleet]")').add_argument
    help = "run on every chip of this Ray cluster: auto (the one that this machine is in),"
    help += " HOST:PORT, or local (this machine's own chips)"
    add("--ray", metavar="ADDRESS", help=help)
    add("--replicas", type=int, metavar="N", help="at most (default: one a chip)")
    help = "where a machine takes the weights and graphs that it lacks: what"
    help += " ltx-neuron artifacts push URL has sent"
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
            "--ray needs ray, which this Python does not have\n"
            'Type: pip install "ltx-neuron[fleet]"'
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
        spatial_upsampler_path=local(args, "spatial_upsampler_path"),
        temporal_upsampler_path=local(args, "temporal_upsampler_path"),
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


# --- of the shard scripts -------------------------------------------------------------------------


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


def shard(model: str, args: argparse.Namespace) -> None:
    """Do what the flags of a shard script say: cut or verify the weights of `model`, "dit",
    "gemma3" or "vae", and print the folders. Raises UserError for flags that exclude others."""
    _check_sharding(args)
    tp = resolve(args.profile, tuple(args.profile_set)).degree(args.tp_degree)
    sets = weight_sets(lora_fields(spec(args))) if "lora" in args else ((),)
    if args.checkpoint_path:
        if model == "gemma3":
            example = "Type for example --gemma-root gemma-3-12b"
            require(args.gemma_root, "--gemma-root", "--checkpoint-path", example)
        opened = workspace(args, writes=False)
        if args.verify:
            for path in opened.verify(model, sets):
                print(f"whole, and bit for bit the source: {path}")
        else:
            for path in opened.shard(model, sets, args.num_workers):
                print(f"weights: {path}")
    elif args.verify:
        verify_finished(model, args.artifacts_dir)
    else:
        artifacts, workers = args.artifacts_dir, args.num_workers
        path = reshard(args.from_shards, artifacts, model, tp, args.dtype, workers)
        print(f"weights: {path}")


def _check_sharding(args: argparse.Namespace) -> None:
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
