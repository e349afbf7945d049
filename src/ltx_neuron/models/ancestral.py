"""A step of the ancestral Euler sampler, which goes below the step's end and adds noise up to it.

Shapes as in dit.py. Sources: ltx-core 1.2.0 EulerAncestralDiffusionStep, ltx-pipelines 1.2.0
utils/samplers.py.
"""

from torch import Tensor

from ltx_neuron.config.transformer import STREAMS
from ltx_neuron.models.dit import Fields, X0Tail, blend, finished, held


class AncestralTail(X0Tail):
    """x0, blend with held tokens, step, noise, and the blend once more: the next latents, in fp32
    until they are rounded. The coefficients are data, so that all steps share a graph: those of the
    last step return the prediction, those of a frozen stream its latent."""

    def forward(self, inputs: Fields) -> dict[str, Tensor]:
        masks, latents = held(inputs, self.streams), {}
        for stream, x0 in self.predictions(inputs).items():
            x, noise = inputs[f"{stream}_latent"], inputs[f"{stream}_noise"]
            coefficients = inputs["ancestral"][STREAMS.index(stream)]
            of_x, of_x0, signal, of_noise, restore = coefficients.unbind(0)
            x0 = blend(x0.float(), *masks[stream]) if stream in masks else x0.float()
            after = signal * (of_x * x.float() + of_x0 * x0) + noise.float() * of_noise
            if stream in masks:
                # The noise is of all tokens. The prediction of the last step is restored already.
                after = restore * blend(after, *masks[stream]) + (1 - restore) * after
            latents[stream] = after.to(x.dtype)
        return finished(latents)
