"""The one error a user causes: its text says what was wrong, what was got, what was wanted and what
to type."""

import signal
import sys
from collections.abc import Callable
from errno import EDQUOT, ENOSPC
from typing import NoReturn


class UserError(Exception):
    """A mistake the user can mend. Scripts print it without a traceback and exit with code 2."""


class RunError(RuntimeError):
    """A run failed through no mistake in what was typed. Its text says all there is to say: exit
    code 1, no traceback. `details`: what else is known, for the log beside the output."""

    details = ""


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM): everything is tidied up as after Ctrl-C."""


def run(main: Callable[[], None]) -> None:
    """Run a script's main; exit 2 on a user's mistake, 1 on a failed run, 130 on Ctrl-C and 143 on
    SIGTERM.

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
        print(
            f"error: the disk is full: {error}\nFree some space and type the same again",
            file=sys.stderr,
        )
        sys.exit(2)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as interrupt:
        print("terminated" if isinstance(interrupt, Terminated) else "interrupted", file=sys.stderr)
        sys.exit(143 if isinstance(interrupt, Terminated) else 130)


def _terminate(*_) -> NoReturn:
    raise Terminated


def require(value, flag: str, why: str, example: str):
    """A flag another flag needs; raises UserError naming both."""
    if value is None:
        raise UserError(f"{why} needs {flag}\n{example}")
    return value
