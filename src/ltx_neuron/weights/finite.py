"""A test for NaN and Inf in latents and in the outputs of the host's models."""

import math

from torch import Tensor


def finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or Inf."""
    # Minimum and maximum propagate NaN, in a twentieth of the time of isfinite().all().
    return all(math.isfinite(bound) for bound in tensor.aminmax())
