"""The manifest of a compiled program: inputs, outputs and costs of its graphs."""

import hashlib
import typing
import zipfile
from collections.abc import Collection
from functools import cache
from pathlib import Path
from unittest import mock

import torch

from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, changed, check_readable, exclusive, read_json, write_checked
from ltx_neuron.models.programs import Graph, Program, weight_name
from ltx_neuron.models.signatures import Field, upload_bytes


def describe_graph(graph: Graph, path: Path, cost: dict[str, int]) -> dict:
    """The manifest's entry for a graph whose file exists. cost: of one call, from export.cost."""
    # One rank's shapes, in the order of the graph's weight inputs.
    parameters = graph.module.named_parameters()
    return {
        "file": path.name,
        "sha256": sha256(path),
        "parameters": {name: list(value.shape) for name, value in parameters},
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "cost": cost,
    }


def write_manifest(
    folder: Path, identity: dict, program: Program, graphs: dict[str, dict], **compiler: str
) -> None:
    """Write the manifest of a program whose graphs are in `folder`: it is finished then. graphs: by
    name, from describe_graph. compiler: the compiler's versions and flags."""
    fields = {
        name: {**field._asdict(), "dtype": str(field.dtype).removeprefix("torch.")}
        for name, field in program.fields.items()
    }
    content = {"identity": identity, "graphs": graphs, "runs": program.runs, "fields": fields}
    write_checked(folder, content | compiler)


def record_size(folder: Path, size: dict) -> None:
    """Add a video size to those for which a finished folder was compiled. Sizes are not part of its
    identity, because several sizes share their token counts."""
    if size in recorded_sizes(folder):
        return
    with exclusive(folder, "recording the size of"):
        content = read_json(folder / MANIFEST)
        if not changed(content):  # else whoever uses it says so
            sizes = content.get("sizes", [])
            write_checked(folder, content | {"sizes": [*sizes, size]})


def recorded_sizes(folder: Path) -> list[dict]:
    return read_json(folder / MANIFEST).get("sizes", [])


class Manifest:
    """A compiled program's manifest, read back."""

    def __init__(self, folder: Path):
        self.folder = folder
        content = read_json(folder / MANIFEST)
        # Every property on which the graphs depend; the graphs by name, from describe_graph.
        self.identity, self.graphs = content["identity"], content["graphs"]
        # JSON stores tuples as lists and dtypes as names.
        self.runs = {
            run: [(name, first) for name, first in calls] for run, calls in content["runs"].items()
        }
        self.fields = {
            name: Field(**of | {"shape": (*of["shape"],), "dtype": getattr(torch, of["dtype"])})
            for name, of in content["fields"].items()
        }

    @property
    def outputs(self) -> set[str]:
        return {name for graph in self.graphs.values() for name in graph["outputs"]}

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Name and one rank's shape of every weight that the program's calls take."""
        return {
            weight_name(parameter, first): tuple(shape)
            for calls in self.runs.values()
            for name, first in calls
            for parameter, shape in self.graphs[name]["parameters"].items()
        }

    def cost(self, run: str = "main") -> dict[str, int]:
        """The cost of one run of the program for one rank, with the keys of export.cost."""
        calls = [self.graphs[name]["cost"] for name, _ in self.runs[run]]
        sums = {key: sum(call[key] for call in calls) for key in calls[0] if key != "peak_bytes"}
        # Peaks are not added: a graph's intermediates are freed before the next graph runs.
        return sums | {"peak_bytes": max(call["peak_bytes"] for call in calls)}

    def upload_bytes(self, only: Collection[str] = ()) -> int:
        """As in signatures.upload_bytes."""
        inputs = {name for graph in self.graphs.values() for name in graph["inputs"]}
        return upload_bytes(self.fields, inputs, self.outputs, only)

    def load(self, name: str) -> torch.export.ExportedProgram:
        """Read a graph of torch.export. UserError if its digest differs, or it contains a
        pickle."""
        path = self.folder / graph_file(name)
        if sha256(path) != self.graphs[name]["sha256"]:
            raise UserError(
                f"{path} is not the graph its manifest describes; delete {self.folder} and compile"
                " again"
            )
        # torch.export.load would unpickle these, which runs any code that they name.
        if any(
            entry.filename.endswith((".pt", ".pkl")) and entry.file_size
            for entry in zipfile.ZipFile(path).infolist()
        ):
            raise UserError(
                f"{path} holds pickled data, which this toolkit neither writes nor reads"
            )
        # torch resolves the type hints of its schema's classes for every node. Cached, four ranks
        # on two cores load the graphs of a tiny step in 2.4 s instead of 3.4 s.
        hints = cache(typing.get_type_hints)
        with mock.patch.object(typing, "get_type_hints", lambda kind, **_: hints(kind)):
            return torch.export.load(path)


def damaged_graphs(folder: Path) -> list[str]:
    """Errors of the graph files of a finished folder; empty if they are intact."""
    try:
        entries = graph_entries(read_json(folder / MANIFEST))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return [f"{MANIFEST}: not a list of graphs ({error})"]
    problems = []
    for name, entry in entries.items():
        if not (folder / name).is_file():
            problems.append(f"{name}: missing")
        elif sha256(folder / name) != entry["sha256"]:
            problems.append(f"{name}: content differs from its sha256")
    return problems


def graph_entries(manifest: dict) -> dict[str, dict]:
    """File name -> {"sha256"} of each graph. Raises ValueError, KeyError, TypeError or
    AttributeError for other manifests, and for file names that this toolkit does not use."""
    if changed(manifest):
        raise ValueError("its content differs from its checksum")
    graphs, backend = manifest["graphs"], manifest["identity"].get("backend")
    names = {graph: graph_file(graph, backend) for graph in graphs}
    if not graphs or any(not n or graphs[graph]["file"] != n for graph, n in names.items()):
        raise ValueError(f"graphs {sorted(graphs)[:8]}")
    return {names[graph]: {"sha256": entry["sha256"]} for graph, entry in graphs.items()}


_digests: dict[tuple, str] = {}  # of files that this process has hashed


def sha256(path: Path) -> str:
    """SHA-256 of a file. A process hashes a file again only if its size, modification time or inode
    changed. Raises UserError if it is not a readable file."""
    check_readable(path)
    status = path.stat()
    key = str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ino
    # A replaced file has another inode even if its time was reset.
    if key not in _digests:
        with open(path, "rb") as file:
            _digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _digests[key]


def graph_file(name: str, backend: str = "torchdist") -> str:
    """The name of a graph's file in its folder; empty for a name outside of it."""
    # Manifests may be written by others.
    return f"{name}.{'pt' if backend == 'nxd' else 'pt2'}" if name.isidentifier() else ""
