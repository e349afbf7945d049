"""The tables of the queue, and how its database is opened.

SQLite in WAL mode by default: one writer at a time, each transaction synced to the disk before it
is said to be done. Nothing here or in queue.py is SQLite's alone, so that another database is a URL
away.
"""

from sqlalchemy import (
    JSON,
    Column,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    create_engine,
    event,
)

_BUSY_MS = 30_000  # how long a writer waits for another
_CONNECTIONS = 20

metadata = MetaData()

jobs = Table(
    "jobs",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),  # the order of arrival
    Column("id", String(64), nullable=False, unique=True),
    Column("owner", String(64), nullable=False),
    Column("key", String(255)),  # Idempotency-Key
    Column("digest", String(64), nullable=False),  # of the request, which a key may not change
    Column("status", String(16), nullable=False),
    Column("kind", String(255), nullable=False),  # jobs of one kind run together, without a reload
    Column("line", JSON, nullable=False),  # what is to be made
    Column("shown", JSON, nullable=False),  # what its owner sees of it
    Column("progress", Integer, nullable=False, default=0),  # percent
    Column("detail", JSON),  # stage and step
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("completed_at", Float),
    Column("error", JSON),
    Column("bytes", Integer, nullable=False, default=0),  # of its folder
    # Who works on it. A worker that holds an older attempt holds nothing.
    Column("worker", String(64)),
    Column("lease_until", Float),
    Column("attempt", Integer, nullable=False, default=0),
    Column("losses", Integer, nullable=False, default=0),  # workers lost since the last stage
    UniqueConstraint("owner", "key"),
    Index("jobs_by_status", "status", "owner", "number"),
    Index("jobs_by_owner", "owner", "number"),
    sqlite_autoincrement=True,  # numbers are never used again
)

# When a job of theirs was taken last: whose turn it is.
owners = Table(
    "owners",
    metadata,
    Column("owner", String(64), primary_key=True),
    Column("served_at", Float, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("worker", String(64), primary_key=True),
    Column("seen_at", Float, nullable=False),
    Column("state", JSON, nullable=False),  # what it holds, and what it has done so far
)


def open_database(url: str) -> Engine:
    """The database of a URL, with its tables made."""
    engine = create_engine(url, pool_size=_CONNECTIONS, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)
    metadata.create_all(engine)
    return engine


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connected(connection, _):
        connection.isolation_level = None  # BEGIN is said below, and not by Python's driver
        for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={_BUSY_MS}"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begun(connection):
        # A transaction that reads first and then writes would fail where another wrote between.
        writes = connection.get_execution_options().get("writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
