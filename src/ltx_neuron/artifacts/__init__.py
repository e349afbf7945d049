"""Where weights and graphs lie under --artifacts-dir, and the identities that say what they were
made from and for. `ltx-neuron artifacts` sends them to other machines.

Weights depend on (checkpoint, tp, dtype); graphs on (model config, bucket, tp, dtype, backend, cut,
code, versions). They never mix. A folder is named by its identity; when the wanted one is absent,
the nearest one there is names the difference.
"""

import ast
import hashlib
import shlex
from functools import cache
from pathlib import Path

from ltx_neuron.backends.manifest import damaged_graphs
from ltx_neuron.config.common import digest
from ltx_neuron.errors import UserError, in_words
from ltx_neuron.files import MANIFEST, check_readable, read_json
from ltx_neuron.weights.rankfiles import verify

LAYOUT = 3  # of rank files: raise it when what the sharders write changes
# What the fields of an identity are to a person, where the name does not say it.
_MEANINGS = {
    "source": "the checkpoint's content",
    "config": "the model's sizes",
    "code": "this toolkit's code",
    "torch": "the version of PyTorch",
    "bucket": "the video's size in tokens, the prompt's, or a tile's in latents",
}
# What makes a backend's graphs from them.
_TRACING = {
    "torchdist": ("backends/export",),
    "nxd": ("backends/nxd/compile", "backends/export", "backends/nki"),
}


def folder(artifacts: Path, identity: dict) -> Path:
    """artifacts/<weights|graphs>/<model>-<bucket>-<tp>-<dtype>-<digest of the whole identity>"""
    parts = [identity["model"], f"tp{identity['tp']}", identity["dtype"], digest(identity)[:8]]
    if "bucket" in identity:
        parts.insert(1, identity["bucket"])
    return Path(artifacts) / identity["kind"] / "-".join(parts)


def find(artifacts: Path, identity: dict, command: str) -> Path:
    """The finished folder of an identity.

    Raises UserError that names the fields in which the nearest one differs, and the command to
    type.
    """
    path, what = folder(artifacts, identity), f"{identity['model']} {identity['kind']}"
    with in_words("--artifacts-dir"):
        finished = (path / MANIFEST).is_file()
    if finished:
        check_readable(path / MANIFEST)  # one that may not be read is not damaged
        if (stored := stored_identity(path)) != identity:
            problems = [f"its {MANIFEST} {_differing(identity, stored)}"]
        else:
            problems = damage(path, identity)
        if not problems:
            return path
        listed = "\n  ".join([f"{path} is damaged:", *problems])
        raise UserError(f"{listed}\nMake it again: rm -r {shlex.quote(str(path))} && {command}")
    if path.is_dir():
        raise UserError(
            f"the {what} in {path} were never finished: there is no {MANIFEST}\nMake them again:"
            f" {command}"
        )
    stored = map(stored_identity, finished_folders(artifacts, identity["kind"]))
    others = [other for other in stored if other and other.get("model") == identity["model"]]
    if not others:
        raise UserError(f"no {what} in {artifacts}\nMake them: {command}")

    def distance(other: dict) -> tuple[int, bool]:
        # Of two that are as near, the one of the same size tells more.
        return len(differences(identity, other)), other.get("bucket") != identity.get("bucket")

    nearest = min(others, key=distance)
    raise UserError(
        f"no fitting {what} in {artifacts}. The nearest {_differing(identity, nearest)}\nMake"
        f" them: {command}"
    )


def damage(path: Path, identity: dict, quick: bool = True) -> list[str]:
    """What is wrong with the files of a finished folder; empty if they are whole. quick: of weights
    compare the sizes only; graphs, which are small, are read in any case."""
    return verify(path, quick) if identity["kind"] == "weights" else damaged_graphs(path)


def differences(wanted: dict, stored: dict) -> list[tuple]:
    """(field, wanted, stored) for every field in which two identities differ."""
    return [
        (field, wanted.get(field), stored.get(field))
        for field in sorted({*wanted, *stored})
        if wanted.get(field) != stored.get(field)
    ]


def _differing(wanted: dict, stored: dict | None) -> str:
    """What two identities differ in, in words."""
    if stored is None:
        return "cannot be read"
    fields = []
    for field, want, got in differences(wanted, stored):
        meaning = f" ({_MEANINGS[field]})" if field in _MEANINGS else ""
        fields.append(f"{field}{meaning}: got {got}, wanted {want}")
    return "differs in " + "; ".join(fields)


def finished_weights(artifacts: Path, model: str) -> list[Path]:
    """The folders of a model's finished weight sets; also those whose manifest cannot be read."""
    folders = finished_folders(artifacts, "weights")
    return [path for path in folders if (stored_identity(path) or {}).get("model", model) == model]


def finished_folders(artifacts: Path, kind: str) -> list[Path]:
    return [path.parent for path in sorted((Path(artifacts) / kind).glob(f"*/{MANIFEST}"))]


def stored_identity(path: Path) -> dict | None:
    """What a finished folder was made from and for; None where its manifest cannot be read."""
    try:
        return {**read_json(path / MANIFEST)["identity"]}
    except (UserError, KeyError, TypeError):
        return None


def code_digest(backend: str, *more: str) -> str:
    """Identity of the traced code (every file of models/ and what a backend traces with), and of
    `more` files or rooms: a graph made by other code is refused."""
    return _digest_of_code(("models", *_TRACING[backend], *more))


@cache
def _digest_of_code(names: tuple[str, ...]) -> str:
    """Comments and docstrings do not count."""
    hasher, package = hashlib.sha256(), Path(__file__).parents[1]
    for name in names:
        room = package / name
        for path in sorted(room.rglob("*.py")) if room.is_dir() else [package / f"{name}.py"]:
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                if not isinstance(body, list) or not body:
                    continue
                first = body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    del body[0]
            hasher.update(f"{path.relative_to(package)} {ast.dump(tree)}".encode())
    return hasher.hexdigest()[:12]
