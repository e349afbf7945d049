"""Safetensors files: read by rows, with a validated header and without mapping whole files, and
written.

The safetensors library maps a whole file writable; a machine with less memory than the 46 GB
checkpoint refuses that. Format: github.com/huggingface/safetensors, README.

Float8 and int8 weights are dequantised to bfloat16 when they are read.
Source: ltx-core quantization/fp8_cast.py (1.2.0): bf16(float32(weight) * scale), then as from a
bfloat16 file. Layouts, by the other tensors of a weight X.weight:
  released, scaled   X.weight_scale, one number; the file's metadata may list the layers
  released, cast     none: weights and biases were cast without a scale
  ComfyUI            X.scale_weight for X.weight_scale and a marker scaled_fp8 in the file, or
                     X.comfy_quant, JSON with the name of the format
X.input_scale (ComfyUI: X.scale_input) is for activations, which stay in bfloat16 here. nvfp4, with
X.weight_scale_2, is refused.

Lightricks' int8-convrot files have a scale per row. Source: ComfyUI comfy/ops.py (format
"int8_tensorwise") and comfy-kitchen tensor/int8_utils.py. A weight (N, K) has `weight_scale`,
float32 (N, 1) or one number, and a note `comfy_quant`. With "convrot" each group of K's features
was multiplied by H, a symmetric matrix with entries +-1 and H H = group size * 1, over the root of
the group size, before it was rounded; so H undoes it.
"""

