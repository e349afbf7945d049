"""push and pull: copy finished folders of artifacts to and from a store, file by file.

The manifest is copied last and the files are compared with it, so an interrupted or damaged copy is
never used. The same command continues with the missing files.
"""

import hashlib
import json
import shlex
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3
from tqdm import tqdm

from ltx_neuron.artifacts import damage, finished_folders, folder, stored_identity
from ltx_neuron.artifacts.store import Store, names_in
from ltx_neuron.backends.manifest import graph_entries
from ltx_neuron.config.common import digest
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, check_space, exclusive, remove_leftovers, whole_file
from ltx_neuron.format import format_bytes
from ltx_neuron.invocation import command
from ltx_neuron.weights.rankfiles import entries_in


class Described(NamedTuple):
    """The manifest of a folder, or a file of tuned settings."""

    name: str
    text: bytes  # its content
    identity: dict
    # The folder's other files by name: "blake3" and "bytes" of weights, "sha256" of graphs
    files: dict[str, dict]

    def missing(self, stored: dict[str, int]) -> list[str]:
        """The files that a store lacks or has in another size. stored: its files' bytes by name."""
        sizes = {file: stored.get(f"{self.name}/{file}") for file in self.files}
        return [f for f, size in sizes.items() if size != self.files[f].get("bytes", size or 0)]

    def is_file(self, path: Path, file: str) -> bool:
        """Whether `path` has the content of a file; reads all of it."""
        if not path.is_file():
            return False
        entry = self.files[file]
        kind, hasher = ("sha256", "sha256") if "sha256" in entry else ("blake3", blake3)
        with open(path, "rb") as opened:
            digest = hashlib.file_digest(opened, hasher)  # pyright: ignore[reportArgumentType]
            return digest.hexdigest() == entry[kind]


def described(name: str, text: bytes) -> Described:
    """Parse the manifest of a name. Raises ValueError if it is damaged, of another name, or lists
    unexpected files. artifacts/tuned_settings.py checks the content of tuned settings."""
    try:
        content, files = json.loads(text), {}
        identity = content["identity"]
        if is_tuned(name):
            fits = name.endswith(f"-{digest(identity)[:8]}")
        else:
            fits = name == folder(Path(), identity).as_posix()
            files = (entries_in if identity["kind"] == "weights" else graph_entries)(content)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not a manifest ({type(error).__name__}: {error})") from None
    if not fits:
        raise ValueError("its identity does not match its name")
    return Described(name, text, identity, files)


def is_tuned(name: str) -> bool:
    return name.startswith("tuned/")


def manifest_file(name: str) -> str:
    """The file of a name that is written last, in a store or under the artifacts."""
    return f"{name}.json" if is_tuned(name) else f"{name}/{MANIFEST}"


def opened(store: Store, name: str) -> Described:
    """The manifest of a name in a store. Raises UserError if it is damaged."""
    try:
        return described(name, store.read(manifest_file(name)))
    except ValueError as error:
        raise _damaged(store, name, manifest_file(name), str(error)) from None


def _damaged(store: Store, name: str, file: str, why: str) -> UserError:
    return UserError(
        f"{store.url}/{file} is damaged: {why}\n{name} is not used. On the machine that made it,"
        f" type: {command('artifacts', 'push', store.url, '--force', '--only', name)}"
    )


def selected(names: Iterable[str], only: list[str], where: object) -> list[str]:
    """The names that match a pattern as a whole, by kind or by model, as in graphs, weights/dit* or
    vae; all without patterns. Raises UserError for a pattern without a match."""
    names = sorted(names)
    fitting = set() if only else {*names}
    for pattern in only:
        fits = [name for name in names if any(fnmatchcase(w, pattern) for w in _words(name))]
        if not fits:
            listed = "\n  ".join(names)
            raise UserError(f"--only {pattern} matches nothing in {where}. It has:\n  {listed}")
        fitting |= {*fits}
    return [name for name in names if name in fitting]


def _words(name: str) -> tuple[str, str, str]:
    kind, _, identity = name.partition("/")
    return name, kind, identity.partition("-")[0]


def push(store: Store, artifacts: Path, only: list[str], force: bool = False) -> list[str]:
    """Upload the finished folders of `artifacts` and tuned settings to a store: each file that it
    lacks. Returns the uploaded names.

    force  also upload files that the store has, to repair it
    """
    folders = [path for kind in ("weights", "graphs") for path in finished_folders(artifacts, kind)]
    names = [f"{path.parent.name}/{path.name}" for path in folders]
    names += [f"tuned/{path.stem}" for path in (artifacts / "tuned").glob("*.json")]
    if not names:
        raise UserError(
            f"no finished weights or graphs in {artifacts}: nothing to push\nMake them"
            f" ({command('prepare')}), or type another --artifacts-dir DIR"
        )
    names, stored, sent = selected(names, only, artifacts), store.files(), []
    for name in names:
        path = artifacts / manifest_file(name)
        try:
            ours = described(name, path.read_bytes())
        except ValueError as error:
            raise UserError(f"{path} is not a valid manifest ({error})") from None
        if force or not _is_stored(store, ours, stored):
            _push(store, artifacts, ours, {} if force else stored)
            sent.append(name)
        print(f"{'pushed' if name in sent else 'already present'}: {name}")
    return sent


