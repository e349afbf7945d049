"""Inputs of the ancestral Euler sampler's steps: their coefficients and their noise.

Sources: ltx-core 1.2.0 EulerAncestralDiffusionStep, ltx-pipelines 1.4 distilled.py,
chunks/operators.py. models/ancestral.py is the step.

Shapes (the batch is always 1): (1, T, C) latents of a stream's T tokens, appended ones included.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

STAGE_SEED = 10_000  # times the stage's number, added to the seed of the initial noise


def steps_of(
    sigmas: tuple[float, ...],
    streams: Sequence[Tensor],
    frozen: Iterable[bool],
    seed: int,
    eta: float = 1.0,
) -> Iterator[tuple[Tensor, ...]]:
    """For each step the noise of both streams, (1, T, C), and the coefficients (2, 5).

    streams  latents of video and audio; the noise has their shapes and dtypes
    seed     of the stage's own generator, so that a resumed stage draws the same. It draws the
             video's first in every step, and none in the last one, to sigma 0
    """
    generator = torch.Generator().manual_seed(seed % 2**64)
    for end, factors in zip(sigmas[1:], coefficients(sigmas, frozen, eta), strict=True):
        noises = map(torch.zeros_like, streams)
        if end:
            noises = (torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in streams)
        yield *noises, factors


def coefficients(sigmas: tuple[float, ...], frozen: Iterable[bool], eta: float = 1.0) -> Tensor:
    """(steps, 2, 5) fp32, of video and of audio: each step's coefficients of the ancestral Euler
    sampler, in the order of signatures.ANCESTRAL.

    A step denoises to sigma_down, below its end (eta 0: its end), and adds noise up to the end.
    This preserves the
    variance of a rectified flow (alpha = 1 - sigma). A frozen stream does not change. The
    operations are upstream's, in upstream's order.
    """
    values = torch.tensor(sigmas, dtype=torch.float32)
    sigma, end = values[:-1], values[1:]
    down = end * (1.0 + (end / sigma - 1.0) * eta)
    ratio = down / sigma
    alpha, alpha_down = 1.0 - end, 1.0 - down
    noise = (end**2 - down**2 * alpha**2 / alpha_down**2).clamp(min=0) ** 0.5
    # At sigma 0 the step returns the prediction.
    moving = torch.stack([ratio, 1.0 - ratio, alpha / alpha_down, noise, (end > 0).float()], dim=1)
    staying = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]).expand_as(moving)
    return torch.stack([staying if stays else moving for stays in frozen], dim=1)
