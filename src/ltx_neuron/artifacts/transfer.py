"""push and pull: finished folders of artifacts to a store and from it, whole, and each byte once.

What both check is the digest of every file that they send or take. The description of a set goes
last in a store, a manifest last in a folder: what was interrupted is never taken for whole, and the
same command goes on with it.
"""

import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from time import gmtime, strftime
from typing import Any, BinaryIO

from tqdm import tqdm

from ltx_neuron.artifacts import sets, stored_identity
from ltx_neuron.artifacts.choices import is_choice, local_choices, pull_choice, push_choice
from ltx_neuron.artifacts.sets import ArtifactSet, Blob
from ltx_neuron.artifacts.store import Store
from ltx_neuron.backends.manifest import damaged_graphs
from ltx_neuron.errors import UserError
from ltx_neuron.files import (
    MANIFEST,
    exclusive,
    growing_file,
    growing_name,
    remove_leftovers,
    whole_file,
)
from ltx_neuron.weights.rankfiles import verify
from ltx_neuron.weights.sharder import JOURNAL, PARTIAL

_BLOCK_BYTES = 16 * 2**20
COMMAND = "python -m ltx_neuron.artifacts"


def selected(names: Iterable[str], only: list[str], where: object) -> list[str]:
    """The names that a pattern fits: of a whole name, of a kind or of a model, as in graphs,
    weights/dit* or vae; without patterns all. UserError for a pattern that fits none."""
    names = sorted(names)

    def fits(name: str, pattern: str) -> bool:
        kind, _, own = name.partition("/")
        words = name, kind, own.partition("-")[0]
        return any(fnmatchcase(word, pattern) for word in words)

    for pattern in only:
        if not any(fits(name, pattern) for name in names):
            listed = "\n  ".join(names)
            raise UserError(f"--only {pattern} fits nothing in {where}, which has:\n  {listed}")
    return [name for name in names if not only or any(fits(name, pattern) for pattern in only)]


# --- push -----------------------------------------------------------------------------------------


def push(store: Store, artifacts: Path, only: list[str], again: bool = False) -> list[str]:
    """Send the finished folders of `artifacts` to a store, of each the files that it lacks; returns
    the names of those sent.

    again  send also what is there: mends a store whose files are damaged
    """
    folders, chosen = sets.local_folders(artifacts), local_choices(artifacts)
    if not folders and not chosen:
        raise UserError(
            f"no finished weights or graphs in {artifacts}: nothing to push\nMake them (shards/,"
            " compile/), or type another --artifacts-dir DIR"
        )
    names, blobs, sent = selected([*folders, *chosen], only, artifacts), store.blobs(), []
    stored = {*store.names()}
    for name in names:
        there = not again and name in stored
        if is_choice(name):
            is_sent = push_choice(store, name, chosen[name], there)
        else:
            is_sent = _push(store, folders[name], blobs, there, again)
        sent += [name] if is_sent else []
        print(f"{'pushed' if is_sent else 'already there'}: {name}")
    return sent


def _is_stored(store: Store, described: ArtifactSet, blobs: dict[str, int]) -> bool:
    """Whether a store has a whole set of the same identity, as far as sizes tell. Another machine
    may have compiled it to other bytes."""
    try:
        stored = store.described(described.name)
    except UserError:  # damaged: it is written again
        return False
    whole = all(blobs.get(blob.key) == blob.bytes for blob in stored.files.values())
    return whole and stored.identity == described.identity


