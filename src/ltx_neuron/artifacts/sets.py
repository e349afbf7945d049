"""A set: the files of one finished folder of artifacts, as a store describes them, and what is
checked of a description that somebody else wrote.

A file is named by the digest that its folder's manifest has for it: blake3 of weights, sha256 of
graphs. The manifest itself is one more file, named by its blake3.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from ltx_neuron.artifacts import finished_folders, folder
from ltx_neuron.backends.manifest import graph_file
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, MAX_JSON_BYTES, read_json
from ltx_neuron.weights.rankfiles import file_names

KINDS = ("weights", "graphs")
SCHEMA = 1
_HASHERS: dict[str, Callable[[], Any]] = {"blake3": blake3, "sha256": hashlib.sha256}
KEY = re.compile(f"(?:{'|'.join(_HASHERS)})-[0-9a-f]{{64}}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # of a folder: never "..", nothing hidden
_BLOCK_BYTES = 16 * 2**20  # read and hashed at once


class Blob(NamedTuple):
    """A file's content: <how it was hashed>-<digest>, and its size."""

    key: str
    bytes: int


class ArtifactSet(NamedTuple):
    """What a finished folder was made from and for, and its files by name.

    pushed  when it was sent to its store, as in 2026-11-22T10:00:00Z
    """

    identity: dict
    files: dict[str, Blob]
    pushed: str = ""

    @property
    def name(self) -> str:
        """Of its folder under the artifacts, as in graphs/dit-v6144-a126-t1-s8-tp4-bfloat16-..."""
        return folder(Path(), self.identity).as_posix()

    @property
    def bytes(self) -> int:
        return sum(blob.bytes for blob in self.files.values())


def local_folders(artifacts: Path) -> dict[str, Path]:
    """The finished folders of weights and graphs, by name."""
    folders = [path for kind in KINDS for path in finished_folders(artifacts, kind)]
    return {f"{path.parent.name}/{path.name}": path for path in folders}


def of_folder(path: Path) -> ArtifactSet:
    """What a finished folder holds, by its manifest. No file but the manifest is read. UserError
    where one is missing, or the manifest describes none that we make."""
    manifest = path / MANIFEST
    content = read_json(manifest)
    try:
        files = {
            name: Blob(key, (path / name).stat().st_size) for name, key in keys_in(content).items()
        }
        found = ArtifactSet(content["identity"], files | {MANIFEST: _blob_of(manifest)})
        if found.name != f"{path.parent.name}/{path.name}":
            raise ValueError(f"its identity is that of {found.name}")
    except FileNotFoundError as error:
        raise UserError(f"{path} is damaged: {Path(error.filename).name} is missing") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{manifest} does not describe artifacts ({error})") from None
    return found


def keys_in(manifest: dict) -> dict[str, str]:
    """File name -> key of each file that a manifest describes. ValueError, KeyError, TypeError or
    AttributeError for a manifest that is none, and for names that our folders do not have."""
    identity = manifest["identity"]
    if identity["kind"] == "weights":
        entries, tp = manifest["files"], identity["tp"]
        if type(tp) is not int or len(entries) != tp + 1 or {*entries} != {*file_names(tp)}:
            raise ValueError(f"files {sorted(entries)[:8]}")
        keys = {name: f"blake3-{entry['blake3']}" for name, entry in entries.items()}
    else:
        graphs, backend = manifest["graphs"], identity["backend"]
        names = {graph: graph_file(graph, backend) for graph in graphs}
        if not graphs or any(graphs[graph]["file"] != name for graph, name in names.items()):
            raise ValueError(f"graphs {sorted(graphs)[:8]}")
        keys = {names[graph]: f"sha256-{entry['sha256']}" for graph, entry in graphs.items()}
    _check_keys(keys.values())
    return keys


def _check_keys(keys) -> None:
    if wrong := [key for key in keys if not KEY.fullmatch(key)]:
        raise ValueError(f"{wrong[0]!r} is no digest")


def encoded(described: ArtifactSet) -> bytes:
    """A set as a store keeps it."""
    files = {name: [*blob] for name, blob in described.files.items()}
    return sealed({**described._asdict(), "files": files})


def decoded(text: bytes, name: str) -> ArtifactSet:
    """The set of that name, as `encoded` wrote it. ValueError that says what is wrong with one that
    is not: damaged, of another name, or with names that would lead out of its folder."""
    try:
        content = unsealed(text)
        files = {file: Blob(*blob) for file, blob in content.pop("files").items()}
        described = ArtifactSet(**content, files=files)
        _check(described, name)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no set of artifacts ({type(error).__name__}: {error})") from None
    return described


def _check(described: ArtifactSet, name: str) -> None:
    """Raise ValueError unless a set is the one of that name and all its files lie in its folder."""
    kind, _, own = name.partition("/")
    if kind not in KINDS or not NAME.fullmatch(own) or described.name != name:
        raise ValueError(f"its identity is that of {described.name!r}")
    wrong = [file for file in described.files if not NAME.fullmatch(file)]
    if wrong or MANIFEST not in described.files:
        raise ValueError(f"it names the file {wrong[0]!r}" if wrong else f"it has no {MANIFEST}")
    _check_keys(blob.key for blob in described.files.values())
    for file, blob in described.files.items():
        if type(blob.bytes) is not int or blob.bytes < 0:
            raise ValueError(f"{file} has {blob.bytes!r} bytes")
    if described.files[MANIFEST].bytes > MAX_JSON_BYTES:
        raise ValueError(f"its {MANIFEST} has {described.files[MANIFEST].bytes} bytes")


def check_manifest(described: ArtifactSet, manifest: bytes) -> None:
    """Raise ValueError unless a set and the manifest of its folder say the same."""
    try:
        content = json.loads(manifest)
        keys = {name: blob.key for name, blob in described.files.items() if name != MANIFEST}
        if content["identity"] != described.identity or keys_in(content) != keys:
            raise ValueError(f"its {MANIFEST} describes other files")
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its {MANIFEST} is none ({type(error).__name__}: {error})") from None


def sealed(content: dict) -> bytes:
    """JSON that carries a digest of itself."""
    content = {"schema": SCHEMA, **content}
    return json.dumps({**content, "blake3": _digest_of(content)}, indent=1).encode()


def unsealed(text: bytes) -> dict:
    """What was `sealed`; ValueError where that is damaged, or something else."""
    try:
        content = json.loads(text)
        written, schema = content.pop("blake3"), content["schema"]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no set of artifacts ({type(error).__name__}: {error})") from None
    if schema != SCHEMA:
        raise ValueError(f"schema {schema}, wanted {SCHEMA}: another version wrote it")
    if written != (got := _digest_of(content)):
        raise ValueError(f"got blake3 {got}, wanted {written!r}")
    return {field: value for field, value in content.items() if field != "schema"}


def _digest_of(content: dict) -> str:
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hasher(key: str):
    """A new digest of the kind that a key names."""
    return _HASHERS[key.partition("-")[0]]()


def key_of(key: str, hashed) -> str:
    """The key of what was hashed in the way of another key."""
    return f"{key.partition('-')[0]}-{hashed.hexdigest()}"


def is_blob(path: Path, blob: Blob) -> bool:
    """Whether a file has a blob's content; all of it is read where the size is right."""
    return path.is_file() and path.stat().st_size == blob.bytes and _blob_of(path, blob.key) == blob


def _blob_of(path: Path, key: str = "blake3-") -> Blob:
    """A file's content, hashed in the way of a key."""
    hashed, size = hasher(key), 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hashed.update(block)
            size += len(block)
    return Blob(key_of(key, hashed), size)
