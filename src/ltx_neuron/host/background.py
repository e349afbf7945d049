"""A function that runs in a thread of its own beside what its caller does meanwhile."""

import threading
from collections.abc import Callable

import torch

_POLL_SECONDS = 0.1  # how often who waits for a function looks whether it is told to stop itself
_thread = threading.local()  # .beside: whose function runs in this thread


class Cancelled(BaseException):
    """Ends a function whose result nobody wants any more."""


def check_cancelled(*_) -> None:
    """Called now and then by what takes long: raises Cancelled in the thread of a BackgroundTask that is told
    to stop."""
    task = getattr(_thread, "task", None)
    if task and task._cancelled:
        raise Cancelled


class BackgroundTask:
    """Calls the function in a new thread. `result` waits for what it returns or raises; `stop` ends
    it at a checkpoint.

    As a context manager: leaving it waits for the function and raises its error; an exception that
    leaves it stops the function first. Either way the thread has ended then.
    """

    def __init__(self, function: Callable):
        self._function, self._result, self._error, self._cancelled = function, None, None, False
        ready, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="task")
        try:
            self._thread.start()
            ready.wait()
        except BaseException:
            self.cancel()
            raise

    def _run(self, ready: threading.Event) -> None:
        _thread.task = self
        # A thread takes its number of threads for an operation from the default at its first one,
        # and winograd.Workers change that for a moment: with another number, sums have other bits.
        torch.get_num_threads()
        ready.set()
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._error = error
        finally:
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether the function has returned or raised."""
        return self._ended.is_set()

    def result(self, poll: Callable[[], None] = lambda: None):
        """`poll` is called now and then meanwhile; an error of it ends the waiting, not the
        function."""
        while not self._ended.wait(
            _POLL_SECONDS
        ):  # Ctrl-C in Thread.join would have it take the thread for ended
            check_cancelled()  # the caller may be a function beside another one
            poll()
        self._thread.join()
        if self._error:
            raise self._error
        return self._result

    def cancel(self) -> None:
        """End the function and wait until it has; its result and its error are nobody's."""
        self._cancelled = True
        if self._thread.ident:
            self._ended.wait()
            self._thread.join()

    def __enter__(self) -> "BackgroundTask":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            if not kind:
                self.result()
        finally:
            self.cancel()
