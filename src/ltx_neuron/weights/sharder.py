"""Shards a model's weights for tp ranks, in one pass over the source.

All files of a set get their names when all are whole. The manifest is written last: a folder with a
manifest is finished. An interrupted run loses the set that it was writing; the next run writes this
set from the beginning.
"""

import errno
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor
from tqdm import tqdm
from xxhash import xxh3_128

from ltx_neuron.errors import UserError
from ltx_neuron.files import (
    MANIFEST,
    check_space,
    exclusive,
    remove_leftovers,
    whole_file,
    write_checked,
)
from ltx_neuron.format import few
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.rankfiles import file_entries, file_names, is_finished
from ltx_neuron.weights.sharding import COL, HOST, local_shape
from ltx_neuron.weights.tensorfile import ALIGNMENT, DTYPE_NAMES, missing_and_unexpected

_PIECE_BYTES = 8 * 2**20  # read from the source at once
# Pieces that are read and not yet written: enough to keep every file's thread busy, 0.1 GB.
_MAX_IN_FLIGHT = 12


class TensorLayout(NamedTuple):
    """The layout of a tensor that rank files store rearranged."""

    # Maps a rank's rows (rows, ...) of the source to the stored tensor
    arrange: Callable[[Tensor], Tensor]
    split: int  # the dimension of the stored tensor in which ranks differ


