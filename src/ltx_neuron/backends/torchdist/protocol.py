"""The protocol between the host (host.py) and its rank processes (rank.py).

host to rank  a command on a pipe: the name of a method of Rank, and its keyword arguments
rank to host  what the method returned, True for None, or a RankFailure, after which the rank ends
tensors       in shared memory that the host makes and a command names
"""

import math
import mmap
import os
import traceback
from dataclasses import dataclass
from enum import IntEnum

import torch

from ltx_neuron.backends.neuron_errors import failure
from ltx_neuron.config.profiles import Profile
from ltx_neuron.errors import UserError


@dataclass(frozen=True)
class RankSettings:
    """The settings of a rank, sent at its start."""

    profile: Profile
    rank: int
    tp: int
    environment: dict[str, str]  # variables that must be set before torch is imported
    # Variables that must be set while a model's graphs are launched, by model
    compilers: dict[str, dict[str, str]]
    store: str = ""  # the process group's rendezvous file, in the run's temporary folder
    place: int = 0  # the rank's number among those of all guidance groups


class SharedTensor:
    """A tensor in shared memory that ranks open through the host's file descriptor. It is no file
    in /dev/shm, which may have 64 MB, and nothing remains when processes are killed."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, name: str | None = None):
        count = math.prod(shape)
        size = max(1, count * dtype.itemsize)  # mmap refuses an empty file
        self._file = os.memfd_create("ltx-neuron") if name is None else os.open(name, os.O_RDWR)
        if name is None:
            os.truncate(self._file, size)
        self.name = name or f"/proc/{os.getpid()}/fd/{self._file}"
        self._memory = mmap.mmap(self._file, size)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)

    def __enter__(self) -> "SharedTensor":
        return self

    def __exit__(self, *_) -> None:
        del self.tensor  # the buffer cannot be closed while a tensor uses it
        self._memory.close()
        os.close(self._file)


class FailureCause(IntEnum):
    """The kind of a rank's failure. If several ranks fail, the smallest value is the cause."""

    ENDED = 0  # its process ended
    RAISED = 1  # an error of its own
    SILENT = 2  # it did not answer, while others waited for it
    LOST_PEER = 3  # it only lost another rank, or waited for it too long


@dataclass(frozen=True)
class RankFailure:
    """A rank's failure. refusal: whether the user can correct it (UserError)."""

    error: str
    cause: FailureCause
    refusal: bool = False


# gloo's errors in a rank that lost another one, which is the cause, or waited for it too long.
_LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("Timed out waiting", "Wait timeout"),
)


def failure_of(error: BaseException, device: str) -> RankFailure:
    """A rank's error for the host's report: its message if that suffices, or a traceback."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_PEER):
        text = f"it lost another rank: {str(error).splitlines()[0]}"
        return RankFailure(text, FailureCause.LOST_PEER)
    refusal, known = isinstance(error, UserError), failure(error) if device == "neuron" else None
    text = str(known or error) if known or refusal else "".join(traceback.format_exception(error))
    return RankFailure(text, FailureCause.RAISED, refusal)
