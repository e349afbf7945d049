"""Forecasts of a clip on one or several chips of a machine, for each layout.

A step's forecast is plan/forecast.py's. Its cost is counted in the graphs of each layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ltx_neuron.config.profiles import CONTEXT_PARALLEL, PROFILES, Profile, blocks_per_graph
from ltx_neuron.config.transformer import Bucket, TransformerConfig
from ltx_neuron.models.programs import may_divide
from ltx_neuron.plan import Plan, largest_bucket
from ltx_neuron.plan.clip import ClipPlanner
from ltx_neuron.plan.cost import step_cost, step_launches
from ltx_neuron.plan.forecast import forecast, is_measured
from ltx_neuron.weights.tensorfile import DTYPES

Range = Sequence[float]  # by the faster and by the slower of the rates


@dataclass(frozen=True)
class ChipLayout:
    """A division of a machine's chips."""

    name: str
    settings: tuple[str, ...]  # of --profile-set, with the machine's own profile
    chips: int  # of one clip
    at_once: int  # clips on the machine at the same time
    step_ms: Range  # of the last stage, with all guidance passes or tiles
    clip_seconds: Range  # from prompt to file
    dollars: Range | None  # of a clip, with --price-per-hour, on a busy machine
    chip_seconds: Range  # chips x seconds of a clip's denoising
    efficiency: Range  # chip_seconds of one chip / chip_seconds
    measured: bool  # others published a step of this many tokens on so many chips


def layouts(planner: ClipPlanner, config: TransformerConfig) -> list[ChipLayout]:
    """The layouts of a planned job; the first has one tensor-parallel group. Empty for a machine
    with one chip or without documented limits, and for groups that are not whole chips."""
    plan, job, profile = planner.plan, planner.job, planner.profile
    chip, tp = profile.chip, plan.tp
    if chip is None or profile.chips == 1 or tp * profile.lnc % chip.cores:
        return []
    base = single_group(profile)
    buckets = [largest_bucket(job, stage) for stage in job.stages]
    passes = [stage.passes for stage in plan.stages]
    groups = (base.cores or 0) // tp
    chips_field = {} if base.chips == PROFILES[base.machine].chips else {"chips": base.chips}
    rows: list[ChipLayout] = []
    for settings in layout_settings(base, tp, groups, max(passes), buckets):
        layout = replace(base, **settings)
        steps = [
            step_ms(config, bucket, layout, plan, count)
            for bucket, count in zip(buckets, passes, strict=True)
        ]
        seconds = tuple(
            sum(s.evaluations * ms / 1e3 for s, ms in zip(plan.stages, of_stages, strict=True))
            for of_stages in zip(*steps, strict=True)
        )
        chips = int(profile.chips_of(layout.cores_needed(tp)))
        at_once, others = profile.chips // chips, _other_seconds(planner, layout)
        clip_seconds = tuple(others + value for value in seconds)
        chip_seconds = tuple(chips * value for value in seconds)
        price = planner.price and replace(planner.price, at_once=at_once)
        single = rows[0].chip_seconds if rows else chip_seconds
        rows.append(
            ChipLayout(
                name=name_of(layout) or ("one chip" if chips == 1 else f"{chips} chips"),
                settings=tuple(f"{key}={value}" for key, value in (chips_field | settings).items()),
                chips=chips,
                at_once=at_once,
                step_ms=steps[-1],
                clip_seconds=clip_seconds,
                dollars=price and tuple(price.dollars(value) for value in clip_seconds),
                chip_seconds=chip_seconds,
                efficiency=tuple(a / b for a, b in zip(single, chip_seconds, strict=True)),
                measured=is_measured(layout, tp, max(bucket.video_tokens for bucket in buckets)),
            )
        )
    return rows


def _other_seconds(planner: ClipPlanner, layout: Profile) -> float:
    """Seconds of a clip besides the steps; more ranks share the tiles of the video VAE."""
    ranks = layout.cores_needed(planner.plan.tp)
    plan = replace(planner.plan, ranks=ranks, guidance_parallel=layout.guidance_parallel)
    clip = replace(planner, plan=plan).planned()
    assert clip.seconds is not None  # with documented limits
    steps = (row for row in clip.rows if row.name.startswith("denoise") and row.where == "device")
    return clip.seconds - sum(row.seconds or 0.0 for row in steps)


def single_group(profile: Profile) -> Profile:
    """A profile with one tensor-parallel group instead of its layout."""
    machine = PROFILES[profile.machine] if profile.context_parallel > 1 else profile
    return replace(
        profile, context_parallel=1, guidance_parallel=1, blocks_per_graph=machine.blocks_per_graph
    )


def layout_settings(
    base: Profile, tp: int, max_groups: int, passes: int, buckets: Sequence[Bucket]
) -> Iterator[dict[str, Any]]:
    """The fields of each layout's profile, from one tensor-parallel group on. max_groups: number of
    tensor-parallel groups for which there are cores. buckets: of the stages; context parallelism
    divides their video tokens."""
    video = all(bucket.video_tokens for bucket in buckets)
    yield {}
    guidance = [
        {"guidance_parallel": groups, "backend": "torchdist"}
        for groups in range(2, min(passes, max_groups) + 1)
        if -(-passes // groups) < -(-passes // (groups - 1))  # otherwise one more is idle
    ]
    yield from guidance
    context = []
    for cp in CONTEXT_PARALLEL[1:] if video else ():
        fields: dict[str, Any] = {"context_parallel": cp}
        if base.chip:  # it limits the size of graphs
            fields["blocks_per_graph"] = blocks_per_graph(cp, base.blocks_per_graph)
        if cp <= max_groups and replace(base, **fields).connected(tp):
            context.append(fields)
    yield from context
    for groups in reversed(guidance):  # the most, or fewer where these leave chips idle
        left, idle = divmod(max_groups, groups["guidance_parallel"])
        fitting = [cp for cp in context if cp["context_parallel"] <= left]
        yield from [groups | cp for cp in fitting[-1:]]
        if fitting or not idle:
            return


def name_of(layout: Profile) -> str:
    """A layout's groups in words; empty for one group."""
    groups, context = layout.guidance_parallel, layout.context_parallel
    parts = {f"guidance {groups}": groups, f"context {context}": context}
    return " x ".join(part for part, count in parts.items() if count > 1)


def step_ms(
    config: TransformerConfig, bucket: Bucket, layout: Profile, plan: Plan, passes: int
) -> Range:
    """Milliseconds of a step with all its passes."""
    divides = layout.sequence_parallel and may_divide(bucket, plan.tp, layout.context_parallel)
    step = step_cost(config, bucket, layout, plan.tp, DTYPES[plan.dtype], divides)[1]
    launches = step_launches(config, layout.blocks_per_graph)
    of_pass = forecast(layout, plan.tp, config.num_layers, step, launches)
    rounds = -(-passes // layout.guidance_parallel)
    return rounds * of_pass.low, rounds * of_pass.high
