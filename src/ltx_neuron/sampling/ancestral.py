"""What the steps of the ancestral Euler sampler add: their coefficients and their noise.

Sources: ltx-core 1.2.0 EulerAncestralDiffusionStep with eta 1, ltx-pipelines 1.2.0 distilled.py,
utils/samplers.py. models/ancestral.py is the step.

Shapes (the batch is always 1): (1, T, C) latents of a stream's T tokens, appended ones included.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_SEED = 10_000  # added to the seed of the initial noise


def steps_of(
    sigmas: tuple[float, ...], streams: Sequence[Tensor], frozen: Iterable[bool], seed: int
) -> Iterator[tuple[Tensor, ...]]:
    """For each step the noise of both streams, (1, T, C), and the coefficients (2, 5).

    streams  latents of video and of audio, whose shapes and dtypes the noise has
    seed     of the initial noise. This noise has a generator of its own, so a resumed stage draws
             it again; in every step the video draws first. The last step, to sigma 0, draws none
    """
    generator = torch.Generator().manual_seed((seed + _SEED) % 2**64)
    for end, own in zip(sigmas[1:], coefficients(sigmas, frozen), strict=True):
        noises = map(torch.zeros_like, streams)
        if end:
            noises = (torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in streams)
        yield *noises, own


def coefficients(sigmas: tuple[float, ...], frozen: Iterable[bool]) -> Tensor:
    """(steps, 2, 5) fp32, of video and of audio: each step's coefficients of the ancestral Euler
    sampler with eta 1, in the order of signatures.ANCESTRAL.

    A step goes down to sigma_down, below its end, and adds noise up to the end, so that the
    variance of a rectified flow (alpha = 1 - sigma) is preserved. A frozen stream stays as it is.
    The operations are upstream's, in its order.
    """
    values = torch.tensor(sigmas, dtype=torch.float32)
    sigma, end = values[:-1], values[1:]
    down = end * (1.0 + (end / sigma - 1.0))
    ratio = down / sigma
    alpha, alpha_down = 1.0 - end, 1.0 - down
    noise = (end**2 - down**2 * alpha**2 / alpha_down**2).clamp(min=0) ** 0.5
    # At sigma 0 the step returns the prediction.
    moving = torch.stack([ratio, 1.0 - ratio, alpha / alpha_down, noise, (end > 0).float()], dim=1)
    staying = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]).expand_as(moving)
    return torch.stack([staying if stays else moving for stays in frozen], dim=1)
