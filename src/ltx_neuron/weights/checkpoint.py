"""The released files: the checkpoint, Gemma3's folder, and the tensors of one model in them.

Opening a file reads its header only. Tensors are read on request, whole or by rows.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from blake3 import blake3
from torch import Tensor

from ltx_neuron.config.common import CHECKPOINT_DOWNLOAD, digest, gemma_download
from ltx_neuron.config.release import RELEASES, identified, parse_release
from ltx_neuron.errors import UserError, as_user_errors
from ltx_neuron.format import print_once
from ltx_neuron.hub import DEFAULT_REPO, RELEASE_FILES, download_again
from ltx_neuron.weights.sharding import COL, COMPONENTS, DIFFUSION, KV, Model, copies, rename, rule
from ltx_neuron.weights.tensorfile import TensorFile, WeightFile

SHARD = re.compile(r"-\d+-of-(\d+)\.safetensors$")  # of a name, with the number of parts
DOWNLOAD = (
    f"{CHECKPOINT_DOWNLOAD}\nand type --checkpoint-path {RELEASE_FILES[DEFAULT_REPO]['distilled']}"
)


class Checkpoint(WeightFile):
    """The single-file LTX-2.3 checkpoint, or the transformer's file of LTX-2.5. `config`, the JSON
    in its metadata, determines all sizes of its models. UserError for a file that is not a
    checkpoint, and for an unsupported version."""

    def __init__(self, path: Path):
        super().__init__(path, DOWNLOAD)
        if re.search(SHARD, path.name):
            raise UserError(
                f"{path} is one of several parts of a checkpoint; wanted one file, as published\n"
                f"Download it: {self.download}"
            )
        if "config" not in self.metadata:
            layout = " (but of diffusers' layout)" * path.name.startswith("diffusion_pytorch_model")
            raise UserError(
                f"{path} has no 'config' metadata, so it is not a released checkpoint of LTX-2"
                f"{layout}.\nDownload one: {self.download}"
            )
        try:
            self.config = json.loads(self.metadata["config"])
        except ValueError as error:
            raise UserError(
                f"{path}: the 'config' metadata is not JSON: {error}\nDownload it again:"
                f" {self.download}"
            ) from None
        sections = self.config if isinstance(self.config, dict) else {}
        if not isinstance(sections.get("transformer"), dict):
            raise UserError(
                f"{path} is not an LTX checkpoint: its 'config' metadata has no 'transformer'"
                f" section.\nDownload one: {self.download}"
            )
        label = self.metadata.get("model_version", "")
        release, self.model_version = identified(label, self.config["transformer"])
        if release is None:
            raise UserError(
                f"{path} is of LTX version {self.model_version}, this toolkit runs"
                f" {' and '.join(supported.version for supported in RELEASES)}.\n"
                f"Download it: {self.download}"
            )
        self.release = release
        if release.split:
            self.download = download_again(self.path) or release.download("distilled")

    def _parse(self, entries: dict) -> None:
        super()._parse(entries)
        release = parse_release(self.metadata.get("model_version", ""))
        if release and release.split:
            self.download = download_again(self.path) or release.download("distilled")

    @cached_property
    def _bare(self) -> str | None:
        """The prefix of the transformer's names in the file: one alone may lack DIFFUSION."""
        known = DIFFUSION, "", "diffusion_model."
        return next(
            (prefix for prefix in known if f"{prefix}patchify_proj.weight" in self.shapes), None
        )

    def name_of(self, key: str) -> str | None:
        if key.startswith(COMPONENTS):
            return key
        bare = self._bare
        return DIFFUSION + key[len(bare) :] if bare is not None and key.startswith(bare) else None

    def say_others(self) -> None:
        """Print once how many tensors no model reads: other models', and copies (EMA)."""
        others = [name for name in self.others if not name.endswith("scaled_fp8")]
        first = dict.fromkeys(name.partition(".")[0] for name in others)
        names = ", ".join([*first][:3]) + ", ..." * (len(first) > 3)
        if others:
            what = f"{len(others):,} tensors of other models are not read ({names})"
            print_once(f"{self.path}: {what}")


def gemma_files(root: Path) -> list[TensorFile]:
    """A Gemma folder's model.safetensors or model-0000x-of-0000y. UserError without all."""
    paths = sorted(Path(root).glob("model*.safetensors"))
    sets: dict[str, list[Path]] = {}  # by the number of files in their names
    for path in paths:
        sets.setdefault("".join(SHARD.findall(path.name)), []).append(path)
    whole = [files for count, files in sets.items() if len(files) == int(count or 1)]
    if not paths:
        with as_user_errors("--gemma-root"):
            os.listdir(root)  # glob hides a missing permission
        raise UserError(
            f"no model*.safetensors in --gemma-root {root}\nDownload it: {gemma_download(root)}"
        )
    if len(whole) != 1:
        has = [f"{len(files)} of {int(count or 1)} weight files" for count, files in sets.items()]
        others = "one set of them" if whole else "the others"
        raise UserError(
            f"--gemma-root {root} has {' and '.join(has)}\nDownload {others}:"
            f" {gemma_download(root, beside=bool(whole))}"
        )
    return [TensorFile(path, gemma_download(root)) for path in whole[0]]


