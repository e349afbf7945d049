"""The queue for workers on other machines: an actor on the API's machine, and a client of it.

A claim returns a job's inputs, and a completion sends its video. Ray's object store carries both.
"""

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ray

from ltx_neuron.engine.outputs import state_path
from ltx_neuron.files import whole_file
from ltx_neuron.service.jobs import THUMBNAIL, VIDEO
from ltx_neuron.service.queue import Entry, Queue

RESULTS = (VIDEO, Path(VIDEO).with_suffix(".json").name, THUMBNAIL)
STATE = state_path(Path(VIDEO)).name


class QueueActor:
    """An actor on the API's machine. Only it writes the replicas' files."""

    def __init__(self, database: Path, folder: Path, lease: float):
        self.queue = Queue(database, folder, lease=lease)
        self._writing = threading.Lock()

    def until_it_dies(self) -> None:
        """Never returns. Waiting for its result ends when the actor dies."""
        threading.Event().wait()

    def call(self, method: str, *args, **more):
        return getattr(self.queue, method)(*args, **more)

    def claim(self, *args) -> list[tuple[Entry, dict[str, bytes]]]:
        """Claim jobs for a worker; each comes with the files in its folder."""
        return [(entry, self._files(entry)) for entry in self.queue.claim(*args)]

    def _files(self, entry: Entry) -> dict[str, bytes]:
        folder = self.queue.folder_of(entry.id)
        paths = folder.iterdir() if folder.is_dir() else ()
        sent = (path for path in paths if path.name not in RESULTS and path.name[0] != ".")
        return {path.name: path.read_bytes() for path in sent}

    def keep(self, entry: Entry, files: dict[str, bytes]) -> bool:
        """Write a job's files, each whole. Returns False if the worker no longer owns the job."""
        # The lock keeps a former owner from writing after a later one.
        with self._writing:
            if not self.queue.owns(entry):
                return False
            for name, content in files.items():
                assert Path(name).name == name, name
                with whole_file(self.queue.folder_of(entry.id) / name) as partial:
                    partial.write_bytes(content)
            return True

    def complete(
        self, entry: Entry, bytes: int, detail: dict | None, files: dict[str, bytes]
    ) -> bool:
        """Write a job's video and complete the job. Returns False for a worker that lost it."""
        if not (self.keep(entry, files) and self.queue.complete(entry, bytes, detail)):
            return False
        (self.queue.folder_of(entry.id) / STATE).unlink(missing_ok=True)
        return True


class RemoteQueue:
    """The queue's client for a worker on any machine. scratch: the worker's private folder."""

    def __init__(self, actor, lease: float, scratch: Path):
        self.actor, self.lease, self.scratch = actor, lease, scratch

    def __getattr__(self, method: str) -> Callable:
        return partial(self._call, method)

    def _call(self, method: str, *args, **more):
        if method in ("fail", "release_job"):
            self._clear(args[0])
        return ray.get(self.actor.call.remote(method, *args, **more))

    def folder_of(self, id: str) -> Path:
        return self.scratch / id

    def claim(self, worker: str, batch_key: str, count: int) -> list[Entry]:
        claimed = ray.get(self.actor.claim.remote(worker, batch_key, count))
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
        return bool(done)

    def release_worker(self, worker: str, crashed: bool = False) -> None:
        for folder in self.scratch.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        self._call("release_worker", worker, crashed)

    def _clear(self, entry: Entry) -> None:
        shutil.rmtree(self.folder_of(entry.id), ignore_errors=True)
