"""push and pull: finished folders of artifacts to a store and from it, a file at a time.

The manifest goes last and files are compared with it, so what was interrupted or damaged is never
taken for whole. The same command goes on with the files that are missing.
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
from ltx_neuron.weights.sharder import JOURNAL, PARTIAL


class Described(NamedTuple):
    """What the manifest of a folder says, or a tuning's file, beside which there are no others.

    text   its content
    files  the other files by name: "blake3" and "bytes" of weights, "sha256" of graphs
    """

    name: str
    text: bytes
    identity: dict
    files: dict[str, dict]

    def missing(self, stored: dict[str, int]) -> list[str]:
        """The files that a store lacks or has in another size. stored: the bytes of all it has."""
        sizes = {file: stored.get(f"{self.name}/{file}") for file in self.files}
        return [f for f, size in sizes.items() if size != self.files[f].get("bytes", size or 0)]

    def is_file(self, path: Path, file: str) -> bool:
        """Whether `path` is one of the files; all of it is read."""
        if not path.is_file():
            return False
        entry = self.files[file]
        kind, hasher = ("sha256", "sha256") if "sha256" in entry else ("blake3", blake3)
        with open(path, "rb") as opened:
            digest = hashlib.file_digest(opened, hasher)  # pyright: ignore[reportArgumentType]
            return digest.hexdigest() == entry[kind]


def described(name: str, text: bytes) -> Described:
    """What `text` says of the artifacts of that name. ValueError where it is damaged, of another
    name, or has files that our folders do not have. What a tuning chose is checked where it is read
    (tune/tuned_settings.py)."""
    try:
        content, files = json.loads(text), {}
        identity = content["identity"]
        if is_tuned(name):
            fits = name.endswith(f"-{digest(identity)[:8]}")
        else:
            fits = name == folder(Path(), identity).as_posix()
            files = (entries_in if identity["kind"] == "weights" else graph_entries)(content)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it describes no artifacts ({type(error).__name__}: {error})") from None
    if not fits:
        raise ValueError("its identity is that of another name")
    return Described(name, text, identity, files)


def is_tuned(name: str) -> bool:
    return name.startswith("tuned/")


def manifest_file(name: str) -> str:
    """The file, in a store or under the artifacts, that is last of those of a name."""
    return f"{name}.json" if is_tuned(name) else f"{name}/{MANIFEST}"


def opened(store: Store, name: str) -> Described:
    """What a store says of the artifacts of a name. UserError where that is damaged."""
    try:
        return described(name, store.read(manifest_file(name)))
    except ValueError as error:
        raise _damaged(store, name, manifest_file(name), str(error)) from None


def _damaged(store: Store, name: str, file: str, why: str) -> UserError:
    return UserError(
        f"{store.url}/{file} is damaged: {why}\nNothing of {name} is used. Where it was made, type:"
        f" {command('artifacts', 'push', store.url, '--force', '--only', name)}"
    )


def selected(names: Iterable[str], only: list[str], where: object) -> list[str]:
    """The names that a pattern fits: of a whole name, of a kind or of a model, as in graphs,
    weights/dit* or vae; without patterns all. UserError for a pattern that fits none."""
    names = sorted(names)
    fitting = set() if only else {*names}
    for pattern in only:
        fits = [name for name in names if any(fnmatchcase(w, pattern) for w in _words(name))]
        if not fits:
            listed = "\n  ".join(names)
            raise UserError(f"--only {pattern} fits nothing in {where}, which has:\n  {listed}")
        fitting |= {*fits}
    return [name for name in names if name in fitting]


def _words(name: str) -> tuple[str, str, str]:
    kind, _, own = name.partition("/")
    return name, kind, own.partition("-")[0]


def push(store: Store, artifacts: Path, only: list[str], force: bool = False) -> list[str]:
    """Send the finished folders of `artifacts` and what tunings chose to a store, each file that it
    lacks; returns the names of those sent.

    force  send also what is there: mends a store whose files are damaged
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
            raise UserError(f"{path} does not describe artifacts ({error})") from None
        if force or not _is_stored(store, ours, stored):
            _push(store, artifacts, ours, {} if force else stored)
            sent.append(name)
        print(f"{'pushed' if name in sent else 'already there'}: {name}")
    return sent


