"""Whether the kernels of sound can take the CPU's matrix unit (AMX)."""

import ctypes
import os
from functools import cache

import torch

from ltx_neuron.host.arithmetic import BLAS, Libraries  # noqa: F401

AMX = "amx"


@cache
def has_amx() -> bool:
    """Whether AMX can be taken on this machine."""
    # numba, told to compile for another CPU, would end the process.
    told = ("NUMBA_CPU_FEATURES", "NUMBA_CPU_NAME", "NUMBA_DISABLE_JIT")
    if not torch.cpu._is_amx_tile_supported() or any(name in os.environ for name in told):
        return False
    from llvmlite.binding import get_host_cpu_features  # large, and of use here alone

    if not get_host_cpu_features().get("amx-bf16"):
        return False
    has_openmp = hasattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel")
    return has_openmp and torch.cpu._init_amx()  # asks Linux for the tiles' registers
