"""Checks arguments of the Python API against their annotated types."""

import dataclasses
import reprlib
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, get_args, get_origin

from ltx_neuron.errors import UserError

_IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    Path: "a path",
    NoneType: "None",
}


def check_fields(value, prefix: str = "") -> None:
    """Raise UserError for the first field of a dataclass with a wrong type.

    prefix  of the fields' names in the message
    """
    for field in dataclasses.fields(value):
        example = None if field.default is dataclasses.MISSING else field.default
        check_type(prefix + field.name, getattr(value, field.name), field.type, example)


def check_type(name: str, value, kind, example=None) -> None:
    """Raise UserError unless a value is of an annotated type, such as int, str | None or
    tuple[Path, ...]. numpy's numbers are accepted as numbers, True and False are not.

    example  a value of that type, for the message
    """
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if isinstance(value, tuple) and get_origin(kind) is tuple:
        for index, item in enumerate(value):
            check_type(f"{name}[{index}]", item, get_args(kind)[0])
        return
    kinds = get_args(kind) if isinstance(kind, UnionType) else (get_origin(kind) or kind,)
    if not any(_is_a(each, value) for each in kinds):
        got = f"{name}={reprlib.repr(value)} is of type {type(value).__name__}"
        wanted = " or ".join(_IN_WORDS.get(each) or each.__name__ for each in kinds)
        as_in = "" if example is None else f", as in {name}={example!r}"
        raise UserError(f"{got}; wanted {wanted}{as_in}")


def _is_a(kind: type, value) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, {int: Integral, float: Real}.get(kind, kind))
