"""The flags of all commands: their definitions, their checks, and their conversion to objects. The
definitions need no torch, so that a mistyped flag is found at once; conversions import what they
make.

A command parses its flags once, into a Job, Outputs, RunOptions and a Workspace. Modules below it
never see an argparse.Namespace. A job's flags are the fields of sampling.spec.JobFields. So are the
keys of a line of a prompts file and some fields of a request.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from random import randrange
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from ltx_neuron.command_line import Parser, advanced
from ltx_neuron.config.parts import KINDS, PARTS
from ltx_neuron.config.profiles import MACHINES, resolve
from ltx_neuron.errors import FieldError, UserError, flag_of, require
from ltx_neuron.files import check_folder, read_json
from ltx_neuron.format import few
from ltx_neuron.invocation import command
from ltx_neuron.report.price import Price
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.size import AutoDuration
from ltx_neuron.sampling.spec import (
    GUIDANCE_KEYS,
    LORAS,
    RANDOM_SEED,
    ConditionFields,
    DetailFields,
    GuidanceFields,
    JobFields,
    LoraFields,
    SamplingFields,
    SizeFields,
    names_of,
)

if TYPE_CHECKING:
    from ltx_neuron.artifacts.workspace import RunOptions, Workspace
    from ltx_neuron.batch import Line
    from ltx_neuron.engine.outputs import OutputPaths
    from ltx_neuron.job import Job

# --- common flags ---------------------------------------------------------------------------------


# The groups of --help-all, with their descriptions.
_INPUTS = "sound, videos and LoRAs"
_GROUPS = {
    "model and machine": (
        "The model's files, the folder of the weights and graphs made from them, and the hardware."
    ),
    "video": "The generated video: its content, its size, and its sampling.",
    "guidance": (
        "Keys of --guidance, with their defaults (with the res_2s sampler):\n"
        "  video_cfg 3, video_stg 1 (0), video_stg_blocks 28, video_rescale 0.7 (0.45), a2v 3,\n"
        "  video_skip_step 0, audio_cfg 7, audio_stg 1 (0), audio_stg_blocks 28,\n"
        "  audio_rescale 0.7 (1), v2a 3, audio_skip_step 0\n"
        "Separate several blocks by commas. The other flags set the same values; they are named as"
        " in ltx-pipelines."
    ),
    _INPUTS: (
        "Inputs of a video besides its prompt and images. The shard command merges LoRAs into the"
        " weights once; other commands name the same LoRAs at the same strengths."
    ),
    "models": "Where the models run, and their files besides the checkpoint.",
    "fleet": "Many machines, connected by Ray (pip install ltx-neuron[fleet]).",
    "output": "Output files, and resuming an interrupted run.",
    "sharding": "The source of the weight files, or only a check of them.",
}
# The fields of a job that --help shows.
_MOST_USED = {
    *("prompt", "negative_prompt", "height", "width", "num_frames", "frame_rate", "seed"),
    *("num_inference_steps", "recipe", "two_stage", "image", "lora", "distilled_lora"),
    *("audio_path", "video_path"),
}


def parser(
    description: str | None, example: str, gemma: bool, required: bool = True, verb: str = ""
) -> Parser:
    """A parser with the flags common to all commands. gemma: whether the command also reads Gemma's
    folder. required: whether the checkpoint is required, and Gemma too unless the checkpoint's
    download has it."""
    prog, epilog = command(verb), f"example:\n  {example}"
    parser = Parser(prog=prog, description=description, epilog=epilog)
    add = group(parser, "model and machine").add_argument
    names = ("--checkpoint-path", "--distilled-checkpoint-path", "--model-path")
    help = "checkpoint: a file, a Hub name, or the folder of LTX-2.5's files"
    add(*names, type=Path, required=required, metavar="FILE", help=help)
    if gemma:
        help = "Gemma3-12B's folder, LTX-2.5's text encoder, or a Hub name"
        action = add("--gemma-root", type=Path, metavar="DIR", help=help)
        vars(action)["usual"] = required
        parser.set_defaults(needs_gemma=required)
    for part in PARTS.values():
        help = f"{part.title}, if it has its own file (default: beside --checkpoint-path)"
        advanced(add(part.flag, type=Path, metavar="FILE", help=help))
    help = "folder of sharded weights and compiled graphs (default: artifacts)"
    add("--artifacts-dir", type=Path, default=Path("artifacts"), metavar="DIR", help=help)
    add("--profile", metavar="NAME", help=f"{', '.join(MACHINES)} (default: detected)")
    help = (
        "change a value of the profile; repeatable. Most used: host_dtype=float32 (arithmetic of"
        " the host's video models), blocks_per_graph=2 (transformer blocks in one graph),"
        " tuned=no (ignore tuned settings). An unknown key lists all keys"
    )
    advanced(add("--profile-set", action="append", default=[], metavar="KEY=VALUE", help=help))
    help = "number of tensor-parallel ranks (default: the profile's)"
    advanced(add("--tp-degree", type=int, metavar="N", help=help))
    help = "data type of weights and activations (default: bfloat16)"
    advanced(add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help=help))
    return parser


def price(args: argparse.Namespace) -> Price | None:
    """The machine's price, for the runs that it has room for; None without the flag."""
    if (dollars := args.price_per_hour) is None:
        return None
    if not 0 < dollars < float("inf"):
        raise UserError(f"--price-per-hour {dollars:g}: wanted US dollars above 0, such as 14.56")
    profile = resolve(args.profile, tuple(args.profile_set))
    needed = profile.cores_needed(profile.degree(args.tp_degree))
    return Price(dollars, max(1, (profile.cores or 0) // needed))


def group(parser: argparse.ArgumentParser, title: str) -> argparse._ActionsContainer:
    """The group with a title of _GROUPS; the first call creates it."""
    groups = (group for group in parser._action_groups if group.title == title)
    return next(groups, None) or parser.add_argument_group(title, _GROUPS[title])


MODEL_FILES = {  # flags, and their files' kinds for hub.local_path
    kind.flag[2:].replace("-", "_"): name
    for name, kind in KINDS.items()
    if name not in ("", "lora")
}


def local(args: argparse.Namespace, flag: str) -> Any:
    """The local Path of one of MODEL_FILES, None without the flag. The first call downloads the
    file of a Hub name. Raises UserError."""
    from ltx_neuron.weights.model_files import located

    name, kind = getattr(args, flag, None), MODEL_FILES[flag]
    if kind == "transformer":
        kind = getattr(args, "recipe", None) or "distilled"
    return name and located(name, kind)


def workspace(args: argparse.Namespace, writes: bool = True, tuned: bool = True) -> Workspace:
    """The checkpoint, profile and artifacts of the common flags. writes: whether the command writes
    into the artifacts folder; if so, check that it can. tuned: whether to use tuned settings;
    commands that compile or run graphs do."""
    from ltx_neuron.artifacts.workspace import Workspace
    from ltx_neuron.weights.model_files import spatial_scale

    profile = resolve(args.profile, tuple(args.profile_set))
    if writes:
        check_folder(args.artifacts_dir, "--artifacts-dir DIR")
    opened = Workspace(
        local(args, "checkpoint_path"),
        profile,
        args.artifacts_dir,
        profile.degree(args.tp_degree),
        args.dtype,
        local(args, "gemma_root"),
        **{f"{kind}_path": local(args, f"{kind}_path") for kind in PARTS},
    )
    opened.compat = getattr(args, "compat", None)
    opened.recipe_note = getattr(args, "recipe_note", "")
    opened.spatial_scale = spatial_scale(local(args, "spatial_upsampler_path"))
    if getattr(args, "needs_gemma", False) and not getattr(args, "text_embeddings", None):
        example = "Type for example --gemma-root gemma-3-12b"
        require(opened.gemma_root, "--gemma-root", "--checkpoint-path", example)
    if tuned:
        opened.take_tuned()
    return opened


# --- flags of a job -------------------------------------------------------------------------------


# The fields of LoRAs: sharding merges them into weight sets, and at run time they name the sets.
WEIGHTS = [*LoraFields.model_fields]
# The fields that graphs depend on; the metadata of LoRAs has a reference's scale.
GRAPHS = [*SizeFields.model_fields, "nag_scale", *ConditionFields.model_fields]
GRAPHS += ["lora", "ic_lora", "detailing_lora"]
_GUIDANCE = [*GuidanceFields.model_fields]


def add_job(parser: argparse.ArgumentParser, fields: Iterable[str] | None = None) -> None:
    """Flags of some fields of a job or, by default, of all that a line of a prompts file accepts,
    and --guidance."""
    if fields is None:
        fields = ["prompt", "prompts", *SamplingFields.model_fields, "sampler", "auto_duration"]
        fields += [*SizeFields.model_fields, *_GUIDANCE, *WEIGHTS]
        fields += [*ConditionFields.model_fields, *DetailFields.model_fields]
        help = "dev recipe: guidance scales, as in video_cfg=3 audio_cfg=7"
        options: Any = {"nargs": "+", "action": "extend", "default": [], "help": help}
        group(parser, "video")  # before the group of guidance
        group(parser, "guidance").add_argument("--guidance", metavar="KEY=VALUE ...", **options)
    inputs = {*WEIGHTS, *ConditionFields.model_fields, *DetailFields.model_fields}
    for name in fields:
        field = JobFields.model_fields[name]
        default = None if name == "recipe" else field.default  # else from the file's name
        options = {"default": default, "help": field.description, **_options(name, field)}
        title = _INPUTS if name in inputs else "guidance" if name in _GUIDANCE else "video"
        action = group(parser, title).add_argument(*map(flag_of, names_of(name)), **options)
        if name not in _MOST_USED:
            advanced(action)


# Flags with further values: by field, the fields of these values and the text for help.
_FURTHER = {
    "audio_path": (("audio_start_time", "audio_max_duration"), "FILE [START_S [LENGTH_S]]"),
    "video_path": (("start_time", "end_time"), "FILE [START_S END_S]"),
    "distilled_lora": ((), "PATH [STRENGTH | STAGE_1 STAGE_2]"),
}


class _WithFurther(argparse.Action):
    def __call__(self, parser, namespace, values: Any, option_string=None):
        fields = (self.dest, *_FURTHER[self.dest][0])
        if len(values) > len(fields):
            parser.error(f"{option_string}: got {len(values)} values, wanted {self.metavar}")
        for field, value in zip(fields, values, strict=False):
            setattr(namespace, field, value)


def _options(name: str, field: FieldInfo) -> dict[str, Any]:
    """argparse's options for a field. Values stay text: JobFields validate them."""
    further, title = _FURTHER.get(name, ((), field.title))
    if field.default is False:
        return {"action": "store_true"}
    if field.default == ():  # PATH [FRAME_IDX [STRENGTH [CRF]]]
        return {"action": "append", "nargs": "+", "metavar": title, "default": []}
    if further:
        return {"action": _WithFurther, "nargs": "+", "metavar": title}
    options: dict[str, Any] = {"metavar": title} if title else {}
    for kind in (field.annotation, *get_args(field.annotation)):
        if get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        if get_origin(kind) is tuple or kind is AutoDuration:
            options["nargs"] = "*"
    return options


# --- jobs -----------------------------------------------------------------------------------------


def spec(args: argparse.Namespace) -> Job:
    """The job of the flags that the command has, without checks. Raises UserError for an invalid
    value."""
    from ltx_neuron.job import Job

    values = {name: getattr(args, name, None) for name in JobFields.model_fields}
    values = {name: value for name, value in values.items() if value is not None}
    guidance = _guidance_settings(getattr(args, "guidance", []))
    for key, field in GUIDANCE_KEYS.items():
        if field in guidance and field in values:
            raise UserError(
                f"--guidance {key}=... and {flag_of(field)} set the same value; leave one out"
            )
    with _as_typed(args):
        values |= guidance | _stage_strengths(values)
        orientation = COMPAT[getattr(args, "compat", None)].orientation
        return Job.validated(values).replaced(orientation=orientation)


def _guidance_settings(settings: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        field = GUIDANCE_KEYS.get(key.replace("-", "_"))
        if field is None:
            near = get_close_matches(key, GUIDANCE_KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else "type for example --guidance video_cfg=3"
            keys = ", ".join(few([*GUIDANCE_KEYS], 9))
            raise UserError(f"--guidance {setting}: unknown key {key!r}; {hint}\nKeys: {keys}")
        if not equals:
            raise UserError(f"--guidance {setting}: no value; type for example --guidance {key}=3")
        if field in values:
            raise UserError(f"--guidance {key} is given twice; leave one out")
        is_list = field.endswith("_blocks")
        values[field] = [word for word in text.split(",") if word] if is_list else text
    return values


def _stage_strengths(values: dict[str, Any]) -> dict[str, Any]:
    loras = values.get("distilled_lora", [])
    pairs = {tuple(strengths) for _, *strengths in loras if len(strengths) == 2}
    if not pairs:
        return {}
    names = "distilled_lora_strength_stage_1", "distilled_lora_strength_stage_2"
    if len(pairs) > 1 or any(len(lora) != 3 for lora in loras) or values.keys() & {*names}:
        raise UserError(
            "--distilled-lora with two strengths, of stage 1 and stage 2: type the same two for"
            " each --distilled-lora, and leave --distilled-lora-strength-stage-1 and -2 out"
        )
    return {"distilled_lora": [path for path, *_ in loras], **dict(zip(names, *pairs, strict=True))}


@contextmanager
def _as_typed(args: argparse.Namespace) -> Iterator[None]:
    """Errors raised in the block quote a value of --guidance as the user typed it."""
    typed = {
        field: f"--guidance {key}"
        for key, field in GUIDANCE_KEYS.items()
        if getattr(args, field, None) is None and getattr(args, "guidance", [])
    }
    try:
        yield
    except FieldError as error:
        raise UserError(error.render(lambda field: typed.get(field) or flag_of(field))) from None


def job(args: argparse.Namespace) -> Job:
    """The job of `add_job`'s flags. Their recipe must be set."""
    return _job(args, spec(args))


def job_of_line(args: argparse.Namespace) -> Callable[[dict[str, Any]], Job]:
    """A function from a line of a prompts file to its Job. The command's flags are the defaults."""
    defaults = spec(args)
    return lambda line: _job(args, defaults.updated(line))


def lines(args: argparse.Namespace, workspace: Workspace, folder: Path | None = None) -> list[Line]:
    """The lines of --prompts-file. folder: of the results, for batch.read_lines."""
    from ltx_neuron.batch import read_lines
    from ltx_neuron.host import input_files

    of_line, files = job_of_line(args), (input_files.check, folder)
    resolved, identity = lambda line: workspace.resolved(of_line(line)), workspace.identity
    return read_lines(args.prompts_file, resolved, identity, spec(args), *files)


def _job(args: argparse.Namespace, job: Job) -> Job:
    from ltx_neuron.weights.model_files import spatial_scale

    if getattr(args, "resume", None):
        _check_resumed(job)
    if getattr(args, "duration_head_path", None):
        job = job.with_auto_duration()
    with _as_typed(args):
        job.check_rules()
    job = job.with_upscaling()
    if job.seed == RANDOM_SEED:
        job = job.replaced(seed=randrange(2**31))
        print(f"seed: {job.seed} (drawn for --seed {RANDOM_SEED}; --seed {job.seed} repeats it)")
    # Before the job is checked, which is before the workspace is opened.
    return job.scaled(spatial_scale(local(args, "spatial_upsampler_path")))


def _check_resumed(job: Job) -> None:
    """Raise UserError if an input file of an interrupted run is missing."""
    for name, path in job.input_paths:
        if not os.path.exists(path):  # False of a name that no file may have
            flag = flag_of(name)
            raise UserError(
                f"--resume needs {flag} {path}, and there is no such file: a resumed run needs the"
                f" same inputs. Type {flag} with the present path of this file, or leave --resume"
                " out"
            )


def shape(args: argparse.Namespace, recipe: str, **values: Any) -> Job:
    """The job to compile graphs for, from the flags of GRAPHS. Its prompt is empty. values: in
    place of the flags'."""
    job = spec(args).replaced(recipe=recipe, **values)
    if job.video_path is not None and job.extend is None:
        # The graphs do not depend on the seconds that are regenerated.
        job = job.replaced(start_time=0.0, end_time=job.size.seconds)
    with _as_typed(args):
        job.check_rules(graphs=True)
        job = job.with_upscaling()
        _ = job.media  # reads the files
    return job


def lora_sets(args: argparse.Namespace) -> dict[str, Job]:
    """A job with the LoRAs of each name in requests: "default" for the command's LoRAs, and the
    sets of --lora-sets."""
    default, known = spec(args), ", ".join(LORAS).replace("_", "-")
    sets = {"default": default}
    for name, line in (read_json(args.lora_sets) if args.lora_sets else {}).items():
        if not isinstance(line, dict) or {key.replace("-", "_") for key in line} - {*LORAS}:
            raise UserError(
                f"--lora-sets {args.lora_sets}: {name!r}: wanted an object with the keys {known}"
            )
        sets[name] = default.updated(line)
    for job in sets.values():
        _ = job.weight_sets  # raises UserError
    return sets


def recipe(args: argparse.Namespace) -> str:
    """The recipe of --recipe, else of the checkpoint's file name, else distilled, with a note for
    the workspace. The checkpoint's metadata does not distinguish them."""
    from ltx_neuron.weights.model_files import named_recipe

    if args.recipe:
        return args.recipe
    if named := args.checkpoint_path and named_recipe(args.checkpoint_path):
        return named
    args.recipe_note = "recipe: distilled (by default; --recipe changes it)"
    return "distilled"


# --- flags of a run -------------------------------------------------------------------------------


def check_prediction(args: argparse.Namespace) -> None:
    """Raise UserError for output flags with --predict-duration. Sets --auto-duration to its default
    limits if it is left out."""
    if not getattr(args, "predict_duration", False):
        return
    outputs = "output_path", "output_dir", "save_frames", "perf_dump_path", "resume"
    if wrong := [flag_of(name) for name in (*outputs, "prompts_file") if getattr(args, name)]:
        raise UserError(
            f"--predict-duration is for one --prompt and makes no video: leave {' '.join(wrong)}"
            " out"
        )
    args.auto_duration = args.auto_duration or []


def check_fleet(args: argparse.Namespace, many: object = True) -> None:
    """Raise UserError for fleet flags without --ray, or if Ray is not installed. many: false for a
    single job."""
    if args.ray and not many:
        raise UserError("--ray needs --prompts-file: a single video runs on one machine")
    for flag in ("replicas", "artifacts_url"):
        if getattr(args, flag) is not None and args.ray is None:
            raise UserError(f"--{flag.replace('_', '-')} needs --ray ADDRESS")
    if args.replicas is not None and args.replicas < 1:
        raise UserError(f"--replicas {args.replicas}: wanted 1 or more")
    if args.ray and not find_spec("ray"):
        raise UserError(
            "--ray needs ray, and this Python does not have it\n"
            'Type: pip install "ltx-neuron[fleet]"'
        )


def run_options(args: argparse.Namespace) -> RunOptions:
    from ltx_neuron.artifacts.workspace import RunOptions

    return RunOptions(
        neuron_gemma=args.neuron_gemma,
        neuron_vae=args.neuron_vae,
        compat=args.compat,
        spatial_upsampler_path=local(args, "spatial_upsampler_path"),
        temporal_upsampler_path=local(args, "temporal_upsampler_path"),
        duration_head_path=local(args, "duration_head_path"),
        warmup=args.warmup,
        # The cache keeps no hidden states, which --save-tensors writes.
        cache_prompts=not (args.no_prompt_cache or getattr(args, "save_tensors", None)),
    )


def outputs(args: argparse.Namespace) -> OutputPaths:
    from ltx_neuron.engine.outputs import OutputPaths

    return OutputPaths(
        video=args.output_path,
        folder=args.output_dir,
        frames=args.save_frames,
        tensors=args.save_tensors,
        report=args.perf_dump_path,
        price=price(args),
        resume=args.resume,
    )
