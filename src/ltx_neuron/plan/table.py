"""The plan as text for a terminal."""

import textwrap
from collections import Counter
from collections.abc import Sequence

from ltx_neuron.config.profiles import COLLECTIVES_BUFFER
from ltx_neuron.config.transformer import STREAMS
from ltx_neuron.format import WIDTH, format_bytes, format_flops, format_seconds
from ltx_neuron.plan import ASSUMED, Plan, StagePlan
from ltx_neuron.plan.clip import ClipPlan, PhaseRow
from ltx_neuron.plan.layouts import ChipLayout, Range
from ltx_neuron.report.price import format_price


def headline(plan: Plan, seconds: float | None) -> str:
    """Whether the job fits, and the seconds of a warm clip if they are known."""
    time = f"; a warm clip takes about {format_seconds(seconds)}" if seconds else ""
    return f"verdict: {_verdict(plan)}{time}"


def table(plan: Plan) -> str:
    """The plan, a label and a value per line."""
    degrees = {"context": plan.context_parallel, "guidance": plan.guidance_parallel}
    layout = "".join(f" x {name} parallel {n}" for name, n in degrees.items() if n > 1)
    layout += f", {plan.ranks} ranks" if layout else ""
    lines = [f"profile {plan.profile}, tp {plan.tp}{layout}, {plan.dtype}", plan.backend]
    lines += [*textwrap.wrap(plan.note, WIDTH), ""]
    windows = Counter(map(id, plan.stages))
    for stage in {id(stage): stage for stage in plan.stages}.values():
        steps = f"{stage.steps} steps"
        if stage.evaluations != stage.steps:
            steps += f" of {stage.evaluations} evaluations in all"
        if stage.tiles > 1:
            steps += f" in {stage.tiles} tiles each"
        elif stage.passes > 1:
            steps += f", {stage.passes} passes each"
        size = f"{stage.height}x{stage.width}, " if stage.video_tokens else ""
        nag = ", two text attentions (NAG)" * stage.nag
        times = f"{windows[id(stage)]} x " * (windows[id(stage)] > 1)
        lines.append(f"{times}{stage.name}: {size}{steps}, {_tokens(stage)} tokens{nag}")
        lines += [f"  {label:22}{text}" for label, text in _stage_rows(stage)]
    rows = [f"{label:24}{text}" for label, text in _memory_rows(plan).items()]
    return "\n".join([*lines, "", *rows])


def _tokens(stage: StagePlan) -> str:
    """The tokens of each stream that the stage has, those of references apart."""
    counts = stage.video_tokens, stage.audio_tokens
    return " and ".join(
        f"{count - reference:,} {stream}" + (f" + {reference:,} reference" if reference else "")
        for stream, count, reference in zip(STREAMS, counts, stage.reference_tokens, strict=True)
        if count
    )


def _stage_rows(stage: StagePlan) -> list[tuple[str, str]]:
    gb, reduced, whole = format_bytes, stage.collectives_per_step, stage.whole
    sent = "nothing"
    if crossing := stage.host_bytes_per_step:
        sent = f"{gb(crossing)} of latents to and from the host"
    rows = [
        ("FLOPs per step", format_flops(stage.flops_per_step)),
        (
            "ideal step",
            f"{_ms(stage.ideal_step_ms)}  (compute {_ms(stage.compute_ms)}, weights"
            f" {_ms(stage.memory_ms)}; collectives {_ms(stage.collectives_ms)} if not hidden)",
        ),
        *_forecast_rows(stage),
        ("collectives per step", f"{reduced['count']}, {gb(reduced['bytes'])} a rank"),
        ("elementwise work", f"{gb(stage.elementwise_bytes_per_step)} a rank, if not fused"),
    ]
    if (between := stage.between_groups)["count"]:
        text = f"{between['count']} of them, {gb(between['bytes'])} received a rank"
        rows.append(("between groups", text))
    if whole:
        reduced = whole["collectives_per_step"]
        text = (
            f"yes; without it {reduced['count']} collectives, {gb(reduced['bytes'])},"
            f" {_ms(whole['collectives_ms'])}; elementwise"
            f" {gb(whole['elementwise_bytes_per_step'])}"
        )
        rows.append(("sequence parallel", text))
    if stage.score_bytes_per_core:
        text = (
            f"{gb(stage.score_bytes_per_core)} a core in fp32, stored at least twice;"
            f" {_ms(stage.score_ms)} to write and read all once"
        )
        rows.append(("attention scores", text))
    return rows + [
        ("activations a core", gb(stage.activation_bytes_per_core)),
        ("to the device", f"{gb(stage.upload_bytes)} a rank once, {sent} in a step"),
    ]


