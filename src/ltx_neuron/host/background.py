"""A function in a thread of its own, which can be cancelled: how decoding runs while the ranks
denoise the next video."""

import threading
from collections.abc import Callable

import torch

POLL_SECONDS = 0.1  # how often `BackgroundTask.result` calls `poll`
_current = threading.local()  # .task: the BackgroundTask whose function runs in this thread


class Cancelled(BaseException):
    """Raised inside a cancelled function. No Exception, so that no handler of errors keeps it."""


def check_cancelled(*_) -> None:
    """Raise Cancelled if this thread runs a BackgroundTask that was cancelled.

    Long computations call it often: per layer, per convolution piece, per frame written. It takes
    and ignores any arguments, to serve as a hook of a module.
    """
    task = getattr(_current, "task", None)
    if task and task._cancelled:
        raise Cancelled


class BackgroundTask:
    """A function without arguments that runs in a new thread.

    `result` waits for what it returns or raises; `cancel` ends it at its next `check_cancelled`.

    As a context manager: leaving the block waits for the function and raises its error; leaving it
    by an exception cancels the function. In both cases the thread has ended afterwards.
    """

    def __init__(self, function: Callable):
        self._function, self._result, self._error = function, None, None
        self._cancelled = False
        ready, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="background")
        try:
            self._thread.start()
            ready.wait()
        except BaseException:  # Ctrl-C in between
            self.cancel()
            raise

    def _run(self, ready: threading.Event) -> None:
        _current.task = self
        # A thread takes its number of threads for an operation from the default at its first one,
        # and winograd.Workers change that for a moment: with another number, sums have other bits.
        torch.get_num_threads()
        ready.set()
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the caller's thread
            self._error = error
        finally:
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether the function has returned or raised."""
        return self._ended.is_set()

    def result(self, poll: Callable[[], None] = lambda: None):
        """Wait for the function; return what it returned or raise what it raised.

        `poll` is called every POLL_SECONDS meanwhile. An error that it raises ends the waiting,
        not the function.
        """
        # Event.wait and not Thread.join: Ctrl-C in join makes Python take the thread for ended.
        while not self._ended.wait(POLL_SECONDS):
            check_cancelled()  # the waiting thread may itself belong to a cancelled task
            poll()
        self._thread.join()
        if self._error:
            raise self._error
        return self._result

    def cancel(self) -> None:
        """End the function at its next `check_cancelled` and wait until the thread has ended.

        The function's result or error is dropped.
        """
        self._cancelled = True
        if self._thread.ident:  # None where the thread could not be started
            self._ended.wait()
            self._thread.join()

    def __enter__(self) -> "BackgroundTask":
        return self

    def __exit__(self, error_type, *_) -> None:
        try:
            if not error_type:
                self.result()
        finally:
            self.cancel()
