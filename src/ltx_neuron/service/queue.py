"""The durable queue: every job from the moment it is accepted until it is deleted.

    queued -> in_progress -> completed | failed
       \\----------\\-> cancelled (gone, for its owner)

A worker takes jobs on a lease that it renews. If it dies, the lease ends and the job is given to
another worker, which resumes from the state that the first left in the job's folder. Every write of
a worker carries the job's attempt number (a fencing token), so a worker presumed dead cannot
overwrite newer results, and no job ends twice.
"""

import json
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx_neuron.service.database import Database

QUEUED, IN_PROGRESS, COMPLETED = "queued", "in_progress", "completed"
FAILED, CANCELLED = "failed", "cancelled"
OPEN = QUEUED, IN_PROGRESS
STATUSES = QUEUED, IN_PROGRESS, COMPLETED, FAILED, CANCELLED
_CRASHED = {
    "code": "worker_lost",
    "message": "every worker that had this job died before it finished a further stage",
}
_JOB_ID = re.compile(r"video_[0-9a-f]{32}")
_DAY = 86400.0
_JSON = "params", "public_fields", "detail", "error"
# Conditions on rows of `jobs`.
_IS_OPEN = "status IN ('queued', 'in_progress')"
_IS_ENDED = "status IN ('completed', 'failed')"
_IS_VISIBLE = "owner = :owner AND status != 'cancelled'"
_IS_FREE = f"{_IS_OPEN} AND (worker IS NULL OR lease_until < :now)"  # a worker may take it
_SELECT_OF_KEY = "SELECT * FROM jobs WHERE owner = :owner AND key = :key"
_IS_OWNED = f"number = :number AND attempt = :attempt AND worker = :worker AND {_IS_OPEN}"


@dataclass(frozen=True)
class Entry:
    """A job as the database has it: the columns of its table."""

    number: int
    id: str
    owner: str
    key: str | None
    digest: str
    status: str
    batch_key: str
    params: dict[str, Any]
    public_fields: dict[str, Any]
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
    crash_count: int


@dataclass(frozen=True)
class NewJob:
    """What is put into the queue. `id` comes from `Queue.new_id`; its folder is filled already."""

    id: str
    owner: str
    digest: str
    batch_key: str
    params: dict[str, Any]
    public_fields: dict[str, Any]
    key: str | None = None
    bytes: int = 0


class QueueFull(Exception):
    """There are as many jobs waiting as may wait: of all owners, or of this one."""


class KeyUsed(Exception):
    """An idempotency key that stands for another request."""


