"""Periodic work in a thread."""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ltx_neuron.service.database import StorageError


@contextmanager
def run_periodically(function: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """Call a function at once and then every `seconds`, in a thread, while the block runs. Errors
    are printed and the calls continue: a disk may be full only for a moment."""
    ended = threading.Event()

    def repeat() -> None:
        while True:
            try:
                function()
            except StorageError:
                pass  # the database has printed it
            except Exception:
                traceback.print_exc()
            if ended.wait(seconds):
                return

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
