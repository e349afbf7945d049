"""The one error a user causes: its text says what was wrong, what was got, what was wanted and what to type."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake the user can mend. Scripts print it without a traceback and exit with code 2."""


def run(main: Callable[[], None]) -> None:
    """Run a script's main; exit 2 on a user's mistake, 130 on Ctrl-C, and let everything else show its traceback (1)."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
