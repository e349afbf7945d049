"""Float32 products on a CPU, by oneDNN.

torch gives them to MKL, which on CPUs that are not Intel's has half of oneDNN's rate or less
(benchmarks/vae_decode.md, benchmarks/text_encode.md).
"""

import torch
from torch import Tensor, nn


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., K) and weight (N, K), both float32, to (..., N)."""
    if not torch.backends.mkldnn.is_available():
        return nn.functional.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(
        x, weight, None, "none", [], ""
    )  # as torch.compile calls it
