"""Steps that others measured on Trainium2, for comparison with our forecast (docs/results.md)."""

import json
from pathlib import Path

from ltx_neuron.plan.forecast import chips_of
from ltx_neuron.profiles import Profile

# size: height, width and frames; tp, cp: tensor and context parallel; ms: one pass, from and to;
# differs: what the stack does and ours does not, if its time is outside of our range
STEPS = json.loads(Path(__file__).with_name("published.json").read_text())


def is_measured(profile: Profile, tp: int, tokens: int) -> bool:
    """Whether others published a step of as many video tokens with a layout of ours, on as many
    chips as a pass has here."""
    chips = chips_of(profile, profile.world_size(tp))
    ours = (step for step in STEPS if step["tp"] == 4 and not step["differs"])
    return any(step["cp"] == chips and tokens <= step["tokens"] for step in ours)
