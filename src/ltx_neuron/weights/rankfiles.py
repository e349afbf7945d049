"""Rank files: a model's weights cut for tp ranks. What a finished set is, and how it is verified,
loaded and cut anew.

A folder holds rank0..rank{tp-1}.safetensors, host.safetensors and manifest.json. sharder.py writes
it.
"""

import shlex
from collections.abc import Iterator
from math import prod
from mmap import mmap
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from ltx_neuron.config import check_heads
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json
from ltx_neuron.weights.sharding import COL, HOST, KV, MODELS, ROW, copies, rule
from ltx_neuron.weights.tensorfile import DTYPE_NAMES, DTYPES, TensorFile

HOST_FILE = "host.safetensors"
AGAIN = "run the shard script again"
_BLOCK_BYTES = 16 * 2**20  # hashed at once


def rank_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def file_names(tp: int) -> list[str]:
    return [*(rank_file(rank) for rank in range(tp)), HOST_FILE]


def finished(folder: Path, identity: dict) -> bool:
    """Whether a folder holds a finished set of that identity whose files have their sizes."""
    try:
        return read_json(folder / MANIFEST)["identity"] == identity and not verify(
            folder, quick=True
        )
    except (UserError, KeyError, TypeError):
        return False


def lines_of(folder: Path) -> dict[str, dict]:
    """Every file of a finished weight set with its size and digests. UserError where the manifest
    is not one."""
    content = read_json(folder / MANIFEST)
    try:
        lines, tp = content["files"], content["identity"]["tp"]
        if type(tp) is not int or len(lines) != tp + 1 or sorted(lines) != sorted(file_names(tp)):
            raise ValueError(
                f"files {sorted(lines)[:8]}"
            )  # also what keeps a path out of the folder from being opened
        if any(line.keys() != {"bytes", "blake3", "header_blake3"} for line in lines.values()):
            raise ValueError("a file is described otherwise than by its size and digests")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{folder / MANIFEST} does not describe a weight set ({error}); delete {folder} and"
            f" {AGAIN}"
        ) from None
    return lines


def verify(folder: Path, quick: bool = False) -> list[str]:
    """Compare every file of a finished weight set with its manifest; the list of differences is
    empty if it is whole.

    `quick` looks at sizes only.
    """
    problems, lines = [], lines_of(folder)
    for name, wanted in lines.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != wanted["bytes"]:
            problems.append(f"{name}: {path.stat().st_size} bytes, wanted {wanted['bytes']}")
        elif not quick:
            if _file_digest(path) != wanted["blake3"]:
                problems.append(f"{name}: content differs from its blake3")
            elif _header_digest(TensorFile(path, AGAIN)) != wanted["header_blake3"]:
                problems.append(f"{name}: header differs from its blake3")
    return problems


