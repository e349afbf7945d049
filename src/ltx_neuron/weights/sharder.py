"""Sharding a model's weights for tp ranks: which rows go to which file, and files written in one
pass over the source that can be resumed after any interruption.

While a folder is written its files end in .partial, and journal.json says how many tensors are
safely in them. The manifest is written last: a folder that has one is finished.
"""

import errno
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from mmap import mmap
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
    write_json,
)
from ltx_neuron.weights import pagecache
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.rankfiles import RankSource, file_entries, file_names, is_finished
from ltx_neuron.weights.sharding import COL, HOST, local_shape
from ltx_neuron.weights.tensorfile import ALIGNMENT, DTYPE_NAMES

JOURNAL, PARTIAL = "journal.json", ".partial"
_PIECE_BYTES = 8 * 2**20  # read from the source at once
# Pieces that are read and not yet written: as many as keep every file's thread busy, 0.1 GB.
_MAX_IN_FLIGHT = 12
# Written between two entries of the journal: what a killed run may have to do again.
_SYNC_BYTES = 2 * 2**30


class Layout(NamedTuple):
    """A tensor that rank files store otherwise than the source does.

    arrange  maps a rank's rows (rows, ...) of the source to the tensor that is stored
    split    the dimension of the stored tensor in which ranks differ
    """

    arrange: Callable[[Tensor], Tensor]
    split: int