class Queue:
    """The jobs of one service: a database file, and a folder for each job's files.

    lease        seconds for which a worker has a job before it must renew
    max_crashes  so many workers may die over a job before it has failed
    clock        seconds since 1970
    """

    def __init__(
        self,
        database: Path,
        folder: Path,
        *,
        lease: float = 60.0,
        max_crashes: int = 5,
        clock: Callable[[], float] = time.time,
    ):
        self.folder, self.lease, self.max_crashes = Path(folder), lease, max_crashes
        self.clock = clock
        self.folder.mkdir(parents=True, exist_ok=True)
        self.database = Database(database)

    def close(self) -> None:
        self.database.close()

    def new_id(self) -> str:
        return f"video_{secrets.token_hex(16)}"

    def folder_of(self, id: str) -> Path:
        """Where a job's files are. Its id is one of ours, never what a client sent."""
        assert _JOB_ID.fullmatch(id), id
        return self.folder / id

    # --- the owners' side -------------------------------------------------------------------------

    def submit(
        self,
        new: NewJob,
        max_queued: int = 1_000_000,
        max_queued_of_owner: int = 1_000_000,
        max_bytes: int = 2**62,
    ) -> tuple[Entry, bool]:
        """Accept a job; it is on the disk when this returns. With an idempotency key that was used
        for the same request, the earlier job; the second value says whether it is a new one.
        QueueFull if as many jobs wait as may, or their files have `max_bytes`."""
        values = _encoded(vars(new))
        with self.database.writing() as connection:
            rows = connection.execute(_SELECT_OF_KEY, values)
            if earlier := _same_request(rows, new.digest):
                return earlier, False
            waiting, of_owner, total = connection.execute(
                "SELECT count(*), count(*) FILTER (WHERE owner = :owner), coalesce(sum(bytes), 0)"
                " FROM jobs WHERE status = 'queued'",
                values,
            ).fetchone()
            if waiting >= max_queued:
                raise QueueFull(f"{max_queued} jobs are waiting, and no more may")
            if of_owner >= max_queued_of_owner:
                raise QueueFull(f"{max_queued_of_owner} of your jobs are waiting, and no more may")
            if total + new.bytes > max_bytes:
                raise QueueFull(f"files of {total} bytes are waiting, {max_bytes} at most may")
            values |= {"status": QUEUED, "created_at": self.clock()}
            values |= {"progress": 0, "attempt": 0, "crash_count": 0}
            columns, places = ", ".join(values), ", ".join(f":{name}" for name in values)
            sql = f"INSERT INTO jobs ({columns}) VALUES ({places}) RETURNING *"
            return _entries(connection.execute(sql, values))[0], True

    def of_key(self, owner: str, key: str | None, digest: str) -> Entry | None:
        """The job that an idempotency key stands for. KeyUsed if that is another request."""
        return _same_request(self.database.read(_SELECT_OF_KEY, owner=owner, key=key), digest)

    def get(self, owner: str, id: str) -> Entry | None:
        """An owner's job; None for another's, as for one that does not exist."""
        if not _JOB_ID.fullmatch(id):
            return None
        sql = f"SELECT * FROM jobs WHERE id = :id AND {_IS_VISIBLE}"
        return next(iter(_entries(self.database.read(sql, id=id, owner=owner))), None)

    def page(
        self, owner: str, after: int | None = None, limit: int = 20, newest_first: bool = True
    ) -> tuple[list[Entry], bool]:
        """Some of an owner's jobs in order, behind the job numbered `after`; are there more?"""
        comparison, order = ("<", "DESC") if newest_first else (">", "ASC")
        rows = self.database.read(
            f"SELECT * FROM jobs WHERE {_IS_VISIBLE}"
            f" AND (:after IS NULL OR number {comparison} :after)"
            f" ORDER BY number {order} LIMIT :rows",
            owner=owner,
            after=after,
            rows=limit + 1,
        )
        return _entries(rows[:limit]), len(rows) > limit

    def ahead_of(self, entry: Entry) -> int:
        """How many waiting jobs came before one."""
        sql = "SELECT count(*) FROM jobs WHERE status = 'queued' AND number < :number"
        return self.database.read(sql, number=entry.number)[0][0]

    def cancel(self, owner: str, id: str) -> bool:
        """Take a job from its owner's sight, whatever its state. A running one is released by its
        worker within a step; its files are deleted then. False if there is none."""
        # The key is free again: the same request may be made once more.
        sql = f"UPDATE jobs SET status = 'cancelled', key = NULL WHERE id = :id AND {_IS_VISIBLE}"
        changed = self.database.write(sql, id=id, owner=owner)
        if changed:
            self.remove_cancelled()
        return changed > 0

    # --- the workers' side ------------------------------------------------------------------------

    def next_batch_key(self, loaded: str | None = None, max_delay: float = 0.0) -> str | None:
        """The batch key of the job whose turn it is: of the owner who was served longest ago. A
        worker stays with the key that it has loaded while no other job has waited longer than
        `max_delay` seconds. None if nothing waits."""
        now = self.clock()
        # The other columns are those of the row with the least number: an owner's first job.
        first = self.database.read(
            "SELECT batch_key, created_at, min(number) AS first,"
            " coalesce(served_at, 0) AS last_served"
            f" FROM jobs LEFT JOIN owners USING (owner) WHERE {_IS_FREE}"
            " GROUP BY owner ORDER BY last_served, first LIMIT 1",
            now=now,
        )
        if not first:
            return None
        key, waited = first[0]["batch_key"], now - first[0]["created_at"]
        if loaded in (None, key) or waited > max_delay:
            return key
        more = f"SELECT 1 FROM jobs WHERE {_IS_FREE} AND batch_key = :loaded LIMIT 1"
        return loaded if self.database.read(more, now=now, loaded=loaded) else key

    def claim(self, worker: str, batch_key: str, count: int) -> list[Entry]:
        """Give a worker up to `count` jobs with a batch key, in turn among their owners."""
        now, entries = self.clock(), []
        with self.database.writing() as connection:
            self._release(connection, "lease_until < :now", crashed=True, now=now)
            chosen = connection.execute(
                "SELECT number, owner FROM (SELECT number, owner, row_number() OVER"
                f" (PARTITION BY owner ORDER BY number) AS turn FROM jobs WHERE {_IS_FREE}"
                " AND batch_key = :batch_key) LEFT JOIN owners USING (owner)"
                " ORDER BY turn, coalesce(served_at, 0), number LIMIT :count",
                {"now": now, "batch_key": batch_key, "count": count},
            ).fetchall()
            for place, (number, owner) in enumerate(chosen):
                # Of owners who are served at once, the later ones keep their turn.
                connection.execute(
                    "INSERT INTO owners VALUES (:owner, :now)"
                    " ON CONFLICT DO UPDATE SET served_at = :now",
                    {"owner": owner, "now": now + place * 1e-6},
                )
                rows = connection.execute(
                    "UPDATE jobs SET worker = :worker, lease_until = :until, attempt = attempt + 1"
                    " WHERE number = :number RETURNING *",
                    {"worker": worker, "until": now + self.lease, "number": number},
                )
                entries += _entries(rows)
        return entries

    def owns(self, entry: Entry) -> bool:
        """Whether a worker still has the job that it took: nobody cancelled it, or gave it away."""
        return bool(self.database.read(f"SELECT 1 FROM jobs WHERE {_IS_OWNED}", **_claim(entry)))

    def report(
        self, entry: Entry, progress: int, detail: dict | None = None, stage_ended: bool = False
    ) -> bool:
        """Store how far a job is. False if the worker does not own it any more."""
        now = self.clock()
        return self._update_owned(
            entry,
            "status = 'in_progress', progress = :progress, detail = :detail,"
            " started_at = coalesce(started_at, :now), lease_until = :until,"
            " crash_count = iif(:stage_ended, 0, crash_count)",
            progress=progress,
            detail=detail,
            now=now,
            until=now + self.lease,
            stage_ended=stage_ended,
        )

    def keep(self, entry: Entry, name: str) -> None:
        """A worker wrote a file of its job: here it is in the job's folder already."""

    def complete(self, entry: Entry, bytes: int = 0, detail: dict | None = None) -> bool:
        """A job's video is on the disk. False if the worker does not own the job any more."""
        done = "status = 'completed', progress = 100, bytes = :bytes, detail = :detail"
        return self._end(entry, done, bytes=bytes, detail=detail)

    def fail(self, entry: Entry, code: str, message: str) -> bool:
        """A job cannot be made. False if the worker does not own it any more."""
        error = {"code": code, "message": message}
        return self._end(entry, "status = 'failed', detail = NULL, error = :error", error=error)

    def _end(self, entry: Entry, assignments: str, **values: Any) -> bool:
        assignments += ", completed_at = :now, worker = NULL, lease_until = NULL"
        return self._update_owned(entry, assignments, now=self.clock(), **values)

    def _update_owned(self, entry: Entry, assignments: str, **values: Any) -> bool:
        """Change a job that is still its worker's, in this attempt; whether it was."""
        sql = f"UPDATE jobs SET {assignments} WHERE {_IS_OWNED}"
        return self.database.write(sql, **_claim(entry), **_encoded(values)) > 0

    def release_job(self, entry: Entry) -> None:
        """Give back a job that was cancelled, or that is not to be worked on: it waits again."""
        with self.database.writing() as connection:
            mine = "number = :number AND attempt = :attempt"
            self._release(connection, mine, crashed=False, **_claim(entry))
        self.remove_cancelled()

    def release_worker(self, worker: str, crashed: bool = False) -> None:
        """A worker has ended, or has begun anew: its jobs wait again, and it is not alive until it
        is heard again. What it has done still counts.

        crashed  over the jobs that it had begun
        """
        with self.database.writing() as connection:
            self._release(connection, "worker = :worker", crashed, worker=worker)
            sql = "UPDATE workers SET seen_at = :then WHERE worker = :worker"
            connection.execute(sql, {"then": self.clock() - self.lease, "worker": worker})
        self.remove_cancelled()

    def _release(
        self, connection: sqlite3.Connection, where: str, crashed: bool, **values: Any
    ) -> None:
        """Make claimed jobs wait again. If their worker crashed over those that it had begun, that
        is counted; a job over which too many crashed has failed."""
        connection.execute(
            "UPDATE jobs SET worker = NULL, lease_until = NULL,"
            " crash_count = crash_count + (:crashed AND status = 'in_progress')"
            f" WHERE worker IS NOT NULL AND {where}",
            values | {"crashed": crashed},
        )
        connection.execute(
            "UPDATE jobs SET status = 'failed', error = :error, detail = NULL, completed_at = :now"
            " WHERE status = 'in_progress' AND crash_count >= :max_crashes",
            {"error": json.dumps(_CRASHED), "now": self.clock(), "max_crashes": self.max_crashes},
        )

    def renew(self, worker: str, state: dict) -> None:
        """A worker's heartbeat: it keeps its jobs, and says what it has loaded and done."""
        now = self.clock()
        values = {"worker": worker, "now": now, "until": now + self.lease}
        with self.database.writing() as connection:
            connection.execute(
                "UPDATE jobs SET lease_until = :until WHERE worker = :worker", values
            )
            connection.execute(
                "INSERT INTO workers VALUES (:worker, :now, :state)"
                " ON CONFLICT DO UPDATE SET seen_at = :now, state = :state",
                values | {"state": json.dumps(state)},
            )

    # --- deleting ---------------------------------------------------------------------------------

    def sweep(self, days: float, max_bytes: int, orphans_after: float = 3600.0) -> None:
        """End leases that ran out; delete what was cancelled, jobs that ended more than `days` ago,
        the oldest ended ones beyond `max_bytes`, and folders that no job has.

        orphans_after  seconds: an upload fills its folder before its job is there
        """
        now = self.clock()
        # SQLite's integers have 64 bits.
        values = {"before": now - days * _DAY, "max_bytes": min(max_bytes, 2**63 - 1)}
        with self.database.writing() as connection:
            self._release(connection, "lease_until < :now", crashed=True, now=now)
            connection.execute("DELETE FROM workers WHERE seen_at < :before", values)
        self.remove_cancelled()
        self._remove(f"{_IS_ENDED} AND completed_at < :before", **values)
        self._remove(
            "number IN (SELECT number FROM (SELECT number, sum(bytes) OVER"
            " (ORDER BY completed_at DESC, number DESC) AS newer_bytes FROM jobs"
            f" WHERE {_IS_ENDED}) WHERE newer_bytes > :max_bytes)",
            **values,
        )
        self._remove_orphans(now - orphans_after)

    def remove_cancelled(self) -> None:
        """Delete cancelled jobs that no worker holds."""
        free = "status = 'cancelled' AND (worker IS NULL OR lease_until < :now)"
        self._remove(free, now=self.clock())

    def _remove(self, where: str, **values: Any) -> None:
        """Delete jobs. Their rows go first: a job in the database has its files, and a folder that
        is left behind is an orphan."""
        with self.database.writing() as connection:
            rows = connection.execute(f"DELETE FROM jobs WHERE {where} RETURNING id", values)
            ids = [row["id"] for row in rows]
        for id in ids:
            shutil.rmtree(self.folder_of(id), ignore_errors=True)

    def _remove_orphans(self, before: float) -> None:
        """Delete folders that no job has and that nobody has touched since a time."""
        old = []
        for folder in self.folder.glob("video_*"):
            with suppress(FileNotFoundError):
                old += [folder] if folder.stat().st_mtime < before else []
        known = {row["id"] for row in self.database.read("SELECT id FROM jobs")} if old else set()
        for folder in old:
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)

    # --- counts -----------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Jobs by status."""
        rows = self.database.read("SELECT status, count(*) FROM jobs GROUP BY status")
        return dict.fromkeys(STATUSES, 0) | {row[0]: row[1] for row in rows}

    def oldest_wait(self) -> float:
        """Seconds for which the oldest waiting job has waited."""
        now = self.clock()
        sql = "SELECT :now - min(created_at) FROM jobs WHERE status = 'queued'"
        return self.database.read(sql, now=now)[0][0] or 0.0

    def workers(self) -> dict[str, dict]:
        """The last state of every worker, with `alive` for those heard within a lease."""
        rows, now = self.database.read("SELECT * FROM workers"), self.clock()
        return {
            worker: {**json.loads(state), "alive": now - seen_at < self.lease}
            for worker, seen_at, state in rows
        }


def _claim(entry: Entry) -> dict[str, Any]:
    """What a worker's writes name of a job that it took."""
    return {"number": entry.number, "attempt": entry.attempt, "worker": entry.worker}


def _encoded(values: dict[str, Any]) -> dict[str, Any]:
    """Values as columns hold them: objects as JSON."""
    return {k: json.dumps(v) if isinstance(v, dict) else v for k, v in values.items()}


def _entries(rows: Iterable[sqlite3.Row]) -> list[Entry]:
    def decoded(name: str, value: Any) -> Any:
        return json.loads(value) if name in _JSON and value is not None else value

    return [Entry(**{name: decoded(name, row[name]) for name in row.keys()}) for row in rows]


def _same_request(rows: Iterable[sqlite3.Row], digest: str) -> Entry | None:
    """The job of an idempotency key, if there is one. KeyUsed if it is of another request."""
    earlier = next(iter(_entries(rows)), None)
    if earlier and earlier.digest != digest:
        raise KeyUsed
    return earlier