class RankSource:
    """The tensors of a finished weight set put together again: what another tp or dtype is made
    from without the source."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).is_file():
            raise UserError(
                f"{folder} is no finished weight set: it has no {MANIFEST}.\nWanted: what a shard"
                " script printed"
            )
        if problems := verify(self.folder):
            raise UserError("\n  ".join([f"{folder} is damaged:", *problems]))
        content = read_json(self.folder / MANIFEST)
        self.identity, self.heads, self._described = (
            content["identity"],
            content["heads"],
            content["source"],
        )
        self.model, self.tp = MODELS[self.identity["model"]], self.identity["tp"]
        self.files = [TensorFile(self.folder / name, AGAIN) for name in file_names(self.tp)]
        self.names = sorted({*self.files[0].shapes, *self.files[-1].shapes})

    def check(self, tp: int, dtype: torch.dtype) -> None:
        """Raise UserError where these files cannot give that tp (half heads) or dtype (bits that
        are gone)."""
        check_heads(tp, self.heads)
        if dtype.itemsize > DTYPES[self.identity["dtype"]].itemsize:
            raise UserError(
                f"{self.folder} is in {self.identity['dtype']}, which cannot be widened again:"
                " shard the checkpoint with --dtype float32"
            )

    def split(self, name: str) -> int | str | None:
        kind = rule(self.model, name)
        if kind == KV:
            return COL
        return (
            ROW if (kind, len(self._part(name))) == (COL, 3) else kind
        )  # arranged: (layers, out, width)

    def copies(self, name: str, tp: int) -> int:
        return copies(rule(self.model, name), tp, self.heads)

    def _part(self, name: str) -> tuple[int, ...]:
        return self._file(name).shapes[name]

    def _file(self, name: str, rank: int = 0) -> TensorFile:
        return self.files[-1 if rule(self.model, name) == HOST else rank]

    def shape(self, name: str) -> tuple[int, ...]:
        split, parts = self.split(name), self.tp // self.copies(name, self.tp)
        return tuple(
            size * parts if dim == split else size for dim, size in enumerate(self._part(name))
        )

    def nbytes(self, name: str) -> int:
        return prod(self.shape(name)) * DTYPES[self.identity["dtype"]].itemsize

    def pieces(
        self, name: str, bounds: list[tuple[int, int]], scratches: Iterator[mmap]
    ) -> Iterator[Tensor]:
        """As Source.pieces, but in memory of their own: a finished set is still to be loaded, the
        cache may keep it."""
        split, part, copies = self.split(name), self._part(name), self.copies(name, self.tp)
        for start, stop in bounds:
            if split == ROW:
                yield torch.cat(
                    [self._file(name, rank).read(name, start, stop) for rank in range(self.tp)],
                    dim=1,
                )
            elif split == COL:
                ranks = range(start // part[0], (stop - 1) // part[0] + 1)
                rows = [
                    (
                        max(start, rank * part[0]) - rank * part[0],
                        min(stop, (rank + 1) * part[0]) - rank * part[0],
                    )
                    for rank in ranks
                ]
                parts = [
                    self._file(name, rank * copies).read(name, *r)
                    for rank, r in zip(ranks, rows, strict=True)
                ]
                yield torch.cat(parts)
            else:
                yield (
                    self._file(name).read(name, start, stop)
                    if part
                    else self._file(name).read(name)
                )

    def described(self, tensors: dict[str, str]) -> dict:
        """Of the checkpoint: what these files were made from still describes what is made from
        them."""
        return self._described


def load(path: Path, wanted: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Exactly the wanted tensors of a rank file, as TensorFile.tensors gives them. Errors as
    `opened` says."""
    tensors = dict(opened(path, wanted, dtype).tensors())
    return {name: tensors[name] for name in wanted}


def opened(path: Path, wanted: dict[str, tuple[int, ...]], dtype: torch.dtype) -> TensorFile:
    """A rank file that holds exactly the wanted tensors. Missing, extra, misshapen or recast ones
    are one error."""
    file = TensorFile(path, AGAIN)
    got = {name: (shape, file.dtypes[name]) for name, shape in file.shapes.items()}
    problems = [f"missing: {name}" for name in wanted if name not in got]
    problems += [f"unexpected: {name}" for name in got if name not in wanted]
    for name in wanted.keys() & got.keys():
        if got[name] != (tuple(wanted[name]), DTYPE_NAMES[dtype]):
            problems.append(
                f"{name}: {got[name][0]} {got[name][1]}, wanted {tuple(wanted[name])}"
                f" {DTYPE_NAMES[dtype]}"
            )
    if problems:
        raise UserError(
            f"{path} does not hold this model's weights:\n  " + "\n  ".join(sorted(problems))
        )
    _check_header(path, file)
    return file


def load_host(folder: Path) -> TensorFile:
    """The tensors of a weight set that stay on the host."""
    file = TensorFile(folder / HOST_FILE, AGAIN)
    _check_header(folder / HOST_FILE, file)
    return file


def _file_digest(path: Path) -> str:
    digest, block = blake3(max_threads=blake3.AUTO), memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def _header_digest(file: TensorFile) -> str:
    return blake3(len(file.header).to_bytes(8, "little") + file.header).hexdigest()


def _check_header(path: Path, file: TensorFile) -> None:
    """A header that says what the model wants may still be another's, or point elsewhere."""
    if _header_digest(file) != lines_of(path.parent)[path.name]["header_blake3"]:
        raise UserError(
            f"{path} is not the file its manifest describes: the header differs; delete"
            f" {path.parent} and {AGAIN}"
        )


def check_whole(path: Path, problems: list[str]) -> None:
    """Raise UserError with the problems of a folder of weights, if there are any."""
    if problems:
        shown = [
            *problems[:20],
            *([f"and {len(problems) - 20} more"] if len(problems) > 20 else []),
        ]
        raise UserError(
            "\n  ".join([f"{path} is damaged:", *shown])
            + f"\nMake it again: rm -r {shlex.quote(str(path))}, then this script without --verify"
        )
