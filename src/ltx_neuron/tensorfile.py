"""Reading safetensors files without mapping them: a header that is checked whole, and reads of the rows that are wanted.

safetensors' own torch reader maps a file privately, which a machine with less memory than the 46 GB checkpoint refuses, and
mapped pages stay in the process's resident memory. Format: github.com/huggingface/safetensors, README.
"""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.errors import UserError

TORCH_DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "F64": torch.float64, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # what --dtype may say
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_MAX_HEADER = 100_000_000  # safetensors' own bound
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class TensorFile:
    """A safetensors file: names, shapes and dtypes from its header, tensors on request.

    The header is checked: entries follow one another without gap or overlap, each as long as its shape and dtype say, and
    the file ends where the last one does. `download` is the command that fetches the file, for error messages.
    """

    def __init__(self, path: Path, download: str):
        self.path, self.download = Path(path), download
        if self.path.is_dir():
            raise UserError(f"{path} is a folder; split (multi-file) checkpoints are not supported yet.\nWanted: one "
                            f".safetensors file, as published: {download}")  # fmt: skip
        if not self.path.is_file():
            raise UserError(f"no such file: {path}\nDownload it: {download}")
        self.size = self.path.stat().st_size
        if self.size == 0:
            raise self._broken("it is empty")
        with self._open() as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if self.size < 8 or length > min(_MAX_HEADER, self.size - 8):
                raise self._broken(f"its first bytes {start!r} are no header length that fits {self.size} bytes")
            self.header = file.read(length)
        try:
            self._parse(json.loads(self.header))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise self._broken(f"the header is not a safetensors header ({type(error).__name__}: {error})") from None

    def _parse(self, entries: dict) -> None:
        self.metadata = entries.pop("__metadata__", {}) or {}
        if not all(isinstance(text, str) for text in self.metadata.values()):
            raise ValueError("metadata that is not text")
        self.shapes, self.dtypes, self._begins = {}, {}, {}
        expected = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
            if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
                raise ValueError(f"{name}: sizes and offsets must be whole numbers")
            if begin != expected:
                raise ValueError(f"{name} begins at {begin}, wanted {expected}")
            known = TORCH_DTYPES.get(entry["dtype"])
            if known is not None and end - begin != _count(shape) * known.itemsize:
                raise ValueError(f"{name} of shape {list(shape)} and dtype {entry['dtype']} has {end - begin} bytes")
            self.shapes[name], self.dtypes[name], self._begins[name] = shape, str(entry["dtype"]), begin
            expected = end
        if 8 + len(self.header) + expected != self.size:
            raise self._broken(f"the header describes {8 + len(self.header) + expected} bytes, the file has {self.size}: "
                               "truncated?")  # fmt: skip

    def _open(self):
        try:
            return open(self.path, "rb", buffering=0)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from None

    def _broken(self, why: str) -> UserError:
        return UserError(f"{self.path} is not a whole safetensors file: {why}.\nDownload it again: {self.download}")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A tensor, or its rows start..stop along the first dimension."""
        shape, dtype = self.shapes[name], TORCH_DTYPES[self.dtypes[name]]
        row = _count(shape[1:]) * dtype.itemsize
        stop = shape[0] if shape and stop is None else stop
        rows, wanted = (1, ()) if not shape else (stop - start, (stop - start, *shape[1:]))
        buffer = torch.empty(rows * row, dtype=torch.uint8)
        view, offset = memoryview(buffer.numpy()), 8 + len(self.header) + self._begins[name] + start * row
        with self._open() as file:
            file.seek(offset)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise self._broken(f"it ends within {name}")
                done += count
        return buffer.view(dtype).view(wanted) if buffer.numel() else torch.empty(wanted, dtype=dtype)

    @property
    def fingerprint(self) -> str:
        """Identity of the content: size, header, and 64 samples of data (dev and distilled have equal headers)."""
        hasher, data = hashlib.sha256(self.header + str(self.size).encode()), 8 + len(self.header)
        with self._open() as file:
            for i in range(_SAMPLES):
                file.seek(data + (self.size - data) * i // _SAMPLES)
                hasher.update(file.read(_SAMPLE_BYTES))
        return hasher.hexdigest()[:16]


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
