"""Threads: a function in one of its own, which can be cancelled (how decoding runs while the ranks
denoise the next video), and workers that compute pieces of a result, each on one core."""

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
# A thread takes its number of threads for an operation from the default at its first one, and
# Workers change that for a moment: with another number, sums have other bits. Held meanwhile, and
# while a thread takes it.
_default_threads = threading.Lock()


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
        """Wait for the function; return what it returned or raise what it raised.

        `poll` is called every POLL_SECONDS meanwhile. An error that it raises ends the waiting,
        not the function.
        """
        # Event.wait and not Thread.join: Ctrl-C in join makes Python take the thread for ended.
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


@contextmanager
def ahead(items: Generator[Item, None, None]) -> Iterator[Iterator[Item]]:
    """The items of a generator, which runs in a thread of its own: one may wait to be taken while
    the next one is made.

    An error of the generator is raised where its item would have been taken. Leaving the block
    cancels it at its next `check_cancelled`, and closes it.
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
            over = task.done  # asked first: what it made last is in the queue then
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
    """One thread per core, each with scratch memory that is used again and again: fresh pages cost
    more than the sums written to them.

    Each thread computes pieces of a result on one core, from that core's cache. torch's own way,
    which shares each operation out between the cores, takes several times as long on a busy
    machine, as every operation waits for the slowest core.
    """

    def __init__(self, count: int | None = None):
        """count: of threads; without it, torch's."""
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
        """What the function returns for every item. Raises the first error of a call, or
        Cancelled."""
        results = []
        for result in self._threads.map(torch.no_grad()(function), items):
            check_cancelled()
            results.append(result)
        return results

    def scratch(self, name: str, *shape: int) -> Tensor:
        """An uninitialised float32 tensor of the calling thread.

        It lies where the thread's tensor of the same name lay before.
        """
        buffers, size = vars(self._memory), math.prod(shape)
        if name not in buffers or buffers[name].numel() < size:
            buffers.pop(name, None)  # freed first, so that both never exist
            buffers[name] = torch.empty(size)
        return buffers[name][:size].view(shape)
