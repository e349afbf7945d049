"""A step of the ancestral Euler sampler, which goes below the step's end and adds noise up to it.

Shapes as in dit.py. Sources: ltx-core 1.2.0 EulerAncestralDiffusionStep, ltx-pipelines 1.2.0
utils/samplers.py.
"""

from ltx_neuron.config.transformer import STREAMS
from ltx_neuron.models.dit import X0Tail, blend, finite, held
from ltx_neuron.models.signatures import TailInputs, TailOutputs, by_stream, of_streams


class AncestralTail(X0Tail):
    """x0, blend with held tokens, step, noise, and the blend once more: the next latents, in fp32
    until they are rounded.

    The coefficients are data, so that all steps share a graph: those of the last step return the
    prediction, those of a frozen stream its latent.
    """

    def forward(self, inputs: TailInputs) -> TailOutputs:
        masks, latents, predicted = held(inputs), [], by_stream(super().forward(inputs), "x0")
        for stream, x0 in predicted.items():
            x, noise = (getattr(inputs, f"{stream}_{name}") for name in ("latent", "noise"))
            own = inputs.ancestral[STREAMS.index(stream)]
            of_x, of_x0, signal, of_noise, restore = own.unbind(0)
            x0 = blend(x0.float(), *masks[stream]) if stream in masks else x0.float()
            after = signal * (of_x * x.float() + of_x0 * x0) + noise.float() * of_noise
            if stream in masks:
                # The noise is of all tokens. The prediction of the last step is restored already.
                after = restore * blend(after, *masks[stream]) + (1 - restore) * after
            latents.append(after.to(x.dtype))
        return of_streams(TailOutputs, tuple(predicted))(*latents, finite(latents))
