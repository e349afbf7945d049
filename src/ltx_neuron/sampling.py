"""Noise schedules. Source: ltx-pipelines utils/constants.py."""

import torch
from torch import Tensor

# Tuned together with the distilled weights: there is no table for another number of steps.
DISTILLED_SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
STAGE_2_SIGMAS = (0.909375, 0.725, 0.421875, 0.0)
DISTILLED_MAX_STEPS = len(DISTILLED_SIGMAS) - 1


def sigma_pairs(sigmas: tuple[float, ...], max_steps: int) -> Tensor:
    """(max_steps, 2) fp32: each step's sigma and the next one; rows beyond the schedule repeat its last step."""
    values = torch.tensor(sigmas, dtype=torch.float32)
    pairs = torch.stack([values[:-1], values[1:]], dim=1)
    return torch.cat([pairs, pairs[-1:].expand(max_steps - len(pairs), 2)])
