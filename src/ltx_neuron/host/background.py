"""Threads: BackgroundTask runs a function that can be cancelled (decoding, while the ranks denoise
the next video), and Workers compute pieces of a result, each on one core."""

import itertools
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

POLL_SECONDS = 0.1  # how often `BackgroundTask.result` calls `poll`
Item = TypeVar("Item")
_current = threading.local()  # .task: the BackgroundTask whose function runs in this thread
# A thread reads the default number of threads at its first operation, and Workers change that
# default for a moment. With another number, sums have other bits. The lock is held during both.
_default_threads = threading.Lock()


class Cancelled(BaseException):
    """Raised inside a cancelled function. Not an Exception, so that error handlers do not catch
    it."""


def check_cancelled(*_) -> None:
    """Raise Cancelled if this thread runs a BackgroundTask that was cancelled.

    Long computations call it often: per layer, per convolution piece, per frame. It ignores its
    arguments, so that it can be a hook of a module.
    """
    task = getattr(_current, "task", None)
    if task and task._cancelled:
        raise Cancelled


class BackgroundTask:
    """A function without arguments that runs in a new thread.

    `result` waits for its return value or error; `cancel` ends it at its next `check_cancelled`.

    As a context manager: leaving the block waits for the function and raises its error; leaving it
    by an exception cancels the function. In both cases the thread has ended afterwards.
    """

    def __init__(self, function: Callable):
        self._function, self._error = function, None
        self._result: Any = None
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
        with _default_threads:
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

    def wait(self) -> bool:
        """Wait for POLL_SECONDS at most; whether the function has ended."""
        check_cancelled()  # the waiting thread may itself belong to a cancelled task
        return self._ended.wait(POLL_SECONDS)

    def result(self, poll: Callable[[], None] = lambda: None):
        """Wait for the function, and return its value or raise its error.

        `poll` is called every POLL_SECONDS meanwhile. Its error ends the waiting, not the
        function.
        """
        # Event.wait, because after Ctrl-C in Thread.join Python regards the thread as ended.
        while not self.wait():
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
        if self._thread.ident:  # None if the thread could not be started
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


@contextmanager
def ahead(items: Generator[Item, None, None]) -> Iterator[Iterator[Item]]:
    """The items of a generator that runs in a separate thread, one item ahead.

    The generator's error is raised in place of its item. Leaving the block cancels it at its next
    `check_cancelled`, and closes it.
    """
    made, end = queue.Queue(maxsize=1), object()

    def make() -> None:
        with closing(items):
            for item in itertools.chain(items, [end]):
                put = False
                while not put:
                    check_cancelled()
                    with suppress(queue.Full):
                        made.put(item, timeout=POLL_SECONDS)
                        put = True
                del item  # not kept while the next one is made

    def taken() -> Iterator[Item]:
        while True:
            check_cancelled()
            over = task.done  # read first, because its last item is then in the queue
            try:
                item = made.get(timeout=0 if over else POLL_SECONDS)
            except queue.Empty:
                if over:
                    task.result()  # raises its error
                continue
            if item is end:
                return
            yield item
            del item

    task = BackgroundTask(make)
    try:
        yield taken()
    finally:
        task.cancel()


class Workers:
    """One thread per core, each with reusable scratch memory, because new pages cost more than
    writing to them.

    Each thread computes pieces of a result on one core, in that core's cache. torch divides each
    operation between the cores. On a busy machine that takes several times as long, because every
    operation waits for the slowest core.
    """

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
        """An uninitialised float32 tensor of the calling thread.

        It reuses the memory of the thread's tensor with the same name.
        """
        buffers, size = vars(self._memory), math.prod(shape)
        if name not in buffers or buffers[name].numel() < size:
            buffers.pop(name, None)  # freed first, so that never both exist
            buffers[name] = torch.empty(size)
        return buffers[name][:size].view(shape)
