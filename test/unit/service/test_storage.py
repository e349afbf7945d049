"""A full disk, a locked database, a failing disk and a damaged file are answered differently; jobs
can be deleted on a full disk; no damage costs more than it must."""

import ctypes
import errno
import json
import os
import resource
import shlex
import shutil
import socket
import sqlite3
import subprocess
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from helpers import exit_code, forked, wait_for

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from service_app import FORM, SIZE, Sent, Service, form, get, listening, opened

from ltx_neuron import errors
from ltx_neuron.errors import UserError
from ltx_neuron.files import exclusive
from ltx_neuron.service import database, server
from ltx_neuron.service.database import StorageError
from ltx_neuron.service.queue import NewJob, Queue
from ltx_neuron.service.settings import Limits

RESERVE = 8 * 2**20


@pytest.fixture
def service(tmp_path):
    with opened(tmp_path) as made:
        yield made


def request(service: Service, method: str = "POST", path: str = "/v1/videos"):
    body = json.dumps({"prompt": "waves", "size": SIZE}).encode() if method == "POST" else b""
    return service.ask(Sent(method, path, b"", service.headers(), body))


def queue_of(folder: Path) -> closing:
    return closing(Queue(folder / "queue.sqlite", folder / "jobs"))


# --- what a client is told ------------------------------------------------------------------------


@contextmanager
def full(queue: Queue, monkeypatch):
    """SQLite may give the database no further page."""
    connect, path = queue.database._connect, queue.database.path

    def limited() -> sqlite3.Connection:
        connection = connect()
        connection.execute("PRAGMA max_page_count = 1")  # as many as it has
        return connection

    monkeypatch.setattr(queue.database, "_connect", limited)
    with closing(sqlite3.connect(path)) as open_files:  # else SQLite removes its log
        open_files.execute("SELECT * FROM jobs")
        queue.database.close()
        yield


