"""Guidance: the combination of the predictions of a step's passes.

A pass is head, blocks and X0Tail of dit.py; its prediction is x0. Shapes as there.
"""

from torch import Tensor, nn

from ltx_neuron.config.transformer import STREAMS
from ltx_neuron.models.dit import Fields, Names, blend, held_tokens, next_latents, step_one_hot
from ltx_neuron.models.signatures import PASSES


class Guide(nn.Module):
    """Combine the predictions of a step's passes in x0 space and take the Euler step. Source:
    ltx-core guiders.py. A pass that did not run has weight 0 and any finite tensor as its input. A
    stream that the step skips repeats `guided_*`. Identity guidance (github.com/ID-LoRA) adds a
    term of the audio alone."""

    def __init__(self, streams: Names = STREAMS):
        super().__init__()
        self.streams = streams

    def forward(self, inputs: Fields) -> dict[str, Tensor]:
        one_hot = step_one_hot(inputs)
        sigma_pairs = (one_hot[:, None, None] * inputs["sigmas"]).sum(0)
        enabled = (one_hot[:, None] * inputs["enabled_steps"]).sum(0)
        guided = {}
        for stream in self.streams:
            index = STREAMS.index(stream)
            cond, uncond, perturbed, isolated = (
                inputs[f"{name}_{stream}"].float() for name in PASSES
            )
            cfg, stg, modality, rescale = inputs["guidance"][index].unbind(0)
            # Every difference is to the conditional prediction. Applied one after another they
            # would give a different result.
            x0 = (
                cond
                + cfg * (cond - uncond)
                + stg * (cond - perturbed)
                + modality * (cond - isolated)
            )
            if stream == "audio" and (without := inputs.get("without_audio")) is not None:
                # Towards a reference's voice, for the clip's own tokens: those that are not held.
                scale = inputs["identity"] * inputs["audio_denoise_mask"]
                x0 = x0 + scale * (cond - without.float())
            # Strong guidance overshoots: `rescale` restores the standard deviation of `cond`.
            x0 = x0 * (rescale * (_std(cond) / _std(x0).clamp_min(_SMALLEST_STD)) + (1 - rescale))
            previous, on = inputs[f"guided_{stream}"], enabled[index]
            guided[stream] = (x0 * on + previous.float() * (1 - on)).to(previous.dtype)
        # The guided predictions are returned before the blend, because a skipped step blends again.
        masks = held_tokens(inputs, self.streams)
        held = {stream: blend(guided[stream], *masks[stream]) for stream in masks}
        latents = next_latents(inputs, guided | held, sigma_pairs)
        return latents | {f"guided_{stream}": x0 for stream, x0 in guided.items()}


# A constant prediction has no deviation; this keeps the quotient finite.
_SMALLEST_STD = 1e-12


def _std(x: Tensor) -> Tensor:
    """Unbiased standard deviation over the whole tensor, keyframe tokens included, fp32."""
    return ((x - x.mean()).square().sum() / (x.numel() - 1)).sqrt()
