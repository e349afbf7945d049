"""Shards a model's weights for tp ranks, in one pass over the source that can be resumed after any
interruption.

Unfinished files end in .partial, and journal.json records the number of tensors that are on disk.
The manifest is written last: a folder with a manifest is finished.
"""

import errno
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
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
    read_json,
    remove_leftovers,
    write_checked,
    write_json,
)
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.rankfiles import file_entries, file_names, is_finished
from ltx_neuron.weights.sharding import COL, HOST, local_shape
from ltx_neuron.weights.tensorfile import ALIGNMENT, DTYPE_NAMES, listed, missing_and_unexpected

JOURNAL, PARTIAL = "journal.json", ".partial"
_PIECE_BYTES = 8 * 2**20  # read from the source at once
# Pieces that are read and not yet written: enough to keep every file's thread busy, 0.1 GB.
_MAX_IN_FLIGHT = 12
# Written between two updates of the journal: the most that a killed run must write again.
_SYNC_BYTES = 2 * 2**30


class Layout(NamedTuple):
    """The layout of a tensor that rank files store rearranged.

    arrange  maps a rank's rows (rows, ...) of the source to the stored tensor
    split    the dimension of the stored tensor in which ranks differ
    """

    arrange: Callable[[Tensor], Tensor]
    split: int


