"""Where a run's time went: print it, compare two runs, plot them, and guard it with thresholds.
recorder.py records it.

python -m ltx_neuron.report run.json
python -m ltx_neuron.report before.json after.json --plot steps.png
python -m ltx_neuron.report run.json --max warm_step_ms.stage_1.median=300 phases.decode_video.seconds=5
"""

import difflib
import json
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ltx_neuron.errors import UserError
from ltx_neuron.report.recorder import PHASES, STAGES

_SCHEMA = {
    "schema": int,
    "job": dict,
    "profile": str,
    "tp": int,
    "versions": dict,
    "identity": dict,
    "phases": [
        {
            "name": str,
            "seconds": int | float,
            "overlapped_seconds?": int | float,
            "peak_rss_bytes": int,
        }
    ],
    "denoise_steps_ms": {stage: [int | float] for stage in STAGES},
    "warm_step_ms": {
        stage: dict.fromkeys(("median", "p90", "host", "device"), int | float | None)
        for stage in STAGES
    },
    "bytes_to_device_per_step": int | float,
    "collectives_per_step": {"count": int | float, "bytes": int | float},
    "flops_per_step": int | float | None,
    "percent_of_peak": int | float | None,
    "end_to_end_seconds": int | float,
    "residual_seconds": int | float,
}


def validate(report: object, source: str = "report") -> None:
    """Raise UserError, naming `source` and the field, unless the report has the fields and types of
    schema 1."""
    schema = report.get("schema") if isinstance(report, dict) else None
    if schema != 1:
        raise UserError(
            f"{source} is not a latency report of schema 1: its schema is {schema}; "
            "make one with generate_ltx23.py --perf-dump-path"
        )
    _check(report, _SCHEMA, source)
    for phase in report["phases"]:
        if phase["name"] not in PHASES:
            raise UserError(
                f"{source}: unknown phase {phase['name']!r}; phases are {', '.join(PHASES)}"
            )


def _check(value: object, wanted: object, where: str) -> None:
    kind = type(wanted) if isinstance(wanted, dict | list) else wanted
    finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, kind) or isinstance(value, bool) or not finite:
        raise UserError(f"{where}: got {value!r}, wanted {getattr(kind, '__name__', kind)}")
    if isinstance(wanted, dict):
        parts = {
            name.removesuffix("?"): part for name, part in wanted.items()
        }  # a name with "?" may be absent
        missing, unexpected = sorted({*wanted} & {*parts} - {*value}), sorted({*value} - {*parts})
        if missing or unexpected:
            raise UserError(f"{where}: missing {missing}, unexpected {unexpected}")
        for name in value:
            _check(value[name], parts[name], f"{where}: {name}")
    elif isinstance(wanted, list):
        for index, item in enumerate(value):
            _check(item, wanted[0], f"{where}[{index}]")


def load(path: str | Path) -> dict:
    """Read and validate a report file."""
    try:
        report = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} as JSON: {error}") from error
    validate(report, str(path))
    return report


def table(report: dict) -> str:
    """The report as a person reads it on a terminal, at most 100 columns wide. 1 GB is 1e9 bytes, 1
    MB 1e6."""
    job = ", ".join(
        f"{name} {textwrap.shorten(str(value), 60)}" for name, value in report["job"].items()
    )
    whole = report["end_to_end_seconds"]
    timed = [
        *_merged(report).items(),
        ("residual", {"seconds": report["residual_seconds"]}),
        ("end to end", {"seconds": whole}),
    ]
    overlap = any("overlapped_seconds" in part for _, part in timed)
    phases = [("phase", "seconds", "share", "peak RSS GB", *(["overlapped s"] if overlap else []))]
    phases += [
        (
            name,
            _text(part["seconds"]),
            f"{100 * part['seconds'] / whole:.1f} %" if whole else "-",
            _text(part["peak_rss_bytes"] / 1e9) if "peak_rss_bytes" in part else "",
            *(
                [_text(part["overlapped_seconds"]) if "overlapped_seconds" in part else ""]
                if overlap
                else []
            ),
        )
        for name, part in timed
    ]
    steps, each = (
        [("denoise", "steps", "cold ms", "warm median ms", "p90 ms", "host ms", "device ms")],
        [],
    )
    for stage, values in report["denoise_steps_ms"].items():
        if values:
            warm = [
                report["warm_step_ms"][stage][key] for key in ("median", "p90", "host", "device")
            ]
            steps.append((stage, str(len(values)), *map(_text, (values[0], *warm))))
            listed = " ".join(f"{value:,.1f}" for value in values)
            each += textwrap.wrap(
                f"each step of {stage}, ms: {listed}", 100, subsequent_indent="  "
            )
    collectives, percent = report["collectives_per_step"], report["percent_of_peak"]
    measured = any(warm["median"] for warm in report["warm_step_ms"].values())
    reason = (
        "no peak for this profile"
        if report["flops_per_step"] and measured
        else "no flops or no warm step counted"
    )
    return "\n".join(
        [
            *textwrap.wrap(f"{title(report)}  {job}", 100),
            "",
            *_columns(phases),
            "",
            *_columns(steps),
            *each,
            "",
            f"bytes to device per step  {report['bytes_to_device_per_step']:,}",
            (
                f"collectives per step      {collectives['count']},"
                f" {_text(collectives['bytes'] / 1e6)} MB"
            ),
            f"percent of peak           {reason if percent is None else f'{percent:.1f} %'}",
        ]
    )


def compare(a: dict, b: dict) -> str:
    """Two reports side by side, with the ratio b/a, and what differs in what they ran."""
    lines = [f"A: {title(a)}   B: {title(b)}"]
    for part in ("job", "versions", "identity"):
        for key in {**a[part], **b[part]}:
            before, after = (textwrap.shorten(str(run[part].get(key)), 30) for run in (a, b))
            if a[part].get(key) != b[part].get(key):
                lines.append(textwrap.shorten(f"differs: {part}.{key}: {before} -> {after}", 100))
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
    return "\n".join([*lines, "", *_columns(rows)])


def numbers(report: dict) -> dict[str, float | None]:
    """Every number of a report by its dotted name; repeated phases as one, named as in
    phases.decode_video.seconds."""
    return dict(_named_numbers({**report, "phases": _merged(report)}, ""))


def _named_numbers(value: object, name: str) -> Iterator[tuple[str, float | None]]:
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _named_numbers(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, int | float | None) and not isinstance(value, bool):
        yield name, value


def _merged(report: dict) -> dict[str, dict]:
    """Phases in the order of their first appearance; repeats add their seconds and keep the higher
    peak.

    `seconds` is what a phase added to the run; `overlapped_seconds`, where there are any, it ran
    beside another phase.
    """
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


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _text(number: float | None) -> str:
    return (
        "-"
        if number is None
        else (
            f"{number:,}"
            if isinstance(number, int)
            else (f"{number:,.3f}" if abs(number) < 1e9 else f"{number:.4g}")
        )
    )


def exceeded(report: dict, limits: list[str], source: str = "report") -> list[str]:
    """One sentence for each limit "NAME=VALUE" the report exceeds; a name without a number is the
    user's mistake."""
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
        if measured.get(name) is None:
            reason = (
                "has no value in this run" if name in measured else "is not a number of this report"
            )
            near = difflib.get_close_matches(name, [key for key in measured if key != name], 5, 0.3)
            raise UserError(f"{source}: {name} {reason}; near it: {', '.join(near)}")
        if measured[name] > allowed:
            sentences.append(f"{source}: {name} is {measured[name]:g}, allowed is {allowed:g}")
    return sentences
