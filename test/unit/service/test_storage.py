"""A full, failing or damaged disk of the queue: what a client is told, and how jobs are deleted all the same."""

import ctypes
import errno
import json
import os
import resource
import shlex
import socket
import sqlite3
import subprocess
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import exit_code, forked, wait_for
from service_app import FORM, SIZE, VIDEOS, listening, open_queue, opened

from ltx_neuron.errors import UserError
from ltx_neuron.files import exclusive
from ltx_neuron.service import database, server
from ltx_neuron.service.database import StorageError
from ltx_neuron.service.queue import NewJob, Queue
from ltx_neuron.service.settings import Limits

RESERVE = 8 * 2**20
BODY = json.dumps({"prompt": "waves", "size": SIZE}).encode()
PART = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nwa'


def truncate_log(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def write_at(path: Path, place: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(os.urandom(4096))


DAMAGES = {
    "emptied": lambda path: os.truncate(path, 0),
    "overwritten": lambda path: (truncate_log(path), write_at(path)),
    "log deleted": lambda path: os.unlink(f"{path}-wal"),
}


@contextmanager
def failing(queue: Queue, kind: str):
    """A database that others locked or damaged, or whose disk takes no file beyond the length that the log has."""
    path, before = queue.database.path, resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        if kind == "disk fails":
            resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(f"{path}-wal"), before[1]))
        elif kind == "locked":
            other.execute("BEGIN IMMEDIATE")
            queue.database.close()  # connections that would wait longer
        else:
            DAMAGES[kind](path)
            queue.database._idle.clear()
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["locked", "disk fails", *DAMAGES])
def test_each_failure_of_the_database_has_its_own_answer_and_one_line_of_the_log(service, kind, monkeypatch, capsys):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.01)
    service.submitter.limits = Limits()
    for _ in range(20):  # several pages
        service.accepted()
    folders, path = set(service.queue.folder.iterdir()), service.queue.database.path
    refused = (503, "storage_unavailable", b"true") if kind == "locked" else (500, "storage_failed", b"false")
    with failing(service.queue, kind):
        for _ in range(2):
            answer = service.post()
            assert (*answer.refused, answer.headers[b"x-should-retry"]) == refused
            assert str(path) not in answer.body.decode()
    printed = capsys.readouterr()
    assert printed.out.count(f"{path}: ") == 1 and "Traceback" not in printed.err
    assert set(service.queue.folder.iterdir()) == folders  # nothing goes, nothing is left


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 500)])
@pytest.mark.parametrize("place", ["starlette.formparsers.SpooledTemporaryFile", "pathlib.Path.mkdir"])
def test_an_upload_without_room_is_answered_with_507(service, place, number, status, monkeypatch, caplog):
    monkeypatch.setattr(place, Mock(side_effect=OSError(number, os.strerror(number))))
    got = service.post_form(size=SIZE, input_reference=b"picture")
    assert got.refused == (status, "storage_full" if status == 507 else "internal_error")
    assert ("Traceback" in caplog.text) == (status == 500)  # only what is a fault is logged


def mount_small_disk(folder: Path) -> None:
    """Give this process a disk of 32 MiB at `folder`. It exits with 77 where the system lets nobody do that."""
    libc, uid = ctypes.CDLL(None, use_errno=True), os.getuid()
    new_mounts, new_users, private = 0x20000, 0x10000000, 0x44000
    if libc.unshare(new_mounts | (0 if uid == 0 else new_users)) and libc.unshare(new_mounts | new_users):
        os._exit(77)
    with suppress(OSError):
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    libc.mount(None, b"/", None, private, None)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=32m"):
        os._exit(77)


def test_on_a_full_disk_jobs_are_deleted_and_ended_and_no_job_is_taken(tmp_path):
    """What an operator needs: with the service that runs, and with one that starts."""
    others, reserve = tmp_path / "others", tmp_path / "queue.sqlite.reserve"

    def fill() -> None:
        with open(others, "ab", 0) as file, suppress(OSError):
            while True:
                file.write(bytes(2**12))

    def check() -> None:
        mount_small_disk(tmp_path)
        with opened(tmp_path) as service:
            queue, ids = service.queue, [service.accepted() for _ in range(6)]
            others.write_bytes(bytes(20 * 2**20))
            queue.sweep(1e9, 10**18)
            free = os.statvfs(tmp_path)  # the reserve leaves a nearly full disk alone
            assert 0 < reserve.stat().st_size < RESERVE and free.f_bavail * free.f_frsize > RESERVE - 2**21
            others.unlink()
            queue.sweep(1e9, 10**18)
            assert reserve.stat().st_size == RESERVE
            running = service.claimed()
            fill()
            answer = service.post()
            assert (answer.refused, answer.headers[b"x-should-retry"]) == ((507, "storage_full"), b"true")
            with pytest.raises(StorageError):
                service.claimed()
            assert queue.report(running, 40) and queue.get("ada", running.id).progress == 0
            for id in ids[1:3]:
                assert service.send("DELETE", f"{VIDEOS}/{id}").status == 200
                fill()  # others take what it freed
            assert queue.complete(running) and queue.get("ada", running.id).progress == 100
            fill()
        with open_queue(tmp_path) as queue:  # started again
            fill()
            with exclusive(tmp_path / "worker", "serving"):
                queue.release_worker(None, crashed=True)
            assert queue.cancel(running.owner, ids[3]) and reserve.stat().st_size < RESERVE
            queue.sweep(0, 0)  # ended jobs
            assert queue.counts() == dict.fromkeys(queue.counts(), 0) | {"queued": 2}
            assert {path.name for path in queue.folder.iterdir()} == {*ids[4:]}
            others.unlink()
            queue.sweep(1e9, 10**18)
            assert reserve.stat().st_size == RESERVE and queue.claim("w", running.batch_key, 9)

    if (code := exit_code(forked(check, 120))) == 77:
        pytest.skip("this system lets nobody mount a small disk")
    assert code == 0


