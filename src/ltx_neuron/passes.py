"""A guided step on the ranks: which passes of the model it runs, what each of them reads in place
of the shared tensors, and how they are combined."""

from collections.abc import Sequence

import torch

from ltx_neuron.backends.ranks import Ranks
from ltx_neuron.config import Bucket
from ltx_neuron.models.signatures import PASSES
from ltx_neuron.sampling.guidance import Guidance
from ltx_neuron.text.encoders import Contexts

_STREAMS = ("video", "audio")


def prepare_passes(
    ranks: Ranks,
    bucket: Bucket,
    guidance: Guidance,
    evaluations: Sequence[int],
    contexts: list[Contexts],
    layers: int,
    dtype: torch.dtype,
    computes_uncond: bool,
) -> list[str]:
    """Upload what guidance needs, and define a step of a guided bucket as a sequence of passes and
    their combination; returns the name of the sequence of each evaluation. Where a pass is not run,
    its predictions are read from "cond": their weight is 0.

    layers           blocks of the model
    computes_uncond  whether the negative pass computes a stream that its step skips, as in ltx-core
                     1.0.0
    """
    name = bucket.name
    enabled = guidance.enabled_steps(evaluations, bucket.max_steps)
    ranks.put(name, guidance=guidance.weights(), enabled_steps=enabled)
    passes, aliases = [], {}
    for kind in PASSES:
        if kind not in guidance.passes():
            aliases |= {f"{kind}_{stream}": f"cond_{stream}" for stream in _STREAMS}
            continue
        ranks.put(name, "keep", **{f"keep_{kind}": guidance.keep(kind, layers, dtype)})
        reads = {"keep": f"keep_{kind}"}
        if kind == "uncond":
            for stream in _STREAMS:
                reads[f"{stream}_context"] = f"negative_{stream}_context"
                negative = {f"negative_{stream}_context": getattr(contexts[1], stream)}
                ranks.put(name, f"{stream}_context", **negative)
            if computes_uncond:
                reads["enabled_steps"] = "enabled_always"
                always = torch.ones(bucket.max_steps, 2)
                ranks.put(name, "enabled_steps", enabled_always=always)
        passes.append(("pass", reads, {f"{stream}_x0": f"{kind}_{stream}" for stream in _STREAMS}))
    ranks.define(name, "guided", [*passes, ("guide", aliases, {})])
    ranks.define(name, "repeat", [("guide", aliases, {})])
    return [
        "guided" if any(stream.computes(step) for stream in guidance.streams) else "repeat"
        for step in evaluations
    ]
