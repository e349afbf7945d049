"""Forecast of a step's time on Trainium2: each part from counts in the graphs and a range of rates.
No step of ours was measured there.

The sum is consistent with published results of such models: FLUX, Wan 2.1 and Qwen-Image (Difflet,
2026-08) and LTX-2.5 (vllm-omni-neuron) reach 31 to 35 % of the chip's peak.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ltx_neuron.format import format_flops
from ltx_neuron.profiles import Profile

# Ranges. Assumed share of the documented peak in matrix products:
_LINEAR = 0.72, 0.62
_ATTENTION = 0.44, 0.35  # attention_cte: 44 % for Wan 2.2's self-attention (AWS); less for text
_LARGE_SUM = 184e9, 102e9  # bytes per second that a rank sends, on one chip: assumed
_SMALL_SUM_MS = 0.02, 0.043  # of statistics: assumed
_LAUNCH_MS = 0.47  # Python's part, per graph, on a CPU (benchmarks/nxd_on_cpu.md)
_UNFUSED = 0.25, 0.35  # share of the elementwise traffic: assumed; the rest is fused
_WAITING = 0.1, 0.13  # of all these: engines wait for each other, as traced in Wan 2.1 (Difflet)
_MIDDLE = 0.56  # of the range: the published models are in its upper half

# Published of several chips, for the table of layouts too (plan/layouts.py). Nobody has published
# LTX-2.3 on more than one.
SHARE = 0.38  # of the peak, all operations: LTX-2.5's step on one chip (vllm-omni-neuron)
ALL_REDUCE = (
    100e9,
    100e9,
)  # bus bandwidth, bytes per second: 4 ranks of a chip (jimburtoft/cookbook)
# Of a rank in a sum over several chips: what MiniMax-H3's scaling (vllm-omni-neuron) implies, and
# what LTX-2.5's at TP 8 implies.
ALL_REDUCE_ACROSS = 60e9, 32e9
# Received by a rank from other chips in an all-gather or all-to-all: from the same two.
GATHER = 24e9, 7e9
HOST_COPY = 8e9  # of guidance groups' predictions, through the host's memory: assumed
SMALL_SUM_MS = _SMALL_SUM_MS[0]
# Chips of a graph's collectives -> milliseconds that each launch waits for all of them. 2.5 ms was
# measured at 32 ranks (kiln); its trn1 measurements give the others.
BARRIER_MS = {1: 0.1, 2: 1.2, 4: 2.0, 8: 2.5, 16: 4.0}


def barrier_ms(profile: Profile, tp: int) -> float:
    """What a launch on the ranks of one guidance group waits for all of them."""
    assert profile.chip
    chips = profile.world_size(tp) * profile.lnc / profile.chip.cores
    return BARRIER_MS[min((n for n in BARRIER_MS if n >= chips), default=max(BARRIER_MS))]


@dataclass(frozen=True)
class Part:
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
    parts: list[Part]


def forecast(
    profile: Profile,
    tp: int,
    step: Mapping[str, float],
    launches: int,
    memory_ms: float,
    score_ms: float,
) -> Forecast:
    """The forecast of a step on a profile with documented limits.

    step       its cost for one rank, as export.cost counts it, and "moved_bytes", which the rank
               sends in collectives of its tensor-parallel group
    launches   graphs that it launches
    memory_ms  to read the weights once: a lower bound of the products
    score_ms   to write and read the scores that attention materializes
    """
    chip, flops, link = profile.chip, profile.flops(tp), profile.link_bytes_per_second(tp)
    bandwidth = profile.memory_bytes_per_second(tp)
    assert chip and flops and link and bandwidth  # a profile with documented limits
    peak, memory = flops / tp, bandwidth / tp
    attention, small = step["attention_flops"], step["small_collectives"]
    linear, received = step["flops"] - attention, step["context_bytes"]
    unfused, moved = step["elementwise_bytes"], step["moved_bytes"]
    # Between chips, sums are slower by the ratio of the links.
    slower = chip.link_bytes_per_second * flops / chip.flops / link
    ranges = {
        "linear": [max(linear / (share * peak) * 1e3, memory_ms) for share in _LINEAR],
        "attention": [attention / (share * peak) * 1e3 + score_ms for share in _ATTENTION],
        "large sums": [moved / rate * slower * 1e3 for rate in _LARGE_SUM],
        "small sums": [small * ms + launches * _LAUNCH_MS for ms in _SMALL_SUM_MS],
        "elementwise": [unfused * share / memory * 1e3 for share in _UNFUSED],
    }
    if received:
        barriers = launches * barrier_ms(profile, tp)
        ranges["between chips"] = [received / rate * 1e3 + barriers for rate in GATHER]
    sums = map(sum, zip(*ranges.values(), strict=True))
    ranges["waiting"] = [share * ms for share, ms in zip(_WAITING, sums, strict=True)]
    sources = {
        "linear": f"{format_flops(tp * linear)} at {_percent(_LINEAR)} of the peak, assumed",
        "attention": (
            f"{format_flops(tp * attention)} at {_percent(_ATTENTION)}: attention_cte on Wan 2.2"
            " (AWS), and lower"
        ),
        "large sums": (
            f"{moved / 1e9:.1f} GB a rank at {_LARGE_SUM[1] / 1e9:.0f} to"
            f" {_LARGE_SUM[0] / 1e9:.0f} GB/s, assumed"
        ),
        "small sums": (
            f"{small} at {_SMALL_SUM_MS[0]} to {_SMALL_SUM_MS[1]} ms, assumed; {launches} launches"
            f" at {_LAUNCH_MS} ms, on a CPU"
        ),
        "elementwise": f"{unfused / 1e9:.0f} GB a rank, {_percent(_UNFUSED)} not fused, assumed",
        "between chips": (
            f"{received / 1e9:.2f} GB a rank at {GATHER[1] / 1e9:.0f} to {GATHER[0] / 1e9:.0f}"
            f" GB/s, from published scaling; {launches} launches at {barrier_ms(profile, tp)} ms"
        ),
        "waiting": f"{_percent(_WAITING)} of these: idle engines, as in Wan 2.1 (Difflet)",
    }
    parts = [Part(name, low, high, sources[name]) for name, (low, high) in ranges.items()]
    low, high = map(sum, zip(*ranges.values(), strict=True))
    return Forecast(low, low + _MIDDLE * (high - low), high, parts)


def _percent(shares: tuple[float, float]) -> str:
    low, high = sorted(100 * share for share in shares)
    return f"{low:.3g} to {high:.3g} %"
