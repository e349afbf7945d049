"""Latency reports as text: one report, a comparison of two, and limits on their numbers."""

import difflib
import math
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json
from ltx_neuron.format import WIDTH, columns
from ltx_neuron.invocation import command
from ltx_neuron.report.price import format_price

_FIELDS = {
    "": (
        "job profile tp versions identity phases denoise_steps_ms warm_step_ms"
        " bytes_to_device_per_step collectives_per_step flops_per_step percent_of_peak"
        " end_to_end_seconds residual_seconds"
    ),
    "phases": "name seconds peak_rss_bytes",
    "warm_step_ms": "median p90 host device",
}


def validate(report: object, source: str = "report") -> None:
    """Raise UserError, with `source` and the fields, unless the report follows schema 1."""
    schema = report.get("schema") if isinstance(report, dict) else None
    if not isinstance(report, dict) or schema != 1:
        raise UserError(
            f"{source} is not a latency report of schema 1, its schema is {schema}\n"
            f"{_how_to_make()}"
        )
    parts = {"": report}
    parts |= {f"phases[{n}].": phase for n, phase in enumerate(report.get("phases", ()))}
    warm = report.get("warm_step_ms", {})
    parts |= {f"warm_step_ms.{s}.": warm.get(s, {}) for s in report.get("denoise_steps_ms", ())}
    missing = [
        prefix + name
        for prefix, part in parts.items()
        for name in _FIELDS[re.split(r"[.[]", prefix)[0]].split()
        if name not in part
    ]
    if missing:
        raise UserError(f"{source}: missing {', '.join(missing)}")


def _how_to_make() -> str:
    flag = "--perf-dump-path", "FILE.json"
    return f"To make a latency report, type {command('generate', *flag)} and the flags of the job"


def load(path: str | Path) -> dict:
    """Read and validate a report file."""
    try:
        report = read_json(Path(path))
    except UserError as error:
        raise UserError(f"{error}\n{_how_to_make()}") from None
    validate(report, str(path))
    return report


def table(report: dict) -> str:
    """The report as text of at most 100 columns. 1 GB is 1e9 bytes, 1 MB 1e6."""
    job = ", ".join(
        f"{name} {textwrap.shorten(str(value), 60)}"
        for name, value in report["job"].items()
        if value not in (None, []) and value is not False
    )
    collectives, percent = report["collectives_per_step"], report["percent_of_peak"]
    measured = any(warm["median"] for warm in report["warm_step_ms"].values())
    reason = "no flops or no warm step counted"
    if report["flops_per_step"] and measured:
        reason = "no peak for this profile"
    launches = report.get("launches_per_step")  # absent in earlier reports
    launched = launches and f"{launches['count']}, {_text(launches['host_ms'])} ms of the host"
    lines = [
        *(*textwrap.wrap(f"{title(report)}  {job}", WIDTH), ""),
        *(*_phase_lines(report), ""),
        *(*_step_lines(report), ""),
        f"bytes to device per step  {report['bytes_to_device_per_step']:,}",
        *([f"launches per step         {launched}"] if launches else []),
        f"collectives per step      {collectives['count']}, {_text(collectives['bytes'] / 1e6)} MB",
        f"percent of peak           {reason if percent is None else f'{percent:.1f} %'}",
    ]
    if (swaps := report.get("weight_swaps", {})).get("count"):  # absent in earlier reports
        lines.append(f"weight swaps              {swaps['count']}, {_text(swaps['seconds'])} s")
    if (seconds := report.get("start_to_first_clip")) is not None:
        lines.append(f"start to first clip       {_text(seconds)} s")
    if price := report.get("price"):
        lines.append(f"price                     {format_price(price)}")
    if groups := report.get("guidance_groups"):
        lines += ["", *_group_lines(groups)]
    return "\n".join(lines)


def _phase_lines(report: dict) -> list[str]:
    end_to_end = report["end_to_end_seconds"]
    phases = _merged(report) | {
        "residual": {"seconds": report["residual_seconds"]},
        "end to end": {"seconds": end_to_end},
    }
    rows = [["phase", "seconds", "share", "peak RSS GB", "overlapped s"]]
    for name, phase in phases.items():
        share = f"{100 * phase['seconds'] / end_to_end:.1f} %" if end_to_end else "-"
        peak, overlapped = phase.get("peak_rss_bytes"), phase.get("overlapped_seconds")
        memory = "" if peak is None else _text(peak / 1e9)
        overlap = "" if overlapped is None else _text(overlapped)
        rows.append([name, _text(phase["seconds"]), share, memory, overlap])
    if not any("overlapped_seconds" in phase for phase in phases.values()):
        rows = [row[:-1] for row in rows]
    return columns(rows)


