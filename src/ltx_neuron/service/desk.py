"""What serves a worker: the queue's side for workers, and the files of their jobs."""

from pathlib import Path
from typing import Protocol

from ltx_neuron.service.queue import Entry


class Desk(Protocol):
    """Gives a worker its jobs, and takes what it made of them. On the queue's own machine this is
    the Queue itself; to others it is brought (fleet/).

    lease  seconds for which a worker has a job before it must renew
    """

    lease: float

    def next_kind(self, prefer: str | None = None, patience: float = 0.0) -> str | None: ...

    def claim(self, worker: str, kind: str, count: int) -> list[Entry]:
        """Jobs for a worker. Their inputs lie in their folders, and beside them what an earlier
        worker kept."""

    def folder_of(self, id: str) -> Path:
        """Where the worker reads and writes a job's files."""

    def keep(self, entry: Entry, name: str) -> None:
        """See to it that a file that the worker wrote into a job's folder outlives the worker."""

    def holds(self, entry: Entry) -> bool: ...

    def report(
        self, entry: Entry, progress: int, detail: dict | None = None, stage_ended: bool = False
    ) -> bool: ...

    def complete(self, entry: Entry, bytes: int = 0, detail: dict | None = None) -> bool:
        """A job's video lies in its folder, and all that belongs to it."""

    def fail(self, entry: Entry, code: str, message: str) -> bool: ...

    def let_go(self, entry: Entry) -> None: ...

    def renew(self, worker: str, state: dict) -> None: ...

    def release(self, worker: str) -> None: ...

    def lose(self, worker: str) -> None: ...

    def forget(self, worker: str) -> None: ...