@dataclass(frozen=True)
class ShardSpec:
    """The distribution of one tensor of a source over the files.

    shape   of the whole tensor in the source
    split   the dimension that is split over the ranks, None for a copy on each, or sharding.HOST
    stored  shape of one rank's part in its file
    copies  the number of neighbouring ranks that store the same part
    """

    name: str
    shape: tuple[int, ...]
    split: int | str | None
    stored: tuple[int, ...]
    layout: Layout | None
    copies: int = 1

    def bounds(self, tp: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Rows start..stop of each piece, in order. A piece never spans two ranks; with a layout it
        is a rank's whole part."""
        ranks = tp // self.copies if self.split == COL else 1
        rows = (self.shape[0] if self.shape else 1) // ranks
        step = rows if self.layout else max(1, _PIECE_BYTES // max(1, row_bytes))
        for first in range(0, rows * ranks, rows) if rows else ():
            for start in range(first, first + rows, step):
                yield start, min(start + step, first + rows)

    def parts(self, piece: Tensor, start: int, tp: int) -> Iterator[tuple[int, Tensor]]:
        """(file index, tensor to append) for each file of the piece that begins at row `start`. The
        host's file has index tp."""
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


def shard_specs(source: Source, tp: int, layouts: dict[str, Layout]) -> list[ShardSpec]:
    """The spec of every tensor of a source, in the files' order: by name, but tensors whose size is
    not a multiple of the alignment come last, so that all others are aligned when they are mapped.
    UserError for a tensor that cannot be split over tp ranks.
    """
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
    specs: list[ShardSpec], wanted: dict[str, tuple[int, ...]], host: dict[str, tuple[int, ...]]
) -> None:
    """Raise UserError, listing every difference, unless the specs give each rank the tensors and
    shapes of `wanted`, and the host those of `host`."""
    stored = {spec.name: spec.stored for spec in specs}
    expected = {name: tuple(shape) for name, shape in (wanted | host).items()}
    if problems := missing_and_unexpected(expected, stored):
        title = "the files do not have the weights of the model in their config (shapes of a rank):"
        raise UserError("\n  ".join([title, *listed(problems)]))


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
    already, or if another process finished it while this one waited for its lock.

    The source is read once, in pieces; a thread per file (at most `workers`) hashes and writes
    them. A file's digest is blake3. A source tensor's is xxh3, which detects accidental changes
    (not forgeries) in a quarter of the time.

    UserError if the disk lacks space, before the first write.
    """
    if is_finished(folder, identity):
        return False
    with exclusive(folder, "writing"):
        if is_finished(folder, identity):
            return False
        existed = folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            files = _set_files(folder, specs, tp, dtype)
            _write_set(source, folder, identity, files, specs, workers or tp)
        finally:
            if not existed and not any(folder.iterdir()):
                folder.rmdir()
    return True


def set_bytes(specs: list[ShardSpec], tp: int, dtype: torch.dtype) -> int:
    """Bytes of a set's files on disk."""
    return sum(file.size for file in _set_files(Path(), specs, tp, dtype))


def _write_set(
    source: Source,
    folder: Path,
    identity: dict,
    files: list["_File"],
    specs: list[ShardSpec],
    workers: int,
) -> None:
    """Write the files of a locked folder, continuing an interrupted run, and its manifest."""
    for name in (JOURNAL, MANIFEST):
        remove_leftovers(folder / name)
    existing = (path for file in files for path in (file.path, file.partial) if path.exists())
    written = sum(path.stat().st_size for path in existing)
    check_space(folder, sum(file.size for file in files) - written, "the weights need")
    (folder / MANIFEST).unlink(missing_ok=True)
    done = _resume(folder, identity, files)
    with ExitStack() as stack:
        for file in files:
            stack.callback(file.close)
        writer = _Writer(stack, folder, identity, files, done, workers)
        bar = stack.enter_context(_progress_bar(source, specs, len(done), folder.name))
        for spec in specs[len(done) :]:
            writer.write(spec.name, _pieces(source, spec, len(files) - 1, bar))
        digests = writer.finish()
        entries = {file.path.name: file.finish() for file in files}
    _sync_folder(folder)
    content = {"identity": identity, "files": entries, "source": source.provenance(digests)}
    write_checked(folder, content)
    (folder / JOURNAL).unlink()


def compare(source: Source, folder: Path, dtype: torch.dtype, specs: list[ShardSpec]) -> list[str]:
    """Shard the source again and compare the bytes with a finished folder's files. Returns one line
    per tensor and file that differ."""
    problems: dict[str, None] = {}
    files = _files(folder, [*file_entries(folder)], specs, dtype)
    with ExitStack() as stack:
        written = [stack.enter_context(open(file.path, "rb")) for file in files]
        for file, stored in zip(files, written, strict=True):
            if stored.read(len(file.header)) != file.header:
                problems[f"{file.path.name}: the header differs"] = None
        bar = stack.enter_context(_progress_bar(source, specs, 0, None))
        for spec in specs:
            for _, parts in _pieces(source, spec, len(files) - 1, bar):
                for index, part in parts:
                    wanted = _bytes(part.to(dtype))
                    if written[index].read(len(wanted)) != wanted:
                        name = files[index].path.name
                        problems[f"{name}: {spec.name} differs from the source"] = None
    return list(problems)


def _progress_bar(source: Source, specs: list[ShardSpec], done: int, name: str | None) -> tqdm:
    """Progress in bytes of the source. done: the number of specs that are written already."""
    sizes = [source.nbytes(spec.name) for spec in specs]
    return tqdm(total=sum(sizes), initial=sum(sizes[:done]), unit="B", unit_scale=True, desc=name)


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
    """The files of those names: the ranks' files, then the host's."""
    ranks = [*map(str, range(len(names) - 1)), HOST]
    return [
        _File(folder / name, rank, specs, dtype) for name, rank in zip(names, ranks, strict=True)
    ]


class _File:
    """A file of a weight set: its header and, while it is written, the digest of its content so
    far. Tensors are appended in order.

    This is the one exception to files.whole_file: a .partial file has a fixed name and outlives
    its run, because the next run continues it.

    rank  its number, or HOST
    """

    def __init__(self, path: Path, rank: str, specs: list[ShardSpec], dtype: torch.dtype):
        self.path, self.dtype = path, dtype
        self.partial = path.with_name(path.name + PARTIAL)
        self.error: OSError | None = None
        entries: dict[str, dict] = {"__metadata__": {"rank": rank}}
        # ends[n]: bytes of data, after the header, of the first n specs.
        self.ends = [0]
        for spec in specs:
            begin = end = self.ends[-1]
            if (spec.split == HOST) == (rank == HOST):
                end += prod(spec.stored) * dtype.itemsize
                entries[spec.name] = {
                    "dtype": DTYPE_NAMES[dtype],
                    "shape": list(spec.stored),
                    "data_offsets": [begin, end],
                }
            self.ends.append(end)
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + self.ends[-1]

    def open(self, tensors: int, digest: str | None) -> bool:
        """Open the file to append after its first `tensors` tensors; digest None starts a new file.
        Returns False unless the header and these tensors have that digest."""
        if self.path.exists() and not self.partial.exists():
            # The last run was stopped between renaming this file and writing the manifest.
            os.replace(self.path, self.partial)
        self.file = open(self.partial, "r+b" if self.partial.exists() else "w+b", buffering=0)
        self.file.truncate(len(self.header) + self.ends[tensors] if digest else 0)
        self.hasher = hashlib.file_digest(self.file, blake3)  # pyright: ignore[reportArgumentType]
        if digest and self.hasher.hexdigest() != digest:
            self.file.close()
            return False
        try:
            # Reserve the disk space; preallocation also halves the system time of writing.
            os.posix_fallocate(self.file.fileno(), 0, self.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # not supported here
                raise
        if not digest:
            self._write(self.header)
        return True

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
        try:
            while view and not self.error:
                view = view[self.file.write(view) :]
        except OSError as error:
            self.error = error
        if self.error:  # appending after a failed write would leave an undetected gap
            raise self.error

    def digest(self) -> str:
        """blake3 of the content so far. Raises the error of an earlier write."""
        if self.error:
            raise self.error
        return self.hasher.hexdigest()

    def close(self) -> None:
        self.file.close()

    def finish(self) -> dict:
        """Give the file its final name. Returns its entry in the manifest."""
        if (size := self.file.tell()) != self.size:
            raise RuntimeError(f"{self.path}: wrote {size} bytes, the header says {self.size}")
        os.replace(self.partial, self.path)
        return {
            "bytes": self.size,
            "blake3": self.digest(),
            "header_blake3": blake3(self.header).hexdigest(),
        }


class _Writer:
    """The writing threads: one per file (at most `workers`), one that hashes the source's tensors,
    and one that syncs the files and then writes the journal for a resumed run.

    done  digests of the source's tensors that are written already
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        identity: dict,
        files: list[_File],
        done: dict[str, str],
        workers: int,
    ):
        self.folder, self.identity, self.files, self.done = folder, identity, files, done
        # Each has one thread, which runs its tasks in order.
        *self._writers, self._hasher, self._saver = (
            stack.enter_context(ThreadPoolExecutor(1)) for _ in range(workers + 2)
        )
        self._digests: dict[str, Future] = {}
        self._in_flight: deque[list[Future]] = deque()
        self._unsaved = 0
        self._saving: Future | None = None

    def write(self, name: str, pieces: Iterator[tuple[Tensor, list[tuple[int, Tensor]]]]) -> None:
        """Hash a source tensor's pieces and append their parts to the files. Waits while too many
        pieces are in flight."""
        tensor_hash = xxh3_128()
        for piece, parts in pieces:
            tasks = [self._to_file(index, self.files[index].append, part) for index, part in parts]
            tasks.append(self._hasher.submit(tensor_hash.update, _bytes(piece)))
            self._in_flight.append(tasks)
            self._unsaved += piece.nbytes
            self._wait(_MAX_IN_FLIGHT)
        self._digests[name] = self._hasher.submit(tensor_hash.hexdigest)
        if self._unsaved >= _SYNC_BYTES:
            self._save()

    def finish(self) -> dict[str, str]:
        """Wait until all data is on disk. Returns the digests of the source's tensors."""
        self._wait(0)
        return self._save().result()

    def _to_file(self, index: int, task: Callable, *arguments) -> Future:
        return self._writers[index % len(self._writers)].submit(task, *arguments)

    def _wait(self, most: int) -> None:
        """Wait until at most `most` pieces are in flight."""
        while len(self._in_flight) > most:
            for task in self._in_flight.popleft():
                task.result()

    def _save(self) -> Future:
        """Schedule a write of the journal, after all earlier data is on disk."""
        if self._saving:
            self._saving.result()
        digests = [self._to_file(index, file.digest) for index, file in enumerate(self.files)]
        self._saving = self._saver.submit(self._write_journal, dict(self._digests), digests)
        self._unsaved = 0
        return self._saving

    def _write_journal(self, tensors: dict[str, Future], files: list[Future]) -> dict[str, str]:
        done = self.done | {name: digest.result() for name, digest in tensors.items()}
        digests = [digest.result() for digest in files]
        for file in self.files:
            os.fsync(file.file.fileno())
        journal = {"identity": self.identity, "tensors_xxh3_128": done, "files": digests}
        write_json(self.folder / JOURNAL, journal)
        return done


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _resume(folder: Path, identity: dict, files: list[_File]) -> dict[str, str]:
    """Open the files after the last tensor in the journal of an interrupted run of this identity,
    else at their beginning. Returns the digests of the source's tensors that are written."""
    try:
        journal = read_json(folder / JOURNAL)
        tensors, digests = journal["tensors_xxh3_128"], journal["files"]
        total = len(files[0].ends) - 1
        if (
            journal["identity"] == identity
            and len(digests) == len(files)
            and len(tensors) <= total
            and all(map(_File.open, files, [len(tensors)] * len(files), digests))
        ):
            print(f"continuing an interrupted run: {len(tensors)} of {total} tensors were done")
            return tensors
    except (UserError, KeyError, TypeError):
        pass  # no readable journal
    (folder / JOURNAL).unlink(missing_ok=True)
    for file in files:
        file.open(0, None)
    return {}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
