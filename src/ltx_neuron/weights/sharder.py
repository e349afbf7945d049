"""Cutting a model's weights for tp ranks: what goes where, and files written in one pass and
resumed where a run stopped.

While a folder is being written its files are named .partial, and journal.json says how many tensors
are safely in them; the manifest comes last of all.
"""

import errno
import fcntl
import itertools
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
from ltx_neuron.files import MANIFEST, read_json, write_json
from ltx_neuron.weights import pagecache
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.rankfiles import RankSource, file_names, finished
from ltx_neuron.weights.sharding import COL, HOST, local_shape
from ltx_neuron.weights.tensorfile import ALIGNMENT, DTYPE_NAMES

JOURNAL, PARTIAL = "journal.json", ".partial"
_PIECE_BYTES = 8 * 2**20  # read from the source at once
# pieces that are read and not yet written: as many as keep every file's thread busy, 0.1 GB
_AHEAD = 12
_SYNC_BYTES = (
    2 * 2**30
)  # written between two entries of the journal: what a killed run may have to do again


class Layout(NamedTuple):
    """A tensor stored otherwise than the source has it: a rank's whole part is arranged, and ranks
    differ in dim `split`."""

    arrange: Callable[[Tensor], Tensor]
    split: int


@dataclass(frozen=True)
class Cut:
    """How one tensor of a source goes to the files: `stored` is the shape of a rank's part of it,
    and so many neighbouring ranks keep the same one."""

    name: str
    shape: tuple[int, ...]
    split: int | str | None
    stored: tuple[int, ...]
    layout: Layout | None
    copies: int = 1

    def bounds(self, tp: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Rows start..stop of each piece: none goes to two ranks, and one that is arranged is a
        rank's whole part."""
        ranks = tp // self.copies if self.split == COL else 1
        rows = (self.shape[0] if self.shape else 1) // ranks
        step = rows if self.layout else max(1, _PIECE_BYTES // max(1, row_bytes))
        for first in range(0, rows * ranks, rows) if rows else ():
            for start in range(first, first + rows, step):
                yield start, min(start + step, first + rows)

    def parts(self, piece: Tensor, start: int, tp: int) -> Iterator[tuple[int, Tensor]]:
        """(number of the file, what it gets) for a piece that begins at row `start`; the host's
        file is number tp."""
        if self.split == HOST:
            yield tp, piece
        elif self.split == COL:
            part, stored = (
                start * tp // self.copies // self.shape[0],
                (self.layout.arrange(piece) if self.layout else piece),
            )
            yield from ((part * self.copies + i, stored) for i in range(self.copies))
        elif self.split is None:
            yield from ((rank, piece) for rank in range(tp))
        else:
            size = self.shape[self.split] // tp
            yield from ((rank, piece.narrow(self.split, size * rank, size)) for rank in range(tp))


def cuts_of(source: Source | RankSource, tp: int, layouts: dict[str, Layout]) -> list[Cut]:
    """How every tensor of a source is cut, in the order of the files: by name, but what is no
    multiple of the alignment comes last, so that all before it may be used where a file's pages
    lie. UserError for one that cannot be cut.
    """
    cuts = []
    for name in sorted(source.names):
        shape, split, layout = source.shape(name), source.split(name), layouts.get(name)
        copies = source.copies(name, tp)
        stored = local_shape(shape, split, tp // copies, name)
        if layout:
            stored = tuple(layout.arrange(torch.empty(stored, device="meta")).shape)
        cuts.append(Cut(name, shape, split, stored, layout, copies))
    return sorted(cuts, key=lambda cut: prod(cut.stored) % ALIGNMENT != 0)


def check_filled(
    cuts: list[Cut], wanted: dict[str, tuple[int, ...]], host: dict[str, tuple[int, ...]]
) -> None:
    """Raise UserError, listing all, unless the cuts give every rank and the host just the tensors
    the model takes."""
    got = {cut.name: cut.stored for cut in cuts}
    problems = [f"missing: {name}" for name in (wanted | host).keys() - got.keys()]
    problems += [f"of no use: {name}" for name in got.keys() - (wanted | host).keys()]
    for name, shape in (wanted | host).items():
        if got.get(name, shape) != tuple(shape):
            problems.append(f"{name}: {list(got[name])} a rank, wanted {list(shape)}")
    if problems:
        listed = "\n  ".join(
            [
                *sorted(problems)[:20],
                *([f"and {len(problems) - 20} more"] if len(problems) > 20 else []),
            ]
        )
        raise UserError(
            "the files do not hold the weights of the model that their config describes:\n "
            f" {listed}"
        )


def shard(
    source: Source | RankSource,
    folder: Path,
    identity: dict,
    tp: int,
    dtype: torch.dtype,
    cuts: list[Cut],
    workers: int | None = None,
) -> bool:
    """Write the files of `cuts` and, last, the manifest; False if the folder is finished already.

    The source is read once, by pieces, while a thread per file (at most `workers`) takes digests
    and writes. A file's digest is blake3, a source tensor's xxh3, which tells accidents apart in a
    quarter of the time, though not forgeries.
    """
    if finished(folder, identity):
        return False
    made = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _alone(folder):
            files = [
                _File(folder / name, *described)
                for name, described in _described(cuts, tp, dtype).items()
            ]
            _check_space(folder, files)
            (folder / MANIFEST).unlink(missing_ok=True)
            _write(source, folder, identity, tp, cuts, files, workers or tp)
    finally:
        if not made and not any(folder.iterdir()):
            folder.rmdir()
    return True


def compare(
    source: Source, folder: Path, tp: int, dtype: torch.dtype, cuts: list[Cut]
) -> list[str]:
    """Cut the source once more and compare bit for bit with a finished folder; the differing
    tensors of every file."""
    problems: dict[str, None] = {}
    described = _described(cuts, tp, dtype)
    scratches = itertools.cycle([pagecache.scratch(_PIECE_BYTES)])
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / name, "rb")) for name in described]
        for file, (header, _, _) in zip(files, described.values(), strict=True):
            if file.read(len(header)) != header:
                problems[f"{Path(file.name).name}: the header differs"] = None
        bar = stack.enter_context(
            tqdm(total=sum(source.nbytes(cut.name) for cut in cuts), unit="B", unit_scale=True)
        )
        for cut in cuts:
            for start, piece in _pieces(source, cut, tp, scratches):
                for number, part in cut.parts(piece, start, tp):
                    wanted = _bytes(part.to(dtype))
                    if files[number].read(len(wanted)) != wanted:
                        problems[
                            f"{Path(files[number].name).name}: {cut.name} differs from the source"
                        ] = None
                bar.update(piece.nbytes)
    return list(problems)


