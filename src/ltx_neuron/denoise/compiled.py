"""A compiled DiT step, and what it costs."""

import math
from dataclasses import dataclass

from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.profiles import Profile
from ltx_neuron.report.recorder import Counters


@dataclass(frozen=True)
class CompiledStep:
    """A compiled DiT step and its bucket. tiles: of a tiled stage, the step of each tile."""

    bucket: Bucket
    manifest: Manifest
    tiles: tuple["CompiledStep", ...] = ()

    @property
    def programs(self) -> list["CompiledStep"]:
        """The steps that run, one for each tile."""
        return list(self.tiles) or [self]

    def count(self, passes: int, profile: Profile, tp: int, counters: Counters) -> None:
        """Record the costs of a step of `passes`, counted when its graphs were compiled."""
        guided, groups = self.bucket.guided, profile.guidance_parallel
        rounds = math.ceil(passes / groups) if guided else passes
        costs = [each.manifest.cost("pass" if guided else "main") for each in self.programs]
        own = costs[::groups]  # of a rank of the first group, which has the most tiles
        counters.collectives_per_step = {
            "count": sum(cost["collectives"] for cost in own) * rounds,
            "bytes": sum(cost["collective_bytes"] for cost in own) * rounds,
        }
        flops = sum(cost["flops"] for cost in costs)
        counters.flops_per_step = flops * passes * profile.world_size(tp)
        counters.peak_flops = profile.flops(profile.cores_needed(tp))
