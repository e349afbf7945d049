"""Weights on disk: the released files in (lazily, by slices), one safetensors file per rank out, strict loading back.

Nothing is ever loaded whole: a rank's part of one tensor at a time is read, cast and appended to that rank's file.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.config import CHECKPOINT_DOWNLOAD, SUPPORTED_VERSION, digest, gemma_download
from ltx_neuron.errors import UserError
from ltx_neuron.sharding import HOST, Model, local_shape, rename, rule
from ltx_neuron.tensorfile import DTYPE_NAMES, TORCH_DTYPES, TensorFile

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_CHUNK_BYTES = 128 * 2**20  # most that is read from the source at once
HOST_FILE, MANIFEST = "host.safetensors", "manifest.json"


def rank_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


class Checkpoint(TensorFile):
    """The single-file LTX-2.3 checkpoint: its parsed config metadata decides every size."""

    def __init__(self, path: Path):
        super().__init__(path, CHECKPOINT_DOWNLOAD)
        version = self.metadata.get("model_version", "")
        if "config" not in self.metadata:
            raise UserError(f"{path} has no 'config' metadata, so it is not a released LTX-2.3 checkpoint.\n"
                            f"Download one: {CHECKPOINT_DOWNLOAD}")  # fmt: skip
        try:
            self.config = json.loads(self.metadata["config"])
        except ValueError as error:
            raise UserError(f"{path}: the 'config' metadata is not JSON: {error}\nDownload it again: {self.download}") from None
        if not isinstance(self.config, dict) or "transformer" not in self.config:
            raise UserError(f"{path} is not an LTX checkpoint: its 'config' metadata has no 'transformer' section.\n"
                            f"Download one: {CHECKPOINT_DOWNLOAD}")  # fmt: skip
        if not version.startswith(SUPPORTED_VERSION):
            raise UserError(f"{path} is of LTX version {version or '2.0 (no model_version metadata)'}, this toolkit runs "
                            f"{SUPPORTED_VERSION}.\nDownload it: {CHECKPOINT_DOWNLOAD}")  # fmt: skip
        self.model_version = version


def gemma_files(root: Path) -> list[TensorFile]:
    """The weight files of a Gemma root: model.safetensors or model-0000x-of-0000y.safetensors."""
    paths = sorted(Path(root).glob("model*.safetensors"))
    if not paths:
        raise UserError(f"no model*.safetensors in --gemma-root {root}\nDownload it: {gemma_download(root)}")
    total = re.fullmatch(r"model-\d+-of-(\d+)", paths[0].stem)
    if total and int(total[1]) != len(paths):
        raise UserError(f"--gemma-root {root} has {len(paths)} of {int(total[1])} weight files\n"
                        f"Download the others: {gemma_download(root)}")  # fmt: skip
    return [TensorFile(path, gemma_download(root)) for path in paths]


class Source:
    """The tensors of one model under our names, wherever they lie in the given files."""

    def __init__(self, model: Model, files: list[TensorFile]):
        self.model, self.files = model, files
        self.where: dict[str, tuple[TensorFile, str]] = {}
        for file in files:
            for key in file.shapes:
                try:
                    name = rename(model, key)
                except UserError as error:
                    raise UserError(f"{file.path}: {error}\nThe published one: {file.download}") from None
                if name is not None and file.dtypes[key] not in TORCH_DTYPES:
                    raise UserError(f"{file.path}: {key} is stored as {file.dtypes[key]}, which is not implemented; "
                                    f"wanted {', '.join(TORCH_DTYPES)}.\nThe published one: {file.download}")  # fmt: skip
                if name is not None and name in self.where:
                    raise UserError(f"tensor {name!r} is in two places: {self.where[name][0].path} and {file.path}")
                if name is not None:
                    self.where[name] = (file, key)
        if not self.where:
            raise self._lacks("tensors")

    @property
    def fingerprint(self) -> str:
        return digest([file.fingerprint for file in self.files])

    def shape(self, name: str) -> tuple[int, ...]:
        file, key = self._find(name)
        return file.shapes[key]

    def _find(self, name: str) -> tuple[TensorFile, str]:
        if name not in self.where:
            raise self._lacks(f"tensor {name!r}")
        return self.where[name]

    def _lacks(self, what: str) -> UserError:
        files = ", ".join(str(file.path) for file in self.files)
        return UserError(f"no {what} of {self.model.name} in {files}\nThe published one: {self.files[-1].download}")

    def read(self, name: str, split: int | str | None, tp: int, rank: int) -> Iterator[Tensor]:
        """A rank's part of a tensor in pieces of at most 128 MiB, to be put one after another."""
        file, key = self._find(name)
        shape = file.shapes[key]
        local = local_shape(shape, split, tp, name)
        if not shape:
            yield file.read(key)
            return
        row_bytes = TORCH_DTYPES[file.dtypes[key]].itemsize * max(1, torch.Size(shape[1:]).numel())
        step = max(1, _CHUNK_BYTES // row_bytes)
        first = local[0] * rank if split == 0 else 0
        for start in range(first, first + local[0], step):
            rows = file.read(key, start, min(start + step, first + local[0]))
            yield rows[:, local[1] * rank : local[1] * (rank + 1)] if split == 1 else rows

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        file, key = self._find(name)
        return file.read(key)

    def rows(self, name: str, indices: list[int]) -> Tensor:
        """Single rows of a tensor."""
        file, key = self._find(name)
        return torch.cat([file.read(key, index, index + 1) for index in indices])


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its shape, and what yields its content in pieces."""

    name: str
    shape: tuple[int, ...]
    pieces: Iterator[Tensor]


def write_tensors(path: Path, entries: list[Entry], dtype: torch.dtype, metadata: dict[str, str]) -> dict:
    """Write a safetensors file piece by piece; it appears under its name only when whole. Returns its size and sha256."""
    header, offset = {"__metadata__": metadata}, 0
    for entry in entries:
        length = torch.Size(entry.shape).numel() * dtype.itemsize
        header[entry.name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + length],
        }
        offset += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts on a multiple of 8
    temporary, hasher = path.with_name(path.name + ".partial"), hashlib.sha256()
    try:
        with open(temporary, "wb") as file:

            def put(content) -> None:
                hasher.update(content)
                file.write(content)

            put(len(text).to_bytes(8, "little") + text)
            for entry in entries:
                for piece in entry.pieces:
                    put(memoryview(piece.to(dtype).contiguous().view(torch.uint8).flatten().numpy()))
            if file.tell() != 8 + len(text) + offset:
                raise RuntimeError(f"{path}: wrote {file.tell()} bytes, the header says {8 + len(text) + offset}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return {"bytes": 8 + len(text) + offset, "sha256": hasher.hexdigest()}


def write_json(path: Path, content: dict) -> None:
    """Write JSON so that it appears under its name only when whole."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def shard(source: Source, folder: Path, identity: dict, tp: int, dtype: torch.dtype, layouts: dict) -> None:
    """Write rank0..rank{tp-1}.safetensors, host.safetensors and, last, the manifest.

    layouts maps a tensor's name to a function that rearranges a rank's whole part of it.
    """
    rules = {name: rule(source.model, name) for name in sorted(source.where)}
    for name, split in rules.items():
        local_shape(source.shape(name), split, tp, name)  # a tensor that cannot be cut is refused before a file appears
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    files = {}
    for rank in range(tp):
        entries = [_entry(source, name, split, tp, rank, layouts) for name, split in rules.items() if split != HOST]
        files[rank_file(rank)] = write_tensors(folder / rank_file(rank), entries, dtype, {"rank": str(rank)})
    entries = [_entry(source, name, split, tp, 0, layouts) for name, split in rules.items() if split == HOST]
    files[HOST_FILE] = write_tensors(folder / HOST_FILE, entries, dtype, {"rank": HOST})
    write_json(folder / MANIFEST, {"identity": identity, "files": files})


def _entry(source: Source, name: str, split: int | str | None, tp: int, rank: int, layouts: dict) -> Entry:
    shape = local_shape(source.shape(name), split, tp, name)
    pieces = source.read(name, split, tp, rank)
    if name in layouts:
        arrange = layouts[name]
        shape = tuple(arrange(torch.empty(shape, device="meta")).shape)
        pieces = (arrange(torch.cat(list(whole))) for whole in [pieces])
    return Entry(name, shape, pieces)


def verify(folder: Path, quick: bool = False) -> list[str]:
    """Compare every file of a finished folder with its manifest; the list of differences is empty if it is whole.

    Of weights, `quick` looks at the sizes only. Graph files are small: they are always read.
    """
    content = json.loads((folder / MANIFEST).read_text())
    problems = []
    for name, wanted in (content.get("files") or {graph["file"]: graph for graph in content["graphs"].values()}).items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != wanted.get("bytes", path.stat().st_size):
            problems.append(f"{name}: {path.stat().st_size} bytes, wanted {wanted['bytes']}")
        elif not quick or "bytes" not in wanted:
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted["sha256"]:
                    problems.append(f"{name}: content differs from its sha256")
    return problems


def load(path: Path, wanted: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Load exactly the wanted tensors of a rank file. Missing, extra, misshapen or recast ones are one error."""
    file = TensorFile(path, "run the shard script again")
    got = {name: (shape, file.dtypes[name]) for name, shape in file.shapes.items()}
    problems = [f"missing: {name}" for name in wanted if name not in got]
    problems += [f"unexpected: {name}" for name in got if name not in wanted]
    for name in wanted.keys() & got.keys():
        if got[name] != (tuple(wanted[name]), DTYPE_NAMES[dtype]):
            problems.append(f"{name}: {got[name][0]} {got[name][1]}, wanted {tuple(wanted[name])} {DTYPE_NAMES[dtype]}")
    if problems:
        raise UserError(f"{path} does not hold this model's weights:\n  " + "\n  ".join(sorted(problems)))
    return {name: file.read(name) for name in wanted}


def load_host(folder: Path) -> TensorFile:
    """The tensors of a weight set that stay on the host."""
    return TensorFile(folder / HOST_FILE, "run the shard script again")
