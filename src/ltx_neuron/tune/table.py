"""A tuning on a terminal: a line while each variant is measured, and a table of all of them."""

import statistics

from ltx_neuron.format import columns
from ltx_neuron.tune.search import Row
from ltx_neuron.tune.tuned_settings import Settings

_HEAD = ("ms a step", "runs", "cold s", "compile s", "rel L2", "variant")


def name_of(settings: Settings, baseline: Settings) -> str:
    """The settings in which a variant differs from the profile's own."""
    changed = [f"{key}={value}" for key, value in settings.items() if value != baseline[key]]
    return " ".join(changed) or "the profile's own"


def progress(row: Row, baseline: Settings) -> str:
    """A line for a new measurement."""
    repeat = f", run {row.repeat + 1}" if row.repeat else ""
    outcome = row.problem or f"{row.step_ms:.2f} ms a step"
    return f"{name_of(row.settings, baseline)}{repeat}: {outcome}"


def median_ms(rows: list[Row], settings: Settings) -> float | None:
    """Milliseconds of a variant's warm step: the median of its runs; None if no run succeeded."""
    times = [row.step_ms for row in rows if row.settings == settings and row.steps_ms]
    return statistics.median(times) if times else None


def table(rows: list[Row], baseline: Settings, best: Settings) -> str:
    """A line for each variant, in the order in which they were first measured. rel L2: the largest
    relative distance of its latents from the step in float32."""
    variants = dict.fromkeys(tuple(row.settings.items()) for row in rows)
    lines = [_line(rows, dict(variant), baseline, best) for variant in variants]
    return "\n".join(columns([_HEAD, *lines], left=(-1,)))


def _line(
    rows: list[Row], settings: Settings, baseline: Settings, best: Settings
) -> tuple[str, ...]:
    runs = [row for row in rows if row.settings == settings]
    verdict = next((row.problem for row in runs if row.problem), "not kept")
    if settings == best:
        verdict = "chosen"
    elif settings == baseline and verdict == "not kept":
        verdict = "own"
    text, first = f"{name_of(settings, baseline)}: {verdict}", runs[0]
    if (ms := median_ms(rows, settings)) is None:
        return ("-", str(len(runs)), "-", "-", "-", text)
    assert first.steps_ms and first.rel_l2
    cold = sum(times[0] for times in first.steps_ms.values()) / 1e3
    error = max(first.rel_l2.values())
    numbers = (f"{ms:.2f}", str(len(runs)), f"{cold:.2f}", f"{first.compile_seconds:.1f}")
    return (*numbers, f"{error:.1e}", text)
