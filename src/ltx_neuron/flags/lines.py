"""Prompts files: a line's keys are flags of a job, and make one on top of the command's own."""

import argparse
from collections.abc import Callable
from functools import cache
from typing import Any

from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json
from ltx_neuron.flags.jobs import SIZES, add_job, job
from ltx_neuron.flags.lora import LORAS, lora_fields
from ltx_neuron.job import Job
from ltx_neuron.weights.lora import WeightSet


def job_of_line(args: argparse.Namespace) -> Callable[[dict[str, Any]], Job]:
    """What makes a Job of a prompts file's line, on top of the command's own flags.

    The line's keys are flags without their dashes; a list is several values, a list of lists the
    flag several times; false and null are a flag that is not given.
    """

    return lambda line: job(_with_line(args, line))


def lora_sets(args: argparse.Namespace) -> dict[str, dict[str, WeightSet]]:
    """What requests may choose by name: the command's own LoRAs as "default", and those of
    --lora-sets. Each as a Job's fields."""
    sets, known = {"default": lora_fields(args)}, ", ".join(LORAS).replace("_", "-")
    for name, line in (read_json(args.lora_sets) if args.lora_sets else {}).items():
        if not isinstance(line, dict) or {_job_flag(key).dest for key in line} - {*LORAS}:
            raise UserError(f"--lora-sets {args.lora_sets}: {name!r} is an object of {known}")
        sets[name] = lora_fields(_with_line(args, line))
    return sets


def _with_line(args: argparse.Namespace, line: dict[str, Any]) -> argparse.Namespace:
    values, given = dict(vars(args)), {}
    for key, value in line.items():
        action = _job_flag(key)
        if value is not None and value is not False:
            if (other := given.setdefault(action.dest, key)) != key:
                raise UserError(f"{other!r} and {key!r} are the same flag; leave one out")
            values[action.dest] = _flag_value(action, value, values[action.dest])
    if "video_path" in given:  # it takes the place of the command's own size
        values |= {name: None for name in SIZES if name not in given}
    return argparse.Namespace(**values)


@cache
def job_flags() -> dict[str, argparse.Action]:
    """Every flag that a line may have, by its spelling without dashes at the front."""
    parser = argparse.ArgumentParser(add_help=False)
    add_job(parser)
    options = parser._option_string_actions
    return {name.removeprefix("--"): action for name, action in options.items()}


def _job_flag(key: str) -> argparse.Action:
    name = key.replace("_", "-")
    if name not in job_flags():
        raise UserError(f"unknown key {key!r}; known: {', '.join(sorted(job_flags()))}")
    return job_flags()[name]


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
        before = [] if action.dest in LORAS else before
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