def killed_service(folder: Path, keep_log: bool) -> Path:
    """The video of a service of 40 jobs that was killed. keep_log: they are in the log of SQLite alone."""
    folder.mkdir()
    video = folder / "jobs" / f"video_{'0' * 32}" / "video.mp4"

    def serve() -> None:
        queue = Queue(folder / "queue.sqlite", folder / "jobs")
        video.parent.mkdir()
        video.write_bytes(b"video")
        for number in range(40):
            queue.submit(NewJob(f"video_{number:032}", "ada", "d", "k", {"p": "x" * 999}, {}))
        if not keep_log:
            truncate_log(folder / "queue.sqlite")
        os._exit(0)

    assert exit_code(forked(serve)) == 0
    return video


def content_of(folder: Path) -> dict[str, bytes]:
    """Of a database's files but the index of its log, which SQLite makes again, and empty ones."""
    paths = [path for path in folder.glob("queue.sqlite*") if path.suffix != ".sqlite-shm"]
    return {path.name: path.read_bytes() for path in paths if path.stat().st_size}


def refusal_of(folder: Path, path: Path | None = None) -> str:
    with pytest.raises(UserError, match="cannot be opened as the queue's database(.|\n)*--data-dir DIR") as caught:
        Queue(path or folder / "queue.sqlite", folder / "jobs")
    return str(caught.value)


AT_START = {
    "cut within a page": lambda path: os.truncate(path, os.path.getsize(path) - 100),
    "a header of garbage": write_at,
    "a page of garbage": lambda path: write_at(path, 4096 * 3),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("kind", AT_START)
def test_a_damaged_database_is_refused_and_the_printed_command_moves_it_away(tmp_path, kind):
    video = killed_service(data := tmp_path / "my data", keep_log=False)
    path = (data if kind == "deleted" else tmp_path / "fast") / "queue.sqlite"  # of --database
    path.parent.mkdir(exist_ok=True)
    for part in data.glob("queue.sqlite*"):
        part.rename(path.parent / part.name)
    AT_START[kind](path)
    content, message = content_of(path.parent), refusal_of(data, path)
    assert content_of(path.parent) == content
    command = message.partition("begin a new queue: ")[2].split("\n")[0]
    subprocess.run(["sh", "-ec", command], check=True)
    moved = tmp_path / "my data.damaged"
    assert (moved / video.relative_to(data)).read_bytes() == b"video" and content_of(moved) == content
    with closing(Queue(path, data / "jobs")) as queue:
        assert sum(queue.counts().values()) == 0


def test_jobs_in_the_log_alone_outlive_a_lost_index_and_a_lost_log_is_refused(tmp_path):
    without_index, emptied, without_log = (tmp_path / name for name in ("index", "database", "log"))
    for folder in (without_index, emptied, without_log):
        killed_service(folder, keep_log=True)
    os.unlink(without_index / "queue.sqlite-shm")
    with open_queue(without_index) as queue:
        assert queue.counts()["queued"] == 40
    log = (emptied / "queue.sqlite-wal").read_bytes()
    os.truncate(emptied / "queue.sqlite", 0)
    refusal_of(emptied)
    assert (emptied / "queue.sqlite-wal").read_bytes() == log != b""
    os.unlink(without_log / "queue.sqlite-wal")
    assert "it is empty" in refusal_of(without_log)  # and its jobs' folders are no orphans


def test_no_worker_is_started_while_the_database_cannot_be_used(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.01)
    started = tmp_path / "started"
    command = ["sh", "-c", f"echo >> {shlex.quote(str(started))}"]
    with open_queue(tmp_path) as queue, closing(sqlite3.connect(queue.database.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with server.supervise_worker(command, queue):
            wait_for(started.exists)
            time.sleep(2)  # a worker that is started at once would be there
            assert started.read_text() == "\n"
            other.execute("COMMIT")
            wait_for(lambda: started.read_text() == "\n\n")
    printed = capfd.readouterr()
    assert printed.out.count("database is locked") == 1 and "Traceback" not in printed.err


@pytest.mark.parametrize(("kind", "body"), [(b"application/json", BODY), (b"application/json", BODY[:9]), (FORM, PART)])
def test_a_client_that_goes_away_leaves_no_job_and_no_traceback(service, kind, body, capfd):
    lines = [b"POST /v1/videos/sync HTTP/1.1", b"Host: localhost", b"Content-Type: " + kind]
    lines += [b"Authorization: Bearer " + service.token, b"Content-Length: %d" % (len(BODY) if body == BODY else 9999)]
    with listening(service) as address:
        with socket.create_connection(address, timeout=20) as client:
            client.sendall(b"\r\n".join([*lines, b"", body]))
            if body == BODY:
                wait_for(lambda: service.queue.counts()["queued"] == 1)
        wait_for(lambda: b'status="499"' in service.get("/metrics").body)
        assert sum(service.queue.counts().values()) == 0 and not any(service.queue.folder.iterdir())
    printed = "".join(capfd.readouterr())
    assert "Traceback" not in printed and "ERROR" not in printed
