"""User errors, whose text has the problem, the value given, the value expected and what to type;
exit codes of commands; and messages for the system's errors on paths."""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from string import Formatter
from typing import NoReturn, TextIO

_DENIED = (
    "you may not read or write it, or not enter its folder",
    "Change the permissions (chmod), or run as the owner",
)
# The system's errors on a path -> text and remedy.
_SYSTEM_ERRORS = {
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.ENOENT: ("no such file", ""),
    errno.EISDIR: ("that is a folder, wanted a file", ""),
    errno.ENOTDIR: ("a part of this path is a file, wanted a folder", ""),
    errno.ELOOP: ("its symbolic links form a loop", ""),
    errno.ENAMETOOLONG: ("this path is longer than the system allows", "Type a shorter one"),
    errno.EIO: (
        "its disk fails (input/output error)",
        "Copy it from elsewhere to another disk; for details type dmesg",
    ),
    errno.EROFS: ("its file system is read-only", "Choose another place"),
}
_MAX_SHOWN = 200  # characters of a path


class UserError(Exception):
    """A mistake that the user can correct: printed without a traceback, exit code 2."""

    fields: Sequence[str] = ()  # a job's fields in the message, in order
    of_one_job = False  # it concerns one job's own files, and no other job of a run

    def render(self, name: Callable[[str], str]) -> str:
        """The message, with fields spelled by `name`."""
        return str(self)


class FieldError(UserError):
    """A mistake in a job's fields, which flags, lines and requests spell differently. text: the
    message, with fields in braces, as in "{seed} {got} is too large". values: other values in
    braces."""

    def __init__(self, text: str, **values):
        super().__init__(text)
        self.text, self.values = text, values

    @property
    def fields(self) -> list[str]:
        named = [name for _, name, _, _ in Formatter().parse(self.text) if name]
        return [name for name in named if name not in self.values]

    def render(self, name: Callable[[str], str]) -> str:
        return self.text.format(**{field: name(field) for field in self.fields}, **self.values)

    def __str__(self) -> str:
        return self.render(flag_of)


def flag_of(field: str) -> str:
    """A field's flag: --num-frames for num_frames."""
    return f"--{field.replace('_', '-')}"


@contextmanager
def own_files() -> Iterator[None]:
    """Where one job's own files are read. Its UserErrors concern that job alone."""
    try:
        yield
    except UserError as error:
        error.of_one_job = True
        raise


class NoPermission(UserError):
    """A file without permission: making or downloading it again would not help."""


class RunError(RuntimeError):
    """A failed run that is not the user's mistake: exit code 1, without a traceback. details:
    further information for the log beside the output."""

    details = ""


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM. It cleans up as after Ctrl-C."""


def os_reason(error: Exception) -> str:
    """The system's reason for refusing a path, as text; for other errors their own text."""
    text = getattr(error, "strerror", None) or str(error)
    return _SYSTEM_ERRORS.get(getattr(error, "errno", None) or 0, (text, ""))[0]


def to_user_error(error: OSError, flag: str = "", advice: str = "") -> UserError:
    """The system's error on a path as a UserError with path, reason and remedy. flag: the path's
    flag. advice: end of the message."""
    path = os.fsdecode(error.filename)
    if len(path) > _MAX_SHOWN:
        path = f"{path[: _MAX_SHOWN // 2]}... ({len(path)} characters)"
    _, remedy = _SYSTEM_ERRORS.get(error.errno or 0, ("", ""))
    kind = NoPermission if isinstance(error, PermissionError) else UserError
    lines = [f"{flag} {path}: {os_reason(error)}".lstrip(), *([remedy] if remedy else [])]
    return kind("\n".join(lines) + advice)


@contextmanager
def as_user_errors(flag: str = "") -> Iterator[None]:
    """Convert the system's errors on paths inside the block by `to_user_error`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise to_user_error(error, flag) from None


def run(main: Callable[[], None]) -> None:
    """Run a command's main. Exits with 2 on a user's mistake, 1 on a failed run, 130 on Ctrl-C and
    143 on SIGTERM. The system's errors on paths and a full disk count as user's mistakes. Other
    errors print their traceback and exit with 1."""
    signal.signal(signal.SIGTERM, _terminate)
    with _forgiving_streams():
        try:
            main()
        except UserError as error:
            _end(2, f"error: {error}")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                advice = "Free some space and run the command again"
                _end(2, f"error: the disk is full: {error}\n{advice}")
            if not isinstance(error.filename, str | bytes | os.PathLike):
                raise
            _end(2, f"error: {to_user_error(error)}")
        except RunError as error:
            _end(1, f"error: {error}")
        except Terminated:
            _end(143, "terminated")
        except KeyboardInterrupt:
            _end(130, "interrupted")


def end_with_parent(seconds: float) -> None:
    """End this process, as SIGTERM does, when its parent dies and closes its stdin. After `seconds`
    the process is killed, with its group if it leads one."""

    def watch() -> None:
        raw = sys.stdin.buffer.raw  # pyright: ignore[reportAttributeAccessIssue]: a BufferedReader
        while raw.read(1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _end(code: int, message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


def _terminate(*_) -> NoReturn:
    raise Terminated


@contextmanager
def _forgiving_streams() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    streams = [_ForgivingStream(stream or open(os.devnull, "w")) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:  # otherwise the interpreter does it at exit, with code 120
            stream.flush()
        sys.stdout, sys.stderr = before


class _ForgivingStream:
    """A standard stream whose failures are ignored: a closed pipe or a full disk. After the first
    failure all output goes to /dev/null, also that of other code to the same descriptor."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str):
        attribute = getattr(self._stream, name)
        return partial(self._attempt, attribute) if name in ("write", "flush") else attribute

    def _attempt(self, action: Callable, *text: str) -> int:
        try:
            action(*text)
        except OSError:
            with suppress(OSError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), self._stream.fileno())
        return sum(map(len, text))


def require(value, flag: str, why: str, example: str):
    """The value of a flag that another flag needs. Raises UserError with both if it is missing."""
    if value is None:
        raise UserError(f"{why} needs {flag}\n{example}")
    return value
