"""Decodes an untrusted file in a separate process. The process has little memory and time, and
inherits no secrets. If it crashes, only the file is refused.
"""

import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

_MEMORY_BYTES = 3 * 2**30  # address space; a decoded picture has up to 8 bytes a pixel, twice
_REFUSED = 3
_at_once = threading.BoundedSemaphore(2)  # each may use all of _MEMORY_BYTES


class BadFile(Exception):
    """A refused file; the text is for its sender."""


def run(module: str, *arguments: object, seconds: int) -> None:
    """Run a module of this package. Raises BadFile if it refuses its file, crashes or hangs."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    try:
        with _at_once:
            process = subprocess.run(
                command,
                capture_output=True,
                timeout=seconds,
                env={"PYTHONPATH": str(Path(__file__).parents[2])},
                stdin=subprocess.DEVNULL,
            )
    except subprocess.TimeoutExpired:
        raise BadFile(f"it took longer than {seconds} s to decode") from None
    if process.returncode == _REFUSED:
        raise BadFile(process.stdout.decode(errors="replace").strip())
    if process.returncode:
        raise BadFile("it cannot be decoded")


# --- in that process ------------------------------------------------------------------------------


def limit(seconds: int) -> None:
    """Limit the resources of this process."""
    for what, most in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, hard))


def refuse(why: str) -> NoReturn:
    """End this process and refuse its file."""
    print(why, flush=True)
    sys.exit(_REFUSED)
