"""The folders of weights and graphs under --artifacts-dir, and their identities. `ltx-neuron
artifacts` copies them to other machines.

An identity lists all that a folder's content depends on: (checkpoint, tp, dtype) for weights,
(model config, bucket, tp, dtype, backend, cut, code, versions) for graphs. Its digest is in the
folder's name. If a folder is missing, the error names the differences from the nearest one.
"""

import ast
import hashlib
import shlex
from functools import cache
from pathlib import Path

from ltx_neuron.backends.manifest import damaged_graphs
from ltx_neuron.config.common import digest
from ltx_neuron.errors import UserError, as_user_errors
from ltx_neuron.files import MANIFEST, check_readable, read_json
from ltx_neuron.weights.rankfiles import verify

LAYOUT = 3  # of rank files: increase it when the sharders' output changes
# Descriptions of an identity's fields, for messages.
_MEANINGS = {
    "source": "the checkpoint's content",
    "config": "the model's sizes",
    "code": "this toolkit's code",
    "torch": "the version of PyTorch",
    "bucket": "the video's size in tokens, the prompt's, or a tile's in latents",
    "loras": "digests and strengths of the LoRA files",
}
# The code that traces the models, by backend.
_TRACING = {
    "torchdist": ("backends/export", "backends/mesh"),
    "nxd": ("backends/nxd/compile", "backends/export", "backends/mesh", "backends/nki"),
}


def folder(artifacts: Path, identity: dict) -> Path:
    """artifacts/<weights|graphs>/<model>-<bucket>-<tp>-<dtype>-<digest of the whole identity>"""
    parts = [identity["model"], f"tp{identity['tp']}", identity["dtype"], digest(identity)[:8]]
    if "bucket" in identity:
        parts.insert(1, identity["bucket"])
    return Path(artifacts) / identity["kind"] / "-".join(parts)


def find(artifacts: Path, identity: dict, command: str) -> Path:
    """The finished folder of an identity.

    Raises UserError with the command to type, and the fields that differ in the nearest folder.
    """
    path, what = folder(artifacts, identity), f"{identity['model']} {identity['kind']}"
    with as_user_errors("--artifacts-dir"):
        finished = (path / MANIFEST).is_file()
    if finished:
        check_readable(path / MANIFEST)  # an unreadable one is not damaged
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
            f"the {what} in {path} are not finished: there is no {MANIFEST}\nMake them again:"
            f" {command}"
        )
    stored = map(stored_identity, finished_folders(artifacts, identity["kind"]))
    others = [other for other in stored if other and other.get("model") == identity["model"]]
    if not others:
        raise UserError(f"no {what} in {artifacts}\nMake them: {command}")

    def distance(other: dict) -> tuple[int, bool]:
        # Of two equal distances, prefer the same bucket.
        return len(differences(identity, other)), other.get("bucket") != identity.get("bucket")

    nearest = min(others, key=distance)
    raise UserError(
        f"no matching {what} in {artifacts}. The nearest {_differing(identity, nearest)}\nMake"
        f" them: {command}"
    )


def damage(path: Path, identity: dict, quick: bool = True) -> list[str]:
    """The problems of a finished folder's files; empty if they are whole. quick: compare only sizes
    of weights; graphs are small and always read."""
    return verify(path, quick) if identity["kind"] == "weights" else damaged_graphs(path)


def differences(expected: dict, stored: dict) -> list[tuple]:
    """(field, wanted, stored) for every field in which two identities differ."""
    return [
        (field, expected.get(field), stored.get(field))
        for field in sorted({*expected, *stored})
        if expected.get(field) != stored.get(field)
    ]


def _differing(expected: dict, stored: dict | None) -> str:
    """The differences of two identities, in words."""
    if stored is None:
        return "cannot be read"
    fields = []
    for field, want, got in differences(expected, stored):
        meaning = f" ({_MEANINGS[field]})" if field in _MEANINGS else ""
        got, want = ("none" if value == [] else value for value in (got, want))
        fields.append(f"{field}{meaning}: got {got}, wanted {want}")
    return "differs in " + "; ".join(fields)


def finished_weights(artifacts: Path, model: str) -> list[Path]:
    """The folders of a model's finished weight sets, including those with a damaged manifest."""
    folders = finished_folders(artifacts, "weights")
    return [path for path in folders if (stored_identity(path) or {}).get("model", model) == model]


def finished_folders(artifacts: Path, kind: str) -> list[Path]:
    return [path.parent for path in sorted((Path(artifacts) / kind).glob(f"*/{MANIFEST}"))]


def stored_identity(path: Path) -> dict | None:
    """A finished folder's identity; None if its manifest cannot be read."""
    try:
        return {**read_json(path / MANIFEST)["identity"]}
    except (UserError, KeyError, TypeError):
        return None


def code_digest(backend: str, *more: str) -> str:
    """The digest of the traced code: models/, the backend's tracing, and `more` files or packages.
    Graphs of other code are not used."""
    return _digest_of_code(("models", *_TRACING[backend], *more))


@cache
def _digest_of_code(names: tuple[str, ...]) -> str:
    """The digest of code without comments and docstrings."""
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