@contextmanager
def locked(queue: Queue, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.01)
    with closing(sqlite3.connect(queue.database.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        queue.database.close()  # connections that would wait longer
        yield


@contextmanager
def disk_fails(queue: Queue, monkeypatch):
    """The system writes no file beyond the length that the log has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = os.path.getsize(f"{queue.database.path}-wal")
    resource.setrlimit(resource.RLIMIT_FSIZE, (log, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def damaged(change, checkpoint: bool = False):
    @contextmanager
    def damage(queue: Queue, monkeypatch):
        if checkpoint:
            truncate_log(queue.database.path)
        change(queue.database.path)
        queue.database._idle.clear()
        yield

    return damage


def truncate_log(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def halve(path: Path) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


def replace(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.write_bytes(path.with_name("other").read_bytes())


def write_at(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(os.urandom(4096))


FAILED = 500, "storage_failed", False
ANSWERS = {
    "full": (full, 507, "storage_full", True),
    "locked": (locked, 503, "storage_unavailable", True),
    "disk fails": (disk_fails, *FAILED),
    "emptied": (damaged(lambda path: os.truncate(path, 0)), *FAILED),
    "cut": (damaged(halve, checkpoint=True), *FAILED),
    "overwritten": (damaged(lambda path: write_at(path, 0), checkpoint=True), *FAILED),
    "deleted": (damaged(Path.unlink), *FAILED),
    "replaced": (damaged(replace), *FAILED),
    "log deleted": (damaged(lambda path: os.unlink(f"{path}-wal")), *FAILED),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_each_failure_of_the_database_has_its_own_answer_and_one_line_of_the_log(service, kind, monkeypatch, capsys):
    failure, status, code, retry = ANSWERS[kind]
    service.submitter.limits = Limits()
    for _ in range(20):  # several pages
        assert request(service).status == 200
    folders = set(service.queue.folder.iterdir())
    with failure(service.queue, monkeypatch):
        for _ in range(2):
            answer = request(service)
            while kind == "full" and answer.status == 200:  # until the free parts of its pages are used
                folders.add(service.queue.folder / json.loads(answer.body)["id"])
                answer = request(service)
            assert (answer.status, answer.error["code"]) == (status, code)
            assert answer.headers[b"x-should-retry"] == (b"true" if retry else b"false")
            assert str(service.queue.database.path) not in answer.body.decode()
    printed = capsys.readouterr()
    assert printed.out.count(f"{service.queue.database.path}: ") == 1 and "Traceback" not in printed.err
    assert set(service.queue.folder.iterdir()) == folders  # nothing goes, nothing is left


# --- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [(errno.ENOSPC, 507, "storage_full"), (errno.EDQUOT, 507, "storage_full"), (errno.EIO, 500, "internal_error")],
)
@pytest.mark.parametrize("place", ["starlette.formparsers.SpooledTemporaryFile", "pathlib.Path.mkdir"])
def test_an_upload_without_room_is_answered_with_507_and_no_traceback(
    service, place, number, status, code, monkeypatch, caplog
):
    """While it is received, and where the job's folder is made."""

    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(place, fails)
    body = form({"prompt": "waves", "size": SIZE, "input_reference": b"picture"})
    got = service.ask(Sent("POST", "/v1/videos", b"", service.headers(FORM), body))
    assert (got.status, got.error["code"]) == (status, code)
    assert ("Traceback" in caplog.text) == (status == 500)  # only what is a fault is logged


def on_small_disk(folder: Path, function) -> int:
    """The exit code of a process that calls `function` with a disk of 32 MiB mounted at `folder`;
    77 where this system lets nobody mount one."""
    libc, uid = ctypes.CDLL(None, use_errno=True), os.getuid()
    new_mounts, new_users, private = 0x20000, 0x10000000, 0x44000

    def inside() -> None:
        own = 0 if uid == 0 else new_users
        if libc.unshare(new_mounts | own) and libc.unshare(new_mounts | new_users):
            os._exit(77)
        with suppress(OSError):
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        libc.mount(None, b"/", None, private, None)
        if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=32m"):
            os._exit(77)
        function()

    return exit_code(forked(inside, 120))


def fill(folder: Path) -> None:
    """Write a file until the disk is full."""
    with open(folder / "others", "ab", 0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**12))


def deletes_on_a_full_disk(folder: Path) -> None:
    """What an operator needs: with the service that runs, and with one that starts."""
    with opened(folder) as service:
        queue, reserve = service.queue, folder / "queue.sqlite.reserve"
        ids = [json.loads(request(service).body)["id"] for _ in range(6)]
        queue.sweep(1e9, 10**18)
        assert reserve.stat().st_size == RESERVE
        (running,) = queue.claim("w", queue.next_batch_key(), 1)
        fill(folder)
        answer = request(service)
        assert (answer.status, answer.error["code"]) == (507, "storage_full")
        with pytest.raises(StorageError):
            queue.claim("w", queue.next_batch_key(), 1)
        assert queue.report(running, 40) and queue.get("ada", running.id).progress == 0
        for id in ids[1:3]:
            assert request(service, "DELETE", f"/v1/videos/{id}").status == 200
            assert get(service, f"/v1/videos/{id}").status == 404
            fill(folder)  # others take what it freed
        assert queue.complete(running) and queue.get("ada", running.id).progress == 100
        fill(folder)
    with queue_of(folder) as queue:  # started again
        fill(folder)
        with exclusive(folder / "worker", "serving"):
            queue.release_worker(None, crashed=True)
        assert queue.cancel(running.owner, ids[3]) and reserve.stat().st_size < RESERVE
        queue.sweep(0, 0)  # ended jobs
        assert queue.counts() == dict.fromkeys(queue.counts(), 0) | {"queued": 2}
        assert {path.name for path in queue.folder.iterdir()} == {*ids[4:]}
        (folder / "others").unlink()
        queue.sweep(1e9, 10**18)
        assert reserve.stat().st_size == RESERVE and queue.claim("w", running.batch_key, 9)


def test_on_a_full_disk_jobs_are_deleted_and_ended_and_no_job_is_taken(tmp_path):
    code = on_small_disk(tmp_path, lambda: deletes_on_a_full_disk(tmp_path))
    if code == 77:
        pytest.skip("this system lets nobody mount a small disk")
    assert code == 0


def test_the_reserve_leaves_a_nearly_full_disk_alone(tmp_path):
    def check() -> None:
        with queue_of(tmp_path) as queue:
            (tmp_path / "others").write_bytes(bytes(20 * 2**20))
            queue.sweep(1e9, 10**18)
            held, free = queue.database.reserve.stat().st_size, os.statvfs(tmp_path)
            assert 0 < held < RESERVE and free.f_bavail * free.f_frsize > RESERVE - 2**21

    assert on_small_disk(tmp_path, check) in (0, 77)


# --- a damaged file at the start ------------------------------------------------------------------


def killed_service(folder: Path, keep_log: bool) -> str:
    """The id of a finished job of a service that was killed. keep_log: its job is in the log of
    SQLite alone."""
    folder.mkdir(exist_ok=True)

    def serve() -> None:
        queue = Queue(folder / "queue.sqlite", folder / "jobs")
        id = queue.new_id()
        queue.folder_of(id).mkdir()
        (queue.folder_of(id) / "video.mp4").write_bytes(b"video")
        for number in range(40):
            queue.submit(NewJob(id[:-2] + f"{number:02}", "ada", "d", "k", {"p": "x" * 999}, {}))
        if not keep_log:
            truncate_log(folder / "queue.sqlite")
        os._exit(0)

    assert exit_code(forked(serve)) == 0
    return next((folder / "jobs").iterdir()).name


DAMAGES = {
    "emptied": lambda path: os.truncate(path, 0),
    "cut": halve,
    "cut within a page": lambda path: os.truncate(path, os.path.getsize(path) - 100),
    "a header of garbage": lambda path: write_at(path, 0),
    "a page of garbage": lambda path: write_at(path, 4096 * 3),
    "deleted": Path.unlink,
}


def content_of(folder: Path) -> dict[str, bytes]:
    """Of a database's files but the index of its log, which SQLite makes again, and empty ones."""
    paths = [path for path in folder.glob("queue.sqlite*") if path.suffix != ".sqlite-shm"]
    return {path.name: path.read_bytes() for path in paths if path.stat().st_size}


def refusal_of(folder: Path, database: Path | None = None) -> str:
    with pytest.raises(UserError, match="cannot be opened as the queue's database") as caught:
        Queue(database or folder / "queue.sqlite", folder / "jobs")
    return str(caught.value)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "by --database"])
