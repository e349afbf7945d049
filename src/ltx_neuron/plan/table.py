"""The plan as a person reads it on a terminal."""

import textwrap

from ltx_neuron.plan import ASSUMED, Plan, StagePlan
from ltx_neuron.plan.clip import ClipPlan, Row
from ltx_neuron.profiles import COLLECTIVES_BUFFER

_COLUMNS = 100  # width of a terminal


def _gb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.2f} GB"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _steps(stage: StagePlan) -> str:
    if stage.evaluations == stage.steps:
        steps = f"{stage.steps} steps"
    else:
        steps = f"{stage.steps} steps of {stage.evaluations} evaluations in all"
    return f"{steps}, {stage.passes} passes each" if stage.passes > 1 else steps


def _sent(stage: StagePlan) -> str:
    return "nothing" if stage.evaluations == stage.steps else "the latents twice"


def _stage_lines(stage: StagePlan) -> list[str]:
    reduced, whole = stage.collectives_per_step, stage.whole
    lines = [
        f"{stage.name}: {stage.height}x{stage.width}, {_steps(stage)},"
        f" {stage.video_tokens:,} video and {stage.audio_tokens} audio tokens",
        f"  FLOPs per step        {stage.flops_per_step / 1e12:.1f} T",
        f"  ideal step            {_ms(stage.ideal_step_ms)} "
        f" (compute {_ms(stage.compute_ms)}, weights {_ms(stage.memory_ms)};"
        f" collectives {_ms(stage.collectives_ms)} if not hidden)",
        *_forecast_lines(stage),
        f"  collectives per step  {reduced['count']}, {_gb(reduced['bytes'])} a rank",
        f"  elementwise work      {_gb(stage.elementwise_bytes_per_step)} a rank, if not fused",
    ]
    if whole:
        reduced = whole["collectives_per_step"]
        lines.append(
            f"  sequence parallel     yes; without it {reduced['count']} collectives,"
            f" {_gb(reduced['bytes'])}, {_ms(whole['collectives_ms'])}; elementwise"
            f" {_gb(whole['elementwise_bytes_per_step'])}"
        )
    if stage.score_bytes_per_core:
        lines.append(
            f"  attention scores      {_gb(stage.score_bytes_per_core)} a core are held in fp32, at"
            f" least twice; {_ms(stage.score_ms)} to write and read all once"
        )
    return lines + [
        f"  activations a core    {_gb(stage.activation_bytes_per_core)}",
        f"  to the device         {_gb(stage.upload_bytes)} a rank once, {_sent(stage)} in a step",
    ]


def _forecast_lines(stage: StagePlan) -> list[str]:
    """The forecast of a step, and its parts with what each is from."""
    if not (made := stage.forecast):
        return []
    each = f" of each of {stage.passes} passes" if stage.passes > 1 else ""
    lines = [
        f"  forecast step         {_two_digits(made.low)} to {_two_digits(made.high)} ms, middle"
        f" {_two_digits(made.middle)}{each}: a forecast, not measured"
    ]
    for part in made.parts:
        low, high = _two_digits(part.low), _two_digits(part.high)
        start = f"    {part.name:20}{low} to {high} ms: "
        lines += textwrap.wrap(
            part.source, _COLUMNS, initial_indent=start, subsequent_indent=" " * 26
        )
    return lines


def _two_digits(value: float) -> str:
    """As much of a forecast as it says."""
    return f"{float(f'{value:.2g}'):,.0f}"


def _buffer_lines(plan: Plan) -> list[str]:
    """What to type where a collective is larger than the runtime's buffer for one."""
    largest, buffer = (
        max(stage.largest_collective_bytes for stage in plan.stages),
        plan.collectives_buffer_bytes,
    )
    if buffer is None or largest <= buffer:
        return []
    return [
        f"collectives' buffer     {_gb(buffer)}, the largest sum has {_gb(largest)} and takes a"
        " slower algorithm. Type",
        f"                        --profile-set environment.{COLLECTIVES_BUFFER}={largest}",
    ]


def table(plan: Plan) -> str:
    """The plan in columns. 1 GB is 1e9 bytes."""

    encode = plan.host_bytes_to_encode
    encode = f" {_gb(encode)} to encode," if encode else ""
    lines = [f"profile {plan.profile}, tp {plan.tp}, {plan.dtype}", ""]
    for stage in plan.stages:
        lines += _stage_lines(stage)
    mapped = []
    if plan.host_bytes_mapped:
        text = f"weights as files' pages {_gb(plan.host_bytes_mapped)}: what memory has no room for"
        mapped = [f"{text} is read from the disk again"]
    lines += [
        "",
        (
            f"DiT weights a core      {_gb(plan.dit_weight_bytes_per_rank)} (blocks"
            f" {_gb(plan.block_weight_bytes_per_rank)})"
        ),
        f"Gemma3 weights a core   {_gb(plan.gemma3_weight_bytes_per_rank)}",
        (
            f"memory a core           {_gb(plan.hbm_bytes_per_core)} in turn,"
            f" {_gb(plan.hbm_bytes_per_core_resident)} both resident, of"
            f" {_gb(plan.hbm_limit_bytes_per_core)}"
        ),
        (
            f"host memory             {_gb(plan.host_bytes_to_load)} while loading,"
            f"{encode} {_gb(plan.host_bytes_to_decode)} to decode in {plan.host_dtype}, of"
            f" {_gb(plan.host_limit_bytes)}"
        ),
        *mapped,
        *_buffer_lines(plan),
        f"disk for rank files     {_gb(plan.disk_bytes)}",
        (
            f"assumed                 {_gb(ASSUMED['runtime_bytes_per_core'])} a core for graphs"
            f" and runtime; {ASSUMED['sdpa']}"
        ),
    ]
    return "\n".join([*lines, f"verdict                 {_verdict(plan)}"])


def _verdict(plan: Plan) -> str:
    """Whether it fits, and what else would."""
    verdict = {
        True: "fits",
        False: "does not fit",
        None: "this profile has no documented memory to compare with",
    }
    nearest = f"; the nearest that does: {plan.nearest_that_fits}" if plan.nearest_that_fits else ""
    nearest = nearest or ("; no length of that size does" if plan.fits is False else "")
    resident = (
        " (both models resident as well)"
        if plan.fits_resident
        else " (one model at a time)"
        if plan.fits
        else ""
    )
    return f"{verdict[plan.fits]}{resident}{nearest}"


def clip_table(clip: ClipPlan) -> str:
    """The time of a warm clip: a line for every phase, as a latency report names it."""
    lines = [f"{'a warm clip':24}{'where':8}{'seconds':>8}  from"]
    for row in clip.rows:
        lines += _row_lines(row)
    lines += [f"{'from prompt to MP4':32}{_seconds(clip.seconds)}  overlapped: {clip.overlaps}"]
    if clip.batch_seconds is not None:
        text = "the ranks denoise the next one meanwhile"
        lines.append(f"{'a clip of a batch':32}{_seconds(clip.batch_seconds)}  {text}")
    return "\n".join(lines)


def _row_lines(row: Row) -> list[str]:
    start = f"{row.name:24}{row.where:8}{_seconds(row.seconds)}  "
    indent = " " * len(start)
    return textwrap.wrap(
        row.rate, _COLUMNS, initial_indent=start, subsequent_indent=indent, drop_whitespace=True
    )


def _seconds(seconds: float | None) -> str:
    return f"{'-' if seconds is None else f'{seconds:.2f}':>8}"