def _push(store: Store, folder: Path, blobs: dict[str, int], stored: bool, again: bool) -> bool:
    """Send a folder's files that the store lacks, and then their description; whether it lacked
    any.

    blobs   the bytes of all that the store has, by key; what is sent is added
    stored  whether the store has a set of that name
    again   send also what is there
    """
    described = sets.of_folder(folder)
    if stored and _is_stored(store, described, blobs):
        return False
    missing = {
        blob.key: (name, blob)
        for name, blob in described.files.items()
        if again or blobs.get(blob.key) != blob.bytes
    }
    for name, blob in missing.values():
        if not sets.is_blob(folder / name, blob):
            raise UserError(
                f"{folder / name} is damaged: its content is not what its {MANIFEST} says\nMake it"
                f" again: rm -r {shlex.quote(str(folder))}, then the shard or compile script"
            )
    total = sum(blob.bytes for _, blob in missing.values())
    with _bar(described.name, total) as bar:
        for name, blob in missing.values():
            show = _shower(bar)
            store.put(folder / name, blob.key, show)
            show(blob.bytes)
            blobs[blob.key] = blob.bytes
    pushed = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime())
    store.write(described.name, sets.encoded(described._replace(pushed=pushed)))
    print(f"sent: {in_units(total)} of {in_units(described.bytes)}")
    return True


def _bar(name: str, total: int) -> tqdm:
    return tqdm(total=total, unit="B", unit_scale=True, desc=name)


def _shower(bar: tqdm) -> Callable[[int], None]:
    """Has a bar show how many bytes have come since now."""
    before = bar.n
    return lambda count: bar.update(before + count - bar.n)


# --- pull -----------------------------------------------------------------------------------------


def pull(store: Store, artifacts: Path, only: list[str], check: bool = False) -> list[Path]:
    """Take the sets of a store into `artifacts`, of each the files that are missing or damaged
    there; returns their folders, and the files of tunings.

    check  read also the finished weights that are here, of which else the sizes are compared
    """
    names = store.names()
    if not names:
        raise UserError(f"{store.url} holds no artifacts\nWanted: what {COMMAND} push URL sent")
    names, blobs, folders = selected(names, only, store.url), store.blobs(), []
    for name in names:
        if is_choice(name):
            folders.append(pull_choice(store, name, artifacts))
            continue
        described, folder = store.described(name), artifacts / name
        folders.append(folder)
        if not _is_whole(folder, described, check):
            with exclusive(folder, "pulling"):
                if not _is_whole(folder, described, check):  # another process may have pulled it
                    _Pull(store, folder, described).run(blobs)
                    continue
        print(f"already there: {folder}")
    return folders


def _is_whole(folder: Path, described: ArtifactSet, check: bool) -> bool:
    """Whether a folder is a finished one of the same identity. Another machine may have compiled it
    to other bytes."""
    if not (folder / MANIFEST).is_file() or stored_identity(folder) != described.identity:
        return False
    try:
        if described.identity["kind"] == "weights":
            return not verify(folder, quick=not check)
        return not damaged_graphs(folder)
    except UserError:  # not even its manifest is whole
        return False