def _step_lines(report: dict) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("denoise", "steps", "cold ms", "warm median ms", "p90 ms", "host ms", "device ms")
    ]
    each_step = []
    for stage, steps in report["denoise_steps_ms"].items():
        if steps:
            warm = report["warm_step_ms"][stage]
            milliseconds = [steps[0], *(warm[key] for key in ("median", "p90", "host", "device"))]
            rows.append((stage, str(len(steps)), *map(_text, milliseconds)))
            listed = " ".join(f"{step:,.1f}" for step in steps)
            text = f"each step of {stage}, ms: {listed}"
            each_step += textwrap.wrap(text, WIDTH, subsequent_indent="  ")
    return [*columns(rows), *each_step]


def _group_lines(groups: dict) -> list[str]:
    rows: list[tuple[str, ...]] = [("denoise", "guidance group", "pass", "runs", "median ms")]
    rows += [
        (stage, str(run["group"]), run["pass"], str(run["runs"]), _text(run["median_ms"]))
        for stage, passes in groups["passes"].items()
        for run in passes
    ]
    lost = [line for text in groups["lost"] for line in textwrap.wrap(text, WIDTH)]
    return [*(columns(rows) if rows[1:] else []), *lost]


def compare(a: dict, b: dict) -> str:
    """Two reports as text: differences of the runs, then their numbers with the ratio b/a."""
    lines = [f"A: {title(a)}   B: {title(b)}"]
    for part in ("job", "versions", "identity"):
        for key in {**a[part], **b[part]}:
            before, after = (textwrap.shorten(str(run[part].get(key)), 30) for run in (a, b))
            if a[part].get(key) != b[part].get(key):
                lines.append(textwrap.shorten(f"differs: {part}.{key}: {before} -> {after}", WIDTH))
    rows = [("", "A", "B", "B/A")]
    numbers_a, numbers_b = numbers(a), numbers(b)
    for name in {**numbers_a, **numbers_b}:
        before, after = numbers_a.get(name), numbers_b.get(name)
        described = name.startswith(
            ("schema", "tp", "job.", "versions.", "identity.", "denoise_steps_ms.")
        )
        if not described and (before, after) != (None, None):
            ratio = after / before if before and after is not None else None
            rows.append((name, _text(before), _text(after), _text(ratio)))
    return "\n".join([*lines, "", *columns(rows)])


def numbers(report: dict) -> dict[str, float | None]:
    """Every number of a report by its dotted name, such as phases.decode_video.seconds."""
    return dict(_named_numbers({**report, "phases": _merged(report)}, ""))


def _named_numbers(value: object, name: str) -> Iterator[tuple[str, float | None]]:
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _named_numbers(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, int | float | None) and not isinstance(value, bool):
        yield name, value


def _merged(report: dict) -> dict[str, dict]:
    """Phases by name in order; of one name, seconds are added and the highest peak counts."""
    merged: dict[str, dict] = {}
    for phase in report["phases"]:
        total = merged.setdefault(phase["name"], {"seconds": 0.0, "peak_rss_bytes": 0})
        for seconds in ("seconds", "overlapped_seconds"):
            if seconds in phase:
                total[seconds] = total.get(seconds, 0.0) + phase[seconds]
        total["peak_rss_bytes"] = max(total["peak_rss_bytes"], phase["peak_rss_bytes"])
    return merged


def title(report: dict) -> str:
    return f"profile {report['profile']}, tp {report['tp']}"


def _text(number: float | None) -> str:
    if number is None:
        return "-"
    if isinstance(number, int):
        return f"{number:,}"
    return f"{number:,.3f}" if abs(number) < 1e9 else f"{number:.4g}"


def exceeded(report: dict, limits: list[str], source: str = "report") -> list[str]:
    """One sentence for every limit "NAME=VALUE" that the report exceeds. Raises UserError for a
    limit of another form, or for a name without a number in the report."""
    measured, sentences = numbers(report), []
    for limit in limits:
        name, _, text = limit.partition("=")
        try:
            allowed = float(text)
        except ValueError:
            allowed = math.nan
        if math.isnan(allowed):
            raise UserError(
                f"--max got {limit!r}, wanted NAME=VALUE with a number, such as"
                " end_to_end_seconds=20"
            )
        if (value := measured.get(name)) is None:
            reason = (
                "has no value in this run" if name in measured else "is not a number of this report"
            )
            near = difflib.get_close_matches(name, [key for key in measured if key != name], 5, 0.3)
            raise UserError(f"{source}: {name} {reason}; similar names: {', '.join(near)}")
        if value > allowed:
            sentences.append(f"{source}: {name} is {value:g}, the limit is {allowed:g}")
    return sentences
