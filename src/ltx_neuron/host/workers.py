"""Threads that compute pieces of a result, each on one core."""

import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ltx_neuron.host.background import check_cancelled


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

        try:
            for started in [self._threads.submit(start) for _ in range(self.count)]:
                started.result()
        except BaseException:  # Ctrl-C, or a thread that could not be started
            all_started.abort()
            self._threads.shutdown()
            raise
        finally:
            # What a worker sets is also the default of threads that start later.
            torch.set_num_threads(default)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        self._threads.shutdown(cancel_futures=True)

    def run(self, function: Callable, items: Iterable) -> None:
        """Call the function with every item. Raises the first error of a call, or Cancelled."""
        for _ in self._threads.map(torch.no_grad()(function), items):
            check_cancelled()

    def scratch(self, name: str, *shape: int) -> Tensor:
        """An uninitialised float32 tensor of the calling thread.

        It lies where the thread's tensor of the same name lay before.
        """
        buffers, size = vars(self._memory), math.prod(shape)
        if name not in buffers or buffers[name].numel() < size:
            buffers.pop(name, None)  # freed first, so that both never exist
            buffers[name] = torch.empty(size)
        return buffers[name][:size].view(shape)
