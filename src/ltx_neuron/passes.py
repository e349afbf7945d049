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


class GuidedPasses:
    """The passes of a guided bucket's steps; `prepare` uploads what they need.

    layers          blocks of the model
    computes_uncond  whether the negative pass computes a stream that its step skips, as in ltx-core
                    1.0.0
    """

    def __init__(
        self, ranks: Ranks, bucket: Bucket, layers: int, dtype: torch.dtype, computes_uncond: bool
    ):
        self.ranks, self.bucket, self.layers, self.dtype = ranks, bucket, layers, dtype
        self.computes_uncond = computes_uncond

    def prepare(
        self, guidance: Guidance, evaluations: Sequence[int], contexts: list[Contexts]
    ) -> list[str]:
        """Upload what guidance needs, and define a step as a sequence of passes and their
        combination; returns the name of the sequence of each evaluation. Where a pass is not run,
        its predictions are read from "cond": their weight is 0."""
        name, bucket = self.bucket.name, self.bucket
        enabled = guidance.enabled_steps(evaluations, bucket.max_steps)
        self.ranks.put(name, guidance=guidance.weights(), enabled_steps=enabled)
        passes, aliases = [], {}
        for kind in PASSES:
            predictions = {stream: f"{kind}_{stream}" for stream in _STREAMS}
            if kind in guidance.passes():
                reads = self._prepare_pass(kind, guidance, contexts)
                writes = {f"{stream}_x0": alias for stream, alias in predictions.items()}
                passes.append(("pass", reads, writes))
            else:
                aliases |= {predictions[stream]: f"cond_{stream}" for stream in _STREAMS}
        self.ranks.define(name, "guided", [*passes, ("guide", aliases, {})])
        self.ranks.define(name, "repeat", [("guide", aliases, {})])
        computed = [
            any(stream.computes(step) for stream in guidance.streams) for step in evaluations
        ]
        return ["guided" if any_stream else "repeat" for any_stream in computed]

    def _prepare_pass(
        self, kind: str, guidance: Guidance, contexts: list[Contexts]
    ) -> dict[str, str]:
        """Upload a pass's own tensors; returns which of them take the place of the shared ones."""
        name = self.bucket.name
        reads = {"keep": f"keep_{kind}"}
        keep = guidance.keep(kind, self.layers, self.dtype)
        self.ranks.put(name, "keep", **{f"keep_{kind}": keep})
        if kind != "uncond":
            return reads
        negative = contexts[1]
        for stream, context in (("video", negative.video), ("audio", negative.audio)):
            reads[f"{stream}_context"] = f"negative_{stream}_context"
            alias = {f"negative_{stream}_context": context}
            self.ranks.put(name, f"{stream}_context", **alias)
        if self.computes_uncond:
            reads["enabled_steps"] = "enabled_always"
            always = torch.ones(self.bucket.max_steps, 2)
            self.ranks.put(name, "enabled_steps", enabled_always=always)
        return reads
