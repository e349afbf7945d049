"""Small files that must be whole or not there, and files that somebody else may have written."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ltx_neuron.errors import UserError

MANIFEST = "manifest.json"  # of every finished folder, written last
MAX_JSON_BYTES = 64 * 2**20  # the manifest of the released weights has 0.5 MB


@contextmanager
def whole_file(path: str | Path, suffix: str = "") -> Iterator[Path]:
    """A temporary file beside `path` to write to: it takes the name at the end, when it is on the
    disk, and is removed if the writing fails. Every file that must be whole is written by this.

    The temporary name is this call's own, so that two processes never write into one file.
    suffix  what the temporary name must end with, for writers that look at it
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    partial = path.with_name(f".{path.name}.{unique}.partial{suffix}")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON object; it appears under its name only when whole."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors that are in memory as safetensors; the file appears only when whole."""
    from safetensors.torch import save

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with whole_file(path) as partial:
        partial.write_bytes(save(contiguous, metadata))


def read_json(path: Path) -> dict:
    """A JSON object of bounded size. UserError for anything else, also for what is not there."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise UserError(f"{path} has {size} bytes, wanted at most {MAX_JSON_BYTES} of JSON")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: got {type(content).__name__}, wanted a JSON object")
    return content


# File systems allow 255; a file in the making has a longer name.
_NAME_BYTES = 200


def check_writable(path: Path, flag: str) -> None:
    """Raise UserError, before any work is done, where a file could not be written to `path`.
    Creates nothing.

    `flag` is what the user types to choose another place, with the kind of value it takes.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder, wanted a file: pass a name inside it with {flag}")
    if len(os.fsencode(path.name)) > _NAME_BYTES:
        raise UserError(
            f"{path.name}: a file name this long cannot be written; pass a shorter one with {flag}"
        )
    check_folder(path.parent, flag, path)


def check_folder(folder: Path, flag: str, path: Path | None = None) -> None:
    """The same for files in a folder, which is made when it is not there. `path` is what the user
    named, else the folder."""
    nearest = next(
        parent
        for parent in (folder.absolute(), *folder.absolute().parents)
        if os.path.lexists(parent)
    )
    if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"{path or folder} cannot be written: {nearest} is not a folder you may write to; pass"
            f" another place with {flag}"
        )