def _described(cuts: list[Cut], tp: int, dtype: torch.dtype) -> dict[str, tuple]:
    """Name of every file -> its header and, for n = 0, 1, ..., where the data of the first n
    tensors of all ends."""
    found = {}
    for number, name in enumerate(file_names(tp)):
        entries, ends = {"__metadata__": {"rank": HOST if number == tp else str(number)}}, [0]
        for cut in cuts:
            mine = (cut.split == HOST) == (number == tp)
            end = ends[-1] + (prod(cut.stored) * dtype.itemsize if mine else 0)
            if mine:
                entries[cut.name] = {
                    "dtype": DTYPE_NAMES[dtype],
                    "shape": list(cut.stored),
                    "data_offsets": [ends[-1], end],
                }
            ends.append(end)
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        found[name] = (len(text).to_bytes(8, "little") + text, ends, dtype)
    return found


class _File:
    """One file in the making, written in order, with the digest of what is in it."""

    def __init__(self, path: Path, header: bytes, ends: list[int], dtype: torch.dtype):
        self.path, self.header, self.ends, self.dtype = path, header, ends, dtype
        self.partial = path.with_name(path.name + PARTIAL)
        self.size = len(header) + ends[-1]
        self.error: OSError | None = None
        self.scratch = torch.empty(
            0, dtype=torch.uint8
        )  # kept: new memory costs the system more than the copy into it

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_) -> None:
        self.file.close()

    def open(self, tensors: int, digest: str | None) -> bool:
        """Begin after the first `tensors` tensors, which must have that digest; False if they are
        not there."""
        if self.path.exists() and not self.partial.exists():
            os.replace(self.path, self.partial)  # stopped between its renaming and the manifest
        keep = len(self.header) + self.ends[tensors] if digest else 0
        self.file, self.hasher = (
            open(self.partial, "r+b" if self.partial.exists() else "w+b", buffering=0),
            blake3(),
        )
        left = keep
        while left and (block := self.file.read(min(left, _PIECE_BYTES))):
            self.hasher.update(block)
            left -= len(block)
        if digest and (left or self.hasher.hexdigest() != digest):
            self.file.close()
            return False
        self.file.truncate(keep)
        # room that nobody else can take meanwhile; and a file of known length is written with half
        # the system's work
        try:
            os.posix_fallocate(self.file.fileno(), 0, self.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
                raise
        if not keep:
            self._write(self.header)
        return True

    def put(self, tensor: Tensor) -> None:
        if tensor.dtype == self.dtype and tensor.is_contiguous():
            self._write(_bytes(tensor))
            return
        for rows in tensor.split(
            max(1, _PIECE_BYTES // max(1, tensor[0].numel() * self.dtype.itemsize))
        ):
            size = rows.numel() * self.dtype.itemsize
            if size > len(self.scratch):
                self.scratch = torch.empty(size, dtype=torch.uint8)
            self._write(_bytes(self.scratch[:size].view(self.dtype).view(rows.shape).copy_(rows)))

    def _write(self, content) -> None:
        self.hasher.update(content)
        view = memoryview(content)
        try:
            while view and not self.error:
                view = view[self.file.write(view) :]
        except OSError as error:
            self.error = error
        if self.error:  # nothing may follow what is not there
            raise self.error

    def digest(self) -> str:
        if self.error:
            raise self.error
        return self.hasher.hexdigest()

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def finish(self) -> dict:
        """Give the file its name; returns its line of the manifest."""
        digest, size = self.digest(), self.file.tell()
        if size != self.size:
            raise RuntimeError(f"{self.path}: wrote {size} bytes, the header says {self.size}")
        os.replace(self.partial, self.path)
        return {"bytes": size, "blake3": digest, "header_blake3": blake3(self.header).hexdigest()}


class _Lanes:
    """Threads that each do what they are given in its order. Leaving drops what was not begun."""

    def __init__(self, count: int):
        self._pools = [ThreadPoolExecutor(1) for _ in range(count)]

    def __enter__(self) -> "_Lanes":
        return self

    def __exit__(self, *_) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools:
            pool.shutdown()

    def do(self, lane: int, job: Callable, *arguments) -> Future:
        """All jobs of one number are done in their order."""
        return self._pools[lane % len(self._pools)].submit(job, *arguments)


def _write(
    source, folder: Path, identity: dict, tp: int, cuts: list[Cut], files: list[_File], workers: int
) -> None:
    """Read, cut and write. Nothing waits for the disk but the end: a thread of its own makes safe
    what was written."""
    with ExitStack() as stack:
        digests = _continue(folder, identity, files)
        for file in files:
            stack.enter_context(file)
        writers, hasher, notary = (stack.enter_context(_Lanes(count)) for count in (workers, 1, 1))
        tensors: dict[str, str | Future] = dict(digests)
        total, before = (
            sum(source.nbytes(cut.name) for cut in part) for part in (cuts, cuts[: len(digests)])
        )
        bar = stack.enter_context(
            tqdm(total=total, initial=before, unit="B", unit_scale=True, desc=folder.name)
        )

        def note() -> Future:
            """Write down, behind what is on its way, that this much is done."""
            ends = [writers.do(number, file.digest) for number, file in enumerate(files)]
            return notary.do(0, _note, folder, identity, dict(tensors), files, ends)

        written, noted, on_the_way = 0, None, deque()
        scratches = itertools.cycle(
            [pagecache.scratch(_PIECE_BYTES) for _ in range(_AHEAD + 1)]
        )  # one more than is on the way

        def wait_for_oldest() -> None:
            for job in on_the_way.popleft():
                job.result()

        for cut in cuts[len(digests) :]:
            digest = xxh3_128()
            for start, piece in _pieces(source, cut, tp, scratches):
                jobs = [
                    writers.do(number, files[number].put, part)
                    for number, part in cut.parts(piece, start, tp)
                ]
                jobs.append(hasher.do(0, digest.update, _bytes(piece)))
                on_the_way.append(jobs)
                written += piece.nbytes
                bar.update(piece.nbytes)
                while len(on_the_way) > _AHEAD:
                    wait_for_oldest()
            tensors[cut.name] = hasher.do(0, digest.hexdigest)
            if written >= _SYNC_BYTES and (not noted or noted.done()):
                if noted:
                    noted.result()
                written, noted = 0, note()
        while on_the_way:
            wait_for_oldest()
        tensors = note().result()
        lines = {file.path.name: file.finish() for file in files}
    _sync_folder(folder)
    content = {
        "identity": identity,
        "heads": source.heads,
        "files": lines,
        "source": source.described(tensors),
    }
    write_json(folder / MANIFEST, content)
    (folder / JOURNAL).unlink()


def _pieces(source, cut: Cut, tp: int, scratches: Iterator[mmap]) -> Iterator[tuple[int, Tensor]]:
    """A tensor's first rows and pieces in order; each may lie in the next of the scratches."""
    bounds = list(
        cut.bounds(tp, source.nbytes(cut.name) // max(1, cut.shape[0]) if cut.shape else 0)
    )
    return zip(
        (start for start, _ in bounds), source.pieces(cut.name, bounds, scratches), strict=True
    )


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _note(
    folder: Path, identity: dict, tensors: dict, files: list[_File], ends: list[Future]
) -> dict[str, str]:
    """Write the journal, once all that it names is on the disk; returns the digests of the source's
    tensors."""
    digests = {
        name: digest if isinstance(digest, str) else digest.result()
        for name, digest in tensors.items()
    }
    ends = [end.result() for end in ends]
    for file in files:
        file.sync()
    write_json(folder / JOURNAL, {"identity": identity, "tensors_xxh3_128": digests, "files": ends})
    return digests


def _continue(folder: Path, identity: dict, files: list[_File]) -> dict[str, str]:
    """Open the files where the journal says an earlier run got to, else at their beginning. Returns
    its source digests."""
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


def _check_space(folder: Path, files: list[_File]) -> None:
    """Raise UserError, before the first byte, where the disk has no room for what is still to be
    written."""
    there = sum(
        path.stat().st_size for file in files for path in (file.path, file.partial) if path.exists()
    )
    needed, free = sum(file.size for file in files) - there, shutil.disk_usage(folder).free
    if needed > free:
        unit, name = (1e9, "GB") if needed > 1e9 else (1e6, "MB")
        raise UserError(
            f"the weights need {needed / unit:.2f} {name} more in {folder}, its disk has"
            f" {free / unit:.2f} {name} free.\nFree some, or choose another place with"
            " --artifacts-dir DIR"
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder: two runs that write the same files would mix them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(
            f"another run is writing {folder}; wait for it or stop it, then type the same again"
        ) from None
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
