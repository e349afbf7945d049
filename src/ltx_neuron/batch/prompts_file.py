"""The forms of a prompts file: JSON objects, one per line or in an array, or a table (CSV) whose
header names flags, as spreadsheets write it."""

import csv
import json
import re
import reprlib
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from ltx_neuron.errors import UserError
from ltx_neuron.sampling.spec import JobFields, resolve_aliases

WANTED = (
    "Wanted: one JSON object per line with flags as keys, for example\n"
    '{"prompt": "a golden retriever runs across a meadow", "seed": 10}\n'
    "or a JSON array of such objects, or a CSV file whose header names flags, as in prompt,seed"
)
_MAX_BYTES = 200_000_000
_UNFINISHED = "the object does not end on its line; write each one on one line"
# What a line that is not JSON has -> the mistake. The first one counts.
_MISTAKES = {
    r"^\s*(#|//)": "a comment, which JSON does not have; delete it",
    r"[:{]\s*[“”„‟]": 'curly quotation marks; type straight ones (")',
    r"^\s*\{\s*'": "single quotation marks; JSON has double ones",
    r":\s*(True|False|None)\b": "True, False and None are Python's; JSON has true, false and null",
    r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})': r"a single backslash; type \\ or, in a path, /",
    r"\}\s*,\s*$": "a comma after the object; leave it out",
    r",\s*[}\]]": "a comma after the last value; leave it out",
    r"^[^}]*$": _UNFINISHED,
}


class Row(NamedTuple):
    """values: by flag, or what is wrong with the text. number: of the line; in a JSON array, where
    a line may have many objects, of the object."""

    number: int
    values: Any
    name: str = "line"


def read(path: Path) -> Iterator[Row]:
    """The rows of a prompts file. Raises UserError for a file that is no text."""
    with open(path, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff")) or data[1:2] == b"\0"
    # Bytes that are not UTF-8 are found in their prompt, with the line's number.
    text = data.decode("utf-16", "replace") if wide else data.decode("utf-8", "surrogateescape")
    text = text.lstrip("\ufeff")
    if len(data) > _MAX_BYTES or "\0" in text or text.startswith("PK\3\4"):
        raise UserError(
            f"{path} is not text of at most 200 MB; save a spreadsheet as CSV UTF-8\n{WANTED}"
        )
    forms = {"{": _lines, "#": _lines, "/": _lines, "[": _array, "": lambda text: iter(())}
    return forms.get(text.lstrip()[:1], _table)(text)


def _lines(text: str) -> Iterator[Row]:
    begun = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield (row := _json(line, number))
            if not begun and _UNFINISHED in str(row.values):
                return  # one object over many lines, none of which is one
            begun = True


def _array(text: str) -> Iterator[Row]:
    whole = _json(text)
    if isinstance(whole.values, UserError):
        return iter([whole])
    return (Row(number, values, "object") for number, values in enumerate(whole.values, 1))


def _json(text: str, number: int = 1) -> Row:
    """The value of a text that begins on the line with this number."""
    try:
        return Row(number, json.loads(text, object_pairs_hook=_object))
    except UserError as error:
        return Row(number, error)
    except (ValueError, RecursionError) as error:
        after = getattr(error, "lineno", 1) - 1
        line = text.split("\n")[after]
        why = next((why for has, why in _MISTAKES.items() if re.search(has, line)), str(error))
        return Row(number + after, UserError(f"not JSON: {why}"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises UserError for a repeated key."""
    values = {}
    for key, value in pairs:
        if key in values:
            raise UserError(f"the key {key!r} is given twice; leave one out")
        values[key] = value
    return values


def _table(text: str) -> Iterator[Row]:
    for delimiter in ",;\t|":
        lines = StringIO(text, newline="")
        reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
        with suppress(csv.Error, StopIteration):
            # Excel's files may have a line with the delimiter before the header.
            header = next(row for row in reader if any(row) and not row[0].startswith("sep="))
            names = [re.sub(r"\s+", "_", name.strip().lstrip("-").lower()) for name in header]
            if "prompt" in names:
                return _rows(reader, names)
    first = text.lstrip().split("\n", 1)[0]
    number = text[: text.index(first)].count("\n") + 1
    why = f"{reprlib.repr(first)} is neither a JSON object nor a CSV header with a column prompt"
    return iter([Row(number, UserError(why))])


def _rows(reader: Any, names: list[str]) -> Iterator[Row]:
    """The rows after the header. reader: csv.reader"""
    number = reader.line_num
    try:
        while names[-1] == "":  # as spreadsheets end lines
            names.pop()
        fields = [*resolve_aliases(_object([(name, "") for name in names]))]
        number += 1
        for cells in reader:
            if any(map(str.strip, cells)):
                yield Row(number, _values(fields, cells))
            number = reader.line_num + 1
    except (csv.Error, UserError) as error:
        yield Row(number, UserError(str(error).replace("unexpected end of data", 'an open "')))


def _values(fields: list[str], cells: list[str]) -> dict[str, Any] | UserError:
    """The values of a row as a JSON object has them; empty cells are not given."""
    if any(map(str.strip, cells[len(fields) :])):
        return UserError(
            f"{len(cells)} cells, and the header has {len(fields)}; put a text that has the"
            ' delimiter between "'
        )
    return {f: _value(f, cell) for f, cell in zip(fields, cells, strict=False) if cell.strip()}


def _value(field: str, cell: str) -> Any:
    """A cell's text, switch or list. Numbers stay text, which the job's fields read."""
    if JobFields.model_fields[field].annotation in (str, str | None):
        return cell
    cell = cell.strip()
    with suppress(ValueError, RecursionError):
        if cell.startswith("[") or cell.lower() in ("true", "false"):
            return json.loads(cell if cell.startswith("[") else cell.lower())
    return re.sub(r"^(-?\d+),(\d+)$", r"\1.\2", cell)  # 12,5 of many countries
