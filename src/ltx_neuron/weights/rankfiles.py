"""Rank files: a model's weights for tp ranks. Recognises, verifies and loads finished sets.

A weight set is a folder of rank0..rank{tp-1}.safetensors, host.safetensors and manifest.json, which
sharder.py writes. If all ranks have the same weights, they share one ranks.safetensors.
"""

import re
import shlex
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from ltx_neuron.errors import NoPermission, UserError
from ltx_neuron.files import MANIFEST, changed, check_readable, read_json
from ltx_neuron.format import few
from ltx_neuron.weights.sharding import ALONE
from ltx_neuron.weights.tensorfile import DTYPE_NAMES, TensorFile, missing_and_unexpected

HOST_FILE = "host.safetensors"
SHARED_FILE = "ranks.safetensors"  # of all ranks, if their weights are equal
_BLOCK_BYTES = 16 * 2**20  # read and hashed at once
RESHARD = "shard the weights again"


def rank_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def file_names(tp: int, shared: bool = False) -> list[str]:
    """The names of a weight set's files: the ranks' (shared: one), then the host's."""
    return [*([SHARED_FILE] if shared else map(rank_file, range(tp))), HOST_FILE]


def rank_path(folder: Path, rank: int) -> Path:
    return folder / (SHARED_FILE if SHARED_FILE in file_entries(folder) else rank_file(rank))


def is_finished(folder: Path, identity: dict) -> bool:
    """Whether a folder contains a finished weight set of that identity with files of the right
    sizes. UserError if permission to read them is missing."""
    try:
        return read_json(folder / MANIFEST)["identity"] == identity and not verify(
            folder, quick=True
        )
    except NoPermission:
        raise
    except (UserError, KeyError, TypeError):
        return False


def file_entries(folder: Path) -> dict[str, dict]:
    """File name -> {"bytes", "blake3", "header_blake3"} of a finished weight set, from its
    manifest, in the order of file_names. UserError if the manifest does not describe one."""
    try:
        return entries_in(read_json(folder / MANIFEST))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{folder / MANIFEST} does not describe a weight set ({error}); delete {folder}"
            f" and {RESHARD}"
        ) from None


def entries_in(manifest: dict) -> dict[str, dict]:
    """As file_entries, from a manifest's content. Raises ValueError, KeyError, TypeError or
    AttributeError if it does not describe a weight set."""
    if changed(manifest):
        raise ValueError("its content differs from its checksum")
    entries, tp = manifest["files"], manifest["identity"]["tp"]
    # Only these names: a manifest must not name a path outside its folder.
    shared = SHARED_FILE in entries
    names_fit = type(tp) is int and len(entries) == (2 if shared else tp + 1)
    if not names_fit or {*entries} != {*file_names(tp, shared)}:
        raise ValueError(f"files {sorted(entries)[:8]}")
    if any(entry.keys() != {"bytes", "blake3", "header_blake3"} for entry in entries.values()):
        raise ValueError("wanted size and digests of every file")
    return {name: entries[name] for name in file_names(tp, shared)}


def verify(folder: Path, quick: bool = False) -> list[str]:
    """Compare the files of a finished weight set with its manifest. Returns one line per differing
    file, or the manifest's own damage. UserError if permission to read one is missing. quick:
    compare sizes only."""
    problems = []
    try:
        entries = file_entries(folder)
    except NoPermission:
        raise
    except UserError as error:
        return [str(error)]
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
            continue
        check_readable(path)
        if path.stat().st_size != entry["bytes"]:
            problems.append(f"{name}: {path.stat().st_size} bytes, wanted {entry['bytes']}")
        elif not quick:
            if _file_digest(path) != entry["blake3"]:
                problems.append(f"{name}: content differs from its blake3")
            elif header_digest(TensorFile(path, RESHARD)) != entry["header_blake3"]:
                problems.append(f"{name}: header differs from its blake3")
    return problems


def load_rank_file(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of a rank file, in the order of `shapes`: name -> shape. UserError unless they
    match `shapes` and `dtype` as in open_rank_file, and the file matches its manifest."""
    tensors = dict(open_rank_file(path, shapes, dtype).tensors(shapes))
    return {name: tensors[name] for name in shapes}


def open_rank_file(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> TensorFile:
    """An opened rank file. UserError with every difference of its tensors from `shapes` (name ->
    shape; of one stream alone, a part) and `dtype`, or if the file does not match its manifest."""
    file = TensorFile(path, RESHARD)
    parts = *ALONE, re.compile(".*")
    part = next(names for names in parts if all(map(names.fullmatch, shapes)))
    stored = {
        name: f"{shape} {file.dtypes[name]}"
        for name, shape in file.shapes.items()
        if name in shapes or part.fullmatch(name)
    }
    expected = {name: f"{tuple(shape)} {DTYPE_NAMES[dtype]}" for name, shape in shapes.items()}
    if problems := missing_and_unexpected(expected, stored):
        raise UserError(f"{path} does not have this model's weights:\n  " + "\n  ".join(problems))
    _check_header(path, file)
    return file


def open_host_file(folder: Path) -> TensorFile:
    """The host's file of a weight set. UserError unless it matches its manifest."""
    file = TensorFile(folder / HOST_FILE, RESHARD)
    _check_header(folder / HOST_FILE, file)
    return file


def _file_digest(path: Path) -> str:
    """blake3 with a thread per core: a weight set may have 37 GB."""
    hasher, block = blake3(max_threads=blake3.AUTO), memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
    return hasher.hexdigest()


def header_digest(file: TensorFile) -> str:
    """The blake3 of a rank file's header, as a weight set's manifest has it."""
    return blake3(len(file.header).to_bytes(8, "little") + file.header).hexdigest()


def _check_header(path: Path, file: TensorFile) -> None:
    """Compare a file's header with its digest in the manifest. Another file may have the same
    names, shapes and dtypes, or the offsets may be damaged."""
    if header_digest(file) != file_entries(path.parent)[path.name]["header_blake3"]:
        raise UserError(
            f"{path} is not the file its manifest describes: the header differs; delete"
            f" {path.parent} and {RESHARD}"
        )


def check_whole(path: Path, problems: list[str], command: str) -> None:
    """Raise UserError with the problems of a weight folder, if any. command: makes the folder."""
    if problems:
        raise UserError(
            "\n  ".join([f"{path} is damaged:", *few(problems, 20)])
            + f"\nMake it again: rm -r {shlex.quote(str(path))} && {command}"
        )
