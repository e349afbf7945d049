"""Rank files: a model's weights, sharded for tp ranks. Recognises, verifies and loads finished
sets, and reads them for another sharding.

A weight set is a folder of rank0..rank{tp-1}.safetensors, host.safetensors and manifest.json, which
sharder.py writes. If all ranks have the same weights, they share one ranks.safetensors.
"""

import shlex
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from ltx_neuron.config.common import check_heads
from ltx_neuron.errors import NoPermission, UserError
from ltx_neuron.files import MANIFEST, changed, check_readable, read_json
from ltx_neuron.weights.sharding import ALL, COL, HOST, KV, MODELS, ROW, SOUND_ALONE, copies, rule
from ltx_neuron.weights.tensorfile import DTYPE_NAMES, DTYPES, TensorFile, listed

HOST_FILE = "host.safetensors"
SHARED_FILE = "ranks.safetensors"  # of all ranks, if their weights are equal
_BLOCK_BYTES = 16 * 2**20  # read and hashed at once
RESHARD = "shard the weights again"


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank{rank}.safetensors"


def file_names(tp: int, shared: bool = False) -> list[str]:
    """The names of a weight set's files: the ranks' in order, then the host's. shared: all ranks
    share one file."""
    return [*([SHARED_FILE] if shared else map(rank_file, range(tp))), HOST_FILE]


def rank_path(folder: Path, rank: int) -> Path:
    """The file of a rank in a finished weight set."""
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
    file, or the manifest's own damage. UserError if permission to read one is missing.

    quick  compare sizes only
    """
    problems = []
    try:
        entries = file_entries(folder)
    except NoPermission:
        raise
    except UserError as error:
        return [str(error)]
    for name, wanted in entries.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
            continue
        check_readable(path)
        if path.stat().st_size != wanted["bytes"]:
            problems.append(f"{name}: {path.stat().st_size} bytes, wanted {wanted['bytes']}")
        elif not quick:
            if _file_digest(path) != wanted["blake3"]:
                problems.append(f"{name}: content differs from its blake3")
            elif header_digest(TensorFile(path, RESHARD)) != wanted["header_blake3"]:
                problems.append(f"{name}: header differs from its blake3")
    return problems


class RankSource:
    """The whole tensors of a finished weight set, assembled from its files. It replaces
    checkpoint.Source when a set of another tp or dtype is made without the checkpoint.

    quick  compare the files' sizes with the manifest, not all bytes
    UserError if the set is unfinished or damaged.
    """

    def __init__(self, folder: Path, quick: bool = False):
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).is_file():
            raise UserError(
                f"{folder} is not a finished weight set: it has no {MANIFEST}.\nWanted: a folder"
                " that a shard command printed"
            )
        if problems := verify(self.folder, quick):
            raise UserError("\n  ".join([f"{folder} is damaged:", *problems]))
        content = read_json(self.folder / MANIFEST)
        self.identity, self.heads = content["identity"], content["heads"]
        self._provenance = content["source"]
        self.model, self.tp = MODELS[self.identity["model"]], self.identity["tp"]
        names = file_entries(self.folder)
        self.files = [TensorFile(self.folder / name, RESHARD) for name in names]
        self.names = sorted({*self.files[0].shapes, *self.files[-1].shapes})

    def check(self, tp: int, dtype: torch.dtype) -> None:
        """Raise UserError if these files cannot be converted to that tp (it would split heads) or
        dtype (it is wider)."""
        check_heads(tp, self.heads)
        if dtype.itemsize > DTYPES[self.identity["dtype"]].itemsize:
            raise UserError(
                f"{self.folder} is in {self.identity['dtype']}, which lacks precision: shard the"
                " checkpoint with --dtype float32"
            )

    def split(self, name: str) -> int | str | None:
        """The dimension along which a tensor's stored parts are joined, None for copies, or
        sharding.HOST."""
        kind = rule(self.model, name)
        if kind == KV:
            return COL
        # Gemma3's projections are stored as (layers, out, width): out-features come second.
        return ROW if kind == COL and len(self.files[0].shapes[name]) == 3 else kind

    def copies(self, name: str, tp: int) -> int:
        """The number of neighbouring ranks, of tp, with the same part of a tensor."""
        return copies(self.model, name, self.files[0].shapes, tp, self.heads)

    def _part(self, name: str) -> tuple[int, ...]:
        """The shape of one rank's part."""
        return self._files_of(name)[0].shapes[name]

    def _files_of(self, name: str) -> list[TensorFile]:
        """The files with the parts of a tensor."""
        split = self.split(name)
        if split in (ALL, HOST):
            return [self.files[-1 if split == HOST else 0]]
        return self.files[: self.tp : self.copies(name, self.tp)]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        split, parts = self.split(name), len(self._files_of(name))
        return tuple(
            size * parts if dim == split else size for dim, size in enumerate(self._part(name))
        )

    def nbytes(self, name: str) -> int:
        """Bytes of a whole tensor in the stored dtype."""
        return prod(self.shape(name)) * DTYPES[self.identity["dtype"]].itemsize

    def pieces(self, name: str, bounds: list[tuple[int, int]]) -> Iterator[Tensor]:
        """Rows start..stop of a whole tensor for each of `bounds`."""
        files = self._files_of(name)
        if len(files) == 1:
            return (files[0].read(name, *rows) for rows in bounds)
        split = self.split(name)
        assert isinstance(split, int)  # otherwise one file contains the whole tensor
        whole = torch.cat([file.read_mapped(name) for file in files], split)
        return (whole[start:stop] for start, stop in bounds)

    def provenance(self, tensors: dict[str, str]) -> dict:
        """The source's entry in a manifest: the checkpoint of these files with its digests, so
        `tensors` is not used."""
        return self._provenance


def load_rank_file(
    path: Path, wanted: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of a rank file, in the order of `wanted`: name -> shape. UserError unless they
    match `wanted` and `dtype` as in open_rank_file, and the file matches its manifest."""
    tensors = dict(open_rank_file(path, wanted, dtype).tensors(wanted))
    return {name: tensors[name] for name in wanted}


def open_rank_file(
    path: Path, wanted: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> TensorFile:
    """An opened rank file. UserError unless its tensors match `wanted` (name -> shape) and `dtype`
    exactly, listing every difference, and the file matches its manifest. Graphs of sound alone
    want a part of the DiT's tensors."""
    file = TensorFile(path, RESHARD)
    stored = {name: (shape, file.dtypes[name]) for name, shape in file.shapes.items()}
    problems = [f"missing: {name}" for name in wanted if name not in stored]
    part = all(map(SOUND_ALONE.fullmatch, wanted))
    known = wanted.keys() | {name for name in stored if part and not SOUND_ALONE.fullmatch(name)}
    problems += [f"unexpected: {name}" for name in stored if name not in known]
    for name in wanted.keys() & stored.keys():
        if stored[name] != (tuple(wanted[name]), DTYPE_NAMES[dtype]):
            problems.append(
                f"{name}: {stored[name][0]} {stored[name][1]}, wanted {tuple(wanted[name])}"
                f" {DTYPE_NAMES[dtype]}"
            )
    if problems:
        raise UserError(
            f"{path} does not have this model's weights:\n  " + "\n  ".join(sorted(problems))
        )
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
            "\n  ".join([f"{path} is damaged:", *listed(problems)])
            + f"\nMake it again: rm -r {shlex.quote(str(path))} && {command}"
        )