def _forecast_rows(stage: StagePlan) -> list[tuple[str, str]]:
    if not (forecast := stage.forecast):
        return []
    kind = "tiles" if stage.tiles > 1 else "passes"
    passes = f" of each of {stage.passes} {kind}" if stage.passes > 1 else ""
    low, middle, high = map(_two_digits, (forecast.low, forecast.middle, forecast.high))
    text = f"{low} to {high} ms, middle {middle}{passes}: a forecast, not measured"
    rows = [("forecast step", text)]
    if not stage.measured:
        rows.append(("", f"{_UNMEASURED}, by tokens or chips"))
    for part in (part for part in forecast.parts if part.high >= _NEGLIGIBLE_MS):
        text = f"{_two_digits(part.low)} to {_two_digits(part.high)} ms: {part.source}"
        wrapped = textwrap.wrap(text, WIDTH - 26, break_long_words=False)
        rows.append((f"  {part.name}", f"\n{'':26}".join(wrapped)))
    return rows


def _memory_rows(plan: Plan) -> dict[str, str]:
    gb, blocks = format_bytes, format_bytes(plan.block_weight_bytes_per_rank)
    encode = f"{gb(plan.host_bytes_to_encode)} to encode, " if plan.host_bytes_to_encode else ""
    decode = f"{gb(plan.host_bytes_to_decode)} to decode in {plan.host_dtype}, "
    rows = {
        "DiT weights a core": f"{gb(plan.dit_weight_bytes_per_rank)} (blocks {blocks})",
        "Gemma weights a core": gb(plan.gemma3_weight_bytes_per_rank),
        "memory a core": (
            f"{gb(plan.hbm_bytes_per_core)} in turn, {gb(plan.hbm_bytes_per_core_resident)} both"
            f" resident, of {gb(plan.hbm_limit_bytes_per_core)}"
        ),
        "host memory": (
            f"{gb(plan.host_bytes_to_load)} while loading, {encode}"
            f"{decode if plan.host_bytes_to_decode else ''}of {gb(plan.host_limit_bytes)}"
        ),
    }
    if plan.host_bytes_mapped:
        rows["weights as files' pages"] = (
            f"{gb(plan.host_bytes_mapped)}; pages beyond memory are read from the disk again"
        )
    largest = max(stage.largest_collective_bytes for stage in plan.stages)
    buffer = plan.collectives_buffer_bytes
    if buffer is not None and largest > buffer:
        rows["collectives' buffer"] = (
            f"{gb(buffer)}, less than the largest sum's {gb(largest)}, which is slower. Type\n"
            f"{'':24}--profile-set environment.{COLLECTIVES_BUFFER}={largest}"
        )
    rows["disk for rank files"] = gb(plan.disk_bytes)
    if plan.quantised:
        rows["quantised"] = f"\n{'':24}".join(textwrap.wrap(plan.quantised, WIDTH - 24))
    runtime = gb(ASSUMED["runtime_bytes_per_core"])
    rows["assumed"] = f"{runtime} a core for graphs and runtime; {ASSUMED['sdpa']}"
    return rows


def _verdict(plan: Plan) -> str:
    if plan.fits is None:
        return "unknown: this profile has no documented memory"
    if plan.fits:
        at_once = "even with both models resident" if plan.fits_resident else "one model at a time"
        return f"fits ({at_once})"
    if plan.nearest_that_fits:
        return f"does not fit; the nearest size that fits: {plan.nearest_that_fits}"
    return "does not fit at any length of this size"


