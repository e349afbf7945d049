"""The search for the fastest settings: its candidates, their order, and the rule to accept one.

The search is coordinate-wise: it tunes one key after another, from the best settings so far. It
misses gains that need two keys at once; trying all combinations would take hundreds of compiles.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from ltx_neuron.artifacts.tuned_settings import GRAPH_KEYS, RUN_KEYS, Settings, text_of
from ltx_neuron.backends.nki import PACKAGE
from ltx_neuron.config import profiles
from ltx_neuron.config.profiles import COLLECTIVES_BUFFER, Profile
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job
from ltx_neuron.models.programs import group_size, may_divide
from ltx_neuron.plan import independent_passes
from ltx_neuron.plan.layouts import layout_settings, single_group

KEYS = (*RUN_KEYS, *GRAPH_KEYS)
MARGIN = 0.02  # the smallest relative saving for which a setting replaces the profile's own
_BLOCKS = (1, 4, 8, 12)


@dataclass(frozen=True)
class Measurement:
    settings: Settings
    repeat: int  # the number of earlier measurements of the same variant
    problem: str = ""  # why the search cannot choose it; empty if it can
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    # Stage -> milliseconds of its steps, the cold step first
    steps_ms: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # stage -> its steps in a generation
    # Tensor -> relative L2 distance from the reference
    rel_l2: dict[str, float] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        """Milliseconds of a warm step: a generation's mean of the stages' medians."""
        medians = {name: statistics.median(times[1:]) for name, times in self.steps_ms.items()}
        total = sum(self.counts[name] * median for name, median in medians.items())
        return total / sum(self.counts.values())


def median_ms(rows: list[Measurement], settings: Settings) -> float | None:
    """Milliseconds of a variant's warm step: the median of its runs; None if no run succeeded."""
    times = [row.step_ms for row in rows if row.settings == settings and row.steps_ms]
    return statistics.median(times) if times else None


def baseline_settings(profile: Profile) -> Settings:
    """The profile's values of all tunable keys, including typed ones."""
    return {key: text for key in KEYS if (text := text_of(profile, key))}


def candidates(
    key: str,
    profile: Profile,
    tp: int,
    num_layers: int,  # the model's depth
    layers: int | None = None,  # the number of layers in a step; None: all
    buckets: Sequence[Bucket] = (),  # of the size's stages
) -> list[str]:
    """The values of a key to try: those that are available here and change the profile's effect."""
    divides = any(may_divide(bucket, tp, profile.context_parallel) for bucket in buckets)
    on_neuron, depth = profile.device == "neuron", layers or num_layers
    # Graphs of so many blocks divide the depth and end after `layers` blocks; 0: of all blocks.
    blocks = [n for n in _BLOCKS if n <= depth and num_layers % n == depth % n == 0]
    blocks += [0] * (depth == num_layers)
    values = {
        "backend": ["nxd", "torchdist"] if on_neuron else [],
        "compile_backend": [*profiles.COMPILE_BACKENDS[profile.device]],
        # The runtime's default, and AWS's value.
        f"environment.{COLLECTIVES_BUFFER}": ["41943040", "167772160"] if on_neuron else [],
        "compiler_flags.dit": [*profiles.DIT_FLAGS] if on_neuron else [],
        "threads": _threads(profile.world_size(tp)) if profile.device == "cpu" else [],
        "attention": ["nki" if on_neuron else "sdpa", "matmul"],
        "sequence_parallel": ["false", "true"] if divides else [],
        "blocks_per_graph": [*map(str, blocks)],
    }
    # Two values that give the same number of blocks per graph give the same graphs.
    effects: dict[object, str] = {}
    for value in values[key]:
        effects.setdefault(_effect(profile, key, value, tp, num_layers), value)
    current = _effect(profile, key, text_of(profile, key), tp, num_layers)
    return [value for effect, value in effects.items() if effect not in (None, current)]


LAYOUT = "backend", "guidance_parallel", "context_parallel", "blocks_per_graph"