class _Pull:
    """One set on its way from a store into its folder, which is locked. `fetched`: bytes so far."""

    def __init__(self, store: Store, folder: Path, described: ArtifactSet):
        self.store, self.folder, self.described = store, folder, described
        self.files = {name: b for name, b in described.files.items() if name != MANIFEST}
        self.fetched = 0

    def run(self, blobs: dict[str, int]) -> None:
        """Take what is missing or damaged in the folder. UserError where the store or the disk
        cannot give that. blobs: the bytes of all that the store has."""
        for name, blob in self.described.files.items():
            if blobs.get(blob.key) != blob.bytes:
                got = f"{blobs[blob.key]} bytes" if blob.key in blobs else "no file"
                raise self._damaged(name, f"got {got}, wanted {blob.bytes} bytes")
        manifest = self._manifest()
        whole = {n: b for n, b in self.files.items() if sets.is_blob(self.folder / n, b)}
        missing = {n: b for n, b in self.files.items() if n not in whole}
        here = {blob.key: name for name, blob in whole.items()}
        _check_space(self.folder, missing)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / MANIFEST).unlink(missing_ok=True)  # with it the folder would be finished
        total = sum(blob.bytes for blob in missing.values())
        with _bar(self.described.name, total) as bar:
            for name, blob in missing.items():
                self._fetch(name, blob, here.get(blob.key), _shower(bar))
                here[blob.key] = name
        with whole_file(self.folder / MANIFEST) as partial:
            partial.write_bytes(manifest)
        self._tidy_up()
        size = in_units(self.described.bytes)
        print(f"pulled: {self.folder}, {in_units(self.fetched)} of {size} fetched")

    def _manifest(self) -> bytes:
        """The manifest, which says of the files what the set says."""
        blob = self.described.files[MANIFEST]
        content = b"".join(self._read(blob, 0))
        hashed = sets.hasher(blob.key)
        hashed.update(content)
        if (got := sets.key_of(blob.key, hashed)) != blob.key:
            raise self._damaged(MANIFEST, f"got {got}, wanted {blob.key}")
        try:
            sets.check_manifest(self.described, content)
        except ValueError as error:
            raise self._damaged(MANIFEST, str(error)) from None
        return content

    def _fetch(self, name: str, blob: Blob, twin: str | None, show: Callable[[int], None]) -> None:
        """Take a file, from where an earlier run got to. twin: a file with its content that is here
        already, as of the ranks of the video decoder."""
        with growing_file(self.folder / name, _tag(blob)) as file:
            kept, hashed = _kept(file, blob)
            while True:
                show(kept)
                for piece in self._pieces(blob, twin, kept):
                    hashed.update(piece)
                    file.write(piece)
                    show(file.tell())
                if (got := sets.key_of(blob.key, hashed)) == blob.key:
                    return
                file.truncate(0)
                if not kept:
                    raise self._damaged(name, f"got {got}, wanted {blob.key}")
                kept, hashed = 0, sets.hasher(blob.key)  # it may be what was kept

    def _pieces(self, blob: Blob, twin: str | None, start: int) -> Iterator[bytes]:
        if twin:
            return _blocks(self.folder / twin, start)
        return self._read(blob, start)

    def _read(self, blob: Blob, start: int) -> Iterator[bytes]:
        """The bytes of a blob from `start` on, in pieces."""
        for piece in self.store.read(blob.key, start, blob.bytes):
            self.fetched += len(piece)
            yield piece

    def _tidy_up(self) -> None:
        """Remove what interrupted runs left in the folder: of a pull, and of a sharding."""
        for name in self.described.files:
            remove_leftovers(self.folder / name)
            (self.folder / f"{name}{PARTIAL}").unlink(missing_ok=True)
        (self.folder / JOURNAL).unlink(missing_ok=True)

    def _damaged(self, file: str, what: str) -> UserError:
        """What is wrong with a blob of the store, and what to type."""
        store, name = self.store.url, self.described.name
        return UserError(
            f"{store}/blobs/{self.described.files[file].key} is damaged: {what}\nIt is {file} of"
            f" {name}, of which nothing is used. Where these artifacts were made, type: {COMMAND}"
            f" push {shlex.quote(store)} --again --only {name}"
        )


def _tag(blob: Blob) -> str:
    return blob.key[-16:]


def _kept(file: BinaryIO, blob: Blob) -> tuple[int, Any]:
    """How much of a blob an earlier run left in a file, and the digest of that."""
    hashed = sets.hasher(blob.key)
    while block := file.read(_BLOCK_BYTES):
        hashed.update(block)
    if file.tell() <= blob.bytes:
        return file.tell(), hashed
    file.truncate(0)
    return 0, sets.hasher(blob.key)


def _blocks(path: Path, start: int) -> Iterator[bytes]:
    """The bytes of a file from `start` on."""
    with open(path, "rb") as file:
        file.seek(start)
        while block := file.read(_BLOCK_BYTES):
            yield block


def _check_space(folder: Path, missing: dict[str, Blob]) -> None:
    """Raise UserError where the disk has no room for what is still to come."""
    partials = (growing_name(folder / name, _tag(blob)) for name, blob in missing.items())
    kept = sum(path.stat().st_size for path in partials if path.is_file())
    needed = sum(blob.bytes for blob in missing.values()) - kept
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise UserError(
            f"{folder.parent.name}/{folder.name} needs {in_units(needed)} more, the disk of"
            f" {folder.parent} has {in_units(free)} free.\nFree some, choose another place with"
            " --artifacts-dir DIR, or take less with --only NAME"
        )


def in_units(count: int) -> str:
    """Bytes for a person."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:.2f} {name}"
