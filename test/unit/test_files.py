"""Files are written whole or not at all, and what others wrote is read with care."""

import errno
import fcntl
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from helpers import exit_code, forked

from ltx_neuron import files
from ltx_neuron.errors import UserError
from ltx_neuron.files import check_readable, check_writable, exclusive, read_json, remove_leftovers, whole_file


def test_a_temporary_file_that_another_writer_removes_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    path, lock, removed = tmp_path / "a.json", fcntl.flock, []

    def lock_late(file, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.glob(".a.json.*"))
            remove_leftovers(path)  # as another writer
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with whole_file(path) as partial:
        partial.write_text("{}")
        remove_leftovers(path)  # once more: now it is locked
        assert partial.exists()
    assert path.read_text() == "{}" and len(removed) == 1 and not removed[0].exists()


def test_a_file_appears_under_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "made" / "file"
    with whole_file(path) as partial:
        partial.write_bytes(b"half")
        assert not path.exists() and partial.parent == path.parent
        partial.write_bytes(b"all of it")
    assert path.read_bytes() == b"all of it"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("content", "error"), [(b"half", KeyboardInterrupt), (None, FileNotFoundError)])
def test_a_writer_that_fails_or_writes_nothing_leaves_the_earlier_file(tmp_path, content, error):
    path = tmp_path / "file"
    for before in ([], [b"the earlier one"]):
        for earlier in before:
            path.write_bytes(earlier)
        with pytest.raises(error), whole_file(path) as partial:
            if content:
                partial.write_bytes(content)
                raise error
        assert [path.read_bytes() for path in tmp_path.iterdir()] == before


def test_what_a_killed_writer_left_is_removed_by_the_next_one_and_no_other_file(tmp_path):
    path, names = tmp_path / "journal.json", {"journal.json", "other.json", ".other.json.1-00.partial"}
    for name in names:
        (tmp_path / name).touch()

    def killed() -> None:
        with whole_file(path):
            os.kill(os.getpid(), signal.SIGKILL)

    exit_code(forked(killed))
    assert len(list(tmp_path.iterdir())) == 4
    with whole_file(path) as mine:
        assert {entry.name for entry in tmp_path.iterdir()} == {*names, mine.name}
        remove_leftovers(path)
        assert mine.exists()
        mine.write_text("{}")
    assert {entry.name for entry in tmp_path.iterdir()} == names


def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path):
    path = tmp_path / "some.json"
    with pytest.raises(UserError, match=r"some\.json cannot be read as JSON: no such file"):
        read_json(path)
    for content, message in (
        (b"{", " cannot be read as JSON"),
        (b"\xff\xfe", " cannot be read as JSON"),
        (b"[" * 100_000, " cannot be read as JSON"),
        (b"[1]", ": got list, wanted a JSON object"),
        (b" " * (files.MAX_JSON_BYTES + 1), f" has .* wanted at most {files.MAX_JSON_BYTES}"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"some\.json{message}"):
            read_json(path)


def test_a_place_that_could_not_be_written_is_refused_with_the_flag_and_nothing_is_made(tmp_path):
    (tmp_path / "a file").touch()
    for path, words in (
        (tmp_path, "is a folder, wanted a file"),
        (tmp_path / ("x" * 201), "this long"),
        (tmp_path / "a file" / "video.mp4", "not a folder you may write to"),
    ):
        with pytest.raises(UserError, match=f"{words}.*--output FILE"):
            check_writable(path, "--output FILE")
    check_writable(tmp_path / "new" / "folder" / "video.mp4", "--output FILE")
    assert os.listdir(tmp_path) == ["a file"]


def holder(folder, ends: signal.Signals | None = None) -> int:
    """A process that has the folder's lock now, and a moment later lets it go, or is ended by a signal."""
    read, write = os.pipe()

    def hold() -> None:
        with exclusive(folder, "compiling"):
            os.write(write, b"x")
            time.sleep(0.3)
            if ends:
                os.kill(os.getpid(), ends)

    child = forked(hold)
    os.read(read, 1)
    return child


@pytest.mark.parametrize("ends", [None, signal.SIGKILL])
def test_a_locked_folder_is_waited_for_until_its_holder_ends_also_by_a_kill(tmp_path, capsys, ends):
    folder = tmp_path / "graphs" / "dit"
    child = holder(folder, ends)
    with exclusive(folder, "compiling"):
        assert exit_code(child) == (-ends if ends else 0)
    assert capsys.readouterr().out == f"another process ({child}) is compiling {folder}; waiting for it\n"
    assert list(folder.parent.iterdir()) == []
    exit_code(holder(folder, signal.SIGKILL))
    assert [path.name for path in folder.parent.iterdir()] == [".dit.lock"]
    with exclusive(folder, "compiling"):  # its holder is dead: taken over without a message
        pass
    assert (capsys.readouterr().out, list(folder.parent.iterdir())) == ("", [])


def test_of_many_processes_never_two_hold_a_lock(tmp_path):
    """One that kept waiting for a removed lock would enter beside another."""
    number, often, processes = tmp_path / "number", 100, 6
    number.write_text("0")

    def count() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        for _ in range(often):
            with exclusive(tmp_path / "counting", "counting in"):
                number.write_text(str(int(number.read_text()) + 1))

    children = [forked(count) for _ in range(processes)]
    assert [exit_code(child) for child in children] == [0] * processes
    assert int(number.read_text()) == often * processes and list(tmp_path.iterdir()) == [number]


def test_a_file_system_without_locks_costs_a_warning(tmp_path, capsys, monkeypatch):
    # There is no such file system to test on.
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with exclusive(tmp_path / "dit", "compiling"):
        assert f"{tmp_path} cannot be locked" in capsys.readouterr().out


def test_what_is_no_regular_file_is_refused_by_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "link")
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for path, message in {
        tmp_path / "a\0b": "no such file",
        tmp_path: "that is a folder, wanted a file",
        tmp_path / "pipe": "that is a named pipe, wanted a regular file",
        tmp_path / "socket": "that is a socket, wanted a regular file",
        "/dev/zero": "that is a device, wanted a regular file",
        tmp_path / "link": "its symbolic links form a loop",
        tmp_path / "file" / "x": "a part of this path is a file, wanted a folder",
    }.items():
        with pytest.raises(UserError) as error:
            check_readable(path, "--image", "; pass FILE")
        assert str(error.value) == f"--image {path}: {message}; pass FILE"
    with pytest.raises(UserError, match="pipe cannot be read as JSON: that is a named pipe"):
        read_json(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"x\.\.\. \(5000 characters\): this path is longer than the sys") as error:
        check_readable("x" * 5000)
    assert len(str(error.value)) < 300


def test_two_writers_at_once_never_mix(tmp_path):
    """Each writes in many small pieces; whenever one looks, the file is all of one writer's."""
    path = tmp_path / "file"

    def write(letter: bytes) -> set[bytes]:
        contents = set()
        for _ in range(20):
            with whole_file(path) as partial, open(partial, "wb", buffering=0) as file:
                for _ in range(50):
                    file.write(letter)
            contents.add(path.read_bytes())
        return contents

    with ThreadPoolExecutor(2) as pool:
        contents = set().union(*pool.map(write, (b"a", b"b")))
    assert contents <= {b"a" * 50, b"b" * 50} and list(tmp_path.iterdir()) == [path]