def test_a_damaged_database_is_refused_and_the_printed_command_moves_it_away(tmp_path, damage, elsewhere):
    data = tmp_path / "my data"
    id = killed_service(data, keep_log=False)
    path = (tmp_path / "fast" if elsewhere else data) / "queue.sqlite"
    path.parent.mkdir(exist_ok=True)
    for part in data.glob("queue.sqlite*"):
        part.rename(path.parent / part.name)
    damage(path)
    content = content_of(path.parent)
    message = refusal_of(data, path)
    assert content_of(path.parent) == content
    command = message.partition("begin a new queue: ")[2].split("\n")[0]
    subprocess.run(["sh", "-ec", command], check=True)
    moved = tmp_path / "my data.damaged"
    assert (moved / "jobs" / id / "video.mp4").read_bytes() == b"video"
    assert content_of(moved) == content
    with closing(Queue(path, data / "jobs")) as queue:
        assert sum(queue.counts().values()) == 0


def test_jobs_in_the_log_alone_outlive_a_lost_index_and_a_lost_log_is_refused(tmp_path):
    folders = [tmp_path / name for name in ("index", "database", "log")]
    for folder in folders:
        killed_service(folder, keep_log=True)
    without_index, emptied, without_log = folders
    os.unlink(without_index / "queue.sqlite-shm")
    with queue_of(without_index) as queue:
        assert queue.counts()["queued"] == 40
    size = os.path.getsize(emptied / "queue.sqlite-wal")
    os.truncate(emptied / "queue.sqlite", 0)
    refusal_of(emptied)
    assert os.path.getsize(emptied / "queue.sqlite-wal") == size > 0
    os.unlink(without_log / "queue.sqlite-wal")
    assert "it is empty" in refusal_of(without_log)  # and its jobs' folders are no orphans


