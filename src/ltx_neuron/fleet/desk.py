"""The desk: an actor beside the front that has the queue and the files; and what stands for it on
the machines of the replicas.

A job's inputs go out with its claim, and its video comes back with its completion: each through
Ray's object store, once.
"""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import ray

from ltx_neuron.files import whole_file
from ltx_neuron.progress import state_path
from ltx_neuron.service.jobs import THUMBNAIL, VIDEO
from ltx_neuron.service.queue import Entry, Queue

RESULTS = (VIDEO, Path(VIDEO).with_suffix(".json").name, THUMBNAIL)
STATE = state_path(Path(VIDEO)).name
_PASSED = ("next_kind", "holds", "report", "fail", "let_go", "renew", "release", "lose", "forget")


class FrontDesk:
    """An actor on the machine of the front: nothing else writes what replicas send."""

    def __init__(self, url: str, folder: Path, lease: float):
        self.queue = Queue(url, folder, lease=lease)
        self._writing = threading.Lock()

    def until_it_dies(self) -> None:
        """Never returns: who waits for it learns that the desk is gone."""
        threading.Event().wait()

    def ask(self, what: str, *args, **more):
        """One of the queue's methods."""
        assert what in _PASSED, what
        return getattr(self.queue, what)(*args, **more)

    def claim(self, worker: str, kind: str, count: int) -> list[tuple[Entry, dict[str, bytes]]]:
        """Jobs for a worker, each with the files that lie in its folder."""
        return [(entry, self._files(entry)) for entry in self.queue.claim(worker, kind, count)]

    def _files(self, entry: Entry) -> dict[str, bytes]:
        folder = self.queue.folder_of(entry.id)
        paths = folder.iterdir() if folder.is_dir() else ()
        sent = (path for path in paths if path.name not in RESULTS and path.name[0] != ".")
        return {path.name: path.read_bytes() for path in sent}

    def keep(self, entry: Entry, files: dict[str, bytes]) -> bool:
        """Write files of a job that is still the worker's, each whole."""
        # One at a time: an earlier worker's come before a later one has the job, or not at all.
        with self._writing:
            if not self.queue.holds(entry):
                return False
            for name, content in files.items():
                assert Path(name).name == name, name
                with whole_file(self.queue.folder_of(entry.id) / name) as partial:
                    partial.write_bytes(content)
            return True

    def complete(
        self, entry: Entry, bytes: int, detail: dict | None, files: dict[str, bytes]
    ) -> bool:
        """A job's video is there: write it, and say so."""
        if not (self.keep(entry, files) and self.queue.complete(entry, bytes, detail)):
            return False
        (self.queue.folder_of(entry.id) / STATE).unlink(missing_ok=True)
        return True


def _passed(what: str) -> Callable:
    def ask(self, *args, **more):
        return ray.get(self.actor.ask.remote(what, *args, **more))

    return ask


class RemoteDesk:
    """service.desk.Desk, for a worker on any machine.

    scratch  a folder of the worker's own
    """

    def __init__(self, actor, lease: float, scratch: Path):
        self.actor, self.lease, self.scratch = actor, lease, scratch

    next_kind, holds, report = map(_passed, _PASSED[:3])
    renew, release, forget = map(_passed, ("renew", "release", "forget"))
    _fail, _let_go, _lose = map(_passed, ("fail", "let_go", "lose"))

    def folder_of(self, id: str) -> Path:
        return self.scratch / id

    def claim(self, worker: str, kind: str, count: int) -> list[Entry]:
        claimed = ray.get(self.actor.claim.remote(worker, kind, count))
        for entry, files in claimed:
            self._clear(entry)
            self.folder_of(entry.id).mkdir()
            for name, content in files.items():
                (self.folder_of(entry.id) / name).write_bytes(content)
        return [entry for entry, _ in claimed]

    def keep(self, entry: Entry, name: str) -> None:
        content = (self.folder_of(entry.id) / name).read_bytes()
        ray.get(self.actor.keep.remote(entry, {name: content}))

    def complete(self, entry: Entry, bytes: int = 0, detail: dict | None = None) -> bool:
        folder = self.folder_of(entry.id)
        files = {name: (folder / name).read_bytes() for name in RESULTS}
        done = ray.get(self.actor.complete.remote(entry, bytes, detail, files))
        self._clear(entry)
        return done

    def fail(self, entry: Entry, code: str, message: str) -> bool:
        self._clear(entry)
        return self._fail(entry, code, message)

    def let_go(self, entry: Entry) -> None:
        self._clear(entry)
        self._let_go(entry)

    def lose(self, worker: str) -> None:
        for folder in self.scratch.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        self._lose(worker)

    def _clear(self, entry: Entry) -> None:
        shutil.rmtree(self.folder_of(entry.id), ignore_errors=True)
