"""Float32 matrix products on a CPU, by oneDNN.

torch gives float32 products to MKL, which has half of oneDNN's rate or less on CPUs that are not
Intel's. The video decoder (host/winograd.py) and the text encoder (text/streamed.py) spend most of
their time in such products. Figures: benchmarks of both.
"""

import torch
from torch import Tensor, nn


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., K) times the transpose of weight (N, K): (..., N). Both are float32."""
    if not torch.backends.mkldnn.is_available():
        return nn.functional.linear(x, weight)
    # The operator that torch.compile's CPU backend puts in for a linear layer: no public call
    # reaches oneDNN for float32.
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