def _is_stored(store: Store, ours: Described, stored: dict[str, int]) -> bool:
    """Whether a store has a whole folder of that name, as far as sizes tell. Another machine may
    have compiled it to other bytes."""
    if manifest_file(ours.name) not in stored:
        return False
    try:
        theirs = opened(store, ours.name)
    except UserError:  # damaged: it is written again
        return False
    return theirs.text == ours.text if is_tuned(ours.name) else not theirs.missing(stored)


def _push(store: Store, artifacts: Path, ours: Described, stored: dict[str, int]) -> None:
    """Send the files of a folder that a store lacks, then its manifest. stored: what it has."""
    # Of weights a file of the right size is this one: the identity tells the bytes. What there is
    # of graphs may be another machine's.
    missing = ours.missing(stored if ours.identity.get("kind") == "weights" else {})
    folder = artifacts / ours.name
    for file in missing:
        if not ours.is_file(folder / file, file):
            raise UserError(
                f"{folder / file} is damaged: its content is not what its {MANIFEST} says\nMake it"
                f" again: rm -r {shlex.quote(str(folder))}, then shard or compile it again"
            )
    files = {f"{ours.name}/{file}": (folder / file).stat().st_size for file in missing}
    total = sum(files.values())
    with tqdm(total=total + len(ours.text), unit="B", unit_scale=True, desc=ours.name) as bar:
        for file in (*files, manifest_file(ours.name)):
            store.put(artifacts / file, file, bar)
    print(f"sent: {format_bytes(total)} in {len(missing)} of {len(ours.files)} files")


def pull(store: Store, artifacts: Path, only: list[str], check: bool = False) -> list[Path]:
    """Take the artifacts of a store, each file that is missing or damaged in `artifacts`; returns
    their folders, and the files of tunings.

    check  read also the finished weights that are here, of which else the sizes are compared
    """
    stored = store.files()
    if not (names := names_in(stored)):
        raise UserError(
            f"{store.url} holds no artifacts\nWanted: weights/, graphs/ or tuned/ as"
            f" {command('artifacts', 'push', 'URL')} sends them"
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
        print(f"already there: {folder}")
    return paths


def _pull_tuned(theirs: Described, artifacts: Path) -> Path:
    """Take what a tuning chose where there is none of its name: one's own is never replaced."""
    path = artifacts / manifest_file(theirs.name)
    if not path.is_file():
        with whole_file(path) as partial:
            partial.write_bytes(theirs.text)
        print(f"pulled: {path}")
    elif path.read_bytes() == theirs.text:
        print(f"already there: {path}")
    else:
        print(f"kept: {path}, which differs from the store's")
    return path


def _is_whole(folder: Path, theirs: Described, check: bool) -> bool:
    """Whether a folder is a finished one of the same identity. Another machine may have compiled it
    to other bytes."""
    if stored_identity(folder) != theirs.identity:
        return False
    try:
        return not damage(folder, theirs.identity, quick=not check)
    except UserError:  # not even its manifest is whole
        return False


def _pull(store: Store, folder: Path, theirs: Described, stored: dict[str, int]) -> None:
    """Take what is missing or damaged in a folder, which is locked. UserError where the store or
    the disk cannot give that. stored: the bytes of all that the store has."""
    name = theirs.name
    for file in theirs.missing(stored):
        raise _damaged(store, name, f"{name}/{file}", "it is missing or has another size")
    missing = [file for file in theirs.files if not theirs.is_file(folder / file, file)]
    total = sum(stored[f"{name}/{file}"] for file in missing)
    check_space(folder.parent, total, f"{name} needs")
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*theirs.files, JOURNAL, MANIFEST):  # of killed runs
        remove_leftovers(folder / file)
        (folder / f"{file}{PARTIAL}").unlink(missing_ok=True)
    (folder / JOURNAL).unlink(missing_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # with it the folder would be finished
    with tqdm(total=total, unit="B", unit_scale=True, desc=name) as bar:
        for file in missing:
            with whole_file(folder / file) as partial:
                store.get(f"{name}/{file}", partial, bar)
                if not theirs.is_file(partial, file):
                    why = f"its content is not what {MANIFEST} says"
                    raise _damaged(store, name, f"{name}/{file}", why)
    with whole_file(folder / MANIFEST) as partial:
        partial.write_bytes(theirs.text)
    print(f"pulled: {folder}, {format_bytes(total)} in {len(missing)} of {len(theirs.files)} files")