def _is_stored(store: Store, ours: Described, stored: dict[str, int]) -> bool:
    """Whether a store has a whole folder of that name, judged by sizes. Another machine may have
    compiled it to other bytes."""
    if manifest_file(ours.name) not in stored:
        return False
    try:
        theirs = opened(store, ours.name)
    except UserError:  # damaged: write it again
        return False
    return theirs.text == ours.text if is_tuned(ours.name) else not theirs.missing(stored)


def _push(store: Store, artifacts: Path, ours: Described, stored: dict[str, int]) -> None:
    """Upload a folder's missing files, then its manifest. stored: the store's sizes by name."""
    # The identity of weights determines their bytes, so the size is enough. Stored graphs may be
    # another machine's.
    missing = ours.missing(stored if ours.identity.get("kind") == "weights" else {})
    folder = artifacts / ours.name
    for file in missing:
        if not ours.is_file(folder / file, file):
            raise UserError(
                f"{folder / file} is damaged: its content does not match its {MANIFEST}\nMake it"
                f" again: rm -r {shlex.quote(str(folder))}, then shard or compile it again"
            )
    files = {f"{ours.name}/{file}": (folder / file).stat().st_size for file in missing}
    total = sum(files.values())
    with tqdm(
        total=total + len(ours.text), unit="B", unit_scale=True, desc=ours.name, disable=None
    ) as bar:
        for file in (*files, manifest_file(ours.name)):
            store.put(artifacts / file, file, bar)
    print(f"sent: {format_bytes(total)} in {len(missing)} of {len(ours.files)} files")


def pull(store: Store, artifacts: Path, only: list[str], check: bool = False) -> list[Path]:
    """Download the artifacts of a store: each file that is missing or damaged in `artifacts`.
    Returns their folders, and the files of tuned settings.

    check  also read finished weights on this machine; otherwise only their sizes are compared
    """
    stored = store.files()
    if not (names := names_in(stored)):
        raise UserError(
            f"{store.url} has no artifacts\nWanted: weights/, graphs/ or tuned/ from"
            f" {command('artifacts', 'push', 'URL')}"
        )
    paths = []
    for name in selected(names, only, store.url):
        theirs = opened(store, name)
        if is_tuned(name):
            paths.append(_pull_tuned(theirs, artifacts))
            continue
        folder = artifacts / name
        paths.append(folder)
        if not _is_whole(folder, theirs, check):
            with exclusive(folder, "pulling"):
                if not _is_whole(folder, theirs, check):  # another process may have pulled it
                    _pull(store, folder, theirs, stored)
                    continue
        print(f"already present: {folder}")
    return paths


def _pull_tuned(theirs: Described, artifacts: Path) -> Path:
    """Download tuned settings unless a file of that name exists: it is never replaced."""
    path = artifacts / manifest_file(theirs.name)
    if not path.is_file():
        with whole_file(path) as partial:
            partial.write_bytes(theirs.text)
        print(f"pulled: {path}")
    elif path.read_bytes() == theirs.text:
        print(f"already present: {path}")
    else:
        print(f"kept: {path} (the store's file differs)")
    return path


def _is_whole(folder: Path, theirs: Described, check: bool) -> bool:
    """Whether a folder is finished and of the same identity. Another machine may have compiled it
    to other bytes."""
    if stored_identity(folder) != theirs.identity:
        return False
    try:
        return not damage(folder, theirs.identity, quick=not check)
    except UserError:  # its manifest is damaged
        return False


def _pull(store: Store, folder: Path, theirs: Described, stored: dict[str, int]) -> None:
    """Download the missing and damaged files of a locked folder. stored: the store's sizes by name.
    Raises UserError if the store is damaged or the disk has no room."""
    name = theirs.name
    for file in theirs.missing(stored):
        raise _damaged(store, name, f"{name}/{file}", "it is missing or has another size")
    missing = [file for file in theirs.files if not theirs.is_file(folder / file, file)]
    total = sum(stored[f"{name}/{file}"] for file in missing)
    check_space(folder.parent, total, f"{name} needs")
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*theirs.files, MANIFEST):  # left by killed runs
        remove_leftovers(folder / file)
    (folder / MANIFEST).unlink(missing_ok=True)  # the folder is unfinished from now on
    with tqdm(total=total, unit="B", unit_scale=True, desc=name, disable=None) as bar:
        for file in missing:
            with whole_file(folder / file) as partial:
                store.get(f"{name}/{file}", partial, bar)
                if not theirs.is_file(partial, file):
                    why = f"its content does not match {MANIFEST}"
                    raise _damaged(store, name, f"{name}/{file}", why)
    with whole_file(folder / MANIFEST) as partial:
        partial.write_bytes(theirs.text)
    print(f"pulled: {folder}, {format_bytes(total)} in {len(missing)} of {len(theirs.files)} files")