class Source:
    """The tensors of one model under this toolkit's names, from one or several files. Tensors of no
    known component are left out: a file may have those of other models, or copies (EMA). UserError
    for a tensor in an unsupported dtype or layout, or in two files."""

    def __init__(self, model: Model, files: list[TensorFile], heads: dict[str, int] | None = None):
        """heads: counts of attention heads by name, for tensors that are split by heads."""
        self.model, self.files, self.heads = model, files, heads or {}
        self.notes: list[str] = []  # sentences for the user about what was merged into it
        # Our name -> (the tensor's file, its name there).
        self.locations: dict[str, tuple[TensorFile, str]] = {}
        for file in files:
            for key in file.shapes:
                if (name := rename(model, key)) is None:
                    continue
                if problem := file.weight_problem(key):
                    raise UserError(
                        f"{file.path}: {key} is {problem}.\nThe published one: {file.download}"
                    )
                if name in self.locations:
                    raise UserError(
                        f"tensor {name!r} is in two places: {self.locations[name][0].path} and"
                        f" {file.path}"
                    )
                self.locations[name] = (file, key)
        if not self.locations:
            raise self._lacks("tensors")

    @cached_property
    def fingerprint(self) -> str:
        return digest([file.fingerprint for file in self.files])

    @property
    def names(self) -> Iterable[str]:
        return self.locations.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        file, key = self._find(name)
        return file.shapes[key]

    def split(self, name: str) -> int | str | None:
        """The dimension in which the ranks split a tensor, None for a copy on each, or HOST."""
        kind = rule(self.model, name)
        return COL if kind == KV else kind

    def copies(self, name: str, tp: int) -> int:
        """Neighbouring ranks with the same part: 1 unless ranks outnumber key-value heads."""
        return copies(self.model, name, self.locations, tp, self.heads)

    def nbytes(self, name: str) -> int:
        file, key = self._find(name)
        return math.prod(file.shapes[key]) * file.torch_dtype(key).itemsize

    def _find(self, name: str) -> tuple[TensorFile, str]:
        if name not in self.locations:
            raise self._lacks(f"tensor {name!r}")
        return self.locations[name]

    def _lacks(self, what: str) -> UserError:
        files = ", ".join(str(file.path) for file in self.files)
        return UserError(
            f"no {what} of {self.model.name} in {files}\nThe published one:"
            f" {self.files[-1].download}"
        )

    def pieces(self, name: str, bounds: list[tuple[int, int]]) -> Iterator[Tensor]:
        """Rows start..stop of a tensor for each of `bounds`. A scalar is one row."""
        file, key = self._find(name)
        yield from (file.read(key, *rows) for rows in bounds)

    def provenance(self, tensors: dict[str, str]) -> dict:
        """The source's entry in a manifest: its files, the digests of the model's tensors
        (`tensors`), and the number of other components' tensors in the files."""
        elsewhere: dict[str, int] = {}
        for file in self.files:
            ours = {key for holder, key in self.locations.values() if holder is file}
            for key in file.shapes.keys() - ours:
                named = (prefix for prefix in COMPONENTS if key.startswith(prefix))
                component = next(named, f"{key.partition('.')[0]}.")
                elsewhere[component] = elsewhere.get(component, 0) + 1
        return {
            "files": [
                {
                    "name": file.path.name,
                    "bytes": file.size,
                    "header_blake3": blake3(file.header).hexdigest(),
                }
                for file in self.files
            ],
            "tensors_xxh3_128": dict(sorted(tensors.items())),
            "elsewhere": dict(sorted(elsewhere.items())),
        }

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, as a copy."""
        file, key = self._find(name)
        return file.read(key)

    def read_mapped(self, name: str) -> Tensor:
        """A whole tensor, mapped from the page cache; of float8, a dequantised copy."""
        file, key = self._find(name)
        return file.read_mapped(key)

    def prefetch(self, name: str) -> None:
        """Start reading a tensor into the page cache, ahead of `read_mapped`."""
        file, key = self._find(name)
        file.prefetch(key)

    def rows(self, name: str, indices: list[int]) -> Tensor:
        file, key = self._find(name)
        return file.rows(key, indices)
