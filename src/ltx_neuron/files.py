"""Small files that must be whole or not there, and files that somebody else may have written."""

import json
import os
from pathlib import Path

from torch import Tensor

from ltx_neuron.errors import UserError

MANIFEST = "manifest.json"  # of every finished folder, written last
MAX_JSON_BYTES = 64 * 2**20  # the manifest of the released weights has 0.5 MB


def write_json(path: Path, content: dict) -> None:
    """Write JSON so that it appears under its name only when whole and on the disk."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with open(temporary, "w") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file of tensors that are in memory; it appears under its name only when whole."""
    from safetensors.torch import save

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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
