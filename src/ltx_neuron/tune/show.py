"""A tuning as a table, and as rows of a plot."""

import statistics
from dataclasses import dataclass

from ltx_neuron.tune.chosen import Settings
from ltx_neuron.tune.search import Row

_HEAD = f"{'ms a step':>10} {'turns':>6} {'cold s':>8} {'compile s':>10} {'off':>9}  variant"


@dataclass(frozen=True)
class Variant:
    """All turns of a variant.

    name     what of it differs from the profile's own settings
    ms       of a warm step, by turn; empty where it never ran to its end
    verdict  "own", "chosen", "not kept", or why it cannot be chosen
    """

    name: str
    ms: list[float]
    verdict: str
    rows: list[Row]

    @property
    def step_ms(self) -> float:
        return statistics.median(self.ms)

    @property
    def cold_seconds(self) -> float:
        return sum(times[0] for times in self.rows[0].steps_ms.values()) / 1e3

    @property
    def off(self) -> float:
        """The largest distance from the reference."""
        return max(self.rows[0].far.values())


def name_of(settings: Settings, own: Settings) -> str:
    changed = [f"{key}={value}" for key, value in settings.items() if value != own[key]]
    return " ".join(changed) or "the profile's own"


def progress(row: Row, own: Settings) -> str:
    """A row that has just been measured, in a line."""
    turn = f", turn {row.turn + 1}" if row.turn else ""
    outcome = row.problem or f"{row.step_ms:.2f} ms a step"
    return f"{name_of(row.settings, own)}{turn}: {outcome}"


def variants(rows: list[Row], own: Settings, best: Settings) -> list[Variant]:
    """The variants in the order in which they were first measured."""
    found = []
    for settings in dict.fromkeys(tuple(row.settings.items()) for row in rows):
        turns = [row for row in rows if tuple(row.settings.items()) == settings]
        problem = next((row.problem for row in turns if row.problem), "")
        verdict = problem or "not kept"
        if dict(settings) == best:
            verdict = "chosen"
        elif dict(settings) == own and not problem:
            verdict = "own"
        ms = [row.step_ms for row in turns if row.steps_ms]
        found.append(Variant(name_of(dict(settings), own), ms, verdict, turns))
    return found


def table(found: list[Variant]) -> str:
    """A line for each variant. ms a step: the median of its turns. off: the largest relative L2
    distance of its latents from the step in float32."""
    return "\n".join([_HEAD, *map(line, found)])


def line(variant: Variant) -> str:
    text = f"{variant.name}: {variant.verdict}"
    if not variant.ms:
        return f"{'-':>10} {len(variant.rows):>6} {'-':>8} {'-':>10} {'-':>9}  {text}"
    compile_seconds = variant.rows[0].compile_seconds
    return (
        f"{variant.step_ms:>10.2f} {len(variant.ms):>6} {variant.cold_seconds:>8.2f}"
        f" {compile_seconds:>10.1f} {variant.off:>9.1e}  {text}"
    )
