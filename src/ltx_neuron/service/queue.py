"""The durable queue: every job from the moment it is accepted until it is deleted.

    queued -> in_progress -> completed | failed
       \\----------\\-> cancelled (gone, for its owner)

A worker takes jobs on a lease that it renews. Where it dies, the lease ends and the job is given to
another, which goes on from the state that the first left in the job's folder. Every write of a
worker names the attempt that it holds: one that was taken for dead and comes back changes nothing,
so that no job ends twice.
"""

import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from ltx_neuron.service.table import jobs, open_database, owners, workers

QUEUED, IN_PROGRESS, COMPLETED = "queued", "in_progress", "completed"
FAILED, CANCELLED = "failed", "cancelled"
OPEN, ENDED = (QUEUED, IN_PROGRESS), (COMPLETED, FAILED)
VISIBLE = (*OPEN, *ENDED)
LOST = {
    "code": "worker_lost",
    "message": "every worker that had this job died before it finished a further stage",
}
_JOB_ID = re.compile(r"video_[0-9a-f]{32}")
_DAY = 86400.0


@dataclass(frozen=True)
class Entry:
    """A job as the database has it: the columns of table.jobs."""

    number: int
    id: str
    owner: str
    key: str | None
    digest: str
    status: str
    kind: str
    line: dict[str, Any]
    shown: dict[str, Any]
    progress: int
    detail: dict[str, Any] | None
    created_at: float
    started_at: float | None
    completed_at: float | None
    error: dict[str, Any] | None
    bytes: int
    worker: str | None
    lease_until: float | None
    attempt: int
    losses: int


@dataclass(frozen=True)
class NewJob:
    """What is put into the queue. `id` comes from `Queue.new_id`; its folder is filled already."""

    id: str
    owner: str
    digest: str
    kind: str
    line: dict[str, Any]
    shown: dict[str, Any]
    key: str | None = None
    bytes: int = 0


class QueueFull(Exception):
    """There are as many jobs waiting as may wait: of all owners, or of this one."""


class KeyUsed(Exception):
    """An idempotency key that stands for another request."""


