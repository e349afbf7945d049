"""The picture of a latency report: phases as a waterfall, steps as lines, cold ones apart from warm
ones."""

import statistics
from pathlib import Path

from matplotlib.figure import Figure

from ltx_neuron.report.recorder import PHASES, STAGES
from ltx_neuron.report.table import title


def plot(reports: dict | list[dict], path: str | Path) -> None:
    """Draw one report, or a list of two, as a PNG of 1200 x 500: phases in seconds left, steps in
    ms right."""
    reports = [reports] if isinstance(reports, dict) else reports
    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    figure.suptitle(
        "   ".join(
            _letter(index, reports) + _described(report) for index, report in enumerate(reports)
        )
    )
    phases, steps = figure.subplots(1, 2)
    _plot_phases(phases, reports)
    _plot_steps(steps, reports)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _letter(index: int, reports: list[dict]) -> str:
    """Which of two reports it is."""
    return f"{'AB'[index]}: " if len(reports) > 1 else ""


def _described(report: dict) -> str:
    percent = report["percent_of_peak"]
    return title(report) + ("" if percent is None else f", {percent:.1f} % of peak")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _plot_phases(axes, reports: list[dict]) -> None:
    """A waterfall: each phase begins where the phase before it ended; what no phase covers closes
    it.

    The pale bar before a phase is the time it ran beside those before it.
    """
    present = {phase["name"] for report in reports for phase in report["phases"]}
    names = [name for name in PHASES if name in present] + ["residual"]
    height = 0.8 / len(reports)
    for index, report in enumerate(reports):
        begin, ends = 0.0, {}
        for phase in [
            *report["phases"],
            {"name": "residual", "seconds": report["residual_seconds"]},
        ]:
            row = names.index(phase["name"]) + (index + 0.5) * height - 0.4
            look = {"color": f"C{index}"}
            if phase["name"] == "residual":  # it lay between the phases, not after them
                look = {"fill": False, "edgecolor": f"C{index}", "hatch": "////"}
            axes.barh(row, phase["seconds"], 0.9 * height, begin, **look)
            if beside := phase.get("overlapped_seconds"):
                axes.barh(
                    row, -min(beside, begin), 0.9 * height, begin, color=f"C{index}", alpha=0.3
                )
            begin += phase["seconds"]
            ends[phase["name"]] = (
                begin,
                row,
                ends.get(phase["name"], (0, 0, 0.0))[2] + phase["seconds"],
            )
        for (
            begin,
            row,
            seconds,
        ) in ends.values():  # a phase that comes back is labelled once, with its sum
            axes.text(begin, row, f" {seconds:.2f}", va="center", fontsize=8)
    axes.set(
        title="Phases",
        xlabel="seconds since the start",
        yticks=range(len(names)),
        yticklabels=names,
    )
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)


def _plot_steps(axes, reports: list[dict]) -> None:
    """Lines of warm steps; hollow marks are cold steps. Far slower cold steps make the scale
    logarithmic."""
    everything = [0.0]
    for index, report in enumerate(reports):
        for stage, style in zip(STAGES, ("o-", "s--"), strict=True):
            if steps := report["denoise_steps_ms"][stage]:
                label = _letter(index, reports) + stage
                if (warm := report["warm_step_ms"][stage])["median"]:
                    label += (
                        f": warm {_number(warm['median'])} ms, host {_number(warm['host'])} ms"
                        " of it"
                    )
                axes.plot(
                    range(2, len(steps) + 1), steps[1:], style, color=f"C{index}", label=label
                )
                axes.plot(1, steps[0], style[0], color=f"C{index}", fillstyle="none", markersize=10)
                everything += steps
    axes.plot(
        [], [], "o", color="0.3", fillstyle="none", markersize=10, label="hollow: cold first step"
    )
    logarithmic = max(everything) > 10 * statistics.median(everything) > 0
    axes.set(
        title="Denoise steps",
        xlabel="step of its stage",
        ylabel="milliseconds, log scale" if logarithmic else "milliseconds",
    )
    axes.set_yscale("log") if logarithmic else axes.set_ylim(0, 1.1 * max(everything) or 1)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=9)
