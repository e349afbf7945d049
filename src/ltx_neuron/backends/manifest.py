"""A compiled program's manifest: what its graphs take, return and cost. Written and read here
alone."""

import hashlib
import typing
import zipfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json
from ltx_neuron.models.signatures import Field


class Manifest:
    """A compiled program's manifest, read back: what its graphs take, return and hold."""

    def __init__(self, folder: Path):
        self.folder = folder
        content = read_json(folder / MANIFEST)
        self.identity, self.graphs = content["identity"], content["graphs"]
        self.runs = {
            run: [(name, first) for name, first in calls] for run, calls in content["runs"].items()
        }
        self.fields = {
            name: Field(
                **{**field, "shape": tuple(field["shape"]), "dtype": getattr(torch, field["dtype"])}
            )
            for name, field in content["fields"].items()
        }

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Name and local shape of every weight the program's calls use."""
        from ltx_neuron.models.programs import weight_name

        return {
            weight_name(parameter, first): tuple(shape)
            for calls in self.runs.values()
            for name, first in calls
            for parameter, shape in self.graphs[name]["parameters"].items()
        }

    def cost(self, run: str = "main") -> dict[str, int]:
        """What one run of the program costs a rank: all-reduces, their bytes, and FLOPs."""
        calls = [self.graphs[name]["cost"] for name, _ in self.runs[run]]
        return {key: sum(call[key] for call in calls) for key in calls[0]}

    def load(self, name: str) -> torch.export.ExportedProgram:
        """Read a graph file. Raises UserError if it is not the file the manifest was written
        for."""
        path = self.folder / graph_file(name)
        if hashlib.sha256(path.read_bytes()).hexdigest() != self.graphs[name]["sha256"]:
            raise UserError(
                f"{path} is not the graph its manifest describes; delete {self.folder} and compile"
                " again"
            )
        if any(
            i.filename.endswith((".pt", ".pkl")) and i.file_size
            for i in zipfile.ZipFile(path).infolist()
        ):
            raise UserError(
                f"{path} holds pickled data, which this toolkit neither writes nor reads"
            )
        with _remembered_type_hints():
            return torch.export.load(path)


@contextmanager
def _remembered_type_hints():
    """torch resolves the type hints of its few schema classes anew for every node: half of the time
    of a load."""
    resolve, known = typing.get_type_hints, {}

    def remember(kind, **scopes):
        if kind not in known:
            known[kind] = resolve(kind, **scopes)
        return known[kind]

    with mock.patch.object(typing, "get_type_hints", remember):
        yield


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def graph_file(name: str, backend: str = "torchdist") -> str:
    """A graph's file in its folder. A name that would lead out of it is none."""
    return f"{name}.{'pt' if backend == 'nxd' else 'pt2'}" if name.isidentifier() else ""