class Queue:
    """The jobs of one service: a database, and a folder for each job's files.

    lease   seconds for which a worker has a job before it must renew
    losses  so many workers may die over a job before it is given up
    clock   seconds since 1970
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        lease: float = 60.0,
        losses: int = 5,
        clock: Callable[[], float] = time.time,
    ):
        self.folder, self.lease, self.losses, self.clock = Path(folder), lease, losses, clock
        self.folder.mkdir(parents=True, exist_ok=True)
        self._reading = open_database(url)
        self._writing = self._reading.execution_options(writes=True)

    def close(self) -> None:
        self._reading.dispose()

    def new_id(self) -> str:
        return f"video_{secrets.token_hex(16)}"

    def folder_of(self, id: str) -> Path:
        """Where a job's files lie. Its id is one of ours, never what a client sent."""
        assert _JOB_ID.fullmatch(id), id
        return self.folder / id

    # --- the owners' side -------------------------------------------------------------------------

    def submit(
        self, new: NewJob, most: int = 1_000_000, most_of_owner: int = 1_000_000
    ) -> tuple[Entry, bool]:
        """Accept a job; it is on the disk when this returns. With an idempotency key that was used
        for the same request, the job of then; the second value says whether it is a new one.

        most, most_of_owner  how many may wait
        """
        values = vars(new) | {"status": QUEUED, "created_at": self.clock()}
        try:
            with self._writing.begin() as connection:
                if before := self._of_key(connection, new):
                    return before, False
                self._check_room(connection, new.owner, most, most_of_owner)
                connection.execute(insert(jobs).values(**values))
                return _one(connection, jobs.c.id == new.id), True
        except IntegrityError:  # where writers do not wait for each other: one was first
            if before := self.of_key(new.owner, new.key, new.digest):
                return before, False
            raise

    def of_key(self, owner: str, key: str | None, digest: str) -> Entry | None:
        """The job that an idempotency key stands for. KeyUsed where that is another request."""
        with self._reading.begin() as connection:
            return self._of_key(connection, NewJob("", owner, digest, "", {}, {}, key))

    def _of_key(self, connection: Connection, new: NewJob) -> Entry | None:
        if new.key is None:
            return None
        before = _one(connection, (jobs.c.owner == new.owner) & (jobs.c.key == new.key))
        if before and before.digest != new.digest:
            raise KeyUsed
        return before

    def _check_room(self, connection: Connection, owner: str, most: int, of_owner: int) -> None:
        waiting = select(func.count()).where(jobs.c.status == QUEUED)
        if connection.scalar(waiting) >= most:
            raise QueueFull(f"{most} jobs are waiting, and no more may")
        if connection.scalar(waiting.where(jobs.c.owner == owner)) >= of_owner:
            raise QueueFull(f"{of_owner} of your jobs are waiting, and no more may")

    def get(self, owner: str, id: str) -> Entry | None:
        """An owner's job; None for another's, as for one that does not exist."""
        if not _JOB_ID.fullmatch(id):
            return None
        with self._reading.begin() as connection:
            return _one(
                connection, (jobs.c.id == id) & (jobs.c.owner == owner) & jobs.c.status.in_(VISIBLE)
            )

    def page(
        self, owner: str, after: int | None = None, limit: int = 20, newest_first: bool = True
    ) -> tuple[list[Entry], bool]:
        """Some of an owner's jobs in order, behind the job numbered `after`; are there more?"""
        number = jobs.c.number
        wanted = (jobs.c.owner == owner) & jobs.c.status.in_(VISIBLE)
        if after is not None:
            wanted &= number < after if newest_first else number > after
        order = number.desc() if newest_first else number
        query = select(jobs).where(wanted).order_by(order).limit(limit + 1)
        with self._reading.begin() as connection:
            entries = _entries(connection.execute(query))
        return entries[:limit], len(entries) > limit

    def ahead_of(self, entry: Entry) -> int:
        """How many waiting jobs came before one."""
        query = select(func.count()).where(
            (jobs.c.status == QUEUED) & (jobs.c.number < entry.number)
        )
        with self._reading.begin() as connection:
            return connection.scalar(query)

    def cancel(self, owner: str, id: str) -> bool:
        """Take a job from its owner's sight, whatever its state. One that is running is let go by
        its worker within a step; its files go then. False where there is none."""
        mine = (jobs.c.id == id) & (jobs.c.owner == owner) & jobs.c.status.in_(VISIBLE)
        with self._writing.begin() as connection:
            # The key is free again: the same request may be made once more.
            changed = connection.execute(
                update(jobs).where(mine).values(status=CANCELLED, key=None)
            ).rowcount
        if changed:
            self.remove_cancelled()
        return changed > 0

    # --- the workers' side ------------------------------------------------------------------------

    def next_kind(self, prefer: str | None = None, patience: float = 0.0) -> str | None:
        """The kind of jobs whose turn it is: that of the owner who was served longest ago. A worker
        that has a kind loaded stays with it while nobody else has waited longer than `patience`
        seconds. None where nothing waits."""
        now = self.clock()
        with self._reading.begin() as connection:
            turn = func.row_number().over(partition_by=jobs.c.owner, order_by=jobs.c.number)
            columns = (jobs.c.owner, jobs.c.kind, jobs.c.number, jobs.c.created_at)
            waiting = select(*columns, turn.label("turn")).where(_free(now)).subquery()
            heads = connection.execute(
                select(waiting, owners.c.served_at)
                .join(owners, owners.c.owner == waiting.c.owner, isouter=True)
                .where(waiting.c.turn == 1)
            ).all()
            if not heads:
                return None
            first = min(heads, key=lambda head: (head.served_at or 0.0, head.number))
            if prefer in (None, first.kind) or now - first.created_at > patience:
                return first.kind
            more = select(jobs.c.number).where(_free(now) & (jobs.c.kind == prefer)).limit(1)
            return first.kind if connection.scalar(more) is None else prefer

    def claim(self, worker: str, kind: str, count: int) -> list[Entry]:
        """Give a worker up to `count` jobs of a kind, in turn among their owners."""
        now = self.clock()
        with self._writing.begin() as connection:
            self._end_leases(connection, jobs.c.lease_until < now)
            turn = func.row_number().over(partition_by=jobs.c.owner, order_by=jobs.c.number)
            free = select(jobs.c.number, jobs.c.owner, turn.label("turn"))
            free = free.where(_free(now) & (jobs.c.kind == kind)).subquery()
            served = func.coalesce(owners.c.served_at, 0.0)
            chosen = connection.execute(
                select(free.c.number, free.c.owner)
                .join(owners, owners.c.owner == free.c.owner, isouter=True)
                .order_by(free.c.turn, served, free.c.number)
                .limit(count)
            ).all()
            for place, row in enumerate(chosen):
                # Of owners who are served in one go, the later keep their turn.
                _serve(connection, row.owner, now + place * 1e-6)
            numbers = [row.number for row in chosen]
            lease = {"worker": worker, "lease_until": now + self.lease}
            connection.execute(
                update(jobs)
                .where(jobs.c.number.in_(numbers))
                .values(**lease, attempt=jobs.c.attempt + 1)
            )
            taken = select(jobs).where(jobs.c.number.in_(numbers))
            entries = {entry.number: entry for entry in _entries(connection.execute(taken))}
        return [entries[number] for number in numbers]

    def holds(self, entry: Entry) -> bool:
        """Whether a worker still has the job that it took: nobody cancelled it, or gave it away."""
        with self._reading.begin() as connection:
            return connection.scalar(select(jobs.c.number).where(_held(entry))) is not None

    def report(
        self, entry: Entry, progress: int, detail: dict | None = None, stage_ended: bool = False
    ) -> bool:
        """Say how far a job is. False where it is not the worker's any more."""
        now = self.clock()
        values = {"status": IN_PROGRESS, "progress": progress, "detail": detail}
        values |= {"started_at": func.coalesce(jobs.c.started_at, now)}
        values |= {"lease_until": now + self.lease} | ({"losses": 0} if stage_ended else {})
        return self._update(_held(entry), values) > 0

    def keep(self, entry: Entry, name: str) -> None:
        """A worker wrote a file of its job: here it lies in the job's folder already."""

    def complete(self, entry: Entry, bytes: int = 0, detail: dict | None = None) -> bool:
        """A job's video is on the disk. False where the job is not the worker's any more."""
        done = {"status": COMPLETED, "progress": 100, "detail": detail, "bytes": bytes}
        return self._end(entry, done)

    def fail(self, entry: Entry, code: str, message: str) -> bool:
        """A job cannot be made. False where it is not the worker's any more."""
        error = {"code": code, "message": message}
        return self._end(entry, {"status": FAILED, "detail": None, "error": error})

    def _end(self, entry: Entry, values: dict) -> bool:
        values = values | {"completed_at": self.clock(), "worker": None, "lease_until": None}
        return self._update(_held(entry), values) > 0

    def let_go(self, entry: Entry) -> None:
        """Give back a job that was cancelled, or that is not to be worked on: it waits again."""
        mine = (jobs.c.number == entry.number) & (jobs.c.attempt == entry.attempt)
        self._update(mine, {"worker": None, "lease_until": None})
        self.remove_cancelled()

    def renew(self, worker: str, state: dict) -> None:
        """A worker's heartbeat: it keeps its jobs, and says what it holds and has done."""
        now = self.clock()
        with self._writing.begin() as connection:
            mine = (jobs.c.worker == worker) & jobs.c.status.in_((*OPEN, CANCELLED))
            connection.execute(update(jobs).where(mine).values(lease_until=now + self.lease))
            seen = {"seen_at": now, "state": state}
            known = update(workers).where(workers.c.worker == worker).values(**seen)
            if not connection.execute(known).rowcount:
                connection.execute(insert(workers).values(worker=worker, **seen))

    def release(self, worker: str) -> None:
        """A worker ends in good order: its jobs wait again."""
        with self._writing.begin() as connection:
            mine = (jobs.c.worker == worker) & jobs.c.status.in_((*OPEN, CANCELLED))
            connection.execute(update(jobs).where(mine).values(worker=None, lease_until=None))
        self.remove_cancelled()

    def lose(self, worker: str) -> None:
        """A worker is known to be dead: its leases end now."""
        with self._writing.begin() as connection:
            self._end_leases(connection, jobs.c.worker == worker)
        self.remove_cancelled()

    def _end_leases(self, connection: Connection, whose) -> None:
        """Jobs of lost workers wait again; one over which too many died has failed."""
        now = self.clock()
        lost = {"worker": None, "lease_until": None}
        leased = jobs.c.worker.is_not(None) & whose
        begun = leased & (jobs.c.status == IN_PROGRESS)
        connection.execute(update(jobs).where(begun).values(**lost, losses=jobs.c.losses + 1))
        connection.execute(update(jobs).where(leased).values(**lost))
        given_up = (jobs.c.status == IN_PROGRESS) & (jobs.c.losses >= self.losses)
        failed = {"status": FAILED, "error": LOST, "detail": None, "completed_at": now}
        connection.execute(update(jobs).where(given_up).values(**failed))

    def _update(self, where, values: dict) -> int:
        with self._writing.begin() as connection:
            return connection.execute(update(jobs).where(where).values(**values)).rowcount

    # --- keeping house ----------------------------------------------------------------------------

    def sweep(self, days: float, most_bytes: int, orphans_after: float = 3600.0) -> None:
        """End leases that ran out; delete what was cancelled, jobs that ended more than `days` ago,
        the oldest ended ones beyond `most_bytes`, and folders that no job has.

        orphans_after  seconds: an upload fills its folder before its job is there
        """
        now = self.clock()
        with self._writing.begin() as connection:
            self._end_leases(connection, jobs.c.lease_until < now)
            stale = workers.c.seen_at < now - days * _DAY
            connection.execute(delete(workers).where(stale))
        self.remove_cancelled()
        old = jobs.c.status.in_(ENDED) & (jobs.c.completed_at < now - days * _DAY)
        self._remove(self._ids(old) + self._beyond(most_bytes))
        self._remove_orphans(now - orphans_after)

    def _remove_orphans(self, before: float) -> None:
        """Delete folders that no job has and that nobody has touched since a time."""
        old = []
        for folder in self.folder.glob("video_*"):
            with suppress(FileNotFoundError):
                old += [folder] if folder.stat().st_mtime < before else []
        known = set(self._ids(jobs.c.number > 0)) if old else set()
        for folder in old:
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)

    def remove_cancelled(self) -> None:
        """Delete cancelled jobs that no worker holds."""
        free = or_(jobs.c.worker.is_(None), jobs.c.lease_until < self.clock())
        self._remove(self._ids((jobs.c.status == CANCELLED) & free))

    def _beyond(self, most_bytes: int) -> list[str]:
        """Ids of the oldest ended jobs, all but the newest that together have `most_bytes`."""
        query = select(jobs.c.id, jobs.c.bytes).where(jobs.c.status.in_(ENDED))
        beyond, kept = [], 0
        with self._reading.begin() as connection:
            for row in connection.execute(query.order_by(jobs.c.completed_at.desc())):
                kept += row.bytes
                if kept > most_bytes:
                    beyond.append(row.id)
        return beyond

    def _ids(self, where) -> list[str]:
        with self._reading.begin() as connection:
            return list(connection.scalars(select(jobs.c.id).where(where)))

    def _remove(self, ids: Iterable[str]) -> None:
        """The row first: a job that is there has its files; a folder without one is swept later."""
        for id in ids:
            with self._writing.begin() as connection:
                # An open one is never removed, whatever was true a moment ago.
                gone = (jobs.c.id == id) & jobs.c.status.in_((*ENDED, CANCELLED))
                removed = connection.execute(delete(jobs).where(gone)).rowcount
            if removed:
                shutil.rmtree(self.folder_of(id), ignore_errors=True)

    # --- what there is ----------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Jobs by status."""
        query = select(jobs.c.status, func.count().label("number")).group_by(jobs.c.status)
        with self._reading.begin() as connection:
            found = {row.status: row.number for row in connection.execute(query)}
        return {status: found.get(status, 0) for status in (*VISIBLE, CANCELLED)}

    def oldest_wait(self) -> float:
        """Seconds for which the oldest waiting job has waited."""
        query = select(func.min(jobs.c.created_at)).where(jobs.c.status == QUEUED)
        with self._reading.begin() as connection:
            oldest = connection.scalar(query)
        return self.clock() - oldest if oldest is not None else 0.0

    def workers(self) -> dict[str, dict]:
        """What every worker said last, with `alive` for those that were heard within a lease."""
        with self._reading.begin() as connection:
            rows = connection.execute(select(workers)).all()
        now = self.clock()
        return {row.worker: {**row.state, "alive": now - row.seen_at < self.lease} for row in rows}

    def forget(self, worker: str) -> None:
        """A worker has ended: it is not alive any more, though what it has done still counts."""
        with self._writing.begin() as connection:
            ended = update(workers).where(workers.c.worker == worker)
            connection.execute(ended.values(seen_at=self.clock() - self.lease))


def _free(now: float):
    """Jobs that may be given to a worker."""
    return jobs.c.status.in_(OPEN) & or_(jobs.c.worker.is_(None), jobs.c.lease_until < now)


def _held(entry: Entry):
    """The job, if it is still open and the worker's of this attempt."""
    return and_(
        jobs.c.number == entry.number,
        jobs.c.attempt == entry.attempt,
        jobs.c.worker == entry.worker,
        jobs.c.status.in_(OPEN),
    )


def _serve(connection: Connection, owner: str, now: float) -> None:
    """Note that it was an owner's turn."""
    known = update(owners).where(owners.c.owner == owner).values(served_at=now)
    if not connection.execute(known).rowcount:
        connection.execute(insert(owners).values(owner=owner, served_at=now))


def _entries(rows) -> list[Entry]:
    return [Entry(**row._mapping) for row in rows]


def _one(connection: Connection, where) -> Entry | None:
    return next(iter(_entries(connection.execute(select(jobs).where(where)))), None)