@dataclass(frozen=True)
class ShardSpec:
    """The distribution of one tensor of a source over the files."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor in the source
    # The dimension that is split over the ranks, None for a copy on each, or sharding.HOST
    split: int | str | None
    stored: tuple[int, ...]  # shape of one rank's part in its file
    layout: TensorLayout | None
    copies: int = 1  # the number of neighbouring ranks that store the same part

    def bounds(self, tp: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Rows start..stop of each piece: of one rank; with a layout, its whole part."""
        ranks = tp // self.copies if self.split == COL else 1
        rows = (self.shape[0] if self.shape else 1) // ranks
        step = rows if self.layout else max(1, _PIECE_BYTES // max(1, row_bytes))
        for first in range(0, rows * ranks, rows) if rows else ():
            for start in range(first, first + rows, step):
                yield start, min(start + step, first + rows)

    def parts(self, piece: Tensor, start: int, tp: int) -> Iterator[tuple[int, Tensor]]:
        """(file index, tensor to append) of the piece that begins at row `start`. tp: the
        host's."""
        if self.layout:
            piece = self.layout.arrange(piece)
        if self.split == HOST:
            yield tp, piece
        elif self.split == COL:
            part = start * tp // self.copies // self.shape[0]
            yield from ((part * self.copies + i, piece) for i in range(self.copies))
        elif self.split is None:
            yield from ((rank, piece) for rank in range(tp))
        else:
            assert isinstance(self.split, int)
            size = self.shape[self.split] // tp
            yield from ((rank, piece.narrow(self.split, size * rank, size)) for rank in range(tp))


def shard_specs(source: Source, tp: int, layouts: dict[str, TensorLayout]) -> list[ShardSpec]:
    """The spec of every tensor of a source, in the files' order: by name, but tensors whose size is
    not a multiple of the alignment come last, so that all others are aligned when they are mapped.
    UserError for a tensor that cannot be split over tp ranks."""
    specs = []
    for name in sorted(source.names):
        shape, split, layout = source.shape(name), source.split(name), layouts.get(name)
        copies = source.copies(name, tp)
        stored = local_shape(shape, split, tp // copies, name)
        if layout:
            stored = tuple(layout.arrange(torch.empty(stored, device="meta")).shape)
        specs.append(ShardSpec(name, shape, split, stored, layout, copies))
    return sorted(specs, key=lambda spec: prod(spec.stored) % ALIGNMENT != 0)


def check_specs(
    specs: list[ShardSpec], graphs: dict[str, tuple[int, ...]], host: dict[str, tuple[int, ...]]
) -> None:
    """Raise UserError, listing every difference, unless the specs give each rank the tensors and
    shapes of `graphs`, and the host those of `host`."""
    stored = {spec.name: spec.stored for spec in specs}
    expected = {name: tuple(shape) for name, shape in (graphs | host).items()}
    if problems := missing_and_unexpected(expected, stored):
        title = "the files do not have the weights of the model in their config (shapes of a rank):"
        raise UserError("\n  ".join([title, *few(problems, 20)]))


def shard_weights(
    source: Source,
    folder: Path,
    identity: dict,
    tp: int,
    dtype: torch.dtype,
    specs: list[ShardSpec],
    workers: int | None = None,
) -> bool:
    """Write a folder of rank files and, last, its manifest. Returns False if the folder is finished
    already, or if another process finished it while this one waited for its lock. The source is
    read once, in pieces; a thread per file (at most `workers`) hashes and writes them. A file's
    digest is blake3. A source tensor's is xxh3, which detects accidental changes (not forgeries) in
    a quarter of the time. UserError if the disk lacks space, before the first write."""
    if is_finished(folder, identity):
        return False
    with exclusive(folder, "writing"):
        if is_finished(folder, identity):
            return False
        existed, files = folder.is_dir(), _set_files(folder, specs, tp, dtype)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for path in (folder / MANIFEST, *(file.path for file in files)):
                remove_leftovers(path)
            replaced = sum(file.path.stat().st_size for file in files if file.path.is_file())
            check_space(folder, sum(file.size for file in files) - replaced, "the weights need")
            (folder / MANIFEST).unlink(missing_ok=True)
            with ExitStack() as stack:
                for file in files:
                    file.path.unlink(missing_ok=True)  # damaged, or of another identity
                    stack.enter_context(file.opened())
                digests = _write_tensors(source, files, specs, workers or tp)
            _sync_folder(folder)
            entries = {file.path.name: file.entry for file in files}
            provenance = source.provenance(digests)
            content = {"identity": identity, "files": entries, "source": provenance}
            write_checked(folder, content)
        finally:
            if not existed and not any(folder.iterdir()):
                folder.rmdir()
    return True


def set_bytes(specs: list[ShardSpec], tp: int, dtype: torch.dtype) -> int:
    return sum(file.size for file in _set_files(Path(), specs, tp, dtype))


def _write_tensors(
    source: Source, files: list["_File"], specs: list[ShardSpec], workers: int
) -> dict[str, str]:
    """Append the tensors to the files in a thread per file (at most `workers`), and hash those of
    the source in another thread. Returns their digests."""
    hashes, in_flight = {spec.name: xxh3_128() for spec in specs}, deque[list[Future]]()
    with ExitStack() as stack:
        bar = stack.enter_context(_progress_bar(source, specs, files[0].path.parent.name))
        # Each has one thread, which runs its tasks in order.
        *writers, hasher = (stack.enter_context(ThreadPoolExecutor(1)) for _ in range(workers + 1))
        for spec in specs:
            for piece, parts in _pieces(source, spec, len(files) - 1, bar):
                tasks = [
                    writers[index % workers].submit(files[index].append, part)
                    for index, part in parts
                ]
                tasks.append(hasher.submit(hashes[spec.name].update, _bytes(piece)))
                in_flight.append(tasks)
                for task in in_flight.popleft() if len(in_flight) > _MAX_IN_FLIGHT else ():
                    task.result()
        for task in chain.from_iterable(in_flight):
            task.result()
    return {name: tensor_hash.hexdigest() for name, tensor_hash in hashes.items()}


def compare(source: Source, folder: Path, dtype: torch.dtype, specs: list[ShardSpec]) -> list[str]:
    """Shard the source again and compare: one line per tensor and file that differ."""
    problems: dict[str, None] = {}
    files = _files(folder, [*file_entries(folder)], specs, dtype)
    with ExitStack() as stack:
        written = [stack.enter_context(open(file.path, "rb")) for file in files]
        for file, stored in zip(files, written, strict=True):
            if stored.read(len(file.header)) != file.header:
                problems[f"{file.path.name}: the header differs"] = None
        bar = stack.enter_context(_progress_bar(source, specs, None))
        for spec in specs:
            for _, parts in _pieces(source, spec, len(files) - 1, bar):
                for index, part in parts:
                    expected = _bytes(part.to(dtype))
                    if written[index].read(len(expected)) != expected:
                        name = files[index].path.name
                        problems[f"{name}: {spec.name} differs from the source"] = None
    return list(problems)


def _progress_bar(source: Source, specs: list[ShardSpec], name: str | None) -> tqdm:
    total = sum(source.nbytes(spec.name) for spec in specs)
    return tqdm(total=total, unit="B", unit_scale=True, desc=name, disable=None)


def _pieces(
    source: Source, spec: ShardSpec, ranks: int, bar: tqdm
) -> Iterator[tuple[Tensor, list[tuple[int, Tensor]]]]:
    """The pieces of a tensor in order, each with its parts: (file index, tensor)."""
    row_bytes = source.nbytes(spec.name) // max(1, spec.shape[0]) if spec.shape else 0
    bounds = list(spec.bounds(ranks, row_bytes))
    for (start, _), piece in zip(bounds, source.pieces(spec.name, bounds), strict=True):
        yield piece, list(spec.parts(piece, start, ranks))
        bar.update(piece.nbytes)


def _set_files(folder: Path, specs: list[ShardSpec], tp: int, dtype: torch.dtype) -> list["_File"]:
    # Weights that are equal on all ranks are stored once.
    names = file_names(tp, shared=all(spec.split in (None, HOST) for spec in specs))
    return _files(folder, names, specs, dtype)


def _files(
    folder: Path, names: list[str], specs: list[ShardSpec], dtype: torch.dtype
) -> list["_File"]:
    ranks = [*map(str, range(len(names) - 1)), HOST]
    return [
        _File(folder / name, rank, specs, dtype) for name, rank in zip(names, ranks, strict=True)
    ]


class _File:
    """A file of a weight set: its header and, while it is written, its content's digest. rank: its
    number, or HOST."""

    def __init__(self, path: Path, rank: str, specs: list[ShardSpec], dtype: torch.dtype):
        self.path, self.dtype, end = path, dtype, 0
        entries: dict[str, dict] = {"__metadata__": {"rank": rank}}
        for spec in specs:
            if (spec.split == HOST) == (rank == HOST):
                begin, end = end, end + prod(spec.stored) * dtype.itemsize
                entries[spec.name] = {
                    "dtype": DTYPE_NAMES[dtype],
                    "shape": list(spec.stored),
                    "data_offsets": [begin, end],
                }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + end

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Reserve the disk space and write the header. On leaving, the file gets its name."""
        self.hasher = blake3()
        with whole_file(self.path) as partial, open(partial, "r+b", buffering=0) as self.file:
            try:
                # Preallocation also halves the system time of writing.
                os.posix_fallocate(self.file.fileno(), 0, self.size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # not supported here
                    raise
            self._write(self.header)
            yield
            if (size := self.file.tell()) != self.size:
                raise RuntimeError(f"{self.path}: wrote {size} bytes, the header says {self.size}")

    def append(self, tensor: Tensor) -> None:
        """Write a tensor's data, cast to the file's dtype."""
        if tensor.dtype == self.dtype and tensor.is_contiguous():
            self._write(_bytes(tensor))
            return
        row_bytes = tensor[0].numel() * self.dtype.itemsize
        for rows in tensor.split(max(1, _PIECE_BYTES // max(1, row_bytes))):
            self._write(_bytes(rows.to(self.dtype)))

    def _write(self, content) -> None:
        self.hasher.update(content)
        view = memoryview(content)
        while view:
            view = view[self.file.write(view) :]

    @property
    def entry(self) -> dict:
        return {
            "bytes": self.size,
            "blake3": self.hasher.hexdigest(),
            "header_blake3": blake3(self.header).hexdigest(),
        }


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
