"""Float32 matrix products on a CPU, by one of two libraries: torch's BLAS, which is MKL on x86, or
oneDNN.

On CPUs that are not Intel's MKL has half of oneDNN's rate or less; on Intel's it has up to 1.5
times as much for small products. host/arithmetic.py measures which is faster. The video decoder
(host/winograd.py) and the text encoder (text/streamed.py) spend most of their time here. Figures:
benchmarks of both.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLAS, ONEDNN = "blas", "onednn"
MANY_ROWS = 256  # of activations, from which on they are many


class Libraries(NamedTuple):
    """BLAS or ONEDNN, by what is multiplied.

    few   few rows of activations with a piece of a large weight
    many  many rows
    tile  what one core takes of a convolution
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