import errno
import hashlib
import json
import mmap
import os
import re
from collections import deque
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property, reduce
from math import inf, isfinite, prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from ltx_neuron.config.release import Release, parse_release
from ltx_neuron.errors import UserError, as_user_errors, os_reason, to_user_error
from ltx_neuron.files import check_regular, other_format, whole_file
from ltx_neuron.format import few
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
_RELEASE_IN_NAME = re.compile(r"ltx-?(\d+)[._](\d+)")  # of the published files
FLOAT8, _FORMAT = "F8_E4M3", "float8_e4m3fn"  # as safetensors and torch name it
_SCALES = "weight_scale", "scale_weight"
_OF_ACTIVATIONS = "input_scale", "scale_input"
_NOTE, _MARKER = "comfy_quant", "scaled_fp8"
_FIELDS = {"format", "full_precision_matrix_mult"}  # of a note; neither changes a weight
_NVFP4 = "weight_scale_2"  # the second scale that nvfp4 alone has
_PIECE = 2**18  # weights dequantised at once: their indices fit in a core's cache
INT8, INT8_FORMAT = "I8", "int8_tensorwise"  # as safetensors and ComfyUI name it
# Of a note; the last three change no weight.
_INT8_FIELDS = {"format", "convrot", "convrot_groupsize"}
_INT8_FIELDS |= {"params", "per_row", "full_precision_matrix_mult"}
_GROUPS = {4**power: power for power in range(1, 7)}  # group size -> factors of H
_GROUP = 256  # ComfyUI's default
_FACTOR = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).float()


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

    @property
    def named_release(self) -> Release | None:
        """The release in the file's metadata or else in its name; None if neither names one."""
        named = _RELEASE_IN_NAME.search(self.path.name.lower())
        label = parse_release(self.metadata.get("model_version", ""))
        return label or (parse_release(f"{named[1]}.{named[2]}") if named else None)

    def check_release(self, flag: str, release: Release, download: str) -> None:
        """Raise UserError if the file is of another supported release by its metadata or, without
        a version there, by its name: upsamplers and many LoRAs have no `model_version`."""
        if (named := self.named_release) in (None, release):
            return
        version, rename = self.metadata.get("model_version", ""), ""
        if not parse_release(version):
            version = f"{named.version} by its name"
            rename = f"\nIf it is of LTX-{release.version}, rename it"
        raise UserError(
            f"{flag} {self.path} is of LTX {version}, but the checkpoint is of"
            f" LTX-{release.version}\nDownload the file of that release: {download}{rename}"
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


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with whole_file(path) as partial:
        partial.write_bytes(save(contiguous, metadata))


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


# --- quantised weights ----------------------------------------------------------------------------


class RowScale(NamedTuple):
    """The scale of an int8 weight, float32 (N, 1) or (1, 1), and the number of input features that
    were rotated together; 1 without a rotation."""

    scale: Tensor
    group: int

    def dequantised(self, stored: Tensor, start: int) -> Tensor:
        """The rows of a weight from row `start`, int8 (n, K), as bfloat16. Products of H are whole
        numbers below 2**24, exact in any order of summation. So the result depends neither on the
        number of rows nor on the CPU."""
        result = torch.empty(stored.shape, dtype=torch.bfloat16)
        rows = max(1, _PIECE // stored.shape[1])
        left, right = _halves(self.group)
        for first in range(0, len(stored), rows):
            whole = stored[first : first + rows]
            values = whole.float()
            if self.group > 1:
                values = left @ values.view(-1, len(left), len(right)) @ right
            scale = self.scale[start + first :][: len(whole)] if len(self.scale) > 1 else self.scale
            result[first : first + rows] = values.view(whole.shape) * (scale / self.group**0.5)
        return result


@cache
def _halves(group: int) -> tuple[Tensor, Tensor]:
    """Two matrices whose Kronecker product is H: 16 times fewer products than H for 256."""
    power = _GROUPS.get(group, 0)
    sizes = power // 2, power - power // 2
    left, right = (reduce(torch.kron, [_FACTOR] * size, torch.ones(1, 1)) for size in sizes)
    return left, right


def row_scale(shape: tuple[int, ...], scale: Tensor, note: dict) -> RowScale:
    """The scale of a weight (N, K). ValueError, with a message, for an unknown or damaged one."""
    values = {**(params if isinstance(params := note.get("params"), dict) else {}), **note}
    group = values.get("convrot_groupsize", _GROUP) if values.get("convrot") else 1
    known = group == 1 or (group in _GROUPS and len(shape) == 2 and shape[1] % group == 0)
    if note.keys() - _INT8_FIELDS or not known:
        raise ValueError(f"quantised as {note} with shape {list(shape)}, not implemented")
    if scale.numel() != 1 and tuple(scale.shape) != (shape[0], 1):
        shapes = f"[{shape[0]}, 1] or one number"
        raise ValueError(f"int8 with a scale of shape {list(scale.shape)}, wanted {shapes}")
    if not ((scale > 0) & (scale < inf)).all():
        raise ValueError("int8 with a scale that is not a finite number above 0")
    return RowScale(scale.reshape(-1, 1), group)


class WeightFile(TensorFile):
    """A file of a model's weights. Tensors stored as F8_E4M3 or as int8 with scales are read as
    bfloat16; `shapes` leaves out their scales and notes, and `others`, of other models. UserError,
    with the tensors' names, for an unknown layout and for a damaged scale."""

    def __init__(self, path: str | Path, download: str):
        super().__init__(path, download)
        names = {key: name for key in self.shapes if (name := self.name_of(key)) is not None}
        self.others = [key for key in self.shapes if key not in names]
        for attribute in ("shapes", "dtypes", "_offsets"):
            values = getattr(self, attribute)
            setattr(self, attribute, {name: values[key] for key, name in names.items()})
        # Float8 tensor -> its scale, float32 without dimensions; None if it has none.
        self.scales: dict[str, Tensor | RowScale | None] = {}
        float8, dropped, problems = [], [], []
        beside: dict[str, dict[str, str]] = {}  # weight -> names of its scales and note
        for key in self.shapes:
            module, _, part = key.rpartition(".")
            if part == _MARKER:
                dropped.append(key)
            elif part in (*_SCALES, *_OF_ACTIVATIONS, _NOTE):
                beside.setdefault(f"{module}.weight", {})[part] = key
                dropped.append(key)
            elif self.dtypes[key] == FLOAT8:
                float8.append(key)
            elif part != "bias" and self.dtypes.get(f"{module}.weight") == FLOAT8:
                problems.append(f"{key} is of an unknown layout")
        if not float8 and not beside:
            return
        if any(key.endswith(f".{_NVFP4}") for key in self.shapes):
            raise UserError(
                f"{self.path} has weights in nvfp4, which this toolkit does not read\nDownload the"
                f" file in bfloat16 (LTX-2.5: or in int8-convrot): {self.download}"
            )
        formats = self._listed_formats()
        # If no metadata lists the scaled layers, either all layers have scales or none has.
        scaled = not formats and any(part in _SCALES for parts in beside.values() for part in parts)
        for key in dict.fromkeys([*float8, *beside]):
            needs_scale = scaled and key.endswith(".weight")
            try:
                self.scales[key] = self._scale(
                    key, beside.get(key, {}), formats.get(key), needs_scale
                )
            except ValueError as problem:
                problems.append(str(problem))
        if problems:
            raise UserError(
                "\n  ".join(
                    [f"{self.path} has weights that cannot be read:", *few(sorted(problems), 20)]
                )
                + "\nWanted: BF16, or F8_E4M3 with one number as weight_scale, or without scales,"
                f" or I8 with {INT8_FORMAT}; the published file: {self.download}"
            )
        for key in dropped:
            del self.shapes[key], self.dtypes[key]

    def _listed_formats(self) -> dict[str, dict]:
        try:
            layers = json.loads(self.metadata.get("_quantization_metadata", "{}")).get("layers", {})
            formats = {self.name_of(f"{layer}.weight"): {**of} for layer, of in layers.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise self._broken(f"its _quantization_metadata is damaged ({error})") from None
        return {weight: fields for weight, fields in formats.items() if weight in self.shapes}

    def name_of(self, key: str) -> str | None:
        """The name that this class gives a tensor of the file; None for one that it leaves out."""
        return key

    def _scale(
        self, key: str, beside: dict[str, str], fields: dict | None, needs_scale: bool
    ) -> Tensor | RowScale | None:
        """The scale of a float8 or int8 tensor. ValueError, with a message, if a needed scale is
        missing, or if a scale or note is damaged or of an unknown layout."""
        if _NOTE in beside:
            try:
                fields = {**json.loads(bytes(self.read(beside[_NOTE]).tolist()))}
            except (ValueError, TypeError):
                raise ValueError(f"{beside[_NOTE]} is not a JSON object") from None
        scales = [beside[part] for part in _SCALES if part in beside]
        whole = self.dtypes.get(key) == INT8 and len(scales) == 1
        if whole and fields and fields.get("format") == INT8_FORMAT:
            try:
                return row_scale(self.shapes[key], self.read(scales[0]).float(), fields)
            except ValueError as problem:
                raise ValueError(f"{key} is {problem}") from None
        if fields and (fields.get("format") != _FORMAT or fields.keys() - _FIELDS):
            raise ValueError(f"{key} is quantised as {json.dumps(fields)}, not implemented")
        if self.dtypes.get(key) != FLOAT8:
            stored = self.dtypes.get(key, "missing")
            raise ValueError(f"{[*scales, *beside.values()][0]} exists, but {key} is {stored}")
        stored = f"{key} is stored as {FLOAT8}"
        if not scales:
            if needs_scale or beside or fields:
                raise ValueError(f"{stored}, but its weight_scale is missing")
            return None
        name = scales[0].rpartition(".")[2]
        if len(scales) > 1:
            raise ValueError(f"{stored} with both a weight_scale and a scale_weight")
        if prod(self.shapes[scales[0]]) != 1:
            shape = list(self.shapes[scales[0]])
            raise ValueError(f"{stored} with a {name} of shape {shape}, wanted one number")
        if problem := TensorFile.weight_problem(self, scales[0]):
            raise ValueError(f"{scales[0]} is {problem}")
        scale = self.read(scales[0]).float().reshape(())
        if not 0 < scale.item() < inf:
            raise ValueError(f"{scales[0]} is {scale.item()}, wanted a finite number above 0")
        return scale

    def torch_dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self.scales else super().torch_dtype(name)

    def weight_problem(self, name: str, known: tuple[str, ...] = (*WEIGHT_DTYPES, FLOAT8)) -> str:
        return "" if name in self.scales else super().weight_problem(name, known)

    def _value(self, name: str, stored: Tensor, start: int = 0) -> Tensor:
        if name not in self.scales:
            return stored
        scale = self.scales[name]
        if isinstance(scale, RowScale):
            return scale.dequantised(stored, start)
        return _dequantised(stored, scale)

    @property
    def quantised(self) -> str:
        """How its quantised tensors are stored, such as "int8"; empty if it has none."""
        kinds = {isinstance(scale, RowScale) for scale in self.scales.values()}
        return " and ".join(["float8", "int8"][kind] for kind in sorted(kinds))

    def describe_quantised(self) -> str:
        """A line about its quantised tensors for the user; empty if it has none."""
        if not self.scales:
            return ""
        scaled = sum(scale is not None for scale in self.scales.values())
        return (
            f"{len(self.scales):,} weights in {self.quantised} are dequantised while sharding; the"
            f" sharded set is as large as the bf16 file's ({scaled:,} have a scale)"
        )


def _dequantised(stored: Tensor, scale: Tensor | None) -> Tensor:
    """float8 -> bfloat16, as a copy. A lookup table converts 1.4 billion values per second and
    core; torch converts 0.1 billion, and only to float32."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    table = (values if scale is None else values * scale).bfloat16().view(torch.int16).numpy()
    result = torch.empty(stored.shape, dtype=torch.bfloat16)
    codes, into = stored.view(torch.uint8).reshape(-1), result.view(torch.int16).view(-1)
    for piece, part in zip(codes.split(_PIECE), into.split(_PIECE), strict=True):
        np.take(table, piece.numpy(), out=part.numpy(), mode="clip")
    return result
