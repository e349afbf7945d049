"""Reads safetensors files by rows, with a validated header and without mapping whole files.

The safetensors library maps a whole file writable; a machine with less memory than the 46 GB
checkpoint refuses that. Format: github.com/huggingface/safetensors, README.
"""

import errno
import hashlib
import json
import mmap
import os
from collections import deque
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from math import isfinite, prod
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.errors import UserError, as_user_errors, os_reason, to_user_error
from ltx_neuron.files import check_regular, other_format
from ltx_neuron.hub import download_again, nearest

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}
WEIGHT_DTYPES = ("BF16", "F16", "F32")  # supported dtypes of stored weights
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # the values of --dtype
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_MAX_HEADER = 100_000_000  # safetensors' own bound
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of the data, for a fingerprint
_GROUP_BYTES = 64 * 2**20  # of tensors that are mapped together
_READERS = 2  # one reads while the other waits for the disk or for memory
# Errors that concern a file's content; others concern the machine.
_CONTENT_ERRORS = (errno.EIO, errno.EFAULT)
ALIGNMENT = 64  # bytes, of a tensor's memory, as in torch
_POPULATE_READ = 22  # MADV_POPULATE_READ (Linux 5.14), missing in Python 3.11


class TensorFile:
    """A safetensors file: names, shapes and dtypes from its header, tensors on request. The header
    is checked on opening: entries have no gaps or overlaps, their lengths match shapes and dtypes,
    and the file ends with the last one. UserError for truncated or unreadable files. path: of the
    file. download: the command that fetches or makes the file, for error messages."""

    def __init__(self, path: str | Path, download: str):
        self.path = Path(path)
        self.download = download_again(self.path) or download
        try:
            check_regular(self.path)
        except IsADirectoryError:
            raise UserError(
                f"{self.path} is a folder; split (multi-file) checkpoints are not supported"
                f" yet.\nWanted: one .safetensors file, as published: {self.download}"
            ) from None
        except FileNotFoundError:
            raise UserError(
                f"no such file: {self.path}{nearest(self.path)}\nDownload it: {self.download}"
            ) from None
        except OSError as error:
            raise to_user_error(error) from None
        self.size = self.path.stat().st_size
        if self.size == 0:
            raise self._broken("it is empty")
        with self._open() as file:
            first_bytes = file.read(8)
            length = int.from_bytes(first_bytes, "little")
            if self.size < 8 or length > min(_MAX_HEADER, self.size - 8):
                raise self._broken(
                    f"its first bytes {first_bytes!r} are no header length that fits"
                    f" {self.size} bytes"
                )
            self.header = file.read(length)
        self._data = 8 + length  # where the tensors' bytes begin
        try:
            self._parse(json.loads(self.header))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._broken(
                f"the header is not a safetensors header ({type(error).__name__}: {error})"
            ) from None

    def _parse(self, entries: dict) -> None:
        self.metadata = entries.pop("__metadata__", {}) or {}
        if not all(isinstance(text, str) for text in self.metadata.values()):
            raise ValueError("metadata that is not text")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}  # in the format's spelling: BF16, F32, ...
        self._offsets: dict[str, int] = {}  # of a tensor's first byte, from the header's end
        expected = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
            if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
                raise ValueError(f"{name}: sizes and offsets must be whole numbers")
            if begin != expected:
                raise ValueError(f"{name} begins at {begin}, wanted {expected}")
            known = TORCH_DTYPES.get(entry["dtype"])
            if known is not None and end - begin != prod(shape) * known.itemsize:
                raise ValueError(
                    f"{name} of shape {list(shape)} and dtype {entry['dtype']} has {end - begin}"
                    " bytes"
                )
            self.shapes[name] = shape
            self.dtypes[name] = str(entry["dtype"])
            self._offsets[name] = begin
            expected = end
        if (described := self._data + expected) != self.size:
            raise self._broken(
                f"the header describes {described} bytes, the file has {self.size}: truncated?"
            )

    def torch_dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor when it is read. UserError for an unsupported one (F8_E5M2)."""
        return self._stored_dtype(name)

    def _stored_dtype(self, name: str) -> torch.dtype:
        if problem := self.weight_problem(name, tuple(TORCH_DTYPES)):
            raise UserError(
                f"{self.path}: {name} is {problem}.\nThe published one: {self.download}"
            )
        return TORCH_DTYPES[self.dtypes[name]]

    def weight_problem(self, name: str, known: tuple[str, ...] = WEIGHT_DTYPES) -> str:
        """The problem with the dtype of a model's weight, for a message; empty if there is none."""
        stored = self.dtypes[name]
        if stored in known:
            return ""
        return f"stored as {stored}, which is not implemented; wanted one of {', '.join(known)}"

    def _open(self):
        with as_user_errors():
            return open(self.path, "rb", buffering=0)

    def _broken(self, why: str) -> UserError:
        again = "it again"
        if other := other_format(self.path):
            why, again = f"it is {other}", "the published one"
        return UserError(
            f"{self.path} is not a whole safetensors file: {why}.\nDownload {again}:"
            f" {self.download}"
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A tensor, or its rows start..stop along the first dimension, as a copy."""
        offset, size, shape = self._byte_range(name, start, stop)
        memory = torch.empty(size, dtype=torch.uint8)
        view = memory.numpy().data
        with self._open() as file, self._reading(name):
            while view:
                if not (count := os.preadv(file.fileno(), [view], offset)):
                    raise self._ends_at(offset, name)
                view, offset = view[count:], offset + count
        return self._value(name, memory.view(self._stored_dtype(name)).view(shape), start)

    def rows(self, name: str, indices: list[int]) -> Tensor:
        """Single rows of a tensor: (rows, ...) -> (len(indices), ...)."""
        return torch.cat([self.read(name, index, index + 1) for index in indices])

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def read_mapped(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A tensor, or its rows start..stop, mapped from the page cache without a copy. Writes to
        the tensor do not reach the file. Data that is not aligned to its element size is copied. If
        the file is truncated while the tensor is in use, the process ends (SIGBUS). Each such
        tensor keeps a file descriptor."""
        offset, size, shape = self._byte_range(name, start, stop)
        dtype = self._stored_dtype(name)
        memory = self._map(name, offset, size)
        return self._value(name, _aligned(memory, dtype.itemsize).view(dtype).view(shape), start)

    def _value(self, name: str, stored: Tensor, start: int = 0) -> Tensor:
        """A tensor, or its rows from `start`, from the stored data."""
        return stored

    def prefetch(self, name: str) -> None:
        """Start reading a tensor into the page cache, ahead of `read_mapped`."""
        offset, size, _ = self._byte_range(name)
        with self._open() as file:
            os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_WILLNEED)

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all tensors in order, or of those in `names`; threads read ahead.
        Tensors are mapped from the page cache. A mapping keeps a file descriptor, so neighbouring
        tensors share mappings of at least 64 MiB, which last until none of them is in use. Tensors
        that are not aligned to 64 bytes are copied, because torch is slower on them; rank files
        have few of these, and they are small."""
        readers, ahead = ThreadPoolExecutor(_READERS), deque()
        try:
            for group in self._groups(names):
                ahead.append(readers.submit(self._read_group, group))
                if len(ahead) > _READERS:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            readers.shutdown(cancel_futures=True)

    def _groups(self, names: Container[str] | None) -> Iterator[list[str]]:
        group, total = [], 0
        for name in self.shapes:
            read = names is None or name in names
            if read:
                group.append(name)
                total += self._byte_range(name)[1]
            if group and (not read or total >= _GROUP_BYTES):
                yield group
                group, total = [], 0
        if group:
            yield group

    def _read_group(self, names: list[str]) -> list[tuple[str, Tensor]]:
        ranges = [self._byte_range(name) for name in names]
        first, (last, size, _) = ranges[0][0], ranges[-1]
        memory = self._map(names[0], first, last + size - first)
        tensors = []
        for name, (offset, size, shape) in zip(names, ranges, strict=True):
            part = _aligned(memory[offset - first :][:size], ALIGNMENT)
            stored = part.view(self._stored_dtype(name)).view(shape)
            tensors.append((name, self._value(name, stored)))
        return tensors

    def _byte_range(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> tuple[int, int, tuple[int, ...]]:
        """(offset in the file, bytes, shape) of rows start..stop; a scalar is one row."""
        shape = self.shapes[name]
        row_bytes = prod(shape[1:]) * self._stored_dtype(name).itemsize
        rows = (stop if stop is not None else shape[0] if shape else 1) - start
        offset = self._data + self._offsets[name] + start * row_bytes
        return offset, rows * row_bytes, (rows, *shape[1:])[: len(shape)]

    def _map(self, name: str, offset: int, size: int) -> Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        before = offset % mmap.PAGESIZE
        with self._open() as file, self._reading(name):
            if (end := os.fstat(file.fileno()).st_size) < offset + size:
                raise self._ends_at(end, name)
            pages = mmap.mmap(
                file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=offset - before
            )
            _populate(pages)
        return torch.frombuffer(pages, dtype=torch.uint8)[before:]

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Convert the system's errors inside the block to a UserError with the file's path."""
        try:
            yield
        except OSError as error:
            if error.errno in _CONTENT_ERRORS:
                raise self._broken(f"{name} cannot be read: {os_reason(error)}") from None
            error.filename = str(self.path)
            raise to_user_error(error) from None

    def _ends_at(self, offset: int, name: str) -> UserError:
        return self._broken(f"it ends at byte {offset}, within a tensor ({name})")

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the content, 16 hex digits: SHA-256 of the size, the header and 64 samples of
        the data (the dev and distilled checkpoints have equal headers)."""
        hasher = hashlib.sha256(self.header + str(self.size).encode())
        with self._open() as file:
            for i in range(_SAMPLES):
                file.seek(self._data + (self.size - self._data) * i // _SAMPLES)
                hasher.update(file.read(_SAMPLE_BYTES))
        return hasher.hexdigest()[:16]


def _aligned(memory: Tensor, alignment: int) -> Tensor:
    return memory.clone() if memory.data_ptr() % alignment else memory


def _populate(pages: mmap.mmap) -> None:
    """Read all pages of a mapping into the page cache and map them into the process."""
    try:
        pages.madvise(_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pages.madvise(mmap.MADV_WILLNEED)  # a kernel before 5.14: reads asynchronously


def missing_and_unexpected(expected: Mapping[str, object], got: Mapping[str, object]) -> list[str]:
    """The differences of two sets of tensors, a sorted line each. Values are shapes, by name."""
    problems = [f"missing: {name}" for name in expected.keys() - got.keys()]
    problems += [f"unexpected: {name}" for name in got.keys() - expected.keys()]
    problems += [
        f"{name}: {got[name]}, wanted {expected[name]}"
        for name in expected.keys() & got.keys()
        if got[name] != expected[name]
    ]
    return sorted(problems)


def finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or Inf."""
    # Minimum and maximum propagate NaN, in a twentieth of the time of isfinite().all().
    return all(isfinite(bound) for bound in tensor.aminmax())
