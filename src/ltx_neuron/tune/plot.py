"""A tuning as a picture: a bar for each variant."""

from pathlib import Path

from matplotlib.figure import Figure

from ltx_neuron.files import whole_file
from ltx_neuron.tune.show import Variant

_COLORS = {"chosen": "C2", "own": "C0", "not kept": "0.7"}
_REFUSED = "C3"  # a problem
_MOST_TEXT = 60


def plot(found: list[Variant], title: str, path: str | Path) -> None:
    """Draw the medians of all variants as bars and their turns as dots, in a PNG 1200 wide."""
    figure = Figure(figsize=(12, 1.6 + 0.42 * len(found)), dpi=100, layout="constrained")
    axes = figure.subplots()
    longest = max((max(variant.ms) for variant in found if variant.ms), default=1.0)
    for place, variant in enumerate(found):
        color = _COLORS.get(variant.verdict, _REFUSED)
        end = variant.step_ms if variant.ms else 0.0
        axes.barh(place, end, 0.7, color=color, alpha=0.8)
        axes.plot(variant.ms, [place] * len(variant.ms), "o", color="0.2", markersize=3)
        verdict = variant.verdict
        shown = verdict if len(verdict) <= _MOST_TEXT else f"{verdict[:_MOST_TEXT]}..."
        number = f"{end:.4g} ms, " if variant.ms else ""
        text_at = max(end, *variant.ms) if variant.ms else 0.0
        axes.text(text_at, place, f"  {number}{shown}", va="center", fontsize=8)
    names = [variant.name for variant in found]
    axes.set(
        title=title,
        xlabel="milliseconds of a warm step: median of the turns, which are dots",
        yticks=range(len(found)),
        yticklabels=names,
        xlim=(0, 1.5 * longest),
    )
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png")
