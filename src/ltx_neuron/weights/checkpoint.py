"""The released files, read lazily by slices: the checkpoint, Gemma3's folder, and a model's tensors
under our names."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from mmap import mmap
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from ltx_neuron.config import CHECKPOINT_DOWNLOAD, SUPPORTED_VERSION, digest, gemma_download
from ltx_neuron.errors import UserError
from ltx_neuron.weights.sharding import COL, KV, Model, copies, rename, rule
from ltx_neuron.weights.tensorfile import TORCH_DTYPES, TensorFile

WEIGHT_DTYPES = ("BF16", "F16", "F32")


class Checkpoint(TensorFile):
    """The single-file LTX-2.3 checkpoint: its parsed config metadata decides every size."""

    def __init__(self, path: Path):
        super().__init__(path, CHECKPOINT_DOWNLOAD)
        version = self.metadata.get("model_version", "")
        if "config" not in self.metadata:
            raise UserError(
                f"{path} has no 'config' metadata, so it is not a released LTX-2.3 checkpoint.\n"
                f"Download one: {CHECKPOINT_DOWNLOAD}"
            )
        try:
            self.config = json.loads(self.metadata["config"])
        except ValueError as error:
            raise UserError(
                f"{path}: the 'config' metadata is not JSON: {error}\nDownload it again:"
                f" {self.download}"
            ) from None
        if not isinstance(self.config, dict) or "transformer" not in self.config:
            raise UserError(
                f"{path} is not an LTX checkpoint: its 'config' metadata has no 'transformer'"
                f" section.\nDownload one: {CHECKPOINT_DOWNLOAD}"
            )
        if not version.startswith(SUPPORTED_VERSION):
            raise UserError(
                f"{path} is of LTX version {version or '2.0 (no model_version metadata)'}, this"
                f" toolkit runs {SUPPORTED_VERSION}.\nDownload it: {CHECKPOINT_DOWNLOAD}"
            )
        self.model_version = version


def gemma_files(root: Path) -> list[TensorFile]:
    """The weight files of a Gemma root: model.safetensors or model-0000x-of-0000y.safetensors."""
    paths = sorted(Path(root).glob("model*.safetensors"))
    if not paths:
        raise UserError(
            f"no model*.safetensors in --gemma-root {root}\nDownload it: {gemma_download(root)}"
        )
    total = re.fullmatch(r"model-\d+-of-(\d+)", paths[0].stem)
    if total and int(total[1]) != len(paths):
        raise UserError(
            f"--gemma-root {root} has {len(paths)} of {int(total[1])} weight files\n"
            f"Download the others: {gemma_download(root)}"
        )
    return [TensorFile(path, gemma_download(root)) for path in paths]


class Source:
    """The tensors of one model under our names, wherever they lie in the given files."""

    def __init__(self, model: Model, files: list[TensorFile], heads: dict[str, int] | None = None):
        self.model, self.files, self.heads = model, files, heads or {}
        self.where: dict[str, tuple[TensorFile, str]] = {}
        for file in files:
            for key in file.shapes:
                try:
                    name = rename(model, key)
                except UserError as error:
                    raise UserError(
                        f"{file.path}: {error}\nThe published one: {file.download}"
                    ) from None
                if name is not None and file.dtypes[key] not in WEIGHT_DTYPES:
                    raise UserError(
                        f"{file.path}: {key} is stored as {file.dtypes[key]}, which is not"
                        f" implemented; wanted {', '.join(WEIGHT_DTYPES)}.\nThe published one:"
                        f" {file.download}"
                    )
                if name is not None and name in self.where:
                    raise UserError(
                        f"tensor {name!r} is in two places: {self.where[name][0].path} and"
                        f" {file.path}"
                    )
                if name is not None:
                    self.where[name] = (file, key)
        if not self.where:
            raise self._lacks("tensors")

    @property
    def fingerprint(self) -> str:
        return digest([file.fingerprint for file in self.files])

    @property
    def names(self) -> Iterable[str]:
        return self.where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        file, key = self._find(name)
        return file.shapes[key]

    def dtype(self, name: str) -> torch.dtype:
        file, key = self._find(name)
        return TORCH_DTYPES[file.dtypes[key]]

    def split(self, name: str) -> int | str | None:
        """The dimension in which the ranks' parts of a tensor differ: the sharding table's word."""
        kind = rule(self.model, name)
        return COL if kind == KV else kind

    def copies(self, name: str, tp: int) -> int:
        """How many neighbouring ranks keep the same part of a tensor."""
        return copies(rule(self.model, name), tp, self.heads)

    def nbytes(self, name: str) -> int:
        file, key = self._find(name)
        return math.prod(file.shapes[key]) * TORCH_DTYPES[file.dtypes[key]].itemsize

    def _find(self, name: str) -> tuple[TensorFile, str]:
        if name not in self.where:
            raise self._lacks(f"tensor {name!r}")
        return self.where[name]

    def _lacks(self, what: str) -> UserError:
        files = ", ".join(str(file.path) for file in self.files)
        return UserError(
            f"no {what} of {self.model.name} in {files}\nThe published one:"
            f" {self.files[-1].download}"
        )

    def pieces(
        self, name: str, bounds: list[tuple[int, int]], scratches: Iterator[mmap]
    ) -> Iterator[Tensor]:
        """A tensor's rows, from each start to its stop, each in the next scratch if it fits; a tensor
        without dimensions is one row."""
        file, key = self._find(name)
        yield from (file.read_uncached(key, *rows, next(scratches)) for rows in bounds)

    def described(self, tensors: dict[str, str]) -> dict:
        """What these tensors came from: the files, the digest of every tensor, and what the files
        hold beside them."""
        elsewhere: dict[str, int] = {}
        for file in self.files:
            for key in file.shapes.keys() - {k for f, k in self.where.values() if f is file}:
                component = max((p for p in self.model.elsewhere if key.startswith(p)), key=len)
                elsewhere[component] = elsewhere.get(component, 0) + 1
        files = [
            {"name": f.path.name, "bytes": f.size, "header_blake3": blake3(f.header).hexdigest()}
            for f in self.files
        ]
        return {
            "files": files,
            "tensors_xxh3_128": dict(sorted(tensors.items())),
            "elsewhere": dict(sorted(elsewhere.items())),
        }

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        file, key = self._find(name)
        return file.read(key)

    def mapped(self, name: str) -> Tensor:
        """A whole tensor as the files hold it: their own pages."""
        file, key = self._find(name)
        return file.mapped(key)

    def prefetch(self, name: str) -> None:
        file, key = self._find(name)
        file.prefetch(key)

    def rows(self, name: str, indices: list[int]) -> Tensor:
        """Single rows of a tensor."""
        file, key = self._find(name)
        return torch.cat([file.read(key, index, index + 1) for index in indices])
