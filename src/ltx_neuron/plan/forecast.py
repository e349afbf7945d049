"""Forecast of a step's time on Trainium2: each part from counts in the graphs and a range of rates.
No step of ours was measured there. The range includes the published steps of stacks that work like
ours.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ltx_neuron.config.profiles import Profile
from ltx_neuron.format import format_flops

# Ranges, from the faster to the slower. Share of the documented peak in matrix products: assumed.
_LINEAR = 0.72, 0.62
_ATTENTION = 0.44, 0.35  # attention_cte: 44 % for Wan 2.2's self-attention (AWS); less for text
# Bytes per second that a rank sends in a sum. On one chip: assumed, and measured with 4 ranks
# (jimburtoft/cookbook). On several: what MiniMax-H3's scaling (vllm-omni-neuron) implies, and what
# LTX-2.5's at TP 8 implies.
SUM = 184e9, 102e9
SUM_ACROSS = 60e9, 32e9
# Received by a rank from other chips in an all-gather: by MiniMax-H3's scaling, and fitted to
# LTX-2.5's steps on two and four chips.
GATHER = 24e9, 6e9
_UNFUSED = 0.25, 0.35  # share of the elementwise traffic: assumed; the rest is fused
_WAITING = 0.1, 0.13  # of all these: engines wait for each other, as traced in Wan 2.1 (Difflet)
# Milliseconds per transformer block that do not shrink with the tokens, such as the latency of its
# collectives. Fitted to the published steps on one chip: 222, 442, 459 and 970 ms exceed the middle
# of the other parts by 120, 152, 169 and 144 ms in 48 blocks. A step is one launch in the stacks of
# the first three and 14 in that of the last, so launches are not the cause.
FIXED_MS = 2.5, 3.5
# Microseconds of a launch's Python per tensor and rank on NxD, least and most of 4 to 64 ranks
# (benchmarks/nxd_launch.md). The ranks wait meanwhile; TorchNeuron's launches return at once.
_TENSOR_US = 0.018, 0.053
# Chips of a graph's collectives -> milliseconds that each launch waits for all of them. 2.5 ms was
# measured at 32 ranks (kiln); its trn1 measurements give the others. The slower: 50 launches fewer
# saved 390 ms on two chips (whn09/vllm-omni-neuron), of which a part is fusion.
BARRIER_MS = {1: 0.1, 2: 1.2, 4: 2.0, 8: 2.5, 16: 4.0}
SLOWEST_BARRIER_MS = 7.8
# What others measured (docs/results.md). size: height, width and frames; tp, cp: tensor and context
# parallel; ms: of one pass, from and to; differs: what the stack does and ours does not, where its
# time is outside of our range.
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


def is_measured(profile: Profile, tp: int, tokens: int) -> bool:
    """Whether others published a step of this size with a layout of ours on as many chips."""
    chips = profile.chips_of(profile.world_size(tp))
    ours = (step for step in PUBLISHED if step["tp"] == 4 and not step["differs"])
    return any(step["cp"] == chips and tokens <= step["tokens"] for step in ours)


def barrier_ms(profile: Profile, tp: int) -> tuple[float, float]:
    """What a launch on the ranks of one guidance group waits for all of them, from and to."""
    chips = profile.chips_of(profile.world_size(tp))
    fast = BARRIER_MS[min((n for n in BARRIER_MS if n >= chips), default=max(BARRIER_MS))]
    return fast, SLOWEST_BARRIER_MS if chips > 1 else fast


@dataclass(frozen=True)
class ForecastPart:
    """Milliseconds, from and to, and their source as text."""

    name: str
    low: float
    high: float
    source: str


@dataclass(frozen=True)
class Forecast:
    """Milliseconds of one pass of a step, the sums of `parts`."""

    low: float
    middle: float
    high: float
    parts: list[ForecastPart]


def forecast(
    profile: Profile, tp: int, blocks: int, step: Mapping[str, float], launches: int
) -> Forecast:
    """The forecast of a step on a profile with documented limits. blocks: of the transformer. step:
    its cost for one rank, as plan.cost.step_cost counts it. launches: graphs that it launches."""
    flops, bandwidth = profile.flops(tp), profile.memory_bytes_per_second(tp)
    assert flops and bandwidth  # a profile with documented limits
    peak, memory = flops / tp, bandwidth / tp
    sums = SUM if profile.chips_of(tp) <= 1 else SUM_ACROSS
    attention, moved = step["attention_flops"], step["moved_bytes"]
    linear, received = step["flops"] - attention, step["context_bytes"]
    unfused, barriers = step["elementwise_bytes"], barrier_ms(profile, tp)
    tensors = step["weight_tensors"] + launches * step["inputs"]
    ranks = profile.world_size(tp) if profile.backend == "nxd" else 0
    # The weights are read once: a lower bound of the products.
    memory_ms, score_ms = (step[k] / memory * 1e3 for k in ("weight_bytes", "score_bytes"))
    python = [tensors * ranks * microseconds / 1e3 for microseconds in _TENSOR_US]
    ranges = {
        "linear": [max(linear / (share * peak) * 1e3, memory_ms) for share in _LINEAR],
        "attention": [attention / (share * peak) * 1e3 + score_ms for share in _ATTENTION],
        "large sums": [moved / rate * 1e3 for rate in sums],
        "elementwise": [unfused * share / memory * 1e3 for share in _UNFUSED],
    }
    if received:
        ranges["between chips"] = [received / rate * 1e3 for rate in GATHER]
    busy = map(sum, zip(*ranges.values(), strict=True))
    ranges["waiting"] = [share * ms for share, ms in zip(_WAITING, busy, strict=True)]
    ranges["fixed"] = [blocks * ms for ms in FIXED_MS]
    ranges["launches"] = [launches * ms + cpu for ms, cpu in zip(barriers, python, strict=True)]
    sources = {
        "linear": f"{format_flops(tp * linear)} at {_percent(_LINEAR)} of the peak, assumed",
        "attention": (
            f"{format_flops(tp * attention)} at {_percent(_ATTENTION)}: attention_cte on Wan 2.2"
            " (AWS), and lower"
        ),
        "large sums": f"{moved / 1e9:.1f} GB a rank at {_gigabytes(sums)} GB/s, assumed",
        "elementwise": f"{unfused / 1e9:.0f} GB a rank, {_percent(_UNFUSED)} not fused, assumed",
        "between chips": f"{received / 1e9:.2f} GB a rank at {_gigabytes(GATHER)} GB/s, published",
        "waiting": f"{_percent(_WAITING)} of these: idle engines, as in Wan 2.1 (Difflet)",
        "fixed": f"{blocks} blocks at {FIXED_MS[0]} to {FIXED_MS[1]} ms, fitted to published steps",
        "launches": (
            f"{launches} at {' to '.join(map(str, dict.fromkeys(barriers)))} ms (kiln, whn09)"
            + f"; NxD's Python, {tensors} tensors of {ranks} ranks, on a CPU" * bool(ranks)
        ),
    }
    parts = [ForecastPart(name, low, high, sources[name]) for name, (low, high) in ranges.items()]
    low, high = map(sum, zip(*ranges.values(), strict=True))
    return Forecast(low, (low + high) / 2, high, parts)


def _gigabytes(rates: tuple[float, float]) -> str:
    high, low = (rate / 1e9 for rate in rates)
    return f"{low:.0f} to {high:.0f}"


def _percent(shares: tuple[float, float]) -> str:
    low, high = sorted(100 * share for share in shares)
    return f"{low:.3g} to {high:.3g} %"
