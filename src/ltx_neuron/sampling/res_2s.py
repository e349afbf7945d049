"""The res_2s sampler of upstream's HQ pipeline: two evaluations of the model per step, additional
noise, and a last evaluation near sigma 0 whose prediction is the result.

Source: ltx-pipelines utils/{samplers,res2s}.py, ltx-core components/diffusion_steps.py.

Between evaluations the host computes in float64, with upstream's operations in the same order, so
results are bit-identical. At 1088x1920 and 121 frames a step of stage 2 takes 1.8 to 3.2 s of one
host thread, sends each rank 17 MB of bf16 latents and reads 17 MB of predictions, besides two
evaluations of 1.7 PFLOP.

Shapes: T tokens of a stream, (1, T, C) latents.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
    rows repeat the last one and are not used.

    After an Euler step to 0 the latents are the prediction, which an unguided graph does not
    return, up to the velocity's rounding: 1e-7 of the latents in fp32; in bf16 .8 % at sigma 1 and
    .01 % at the end. A substep's sigma is rounded to fp32 for the graphs; upstream's is float64.
    """
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
    """The state of video or audio between evaluations.

    latent        (1, T, C), in the model's dtype
    clean_latent  (1, T, C), of held tokens; denoise_mask (T, 1) fp32: 1 denoised freely, 0 held
    """

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
    predictions of the clean latents, in the model's dtype, with held tokens restored.
    """

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
