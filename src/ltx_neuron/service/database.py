"""The queue's SQLite database: its tables, and connections for any number of threads.

In WAL mode, readers never wait and there is one writer at a time. A transaction is synced to the
disk before it returns. Deletions need space too: a reserve file gives it up when the disk is full.
"""

import errno
import glob
import os
import shlex
import shutil
import sqlite3
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ltx_neuron.errors import UserError, os_reason

_BUSY_SECONDS = 30.0  # how long a writer waits for another process
_LINE_SECONDS = 60.0  # between two lines about an error that lasts
_RESERVE, _PIECE = 8 * 2**20, 2**20  # bytes: twice SQLite's log; given up at a time
# Beginnings of SQLite's errors by errno of a StorageError. SHMSIZE: no room for its log's index.
_ERRORS = {
    errno.ENOSPC: ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"),
    errno.EBADMSG: ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ"),
    errno.EBUSY: ("SQLITE_BUSY",),
    errno.EACCES: ("SQLITE_READONLY", "SQLITE_CANTOPEN"),
    errno.EIO: ("SQLITE_IOERR",),
}
_SCHEMA = Path(__file__).with_name("schema.sql")
# Earlier names of columns of `jobs`.
_RENAMED = {
    "kind": "batch_key",
    "line": "params",
    "shown": "public_fields",
    "losses": "crash_count",
}


class StorageError(OSError):
    """The queue's database cannot be used. errno: its disk is full (ENOSPC), another program has
    locked it (EBUSY), it is damaged (EBADMSG), or its disk fails or it may not be written."""


class Database:
    """A database file, created if absent. Raises StorageError; UserError for a damaged file, or an
    empty one that jobs' folders in `folder` show to have had jobs."""

    def __init__(self, path: Path, folder: Path):
        self.path, self._idle = Path(path), deque[sqlite3.Connection]()
        self._printed = -_LINE_SECONDS
        self.reserve, self._opened = self.path.with_name(f"{self.path.name}.reserve"), None
        try:
            with open(path, "ab") as file:  # SQLite opens what it may not write
                size, lost = file.tell(), any(folder.glob("video_*"))
            if size % 512 or lost and not size:  # SQLite would read zeros, or delete its log
                raise sqlite3.DatabaseError(f"it has {size} bytes")
            with self.writing(frees=True) as connection:
                (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                if lost and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                    state = "it is empty"
                if state != "ok":
                    raise sqlite3.DatabaseError(state)
                columns = {row["name"] for row in connection.execute("PRAGMA table_info(jobs)")}
                for old in _RENAMED.keys() & columns:
                    connection.execute(f"ALTER TABLE jobs RENAME COLUMN {old} TO {_RENAMED[old]}")
                for statement in _SCHEMA.read_text().split(";"):
                    connection.execute(statement)
            self._opened = self._identity()
        except (StorageError, sqlite3.DatabaseError) as error:
            if getattr(error, "errno", errno.EBADMSG) != errno.EBADMSG:
                raise
            backup = f"{folder.parent}.damaged"
            parts = path.parent.glob(f"{glob.escape(path.name)}*")
            move = shlex.join(["mv", *map(str, parts), str(folder), backup])
            raise UserError(
                f"{path} cannot be opened as the queue's database: {os_reason(error)}\nPut back a"
                " copy of it. Or keep it and the finished videos elsewhere, and begin a new queue:"
                f" mkdir {shlex.quote(backup)} && {move}\nOr type another --data-dir DIR"
            ) from None

    def close(self) -> None:
        self._opened = None  # the last connection deletes the log
        while self._idle:
            self._idle.pop().close()

    def read(self, sql: str, **values: Any) -> list[sqlite3.Row]:
        with self._connected() as connection:
            return connection.execute(sql, values).fetchall()

    @contextmanager
    def writing(self, frees: bool = False) -> Iterator[sqlite3.Connection]:
        """A write transaction: all changes of the block, or none. frees: it frees space or ends a
        job; on a full disk a piece of the reserve gives way to it."""
        if frees and self._is_full():
            with suppress(FileNotFoundError):
                os.truncate(self.reserve, max(0, self.reserve.stat().st_size - _PIECE))
        with self._connected() as connection, connection:
            # A transaction that reads first would fail if another one wrote before its own write.
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def write(self, sql: str, frees: bool = True, **values: Any) -> int:
        """Run one statement; return the number of changed rows."""
        with self.writing(frees) as connection:
            return connection.execute(sql, values).rowcount

    def fill_reserve(self) -> None:
        """Make the reserve whole while the disk has room for as much beside it."""
        with suppress(OSError), open(self.reserve, "ab", 0) as file:
            while file.tell() < _RESERVE and not self._is_full(_RESERVE):
                file.write(os.urandom(_PIECE))  # a file system may store no zeros

    def _is_full(self, needed: int = _PIECE) -> bool:
        return shutil.disk_usage(self.path.parent).free < needed

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection that no other thread uses at the same time. Prints a StorageError."""
        try:
            if self._opened and self._opened != self._identity():
                raise StorageError(errno.EBADMSG, "emptied, deleted or replaced", str(self.path))
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            try:
                yield connection
            finally:
                self._idle.append(connection)
        except (StorageError, sqlite3.Error) as error:
            raise self._to_storage_error(error) from None

    def _identity(self) -> list[int]:
        """The numbers of an open database's files; empty if one is missing or the first is empty.
        SQLite would go on with deleted files, and make new ones in other processes."""
        with suppress(FileNotFoundError):
            numbers = [os.stat(f"{self.path}{end}").st_ino for end in ("", "-wal", "-shm")]
            return numbers if self.path.stat().st_size else []
        return []

    def _to_storage_error(self, error: Exception) -> Exception:
        """SQLite's error as a StorageError, printed as a line; other errors as they are."""
        name = getattr(error, "sqlite_errorname", "")
        if number := next((n for n, names in _ERRORS.items() if name.startswith(names)), 0):
            error = StorageError(number, str(error), str(self.path))
        if isinstance(error, StorageError) and time.monotonic() - self._printed >= _LINE_SECONDS:
            self._printed = time.monotonic()
            advice = "; start the service again" if error.errno == errno.EBADMSG else ""
            print(f"{self.path}: {os_reason(error)}{advice}", flush=True)
        return error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection
