"""Where weights and graphs lie under --artifacts-dir, and the identities that say what they were
made from and for.

Weights depend on (checkpoint, tp, dtype); graphs on (model config, bucket, tp, dtype, backend, cut,
code, versions). They never mix. A folder is named by its identity; when the wanted one is absent,
the nearest one there is names the difference.
"""

import ast
import hashlib
import shlex
from functools import cache
from pathlib import Path

from ltx_neuron.backends.manifest import graph_file, sha256
from ltx_neuron.config import digest
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json
from ltx_neuron.weights.rankfiles import verify

LAYOUT = 3  # of rank files: raise it when what the sharders write changes
# What the fields of an identity are to a person, where the name does not say it.
_MEANINGS = {
    "source": "the checkpoint's content",
    "config": "the model's sizes",
    "code": "this toolkit's code",
    "torch": "the version of PyTorch",
    "bucket": "the video's size in tokens, or the prompt's",
}
_TRACING = {
    "torchdist": "backends/export",
    "nxd": "backends/nxd_compile",
}  # what makes a backend's graphs from them


def folder(artifacts: Path, identity: dict) -> Path:
    """artifacts/<weights|graphs>/<model>-<what a person looks for>-<digest of the whole
    identity>"""
    said = [
        identity["model"],
        *([identity["bucket"]] if "bucket" in identity else []),
        f"tp{identity['tp']}",
        identity["dtype"],
        digest(identity)[:8],
    ]
    return Path(artifacts) / identity["kind"] / "-".join(said)


def find(artifacts: Path, identity: dict, command: str) -> Path:
    """The finished folder of that identity; else a UserError that names the differing fields and
    the command to type."""
    path = folder(artifacts, identity)
    if (path / MANIFEST).is_file():
        got = _identity(path)
        problems = (
            _problems(path) if got == identity else [f"its {MANIFEST} {_said(identity, got)}"]
        )
        if problems:
            again = f"rm -r {shlex.quote(str(path))} && {command}"
            raise UserError(
                "\n  ".join([f"{path} is damaged:", *problems]) + f"\nMake it again: {again}"
            )
        return path
    others = [
        other
        for other in _identities(Path(artifacts) / identity["kind"])
        if other.get("model") == identity["model"]
    ]
    what = f"{identity['model']} {identity['kind']}"
    if path.is_dir():
        raise UserError(
            f"the {what} in {path} were never finished: there is no {MANIFEST}\nMake them again:"
            f" {command}"
        )
    if not others:
        raise UserError(f"no {what} in {artifacts}\nMake them: {command}")
    nearest = min(others, key=lambda other: len(differences(identity, other)))
    raise UserError(
        f"no fitting {what} in {artifacts}. The nearest {_said(identity, nearest)}\nMake them:"
        f" {command}"
    )


def _problems(path: Path) -> list[str]:
    """What is wrong with a finished folder's files: of weights the sizes, of graphs, which are
    small, everything."""
    content = read_json(path / MANIFEST)
    if content["identity"]["kind"] == "weights":
        return verify(path, quick=True)
    backend = content["identity"].get("backend")
    try:
        graphs = {
            graph_file(name, backend): graph["sha256"]
            for name, graph in content["graphs"].items()
            if graph["file"] == graph_file(name, backend)
        }
    except (KeyError, TypeError, AttributeError):
        graphs = {}
    if not graphs or len(graphs) != len(content["graphs"]):
        return [f"{MANIFEST}: not a list of graphs"]
    problems = []
    for name, digest_wanted in graphs.items():
        if not (path / name).is_file():
            problems.append(f"{name}: missing")
        elif sha256(path / name) != digest_wanted:
            problems.append(f"{name}: content differs from its sha256")
    return problems


def _said(wanted: dict, got: dict | None) -> str:
    """What two identities differ in, or that there is none."""
    if got is None:
        return "cannot be read"
    fields = [
        f"{k}{f' ({_MEANINGS[k]})' if k in _MEANINGS else ''}: got {g}, wanted {w}"
        for k, w, g in differences(wanted, got)
    ]
    return "differs in " + "; ".join(fields)


def differences(wanted: dict, got: dict) -> list[tuple]:
    """(field, wanted, got) for every field in which two identities differ."""
    return [
        (k, wanted.get(k), got.get(k))
        for k in sorted({*wanted, *got})
        if wanted.get(k) != got.get(k)
    ]


def _identities(parent: Path) -> list[dict]:
    """Those of the finished folders; somebody's broken one is no candidate."""
    found = (_identity(path.parent) for path in sorted(parent.glob(f"*/{MANIFEST}")))
    return [identity for identity in found if identity is not None]


def finished_weights(artifacts: Path, model: str) -> list[Path]:
    """The folders of a model's finished weight sets."""
    found = [path.parent for path in sorted((Path(artifacts) / "weights").glob(f"*/{MANIFEST}"))]
    return [path for path in found if (_identity(path) or {}).get("model", model) == model]


def _identity(path: Path) -> dict | None:
    """What a finished folder was made from and for; None where its manifest cannot be read."""
    try:
        return {**read_json(path / MANIFEST)["identity"]}
    except (UserError, KeyError, TypeError):
        return None


def code_digest(backend: str, *more: str) -> str:
    """Identity of the traced code (every file of models/ and what a backend traces with), and of
    `more` files or rooms: a graph made by other code is refused."""
    return _digest_of_code(("models", _TRACING[backend], *more))


@cache
def _digest_of_code(names: tuple[str, ...]) -> str:
    """Comments and docstrings do not count."""
    hasher, package = hashlib.sha256(), Path(__file__).parent
    for name in names:
        room = package / name
        for path in sorted(room.rglob("*.py")) if room.is_dir() else [package / f"{name}.py"]:
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                first = body[0] if isinstance(body, list) and body else None
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    del body[0]
            hasher.update(f"{path.relative_to(package)} {ast.dump(tree)}".encode())
    return hasher.hexdigest()[:12]