@dataclass(frozen=True)
class ShardSpec:
    """How one tensor of a source is distributed over the files.

    shape   of the whole tensor in the source
    split   the dimension that is split over the ranks, None for a copy on each, or sharding.HOST
    stored  shape of one rank's part in its file
    copies  how many neighbouring ranks store the same part
    """

    name: str
    shape: tuple[int, ...]
    split: int | str | None
    stored: tuple[int, ...]
    layout: Layout | None
    copies: int = 1

    def bounds(self, tp: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Rows start..stop of each piece, in order. No piece belongs to two ranks; with a layout a
        piece is a rank's whole part."""
        ranks = tp // self.copies if self.split == COL else 1
        rows = (self.shape[0] if self.shape else 1) // ranks
        step = rows if self.layout else max(1, _PIECE_BYTES // max(1, row_bytes))
        for first in range(0, rows * ranks, rows) if rows else ():
            for start in range(first, first + rows, step):
                yield start, min(start + step, first + rows)

    def parts(self, piece: Tensor, start: int, tp: int) -> Iterator[tuple[int, Tensor]]:
        """(index of a file, the tensor to append to it) for the piece that begins at row `start`.
        The host's file has index tp."""
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
            size = self.shape[self.split] // tp
            yield from ((rank, piece.narrow(self.split, size * rank, size)) for rank in range(tp))


def shard_specs(
    source: Source | RankSource, tp: int, layouts: dict[str, Layout]
) -> list[ShardSpec]:
    """The spec of every tensor of a source, in the order of the files: by name, but tensors whose
    size is no multiple of the alignment come last, so that all before them can be used where a
    file's pages lie. UserError for a tensor that cannot be split over tp ranks.
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
    """Raise UserError, listing every difference, unless the specs give each rank the `wanted`
    tensors of the model in their shapes, and the host those of `host`."""
    stored = {spec.name: spec.stored for spec in specs}
    problems = [f"missing: {name}" for name in (wanted | host).keys() - stored.keys()]
    problems += [f"of no use: {name}" for name in stored.keys() - (wanted | host).keys()]
    for name, shape in (wanted | host).items():
        if stored.get(name, shape) != tuple(shape):
            problems.append(f"{name}: {list(stored[name])} a rank, wanted {list(shape)}")
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        listed = "\n  ".join([*sorted(problems)[:20], *more])
        raise UserError(
            "the files do not hold the weights of the model that their config describes:\n "
            f" {listed}"
        )


def shard_weights(
    source: Source | RankSource,
    folder: Path,
    identity: dict,
    tp: int,
    dtype: torch.dtype,
    specs: list[ShardSpec],
    workers: int | None = None,
) -> bool:
    """Write a folder of rank files and, last, its manifest. Returns False if it is finished
    already, also where another process wrote it while this one waited for it.

    The source is read once, in pieces, while a thread per file (at most `workers`) takes digests
    and writes. A file's digest is blake3; a source tensor's is xxh3, which detects accidents (not
    forgeries) in a quarter of the time.

    UserError where the disk has too little room, before the first byte is written.
    """
    if is_finished(folder, identity):
        return False
    with exclusive(folder, "writing"):
        if is_finished(folder, identity):
            return False
        existed = folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # Where all ranks have the same weights, these are stored once.
            names = file_names(tp, shared=all(spec.split in (None, HOST) for spec in specs))
            layouts = _file_layouts(specs, names, dtype)
            files = [_File(folder / name, layout, dtype) for name, layout in layouts.items()]
            _write_set(source, folder, identity, files, specs, workers or tp)
        finally:
            if not existed and not any(folder.iterdir()):
                folder.rmdir()
    return True


def _write_set(
    source: Source | RankSource,
    folder: Path,
    identity: dict,
    files: list["_File"],
    specs: list[ShardSpec],
    workers: int,
) -> None:
    """Write the files of a locked folder, from where an earlier run got to, and its manifest."""
    count = len(files) - 1  # of the ranks
    for name in (JOURNAL, MANIFEST):
        remove_leftovers(folder / name)
    existing = (path for file in files for path in (file.path, file.partial) if path.exists())
    written = sum(path.stat().st_size for path in existing)
    check_space(folder, sum(file.size for file in files) - written, "the weights need")
    (folder / MANIFEST).unlink(missing_ok=True)
    done = _resume(folder, identity, files)
    total, before = (
        sum(source.nbytes(s.name) for s in part) for part in (specs, specs[: len(done)])
    )
    # One more than are in flight: the next piece is read meanwhile.
    scratch_buffers = itertools.cycle(
        [pagecache.scratch(_PIECE_BYTES) for _ in range(_MAX_IN_FLIGHT + 1)]
    )
    with ExitStack() as stack:
        for file in files:
            stack.callback(file.close)
        writer = _Writer(stack, folder, identity, files, done, workers)
        bar = stack.enter_context(
            tqdm(total=total, initial=before, unit="B", unit_scale=True, desc=folder.name)
        )
        for spec in specs[len(done) :]:
            writer.begin_tensor()
            for start, piece in _pieces(source, spec, count, scratch_buffers):
                writer.submit(piece, spec.parts(piece, start, count))
                bar.update(piece.nbytes)
            writer.end_tensor(spec.name)
        digests = writer.finish()
        entries = {file.path.name: file.finish() for file in files}
    _sync_folder(folder)
    content = {
        "identity": identity,
        "heads": source.heads,
        "files": entries,
        "source": source.provenance(digests),
    }
    write_json(folder / MANIFEST, content)
    (folder / JOURNAL).unlink()


def compare(source: Source, folder: Path, dtype: torch.dtype, specs: list[ShardSpec]) -> list[str]:
    """Shard the source once more and compare the bytes with a finished folder's files. Returns one
    line for each tensor of a file that differs; empty if none does."""
    problems: dict[str, None] = {}
    layouts = _file_layouts(specs, [*file_entries(folder)], dtype)
    count = len(layouts) - 1  # of the ranks
    scratch_buffers = itertools.cycle([pagecache.scratch(_PIECE_BYTES)])
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / name, "rb")) for name in layouts]
        for file, (header, _) in zip(files, layouts.values(), strict=True):
            if file.read(len(header)) != header:
                problems[f"{Path(file.name).name}: the header differs"] = None
        total = sum(source.nbytes(spec.name) for spec in specs)
        bar = stack.enter_context(tqdm(total=total, unit="B", unit_scale=True))
        for spec in specs:
            for start, piece in _pieces(source, spec, count, scratch_buffers):
                for index, part in spec.parts(piece, start, count):
                    wanted = _bytes(part.to(dtype))
                    if files[index].read(len(wanted)) != wanted:
                        name = Path(files[index].name).name
                        problems[f"{name}: {spec.name} differs from the source"] = None
                bar.update(piece.nbytes)
    return list(problems)


class _FileLayout(NamedTuple):
    """The header of a file, and where the data of the first n = 0, 1, ... tensors of all specs
    ends: bytes after the header."""

    header: bytes
    ends: list[int]


def _file_layouts(
    specs: list[ShardSpec], names: list[str], dtype: torch.dtype
) -> dict[str, _FileLayout]:
    """The layout of each file, by its name: those of the ranks, then the host's."""
    layouts, count = {}, len(names) - 1
    for index, name in enumerate(names):
        entries, ends = {"__metadata__": {"rank": HOST if index == count else str(index)}}, [0]
        for spec in specs:
            belongs_here = (spec.split == HOST) == (index == count)
            end = ends[-1] + (prod(spec.stored) * dtype.itemsize if belongs_here else 0)
            if belongs_here:
                entries[spec.name] = {
                    "dtype": DTYPE_NAMES[dtype],
                    "shape": list(spec.stored),
                    "data_offsets": [ends[-1], end],
                }
            ends.append(end)
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        layouts[name] = _FileLayout(len(text).to_bytes(8, "little") + text, ends)
    return layouts


class _File:
    """A file that is being written in order, with the digest of its content so far.

    This is the one exception to files.whole_file: a .partial file has a fixed name and outlives
    its run, because the next run goes on with it.
    """

    def __init__(self, path: Path, layout: _FileLayout, dtype: torch.dtype):
        self.path, self.dtype = path, dtype
        self.header, self.ends = layout
        self.partial = path.with_name(path.name + PARTIAL)
        self.size = len(self.header) + self.ends[-1]
        self.error: OSError | None = None
        # Kept between tensors: new memory costs the system more than the copy into it.
        self._cast_buffer = torch.empty(0, dtype=torch.uint8)

    def open(self, tensors: int, digest: str | None) -> bool:
        """Open the file to append after its first `tensors` tensors, which must have that digest
        together with the header; digest None begins the file. Returns False if they do not."""
        if self.path.exists() and not self.partial.exists():
            # The last run was stopped between renaming this file and writing the manifest.
            os.replace(self.path, self.partial)
        keep = len(self.header) + self.ends[tensors] if digest else 0
        self.file = open(self.partial, "r+b" if self.partial.exists() else "w+b", buffering=0)
        self.hasher = blake3()
        left = keep
        while left and (block := self.file.read(min(left, _PIECE_BYTES))):
            self.hasher.update(block)
            left -= len(block)
        if digest and (left or self.hasher.hexdigest() != digest):
            self.file.close()
            return False
        self.file.truncate(keep)
        self._reserve()
        if not keep:
            self._write(self.header)
        return True

    def _reserve(self) -> None:
        """Take the room of the whole file on the disk, which nobody else can take meanwhile; also,
        a file of known length is written with half the system's work."""
        try:
            os.posix_fallocate(self.file.fileno(), 0, self.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
                raise

    def append(self, tensor: Tensor) -> None:
        """Write a tensor's data, cast to the file's dtype."""
        if tensor.dtype == self.dtype and tensor.is_contiguous():
            self._write(_bytes(tensor))
            return
        row_bytes = tensor[0].numel() * self.dtype.itemsize
        for rows in tensor.split(max(1, _PIECE_BYTES // max(1, row_bytes))):
            size = rows.numel() * self.dtype.itemsize
            if size > len(self._cast_buffer):
                self._cast_buffer = torch.empty(size, dtype=torch.uint8)
            cast = self._cast_buffer[:size].view(self.dtype).view(rows.shape).copy_(rows)
            self._write(_bytes(cast))

    def _write(self, content) -> None:
        self.hasher.update(content)
        view = memoryview(content)
        try:
            while view and not self.error:
                view = view[self.file.write(view) :]
        except OSError as error:
            self.error = error
        if self.error:  # after a failed write nothing may be appended: a gap would go unnoticed
            raise self.error

    def digest(self) -> str:
        """blake3 of all that was written so far. Raises the error of an earlier write."""
        if self.error:
            raise self.error
        return self.hasher.hexdigest()

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()

    def finish(self) -> dict:
        """Give the file its final name. Returns its entry in the manifest."""
        digest, size = self.digest(), self.file.tell()
        if size != self.size:
            raise RuntimeError(f"{self.path}: wrote {size} bytes, the header says {self.size}")
        os.replace(self.partial, self.path)
        return {"bytes": size, "blake3": digest, "header_blake3": blake3(self.header).hexdigest()}


class _Writer:
    """The threads between reading and the disk: one a file (at most `workers`), one that hashes the
    source's tensors, and one that waits for the disk and then writes the journal, from which the
    next run goes on.

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
        # Of one thread each: what is submitted to one is done in that order.
        *self._writers, self._hasher, self._saver = (
            stack.enter_context(ThreadPoolExecutor(1)) for _ in range(workers + 2)
        )
        self._digests: dict[str, Future] = {}
        self._in_flight: deque[list[Future]] = deque()
        self._unsaved, self._saving = 0, None

    def begin_tensor(self) -> None:
        """Begin the digest of the next tensor of the source."""
        self._tensor_hash = xxh3_128()

    def submit(self, piece: Tensor, parts: Iterator[tuple[int, Tensor]]) -> None:
        """Hash a piece of the current tensor and append its parts to their files. Waits while too
        many pieces are in flight; `piece` must stay unchanged until _MAX_IN_FLIGHT more came."""
        tasks = [self._to_file(index, self.files[index].append, part) for index, part in parts]
        tasks.append(self._hasher.submit(self._tensor_hash.update, _bytes(piece)))
        self._in_flight.append(tasks)
        self._unsaved += piece.nbytes
        while len(self._in_flight) > _MAX_IN_FLIGHT:
            self._wait_for_oldest()

    def end_tensor(self, name: str) -> None:
        """Note the digest of the current tensor; write the journal where much was written and the
        last time is over."""
        self._digests[name] = self._hasher.submit(self._tensor_hash.hexdigest)
        if self._unsaved >= _SYNC_BYTES and (not self._saving or self._saving.done()):
            if self._saving:
                self._saving.result()
            self._unsaved, self._saving = 0, self._save()

    def finish(self) -> dict[str, str]:
        """Wait until all is written and on the disk. Returns the digests of the source's
        tensors."""
        while self._in_flight:
            self._wait_for_oldest()
        return self._save().result()

    def _to_file(self, index: int, task: Callable, *arguments) -> Future:
        return self._writers[index % len(self._writers)].submit(task, *arguments)

    def _wait_for_oldest(self) -> None:
        for task in self._in_flight.popleft():
            task.result()

    def _save(self) -> Future:
        """Write the journal once all that was submitted before is on the disk."""
        digests = [self._to_file(index, file.digest) for index, file in enumerate(self.files)]
        return self._saver.submit(self._write_journal, dict(self._digests), digests)

    def _write_journal(self, tensors: dict[str, Future], files: list[Future]) -> dict[str, str]:
        done = self.done | {name: digest.result() for name, digest in tensors.items()}
        digests = [digest.result() for digest in files]
        for file in self.files:
            file.sync()
        journal = {"identity": self.identity, "tensors_xxh3_128": done, "files": digests}
        write_json(self.folder / JOURNAL, journal)
        return done


def _pieces(
    source: Source | RankSource, spec: ShardSpec, count: int, scratch_buffers: Iterator[mmap]
) -> Iterator[tuple[int, Tensor]]:
    """(first row, piece) of a tensor, in order; each piece may lie in the next scratch buffer."""
    row_bytes = source.nbytes(spec.name) // max(1, spec.shape[0]) if spec.shape else 0
    bounds = list(spec.bounds(count, row_bytes))
    starts = (start for start, _ in bounds)
    return zip(starts, source.pieces(spec.name, bounds, scratch_buffers), strict=True)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _resume(folder: Path, identity: dict, files: list[_File]) -> dict[str, str]:
    """Open the files where the journal says that an earlier run of this identity got to, else at
    their beginning. Returns the digests of the source's tensors that are written already."""
    try:
        journal = read_json(folder / JOURNAL)
        tensors, digests = journal["tensors_xxh3_128"], journal["files"]
        fits = (
            journal["identity"] == identity
            and len(digests) == len(files)
            and len(tensors) < len(files[0].ends)
        )
    except (UserError, KeyError, TypeError):
        fits = False
    if fits and all(
        file.open(len(tensors), digest) for file, digest in zip(files, digests, strict=True)
    ):
        print(
            f"continuing an interrupted run: {len(tensors)} of {len(files[0].ends) - 1} tensors"
            " were done"
        )
        return tensors
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
