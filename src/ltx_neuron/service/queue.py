"""The durable queue: every job from its acceptance to its deletion.

    queued -> in_progress -> completed | failed -> queued (its owner tries again)
       \\----------\\-> cancelled (hidden from its owner)

A worker takes jobs on a lease that it renews. If it dies, the lease ends and another worker takes
the job. That worker resumes from the state in the job's folder. Every write of a worker carries the
job's attempt number (a fencing token), so a worker presumed dead cannot overwrite newer results,
and no job ends twice.
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
from typing import Any, NamedTuple

from ltx_neuron.files import PARTIAL
from ltx_neuron.service.database import Database, StorageError

QUEUED, IN_PROGRESS, COMPLETED = "queued", "in_progress", "completed"
FAILED, CANCELLED = "failed", "cancelled"
OPEN = QUEUED, IN_PROGRESS
STATUSES = QUEUED, IN_PROGRESS, COMPLETED, FAILED, CANCELLED
_CRASHED = {
    "code": "worker_lost",
    "message": "every worker that ran this job crashed before it finished another stage",
}
_JOB_ID = re.compile(r"video_[0-9a-f]{32}")
_DAY = 86400.0
_JSON = "params", "public_fields", "detail", "error"
# Conditions on rows of `jobs`.
_IS_OPEN = "status IN ('queued', 'in_progress')"
_IS_ENDED = "status IN ('completed', 'failed')"
_IS_VISIBLE = "owner = :owner AND status != 'cancelled'"
# The leases' clock begins again with the machine: those far ahead were given before. One lease is
# for the time that a writer waits for others after its `now`.
_IS_LEASED = "lease_until BETWEEN :now AND :now + 2 * :lease"
_IS_FREE = f"{_IS_OPEN} AND (worker IS NULL OR NOT {_IS_LEASED})"  # a worker may take it
_SELECT_OF_KEY = "SELECT * FROM jobs WHERE owner = :owner AND key = :key"
_IS_OWNED = f"number = :number AND attempt = :attempt AND worker = :worker AND {_IS_OPEN}"


@dataclass(frozen=True)
class NewJob:
    """A new job. `Queue.new_id` makes its `id`; its folder has the job's files already."""

    id: str
    owner: str
    digest: str
    batch_key: str
    params: dict[str, Any]
    public_fields: dict[str, Any]
    key: str | None = None
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Entry(NewJob):
    """A job: one row of the table `jobs`."""

    number: int
    status: str
    progress: int
    detail: dict[str, Any] | None
    created_at: float
    started_at: float | None
    completed_at: float | None
    error: dict[str, Any] | None
    worker: str | None
    lease_until: float | None
    attempt: int
    crash_count: int


class QueueFull(Exception):
    """Too many jobs wait: of all owners, or of this one."""


class Room(NamedTuple):
    """How many jobs may wait, of all owners and of one, and the bytes of their files."""

    jobs: int = 1_000_000
    jobs_of_owner: int = 1_000_000
    bytes: int = 2**62

    def check(self, connection: sqlite3.Connection, new: NewJob) -> None:
        """Raise QueueFull if one job more does not fit."""
        waiting, of_owner, total = connection.execute(
            "SELECT count(*), count(*) FILTER (WHERE owner = :owner), coalesce(sum(bytes), 0)"
            " FROM jobs WHERE status = 'queued'",
            {"owner": new.owner},
        ).fetchone()
        if waiting >= self.jobs:
            raise QueueFull(f"the queue is full: {self.jobs} jobs are waiting")
        if of_owner >= self.jobs_of_owner:
            raise QueueFull(f"the queue is full: {self.jobs_of_owner} of your jobs wait")
        if total + new.bytes > self.bytes:
            raise QueueFull(f"the queue is full: its files have {total} of {self.bytes} bytes")


_ANY = Room()


class KeyUsed(Exception):
    """An idempotency key that was used for another request."""


