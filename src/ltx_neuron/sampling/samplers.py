"""The samplers. docs/architecture.md lists what a new one changes.

On the host: between evaluations of the model it computes with upstream's operations in the same
order, so that results are bit-identical.

res_2s (HQ): two evaluations a step, additional noise, and a last evaluation near sigma 0 whose
prediction is the result; in float64. At 1088x1920 and 121 frames a step of stage 2 takes 1.8 to
3.2 s of one host thread, sends each rank 17 MB of bf16 latents and reads 17 MB of predictions,
besides two evaluations of 1.7 PFLOP. Sources: ltx-pipelines utils/{samplers,res2s}.py, ltx-core
components/diffusion_steps.py.

Euler and gradient estimation: one evaluation a step, in fp32. Gradient estimation corrects the
velocity by its change since the step before, so that 20 to 30 steps of the dev recipe suffice in
place of 40. Sources: ltx-pipelines 1.2.0 utils/samplers.py,
gradient_estimating_euler_denoising_loop;
https://openreview.net/pdf?id=o2ND9v0CeK.

The ancestral Euler sampler's steps are in graphs (models/dit.py), and their coefficients and
noise are here. Sources: ltx-core 1.2.0 EulerAncestralDiffusionStep, ltx-pipelines 1.4 distilled.py,
chunks/operators.py.

Shapes (the batch is always 1): (1, T, C) latents of a stream's T tokens, appended ones included.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.sampling.schedules import sigma_pairs

# Seeds of the noise, independent of the job's seed, as upstream.
_STEP_SEED, _SUBSTEP_SEED = -1, 9999
_LAST_SIGMA = 0.0011  # instead of 0, because step sizes use the logarithm
# For small steps at high noise levels the start is refined.
_REFINED_STEP, _REFINED_SIGMA, _REFINEMENTS = 0.5, 0.03, 100

Streams = tuple[Tensor, Tensor]  # of video and of audio, (1, T, C) each
Predict = Callable[[Tensor, Tensor, int], Streams]


def extended(sigmas: tuple[float, ...]) -> Tensor:
    """The n + 2 sigmas of n steps and of the evaluation after them, fp32, ending with .0011 and
    0."""
    return torch.tensor([*sigmas[:-1], _LAST_SIGMA, 0.0])


def evaluation_pairs(sigmas: tuple[float, ...], max_steps: int) -> Tensor:
    """(max_steps, 2) fp32: the sigma of each of the 2n + 1 evaluations, in order, and 0. Surplus
    rows repeat the last one and are not used. After an Euler step to 0 the latents are the
    prediction, which an unguided graph does not return, up to the velocity's rounding: 1e-7 of the
    latents in fp32; in bf16 .8 % at sigma 1 and .01 % at the end. A substep's sigma is rounded to
    fp32 for the graphs; upstream's is float64."""
    levels = extended(sigmas)[:-1].double()
    between = (levels[:-1] * levels[1:]).sqrt()
    ordered = torch.cat([torch.stack([levels[:-1], between], dim=1).flatten(), levels[-1:]])
    pairs = torch.stack([ordered, torch.zeros_like(ordered)], dim=1).float()
    return torch.cat([pairs, pairs[-1:].expand(max_steps - len(pairs), 2)])


def steps_of_evaluations(steps: int) -> tuple[int, ...]:
    """The step number that guidance uses for each of the 2n + 1 evaluations. As upstream, every
    substep counts as a first step."""
    return (*(number for step in range(steps) for number in (step, 0)), steps)


def coefficients(h: float) -> tuple[float, float, float]:
    """Coefficients of the first prediction in the substep, and of the first and second prediction
    in the step, in units of h, the logarithm of the quotient of a step's sigmas."""
    second = _phi(2, -h) / 0.5
    return 0.5 * _phi(1, -h * 0.5), _phi(1, -h) - second, second


def _phi(order: int, z: float) -> float:
    """(e^z minus the first terms of its series) / z^order. Source: ltx-pipelines phi."""
    if abs(z) < 1e-10:
        return 1.0 / math.factorial(order)
    terms = sum(z**k / math.factorial(k) for k in range(order))
    return (math.exp(z) - terms) / z**order


