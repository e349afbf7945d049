"""Samplers on the host of one evaluation a step: Euler, and gradient estimation, whose velocity is
corrected by its change since the step before, so that 20 to 30 steps of the dev recipe suffice in
place of 40.

Sources: ltx-pipelines 1.2.0 utils/samplers.py, gradient_estimating_euler_denoising_loop;
https://openreview.net/pdf?id=o2ND9v0CeK. Between evaluations of the model the host computes in
fp32, with upstream's operations in the same order.

Shapes: T tokens of a stream, (1, T, C) latents.
"""

import torch
from torch import Tensor

from ltx_neuron.sampling.res_2s import Predict, Stream

_GAMMA = 2.0  # the weight of the velocity's change


class Euler:
    """A stage's sampling, as Res2s."""

    corrects = False  # the velocity

    def __init__(self, sigmas: tuple[float, ...], video: Stream, audio: Stream):
        self.streams, self.sigmas = (video, audio), torch.tensor(sigmas)
        self._velocities: list[Tensor | None] = [None, None]

    def step(self, number: int, predict: Predict) -> None:
        """Run a step of one evaluation. The last step's prediction is the result."""
        sigma, sigma_next = self.sigmas[number : number + 2]
        video, audio = (stream.latent for stream in self.streams)
        predictions = predict(video, audio, number)
        for index, (stream, x0) in enumerate(zip(self.streams, predictions, strict=True)):
            sample, stream.denoised = stream.latent, x0
            if sigma_next == 0:
                stream.latent = x0
                continue
            velocity = _velocity(sample, x0, sigma)
            previous, self._velocities[index] = self._velocities[index], velocity
            if self.corrects and previous is not None:
                change = velocity - previous
                corrected = _GAMMA * change + previous
                x0 = (sample.float() - corrected.float() * sigma).to(sample.dtype)
                velocity = _velocity(sample, x0, sigma)
            moved = sample.float() + velocity.float() * (sigma_next - sigma)
            stream.latent = moved.to(sample.dtype)


class GradientEstimation(Euler):
    corrects = True


def _velocity(sample: Tensor, x0: Tensor, sigma: Tensor) -> Tensor:
    return ((sample.float() - x0.float()) / sigma).to(sample.dtype)
