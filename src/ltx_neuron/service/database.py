"""The queue's SQLite database: its tables, and connections for any number of threads.

In WAL mode, readers never wait and there is one writer at a time. A transaction is synced to the
disk before it returns.
"""

import sqlite3
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ltx_neuron.errors import UserError

_BUSY_SECONDS = 30.0  # how long a writer waits for another process
# Earlier names of columns of `jobs`.
_RENAMED = {
    "kind": "batch_key",
    "line": "params",
    "shown": "public_fields",
    "losses": "crash_count",
}
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,  -- order of arrival, never reused
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    key TEXT,                       -- Idempotency-Key
    digest TEXT NOT NULL,           -- of the request: a repeated key must match it
    status TEXT NOT NULL,
    batch_key TEXT NOT NULL,        -- jobs with one key share loaded graphs and weights
    params TEXT NOT NULL,           -- JSON: the job, as in a prompts file
    public_fields TEXT NOT NULL,    -- JSON: fields that its owner sees
    progress INTEGER NOT NULL,      -- percent
    detail TEXT,                    -- JSON: stage and step
    created_at FLOAT NOT NULL,
    started_at FLOAT,
    completed_at FLOAT,
    error TEXT,                     -- JSON
    bytes INTEGER NOT NULL,         -- size of its folder
    worker TEXT,
    lease_until FLOAT,
    attempt INTEGER NOT NULL,       -- the fencing token: writes with an older one are ignored
    crash_count INTEGER NOT NULL,   -- workers that crashed since its last finished stage
    UNIQUE (owner, key)
);
CREATE INDEX IF NOT EXISTS jobs_by_status ON jobs (status, owner, number);
CREATE INDEX IF NOT EXISTS jobs_by_owner ON jobs (owner, number);
CREATE TABLE IF NOT EXISTS owners (  -- when a job of theirs started last, for fair turns
    owner TEXT NOT NULL PRIMARY KEY,
    served_at FLOAT NOT NULL
);
CREATE TABLE IF NOT EXISTS workers (
    worker TEXT NOT NULL PRIMARY KEY,
    seen_at FLOAT NOT NULL,
    state TEXT NOT NULL             -- JSON: loaded batch key, totals
);
"""


class Database:
    """A database file, created if absent. Raises UserError if the file is no such database."""

    def __init__(self, path: Path):
        self.path, self._idle = Path(path), deque[sqlite3.Connection]()
        try:
            with self.writing() as connection:
                _rename_columns(connection)
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"{path} cannot be opened as the queue's database: {error}\nRepair it, or type"
                " another --data-dir DIR"
            ) from None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def read(self, sql: str, **values: Any) -> list[sqlite3.Row]:
        """The rows of one statement."""
        with self._connected() as connection:
            return connection.execute(sql, values).fetchall()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A write transaction: all changes of the block, or none."""
        with self._connected() as connection, connection:
            # A transaction that reads first would fail if another one wrote before its own write.
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def write(self, sql: str, **values: Any) -> int:
        """Run one statement; return the number of changed rows."""
        with self.writing() as connection:
            return connection.execute(sql, values).rowcount

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection that no other thread uses at the same time."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            yield connection
        finally:
            self._idle.append(connection)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection


def _rename_columns(connection: sqlite3.Connection) -> None:
    """Rename the columns of an earlier version's database."""
    columns = {row["name"] for row in connection.execute("PRAGMA table_info(jobs)")}
    for old in _RENAMED.keys() & columns:
        connection.execute(f"ALTER TABLE jobs RENAME COLUMN {old} TO {_RENAMED[old]}")