def test_a_queue_that_cannot_be_opened_on_a_full_disk_reports_a_full_disk(tmp_path):
    killed_service(tmp_path / "before", keep_log=False)
    (tmp_path / "disk").mkdir()

    def check() -> None:
        shutil.copy(tmp_path / "before/queue.sqlite", tmp_path / "disk")
        fill(tmp_path / "disk")
        with pytest.raises(StorageError) as caught:
            Queue(tmp_path / "disk/queue.sqlite", tmp_path / "before/jobs")
        assert caught.value.errno == errno.ENOSPC

    assert on_small_disk(tmp_path / "disk", check) in (0, 77)


def test_a_file_that_may_not_be_written_is_told_so(tmp_path, capfd):
    killed_service(tmp_path, keep_log=False)

    def check() -> None:
        os.chmod(tmp_path / "queue.sqlite", 0o444)
        if os.getuid() == 0:  # who may write anything
            for path in (tmp_path, tmp_path / "jobs"):
                os.chown(path, 65534, 65534)
            for path in tmp_path.parents:
                path.chmod(path.stat().st_mode | 0o055)
            os.setuid(65534)
        errors.run(lambda: Queue(tmp_path / "queue.sqlite", tmp_path / "jobs"))

    assert exit_code(forked(check)) == 1  # SystemExit, as any other exception
    assert "queue.sqlite: you may not read or write it" in capfd.readouterr().err


# --- the worker's process -------------------------------------------------------------------------


def test_no_worker_is_started_while_the_database_cannot_be_used(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.01)
    started = tmp_path / "started"
    command = ["sh", "-c", f"echo >> {shlex.quote(str(started))}"]
    with queue_of(tmp_path) as queue:
        other = sqlite3.connect(queue.database.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with closing(other), server.supervise_worker(command, queue):
            wait_for(started.exists)
            time.sleep(3)  # a worker that is started at once would be there
            assert started.read_text() == "\n"
            other.execute("COMMIT")
            wait_for(lambda: started.read_text() == "\n\n")
    printed = capfd.readouterr()
    assert printed.out.count("database is locked") == 1 and "Traceback" not in printed.err


# --- clients that go away -------------------------------------------------------------------------


BODY = json.dumps({"prompt": "waves", "size": SIZE}).encode()
PART = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nwa'


@pytest.mark.parametrize(
    ("path", "kind", "length", "body"),
    [
        (b"/v1/videos/sync", b"application/json", len(BODY), BODY),
        (b"/v1/videos", b"application/json", len(BODY), BODY[:9]),
        (b"/v1/videos/sync", FORM, 9999, PART),
    ],
    ids=["waits", "half a JSON", "half a form"],
)
def test_a_client_that_goes_away_leaves_no_job_and_no_traceback(service, path, kind, length, body, capfd):
    lines = [b"POST %s HTTP/1.1" % path, b"Host: localhost", b"Content-Type: " + kind]
    lines += [b"Authorization: Bearer " + service.token, b"Content-Length: %d" % length]
    with listening(service) as address:
        with socket.create_connection(address, timeout=20) as client:
            client.sendall(b"\r\n".join([*lines, b"", body]))
            if body == BODY:
                wait_for(lambda: service.queue.counts()["queued"] == 1)
        wait_for(lambda: b'status="499"' in get(service, "/metrics").body)
        assert sum(service.queue.counts().values()) == 0 and not any(service.queue.folder.iterdir())
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err and "ERROR" not in printed.out + printed.err