class Stream:
    """The state of video or audio between evaluations. latent: (1, T, C), in the model's dtype.
    clean_latent: (1, T, C), of held tokens; denoise_mask (T, 1) fp32: 1 denoised freely, 0 held."""

    def __init__(self, latent: Tensor, clean_latent: Tensor, denoise_mask: Tensor):
        self.latent, self.denoised = latent, latent
        self.clean_latent, self.denoise_mask = clean_latent, denoise_mask

    def held(self, x: Tensor) -> Tensor:
        """x with held tokens restored, by the mask (ltx-pipelines post_process_latent)."""
        clean = self.clean_latent.float() * (1 - self.denoise_mask)
        return (x * self.denoise_mask + clean).to(x.dtype)

    def substep(self, x0: Tensor, size: float, sigmas: Tensor, noise: Tensor, refine: bool) -> None:
        """Advance to the state between two sigmas by the first prediction. size: h times the
        substep's coefficient."""
        self.first, self.anchor = x0.double(), self.latent.double()
        middle = self.anchor + size * (self.first - self.anchor)
        middle = self.held(_with_noise(self.anchor, middle, sigmas, noise))
        if refine:
            self.anchor = _refined(self.anchor, middle, self.first, size)
        self.latent = middle.to(self.latent.dtype)

    def step(
        self, x0: Tensor, h: float, weights: Sequence[float], sigmas: Tensor, noise: Tensor
    ) -> None:
        """Advance to the next state by the second prediction. weights: of both predictions."""
        first, second = self.first - self.anchor, x0.double() - self.anchor
        latent = self.anchor + h * (weights[0] * first + weights[1] * second)
        latent = self.held(_with_noise(self.anchor, latent, sigmas, noise))
        self.latent, self.denoised = latent.to(self.latent.dtype), x0
        del self.first, self.anchor


class Res2s:
    """A stage's sampling: call `step` for each number in order; the streams have the latents.
    `step` calls `predict` with both latents and the evaluation's number. It returns both
    predictions of the clean latents, in the model's dtype, with held tokens restored."""

    def __init__(self, sigmas: tuple[float, ...], video: Stream, audio: Stream):
        self.streams, self.steps, self.sigmas = (video, audio), len(sigmas) - 1, extended(sigmas)
        doubled = self.sigmas.double()
        self._sizes = -torch.log(doubled[1:] / doubled[:-1])
        seeds = (_STEP_SEED, _SUBSTEP_SEED)
        self._step_noise, self._substep_noise = (torch.Generator().manual_seed(s) for s in seeds)

    def step(self, number: int, predict: Predict) -> None:
        """Run a step of two evaluations. The last step has a third one, which is the result."""
        sigmas, h = self.sigmas[number : number + 2], self._sizes[number].item()
        substep, *weights = coefficients(h)
        sigma, sigma_next = sigmas.double()
        halfway = torch.stack([sigma, torch.sqrt(sigma * sigma_next)])
        refine = h < _REFINED_STEP and bool(sigma > _REFINED_SIGMA)
        for stream, x0 in self._predicted(predict, 2 * number):
            noise = _normal(stream.latent.shape, self._substep_noise)
            stream.substep(x0, h * substep, halfway, noise, refine)
        for stream, x0 in self._predicted(predict, 2 * number + 1):
            noise = _normal(stream.latent.shape, self._step_noise)
            # These sigmas are fp32, like upstream's coefficients of the noise.
            stream.step(x0, h, weights, sigmas, noise)
        if number + 1 == self.steps:
            for stream, x0 in self._predicted(predict, 2 * self.steps):
                stream.latent = stream.denoised = x0

    def _predicted(self, predict: Predict, evaluation: int) -> list[tuple[Stream, Tensor]]:
        video, audio = self.streams
        return list(zip(self.streams, predict(video.latent, audio.latent, evaluation), strict=True))