def layout_candidates(
    profile: Profile, tp: int, job: Job, cores: int
) -> tuple[Settings, list[Settings]]:
    """The settings of one tensor-parallel group, and the changes of the other layouts."""
    base = single_group(profile)
    passes = max(independent_passes(job, stage) for stage in job.stages)
    layouts = layout_settings(base, tp, cores // tp, passes, job.buckets)
    changes = [{key: str(value) for key, value in fields.items()} for fields in layouts]
    return {key: text_of(base, key) for key in LAYOUT}, changes[1:]


def _threads(ranks: int) -> list[str]:
    cores = os.cpu_count() or 1
    share = max(1, cores // ranks)
    return [str(n) for n in sorted({1, max(1, share // 2), share, 2 * share, cores}) if n <= cores]


def _effect(profile: Profile, key: str, value: str, tp: int, num_layers: int) -> object:
    """A value's effect, for comparison; None if its backend or kernel package is not installed."""
    try:
        changed = with_settings(profile, {key: value})
        if key == "backend":
            profiles.require_runtime(changed, tp)
    except UserError:
        return None
    if (key, value) == ("attention", "nki") and find_spec(PACKAGE) is None:
        return None
    if key == "blocks_per_graph":
        return changed.blocks_per_graph and group_size(num_layers, changed.blocks_per_graph)
    return changed.rank_threads(tp) if key == "threads" else value


def with_settings(profile: Profile, settings: Settings) -> Profile:
    """A profile with these settings, which override typed ones."""
    added = (f"{key}={value}" for key, value in settings.items())
    return profiles.resolve(profile.name, (*profile.settings, *added))


def check_layers(layers: int | None, profile: Profile, num_layers: int) -> None:
    """Raise UserError unless a step can end after its first `layers` blocks."""
    if layers is None:
        return
    if profile.blocks_per_graph == 0:
        raise UserError(
            f"--layers {layers}: profile {profile.name!r} has the whole step in one graph, which"
            " cannot end early; type --profile-set blocks_per_graph=1 as well"
        )
    group = group_size(num_layers, profile.blocks_per_graph)
    if not 1 <= layers <= num_layers or layers % group:
        raise UserError(
            f"--layers {layers}: wanted a multiple of {group}, the blocks in one graph, of at most"
            f" {num_layers}"
        )


Measure = Callable[[Settings, int], Measurement]  # settings, their earlier measurements
Others = Callable[[str, Settings], list[Settings]]  # a key, and the best settings so far


def search(
    baseline: Settings, keys: tuple[str, ...], others: Others, rounds: int, measure: Measure
) -> Settings:
    """Run the search; returns the best settings. All values of a key are measured once. The fastest
    valid one is then measured against the best settings so far in `rounds` alternating rounds. It
    replaces them if it is faster in every round, by more than their own runs differ and by at least
    MARGIN. others: returns the changes to try for a key."""
    best, measured = baseline, {}

    def again(settings: Settings) -> Measurement:
        key = tuple(settings.items())
        measured[key] = measured.get(key, -1) + 1
        return measure(settings, measured[key])

    standing = again(baseline)
    for key in keys:
        rows = [again(best | change) for change in others(key, best)]
        rows = [row for row in rows if not row.problem]
        if not rows:
            continue
        challenger = min(rows, key=lambda row: row.step_ms)
        if standing.problem:
            best, standing = challenger.settings, challenger
        elif challenger.step_ms < standing.step_ms * (1 - MARGIN):
            pairs = []
            while len(pairs) < rounds and all(map(_faster, pairs)):  # stop at the first lost round
                pairs.append((again(best), again(challenger.settings)))
            if wins(pairs):
                best, standing = challenger.settings, pairs[-1][1]
    return best


def _faster(pair: tuple[Measurement, Measurement]) -> bool:
    return not any(row.problem for row in pair) and pair[1].step_ms < pair[0].step_ms


def wins(pairs: list[tuple[Measurement, Measurement]]) -> bool:
    """Whether the second of each pair is faster than the first by more than the noise."""
    if not all(map(_faster, pairs)):
        return False
    before, after = ([row.step_ms for row in rows] for rows in zip(*pairs, strict=True))
    middle = statistics.median(before)
    noise = max(MARGIN, (max(before) - min(before)) / middle)
    return statistics.median(after) < middle * (1 - noise)
