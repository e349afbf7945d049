"""A guided step on the ranks: the passes of the model and their combination, as sequences."""

from collections.abc import Sequence

import torch

from ltx_neuron.backends.ranks import Ranks
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.models.signatures import NO_VOICE, PASSES
from ltx_neuron.sampling.guidance import Guidance
from ltx_neuron.sampling.latent_state import LatentState
from ltx_neuron.text.encoders import Contexts


def prepare_passes(
    ranks: Ranks,
    bucket: Bucket,
    guidance: Guidance,
    evaluations: Sequence[int],
    contexts: list[Contexts],
    layers: int,
    dtype: torch.dtype,
    computes_uncond: bool,
    identity_scale: float = 0.0,
    audio: LatentState | None = None,
) -> list[str]:
    """Upload the inputs of guidance, and define a guided step as a sequence of passes and their
    combination. Returns the name of the sequence of each evaluation. A pass that is not run has
    weight 0, and "cond" provides its input.

    layers           blocks of the model
    computes_uncond  whether the negative pass computes a stream that its step skips, as in ltx-core
                     1.0.0
    identity_scale   of a bucket with identity guidance, whose pass leaves out the held tokens of
                     `audio`
    """
    name = bucket.name
    enabled = guidance.enabled_steps(evaluations, bucket.max_steps)
    ranks.put(name, guidance=guidance.weights(), enabled_steps=enabled)
    passes, aliases = [], {}
    for kind in PASSES:
        if kind not in guidance.passes():
            aliases |= {f"{kind}_{stream}": f"cond_{stream}" for stream in bucket.streams}
            continue
        ranks.put(name, "keep", **{f"keep_{kind}": guidance.keep(kind, layers, dtype)})
        reads = {"keep": f"keep_{kind}"}
        if kind == "uncond":
            for stream in bucket.streams:
                reads[f"{stream}_context"] = f"negative_{stream}_context"
                negative = {f"negative_{stream}_context": getattr(contexts[1], stream)}
                ranks.put(name, f"{stream}_context", **negative)
            if computes_uncond:
                reads["enabled_steps"] = "enabled_always"
                always = torch.ones(bucket.max_steps, 2)
                ranks.put(name, "enabled_steps", enabled_always=always)
        writes = {f"{stream}_x0": f"{kind}_{stream}" for stream in bucket.streams}
        passes.append(("pass", reads, writes))
    if bucket.identity:
        assert audio
        zeros = torch.zeros(1, bucket.audio_tokens)
        bias = zeros.masked_fill(audio.denoise_mask.T == 0, torch.finfo(dtype).min)
        ranks.put(name, audio_bias=zeros, identity=torch.tensor([identity_scale]))
        ranks.put(name, "audio_bias", without_bias=bias)
        reads = {"keep": "keep_cond", "audio_bias": "without_bias"}
        writes = {f"{stream}_x0": f"{NO_VOICE}_{stream}" for stream in bucket.streams}
        passes.append(("pass", reads, writes))
    ranks.define(name, "guided", [*passes, ("guide", aliases, {})])
    ranks.define(name, "repeat", [("guide", aliases, {})])
    return [
        "guided" if any(stream.computes(step) for stream in guidance.streams) else "repeat"
        for step in evaluations
    ]