class Queue:
    """The jobs of one service: a database, and a folder for each job's files. lease: seconds that a
    worker owns a job before it must renew. max_crashes: number of worker crashes after which a job
    fails. clock: seconds since 1970; it may be set. monotonic: seconds of leases, of one clock for
    all processes of the machine, never set."""

    def __init__(
        self,
        database: Path,
        folder: Path,
        *,
        lease: float = 60.0,
        max_crashes: int = 5,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.folder, self.lease, self.max_crashes = Path(folder), lease, max_crashes
        self.clock, self.monotonic = clock, monotonic
        self.folder.mkdir(parents=True, exist_ok=True)
        self.database = Database(Path(database), self.folder)

    def close(self) -> None:
        self.database.close()

    def new_id(self) -> str:
        return f"video_{secrets.token_hex(16)}"

    def folder_of(self, id: str) -> Path:
        """The folder of a job's files. `id` is one of ours, never a client's text."""
        assert _JOB_ID.fullmatch(id), id
        return self.folder / id

    # --- the owners' side -------------------------------------------------------------------------

    def submit(self, new: NewJob, room: Room = _ANY) -> tuple[Entry, bool]:
        """Accept a job; it is on disk when this returns. A repeated idempotency key returns the
        earlier job. The second value is true for a new job. Raises KeyUsed if the key's request
        differs, and QueueFull."""
        values = _encoded(vars(new))
        with self.database.writing() as connection:
            rows = connection.execute(_SELECT_OF_KEY, values)
            if earlier := _same_request(rows, new.digest):
                return earlier, False
            room.check(connection, new)
            values |= {"status": QUEUED, "created_at": self.clock()}
            values |= {"progress": 0, "attempt": 0, "crash_count": 0}
            columns, places = ", ".join(values), ", ".join(f":{name}" for name in values)
            sql = f"INSERT INTO jobs ({columns}) VALUES ({places}) RETURNING *"
            return _entries(connection.execute(sql, values))[0], True

    def retry(self, entry: Entry, room: Room = _ANY) -> bool:
        """Let a failed job wait again, with its files. False if it is no failed job. Raises
        QueueFull."""
        sql = (
            "UPDATE jobs SET status = 'queued', progress = 0, error = NULL, started_at = NULL,"
            " completed_at = NULL, crash_count = 0"
            f" WHERE id = :id AND status = 'failed' AND {_IS_VISIBLE}"
        )
        with self.database.writing() as connection:
            room.check(connection, entry)
            return connection.execute(sql, {"id": entry.id, "owner": entry.owner}).rowcount > 0

    def of_key(self, owner: str, key: str | None, digest: str) -> Entry | None:
        """The job of an idempotency key. Raises KeyUsed if its request differs."""
        return _same_request(self.database.read(_SELECT_OF_KEY, owner=owner, key=key), digest)

    def get(self, owner: str, id: str) -> Entry | None:
        """An owner's job; None if it is absent or another owner's."""
        if not _JOB_ID.fullmatch(id):
            return None
        sql = f"SELECT * FROM jobs WHERE id = :id AND {_IS_VISIBLE}"
        return next(iter(_entries(self.database.read(sql, id=id, owner=owner))), None)

    def page(
        self, owner: str, after: int | None = None, limit: int = 20, newest_first: bool = True
    ) -> tuple[list[Entry], bool]:
        """A page of an owner's jobs after the job numbered `after`, and whether more follow."""
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
        sql = "SELECT count(*) FROM jobs WHERE status = 'queued' AND number < :number"
        return self.database.read(sql, number=entry.number)[0][0]

    def cancel(self, owner: str, id: str) -> bool:
        """Hide a job from its owner, in any state. A running job's worker releases it within a
        step; then its files are deleted. False if there is no such job."""
        # This frees the key: the client may send the same request again.
        sql = f"UPDATE jobs SET status = 'cancelled', key = NULL WHERE id = :id AND {_IS_VISIBLE}"
        changed = self.database.write(sql, id=id, owner=owner)
        if changed:
            self.remove_cancelled()
        return changed > 0

    # --- the workers' side ------------------------------------------------------------------------

    def next_batch_key(self, loaded: str | None = None, max_delay: float = 0.0) -> str | None:
        """The batch key of the next job, or None: that of the owner who was served longest ago. A
        worker keeps its loaded key while no other job has waited longer than `max_delay` s."""
        # SQLite takes the other columns from the row with the minimum: an owner's first job.
        first = self.database.read(
            "SELECT batch_key, created_at, min(number) AS first,"
            " coalesce(served_at, 0) AS last_served"
            f" FROM jobs LEFT JOIN owners USING (owner) WHERE {_IS_FREE}"
            " GROUP BY owner ORDER BY last_served, first LIMIT 1",
            **self._now(),
        )
        if not first:
            return None
        key, waited = first[0]["batch_key"], self.clock() - first[0]["created_at"]
        if loaded in (None, key) or not 0 <= waited <= max_delay:  # below 0: the clock was set
            return key
        more = f"SELECT 1 FROM jobs WHERE {_IS_FREE} AND batch_key = :loaded LIMIT 1"
        return loaded if self.database.read(more, **self._now(), loaded=loaded) else key

    def claim(self, worker: str, batch_key: str, count: int) -> list[Entry]:
        """Assign a worker up to `count` jobs with a batch key, alternating between owners."""
        now, entries = self._now(), []
        with self.database.writing() as connection:
            self._release(connection, f"NOT {_IS_LEASED}", crashed=True, **now)
            chosen = connection.execute(
                "SELECT number, owner FROM (SELECT number, owner, row_number() OVER"
                f" (PARTITION BY owner ORDER BY number) AS turn FROM jobs WHERE {_IS_FREE}"
                " AND batch_key = :batch_key) LEFT JOIN owners USING (owner)"
                " ORDER BY turn, coalesce(served_at, 0), number LIMIT :count",
                now | {"batch_key": batch_key, "count": count},
            ).fetchall()
            for number, owner in chosen:
                connection.execute(
                    "INSERT INTO owners SELECT :owner, coalesce(max(served_at), 0) + 1 FROM owners"
                    " WHERE TRUE ON CONFLICT DO UPDATE SET served_at = excluded.served_at",
                    {"owner": owner},
                )
                rows = connection.execute(
                    "UPDATE jobs SET worker = :worker, lease_until = :now + :lease,"
                    " attempt = attempt + 1 WHERE number = :number RETURNING *",
                    now | {"worker": worker, "number": number},
                )
                entries += _entries(rows)
        for entry in entries:
            self._remove_partials(entry.id)
        return entries

    def _now(self) -> dict[str, float]:
        return {"now": self.monotonic(), "lease": self.lease}

    def _remove_partials(self, id: str) -> None:
        for partial in self.folder_of(id).glob(f".*{PARTIAL}*"):
            partial.unlink(missing_ok=True)

    def owns(self, entry: Entry) -> bool:
        """Whether a worker still owns its job: it was not cancelled or assigned to another."""
        return bool(self.database.read(f"SELECT 1 FROM jobs WHERE {_IS_OWNED}", **_claim(entry)))

    def report(
        self, entry: Entry, progress: int, detail: dict | None = None, stage_ended: bool = False
    ) -> bool:
        """Store a job's progress, unless the database is full. False if the worker lost the job."""
        try:
            return self._update_owned(
                entry,
                "status = 'in_progress', progress = :progress, detail = :detail,"
                " started_at = coalesce(started_at, :started), lease_until = :now + :lease,"
                " crash_count = iif(:stage_ended, 0, crash_count)",
                frees=False,
                progress=progress,
                detail=detail,
                started=self.clock(),
                stage_ended=stage_ended,
                **self._now(),
            )
        except StorageError:
            return self.owns(entry)

    def keep(self, entry: Entry, name: str) -> None:
        """Keep a file that a worker wrote. Nothing to do: it is in the job's folder already."""

    def complete(self, entry: Entry, bytes: int = 0, detail: dict | None = None) -> bool:
        """Mark a job as completed. False if the worker no longer owns it."""
        done = "status = 'completed', progress = 100, bytes = :bytes, detail = :detail"
        return self._end(entry, done, bytes=bytes, detail=detail)

    def fail(self, entry: Entry, code: str, message: str) -> bool:
        """Mark a job as failed. False if the worker no longer owns it."""
        error = {"code": code, "message": message}
        return self._end(entry, "status = 'failed', detail = NULL, error = :error", error=error)

    def _end(self, entry: Entry, assignments: str, **values: Any) -> bool:
        assignments += ", completed_at = :now, worker = NULL, lease_until = NULL"
        if ended := self._update_owned(entry, assignments, now=self.clock(), **values):
            self._remove_partials(entry.id)
        return ended

    def _update_owned(self, entry: Entry, assignments: str, **values: Any) -> bool:
        sql = f"UPDATE jobs SET {assignments} WHERE {_IS_OWNED}"
        return self.database.write(sql, **_claim(entry), **_encoded(values)) > 0

    def release_job(self, entry: Entry) -> None:
        """Release a job. It waits again unless it was cancelled."""
        with self.database.writing(frees=True) as connection:
            mine = "number = :number AND attempt = :attempt"
            self._release(connection, mine, crashed=False, **_claim(entry))
        self.remove_cancelled()

    def release_worker(self, worker: str | None, crashed: bool = False) -> None:
        """Release the jobs of a worker that ended or restarted; its totals remain. worker: None for
        all of them; the caller holds the lock of the data folder's one worker. crashed: whether it
        crashed, which counts for the jobs that it had begun."""
        with self.database.writing(frees=True) as connection:
            its = "worker = coalesce(:worker, worker)"
            self._release(connection, its, crashed, worker=worker)
            sql = f"UPDATE workers SET state = json_remove(state, '$.lease_until') WHERE {its}"
            connection.execute(sql, {"worker": worker})
        self.remove_cancelled()

    def _release(
        self, connection: sqlite3.Connection, where: str, crashed: bool, **values: Any
    ) -> None:
        """Make claimed jobs wait again. A crash counts for the jobs that the worker had begun; a
        job with too many crashes fails."""
        connection.execute(
            "UPDATE jobs SET worker = NULL, lease_until = NULL,"
            " crash_count = crash_count + (:crashed AND status = 'in_progress')"
            f" WHERE worker IS NOT NULL AND {where}",
            values | {"crashed": crashed},
        )
        lost = connection.execute(
            "UPDATE jobs SET status = 'failed', error = :error, detail = NULL, completed_at = :now"
            " WHERE status = 'in_progress' AND crash_count >= :max_crashes RETURNING id",
            {"error": json.dumps(_CRASHED), "now": self.clock(), "max_crashes": self.max_crashes},
        )
        for (id,) in lost.fetchall():
            self._remove_partials(id)

    def renew(self, worker: str, state: dict) -> None:
        """A worker's heartbeat: renew its leases and store its state."""
        until = self.monotonic() + self.lease
        values = {"worker": worker, "now": self.clock(), "until": until}
        with self.database.writing() as connection:
            connection.execute(
                "UPDATE jobs SET lease_until = :until WHERE worker = :worker", values
            )
            connection.execute(
                "INSERT INTO workers VALUES (:worker, :now, :state)"
                " ON CONFLICT DO UPDATE SET seen_at = :now, state = :state",
                values | {"state": json.dumps(state | {"lease_until": until})},
            )

    # --- deleting ---------------------------------------------------------------------------------

    def sweep(self, days: float, max_bytes: int, orphans_after: float = 3600.0) -> None:
        """Expire leases. Delete cancelled jobs, jobs that ended more than `days` ago, the oldest
        ended jobs above `max_bytes`, and folders without a job. orphans_after: seconds; an upload
        fills its folder before its job exists."""
        now = self.clock()
        # SQLite's integers have 64 bits.
        values = {"before": now - days * _DAY, "max_bytes": min(max_bytes, 2**63 - 1)}
        with self.database.writing(frees=True) as connection:
            self._release(connection, f"NOT {_IS_LEASED}", crashed=True, **self._now())
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
        self.database.fill_reserve()

    def remove_cancelled(self) -> None:
        """Delete cancelled jobs that no worker owns."""
        free = f"status = 'cancelled' AND (worker IS NULL OR NOT {_IS_LEASED})"
        self._remove(free, **self._now())

    def _remove(self, where: str, **values: Any) -> None:
        """Delete jobs. Rows go first: every job in the database has its files."""
        with self.database.writing(frees=True) as connection:
            rows = connection.execute(f"DELETE FROM jobs WHERE {where} RETURNING id", values)
            ids = [row["id"] for row in rows]
        for id in ids:
            shutil.rmtree(self.folder_of(id), ignore_errors=True)

    def _remove_orphans(self, before: float) -> None:
        """Delete folders without a job that have not changed since a time."""
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
        rows = self.database.read("SELECT status, count(*) FROM jobs GROUP BY status")
        return dict.fromkeys(STATUSES, 0) | {row[0]: row[1] for row in rows}

    def oldest_wait(self) -> float:
        """Seconds that the oldest waiting job has waited."""
        now = self.clock()
        sql = "SELECT :now - min(created_at) FROM jobs WHERE status = 'queued'"
        return max(0.0, self.database.read(sql, now=now)[0][0] or 0.0)

    def workers(self) -> dict[str, dict]:
        """The last state of every worker; `alive` if its last heartbeat is within a lease."""
        sql = "SELECT * FROM workers"
        states = {row["worker"]: json.loads(row["state"]) for row in self.database.read(sql)}
        now = self.monotonic()
        for state in states.values():
            state["alive"] = now <= state.pop("lease_until", -1.0) <= now + self.lease
        return states


def _claim(entry: Entry) -> dict[str, Any]:
    return {"number": entry.number, "attempt": entry.attempt, "worker": entry.worker}


def _encoded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: json.dumps(v) if isinstance(v, dict) else v for k, v in values.items()}


def _entries(rows: Iterable[sqlite3.Row]) -> list[Entry]:
    def decoded(name: str, value: Any) -> Any:
        return json.loads(value) if name in _JSON and value is not None else value

    return [Entry(**{name: decoded(name, row[name]) for name in row.keys()}) for row in rows]


def _same_request(rows: Iterable[sqlite3.Row], digest: str) -> Entry | None:
    """The job of an idempotency key, if any. Raises KeyUsed if its request differs."""
    earlier = next(iter(_entries(rows)), None)
    if earlier and earlier.digest != digest:
        raise KeyUsed
    return earlier
