"""The one error a user causes: its text says what was wrong, what was got, what was wanted and what to type."""

import os
import signal
import sys
from collections.abc import Callable
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import NoReturn

_NAME_BYTES = 200  # file systems allow 255, a file in the making has a longer name


class UserError(Exception):
    """A mistake the user can mend. Scripts print it without a traceback and exit with code 2."""


class RunError(RuntimeError):
    """A run failed through no mistake in what was typed. Its text says all there is to say: exit code 1, no traceback."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM): everything is tidied up as after Ctrl-C."""


def run(main: Callable[[], None]) -> None:
    """Run a script's main; exit 2 on a user's mistake, 1 on a failed run, 130 on Ctrl-C and 143 on SIGTERM.

    Everything else shows its traceback (1).
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT):
            raise
        print(f"error: the disk is full: {error}\nFree some space and type the same again", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as interrupt:
        print("terminated" if isinstance(interrupt, Terminated) else "interrupted", file=sys.stderr)
        sys.exit(143 if isinstance(interrupt, Terminated) else 130)


def _terminate(*_) -> NoReturn:
    raise Terminated


def check_writable(path: Path, flag: str) -> None:
    """Raise UserError, before any work is done, where a file could not be written to `path`. Creates nothing.

    `flag` is what the user types to choose another place, with the kind of value it takes.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder, wanted a file: pass a name inside it with {flag}")
    if len(os.fsencode(path.name)) > _NAME_BYTES:
        raise UserError(f"{path.name}: a file name this long cannot be written; pass a shorter one with {flag}")
    check_folder(path.parent, flag, path)


def check_folder(folder: Path, flag: str, path: Path | None = None) -> None:
    """The same for files in a folder, which is made when it is not there. `path` is what the user named, else the folder."""
    nearest = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(parent))
    if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"{path or folder} cannot be written: {nearest} is not a folder you may write to; pass another place with {flag}"
        )
