"""Noise schedules. Source: ltx-pipelines utils/constants.py."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# Tuned with the distilled weights; other numbers of steps have no table.
DISTILLED_SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
STAGE_2_SIGMAS = (0.909375, 0.725, 0.421875, 0.0)
DISTILLED_MAX_STEPS = len(DISTILLED_SIGMAS) - 1


def sigma_pairs(sigmas: tuple[float, ...], max_steps: int) -> Tensor:
    """(max_steps, 2) fp32: each step's sigma and the next one; surplus rows repeat its last step
    and are not used, because graphs have a fixed number of rows."""
    values = torch.tensor(sigmas, dtype=torch.float32)
    pairs = torch.stack([values[:-1], values[1:]], dim=1)
    return torch.cat([pairs, pairs[-1:].expand(max_steps - len(pairs), 2)])


def stream_sigmas(pairs: Tensor, frozen: Iterable[bool] = (False, False)) -> Tensor:
    """(max_steps, 2, 2) fp32: sigma_pairs of video and of audio. A frozen one has each step's
    sigma twice, so that the Euler step does not change it."""
    return torch.stack([pairs[:, [0, 0]] if stays else pairs for stays in frozen], dim=1)


_TERMINAL = 0.1
# The shift is linear in the tokens, through these two points.
_TOKENS, _SHIFTS = (1024, 4096), (0.95, 2.05)
SCHEDULE_TOKENS = _TOKENS[1]


def ltx2_schedule(steps: int, tokens: int = SCHEDULE_TOKENS) -> tuple[float, ...]:
    """Sigmas of the dev recipe, from 1 to 0, the last nonzero 0.1. Source: ltx-core LTX2Scheduler.
    Upstream's pipelines pass no latent, so the shift is that of 4096 tokens for every size. Only HQ
    passes stage 1's number of tokens, F * h * w, without keyframes."""
    slope = (_SHIFTS[1] - _SHIFTS[0]) / (_TOKENS[1] - _TOKENS[0])
    shift = tokens * slope + (_SHIFTS[0] - slope * _TOKENS[0])
    sigmas = torch.linspace(1.0, 0.0, steps + 1)
    shifted = math.exp(shift) / (math.exp(shift) + (1 / sigmas[:-1] - 1))
    remaining = 1.0 - shifted
    stretched = 1.0 - remaining / (remaining[-1] / (1.0 - _TERMINAL))
    return (*stretched.tolist(), 0.0)