def _refined(anchor: Tensor, middle: Tensor, x0: Tensor, size: float) -> Tensor:
    """The start from which the substep, without its noise, leads to `middle`. Upstream iterates 100
    times. Each iteration reduces the error by `size`, at most .22, until nothing changes, so this
    stops there with the same bits. The closed form (middle - size * x0) / (1 - size) has different
    last bits."""
    for _ in range(_REFINEMENTS):
        before, anchor = anchor, middle - size * (x0 - anchor)
        if torch.equal(anchor, before):
            break
    return anchor


def _with_noise(sample: Tensor, denoised: Tensor, sigmas: Tensor, noise: Tensor) -> Tensor:
    """A step from `sample` to `denoised` between two sigmas, with half of the second one's noise
    new (ltx-core Res2sDiffusionStep)."""
    sigma, sigma_next = sigmas
    sigma_up = sigma_next * 0.5
    residual = (sigma_next**2 - sigma_up**2) ** 0.5
    alpha = (1 - sigma_next) + residual
    direction = (sample - denoised) / (sigma - sigma_next)
    clean = sample - sigma * direction
    return alpha * (clean + residual / alpha * direction) + sigma_up * noise


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Noise with mean 0 and standard deviation 1 over the whole tensor, (1, T, C) float64. For one
    batch upstream's normalisation by channels is over the whole too; it is repeated for equal
    bits."""
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = (noise - noise.mean()) / noise.std()
    noise = noise - noise.mean(dim=(-2, -1), keepdim=True)
    return noise / noise.std(dim=(-2, -1), keepdim=True)


# --- Euler and gradient estimation ----------------------------------------------------------------

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


# --- the ancestral Euler sampler ------------------------------------------------------------------

STAGE_SEED = 10_000  # times the stage's number, added to the seed of the initial noise


def ancestral_steps(
    sigmas: tuple[float, ...],
    streams: Sequence[Tensor],
    frozen: Iterable[bool],
    seed: int,
    eta: float = 1.0,
) -> Iterator[tuple[Tensor, ...]]:
    """For each step the noise of both streams, (1, T, C), and the coefficients (2, 5). streams:
    latents of video and audio; the noise has their shapes and dtypes. seed: of the stage's own
    generator, so that a resumed stage draws the same. It draws the video's first in every step, and
    none in the last one, to sigma 0."""
    generator = torch.Generator().manual_seed(seed % 2**64)
    for end, factors in zip(sigmas[1:], ancestral_coefficients(sigmas, frozen, eta), strict=True):
        noises = map(torch.zeros_like, streams)
        if end:
            noises = (torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in streams)
        yield *noises, factors


def ancestral_coefficients(
    sigmas: tuple[float, ...], frozen: Iterable[bool], eta: float = 1.0
) -> Tensor:
    """(steps, 2, 5) fp32, of video and of audio: each step's coefficients of the ancestral Euler
    sampler, in the order of signatures.ANCESTRAL. A step denoises to sigma_down, below its end
    (eta 0: its end), and adds noise up to the end. This preserves the variance of a rectified flow
    (alpha = 1 - sigma). A frozen stream does not change. The operations are upstream's, in
    upstream's order."""
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


class Sampler(NamedTuple):
    """How a stage steps from noise to latents.

    host         steps on the host; None: the graphs step on the ranks
    pairs        sigmas and rows of the graphs' table to the sigmas (rows, 2) of each evaluation
    evaluations  number of steps to the step number that guidance uses in each evaluation
    """

    host: type[Euler | Res2s] | None = None
    pairs: Callable[[tuple[float, ...], int], Tensor] = sigma_pairs
    evaluations: Callable[[int], tuple[int, ...]] = lambda steps: tuple(range(steps))


SAMPLERS = {
    "euler": Sampler(),
    "ancestral": Sampler(),  # Euler that adds noise in each step; a release selects it
    "res_2s": Sampler(Res2s, evaluation_pairs, steps_of_evaluations),  # two evaluations a step
    "gradient_estimation": Sampler(GradientEstimation),
}
