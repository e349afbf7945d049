"""The flags of one generation, made of JobSpec's fields, and the jobs of flags and of lines."""

import argparse
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json
from ltx_neuron.flags import resolve
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.spec import (
    LORAS,
    ConditionFields,
    DetailFields,
    GuidanceFields,
    JobSpec,
    LoraFields,
    SamplingFields,
    SizeFields,
    flag_of,
    names_of,
    validated,
)
from ltx_neuron.weights.lora import WeightSet

# --- flags ----------------------------------------------------------------------------------------


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


def add_ic_loras(parser: argparse.ArgumentParser) -> None:
    """What stage 1 alone runs with, beside a reference."""
    _add(parser, ["ic_lora"])


def add_conditions(parser: argparse.ArgumentParser, shape_only: bool = False) -> None:
    """What a video is made from besides its prompt and images. shape_only: the flags that graphs
    depend on, of the scripts that compile them."""
    group = parser.add_argument_group("sound, video and guides")
    _add(group, ConditionFields.model_fields)
    _add(group, [] if shape_only else DetailFields.model_fields)


def _add(parser: argparse._ActionsContainer, fields: Iterable[str]) -> None:
    for name in fields:
        field = JobSpec.model_fields[name]
        options = {"help": field.description, **_options(field.annotation, field.title)}
        default = [] if field.default == () else field.default
        parser.add_argument(*map(flag_of, names_of(name)), default=default, **options)


def _options(annotation: Any, value: str | None) -> dict[str, Any]:
    """What argparse takes for a field's type and the name of its value."""
    kind = next((each for each in get_args(annotation) if each is not NoneType), annotation)
    kind = annotation if get_origin(annotation) in (Literal, tuple) else kind
    if kind is bool:
        return {"action": "store_true"}
    options = {"metavar": value} if value else {}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple and value:  # PATH [FRAME_IDX [STRENGTH [CRF]]]
        path, _, rest = value.partition(" ")
        options["metavar"] = path, rest.removeprefix("[").removesuffix("]")
        return {"action": "append", "nargs": "+", **options}
    if get_origin(kind) is tuple:
        return {"nargs": "*", "type": get_args(kind)[0]}
    return options if kind is str else {"type": kind, **options}


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
        resolve.check_resumed(said)
    return resolve.job_of(said, _upright(args))


def shape(args: argparse.Namespace, recipe: str) -> Job:
    """The job of the flags of `add_size`, `add_ic_loras` and `add_conditions(shape_only=True)`:
    what graphs are compiled for. Its prompt is empty."""
    said = spec(args).model_copy(update={"recipe": recipe})
    if said.video_path is not None and said.extend is None:
        # Whichever seconds of it are made anew: the graphs are the same.
        seconds = resolve.size_of(said, _upright(args)).seconds
        said = said.model_copy(update={"start_time": 0.0, "end_time": seconds})
    return resolve.job_of(said, _upright(args))


def size(args: argparse.Namespace) -> Size:
    """What was typed, or what the file of --video-path has."""
    return resolve.size_of(spec(args), _upright(args))


def images(args: argparse.Namespace) -> tuple[ImageCondition, ...]:
    return spec(args).image


def lora_fields(args: argparse.Namespace) -> dict[str, WeightSet]:
    """A Job's LoRAs, by its fields."""
    return resolve.lora_fields(spec(args))


def lora_sets(args: argparse.Namespace) -> dict[str, dict[str, WeightSet]]:
    """What requests may choose by name: the command's own LoRAs as "default", and those of
    --lora-sets. Each as a Job's fields."""
    command, known = spec(args), ", ".join(LORAS).replace("_", "-")
    sets = {"default": resolve.lora_fields(command)}
    for name, line in (read_json(args.lora_sets) if args.lora_sets else {}).items():
        if not isinstance(line, dict) or {key.replace("-", "_") for key in line} - {*LORAS}:
            raise UserError(f"--lora-sets {args.lora_sets}: {name!r} is an object of {known}")
        sets[name] = resolve.lora_fields(command.with_line(line))
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