def clip_table(clip: ClipPlan) -> str:
    """The time of a warm clip, of a first one, and the price: lines named as in a latency
    report."""
    lines = [_clip_line("a warm clip", "where", "seconds", "from"), *map(_phase_line, clip.rows)]
    file = "MP4" if any(row.name == "encode_mp4" for row in clip.rows) else "WAV"
    overlaps = f"overlapped: {clip.overlaps}"
    lines.append(_clip_line(f"from prompt to {file}", "", _seconds(clip.seconds), overlaps))
    if clip.batch_seconds is not None:
        text = "the ranks denoise the next clip at the same time"
        if clip.batch_seconds == clip.seconds:
            text = "the next clip waits for the MP4"
        lines.append(_clip_line("a clip of a batch", "", _seconds(clip.batch_seconds), text))
    if clip.price:
        lines.append(_clip_line("price", "", "", format_price(clip.price)))
    if clip.cold:
        lines += ["", _clip_line("a cold start", "where", "seconds", "from")]
        lines += map(_phase_line, clip.cold)
        text = "with the warm clip; the start of the processes comes before"
        seconds = clip.seconds and sum((row.seconds or 0 for row in clip.cold), clip.seconds)
        lines.append(_clip_line(f"to the first {file}", "", _seconds(seconds), text))
    return "\n".join(lines)


_NEGLIGIBLE_MS = 0.05  # a part of a forecast below it has no line
_LAYOUT_LINE = "{:35}{:>5}{:>16}{:>15}{:>16}{:>13}"
_UNMEASURED = "beyond every published measurement"


def layout_table(layouts: Sequence[ChipLayout], machine: str) -> str:
    """A line for each layout, and which is best for one clip and for many. machine: its profile."""
    cost = "$ a clip" if layouts[0].dollars else "chip-seconds"
    lines = [
        f"layouts of a {machine}: forecasts, not measured, from the faster to the slower rates",
        _LAYOUT_LINE.format("layout", "chips", "step, ms", "clip, s", cost, "efficiency"),
    ]
    for layout in layouts:
        ranges = (
            _range(layout.step_ms, ",.0f" if layout.step_ms[1] < 10_000 else ".0f"),
            _range(layout.clip_seconds, ",.1f"),
            _range(layout.dollars, ".2g")
            if layout.dollars
            else _range(layout.chip_seconds, ",.1f" if layout.chip_seconds[1] < 1000 else ",.0f"),
            _range(layout.efficiency, ".0%"),
        )
        name = layout.name + " *" * (not layout.measured)
        lines.append(_LAYOUT_LINE.format(name, layout.chips, *ranges))
    measured = [layout for layout in layouts if layout.measured]
    if len(measured) < len(layouts):
        lines.append(f"* {_UNMEASURED}, by tokens or chips")
    shortest = min(measured or layouts, key=lambda layout: sum(layout.clip_seconds))
    # One that is shorter even by its slower rates, such as groups that share tiles.
    surer = [row for row in layouts if row.clip_seconds[1] < shortest.clip_seconds[0]]
    shortest = min(surer or [shortest], key=lambda layout: sum(layout.clip_seconds))
    cheapest = min(layouts, key=lambda layout: sum(layout.chip_seconds))
    flags = [f"--profile-set {setting}" for setting in shortest.settings]
    typed = " ".join([f"shortest clip: {shortest.name}; type --profile {machine}", *flags])
    lines += textwrap.wrap(typed, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    chip_seconds_an_hour = cheapest.at_once * cheapest.chips * 3600
    hourly = [chip_seconds_an_hour / seconds for seconds in cheapest.chip_seconds]
    lines.append(
        f"most clips: {cheapest.name} a clip, {cheapest.at_once} at once;"
        f" {_range(hourly, ',.0f')} an hour by denoising alone"
    )
    return "\n".join(lines)


def _range(both: Range, form: str) -> str:
    first, second = (format(value, form) for value in both)
    return first if first == second else f"{first} to {second}"


def _phase_line(row: PhaseRow) -> str:
    return _clip_line(row.name, row.where, _seconds(row.seconds), row.rate)


def _clip_line(name: str, where: str, seconds: str, source: str) -> str:
    start = f"{name:24}{where:8}{seconds:>8}  "
    return start + f"\n{'':{len(start)}}".join(textwrap.wrap(source, WIDTH - len(start)))


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.{1 if value < 9.95 else 0}f}"
