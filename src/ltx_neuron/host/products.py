"""Float32 matrix products on a CPU, by one of two libraries, torch's BLAS, which is MKL on x86, or
oneDNN, or by a kernel of ours for Intel's matrix unit and weights in bf16.

On CPUs that are not Intel's MKL has half of oneDNN's rate or less; on Intel's it has up to 1.5
times as much for small products, and the kernel (host/amx.py) three times MKL's.
host/arithmetic.py measures which is faster. The video decoder
(host/winograd.py) and the text encoder (text/streamed.py) spend most of their time here. Figures:
benchmarks of both.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

BLAS, ONEDNN, AMX = "blas", "onednn", "amx"
MANY_ROWS = 256  # of activations, from which on they are many


class Libraries(NamedTuple):
    """BLAS, ONEDNN or AMX, by what is multiplied.

    few   few rows of activations with a large weight
    many  many rows
    tile  what one core takes of a convolution: not by AMX, as the weights are in float32
    """

    few: str = ONEDNN
    many: str = ONEDNN
    tile: str = ONEDNN

    def of(self, rows: int) -> str:
        """For so many rows of activations."""
        return self.few if rows < MANY_ROWS else self.many


ONEDNN_ALONE = Libraries()


def multiply(x: Tensor, weight: Tensor, out: Tensor, library: str) -> None:
    """Write x (M, K) times the transpose of weight (N, K) to `out` (M, N), which may be columns of
    a larger matrix. All are float32."""
    if library == ONEDNN and torch.backends.mkldnn.is_available():
        # The operator that torch.compile's CPU backend puts in for a linear layer: no public call
        # reaches oneDNN for float32.
        out.copy_(torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
    else:
        torch.mm(x, weight.t(), out=out)


def multiplier(library: str) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The function of x, weight and out that multiplies as `multiply` does. AMX's takes weights in
    bf16, and keeps memory as long as it lives."""
    if library == AMX:
        from ltx_neuron.host.amx import Products  # imports numba and compiles

        return Products().multiply
    return partial(multiply, library=library)


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
