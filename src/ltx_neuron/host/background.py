"""Threads: Background runs functions that can be cancelled (decoding, while the ranks denoise the
next video), and Workers compute pieces of a result, each on one core."""

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

POLL_SECONDS = 0.1  # how often `wait_for` calls `poll`
Item = TypeVar("Item")
_thread = threading.local()  # .cancelled: the event of the Background that this thread is of
# A thread reads the default number of threads at its first operation, and Workers change that
# default for a moment. With another number, sums have other bits. The lock is held during both.
_default_threads = threading.Lock()


class Cancelled(BaseException):
    """Raised inside a cancelled function. Not an Exception, so that error handlers do not catch
    it."""


def check_cancelled() -> None:
    """Raise Cancelled in a thread of a Background that was cancelled. Long computations call it
    between their pieces: tiles, frames, pieces of Workers."""
    if (cancelled := getattr(_thread, "cancelled", None)) and cancelled.is_set():
        raise Cancelled


class Background:
    """A thread that runs functions one after another. Leaving the block ends the running one at its
    next `check_cancelled`, drops the others, and waits until the thread has ended."""

    def __init__(self, name: str = "background") -> None:
        self.cancelled = threading.Event()
        self._executor = ThreadPoolExecutor(1, name, self._begin)
        self.submit = self._executor.submit

    def _begin(self) -> None:
        _thread.cancelled = self.cancelled
        with _default_threads:
            torch.get_num_threads()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.cancelled.set()
        self._executor.shutdown(cancel_futures=True)


def wait_for(future: Future, poll: Callable[[], None] = lambda: None) -> Any:
    """The result of a Background's function, or its error. `poll` is called every POLL_SECONDS
    meanwhile; its error ends the waiting. So does the cancellation of the waiting thread."""
    while not wait([future], POLL_SECONDS).done:
        check_cancelled()
        poll()
    return future.result()


def prefetch(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """The items of a generator that runs in a separate thread, so that one item waits while the
    next one is made. Closing this generator cancels that one, and closes it in its thread."""
    end: Any = object()
    with Background() as thread:
        following = deque(thread.submit(next, items, end) for _ in range(2))
        try:
            while (item := wait_for(following.popleft())) is not end:
                following.append(thread.submit(next, items, end))
                yield item
                del item  # not kept while the next one is made
        finally:
            thread.cancelled.set()
            for future in following:
                future.cancel()
            wait([thread.submit(items.close)])


class Workers:
    """One thread per core, each with reusable scratch memory, because new pages cost more than
    writing to them. Each thread computes pieces of a result on one core, in that core's cache.
    torch divides each operation between the cores. On a busy machine that takes several times as
    long, because every operation waits for the slowest core."""

    def __init__(self, count: int | None = None):
        """count: number of threads; None: torch's."""
        default = torch.get_num_threads()
        self.count = count or default
        self._memory = threading.local()
        self._threads = ThreadPoolExecutor(self.count)
        all_started = threading.Barrier(self.count)

        def start() -> None:
            # The first call in a thread sets that thread's number to the default, which would undo
            # the next line if it came later.
            torch.get_num_threads()
            torch.set_num_threads(1)
            all_started.wait()

        with _default_threads:
            try:
                for started in [self._threads.submit(start) for _ in range(self.count)]:
                    started.result()
            except BaseException:  # Ctrl-C, or a thread that could not be started
                all_started.abort()
                self._threads.shutdown()
                raise
            finally:
                torch.set_num_threads(default)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        self._threads.shutdown(cancel_futures=True)

    def map(self, function: Callable, items: Iterable) -> list:
        """The function's results for all items. Raises the first error of a call, or Cancelled."""
        results = []
        for result in self._threads.map(torch.no_grad()(function), items):
            check_cancelled()
            results.append(result)
        return results

    def scratch(self, name: str, *shape: int) -> Tensor:
        """An uninitialised float32 tensor of the calling thread. It reuses the memory of the
        thread's tensor with the same name."""
        buffers, size = vars(self._memory), math.prod(shape)
        if name not in buffers or buffers[name].numel() < size:
            buffers.pop(name, None)  # freed first, so that never both exist
            buffers[name] = torch.empty(size)
        return buffers[name][:size].view(shape)
