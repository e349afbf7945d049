"""Latency reports as a picture: phases as a waterfall, denoise steps as lines."""

import statistics
from pathlib import Path

from matplotlib.figure import Figure

from ltx_neuron.files import whole_file
from ltx_neuron.report.recorder import PHASES, STAGES
from ltx_neuron.report.table import title


def plot(reports: dict | list[dict], path: str | Path) -> None:
    """Draw one report, or a list of two, as a PNG of 1200 x 500: phases in seconds on the left,
    steps in milliseconds on the right."""
    reports = [reports] if isinstance(reports, dict) else reports
    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    figure.suptitle(
        "   ".join(
            _letter(index, reports) + _describe(report) for index, report in enumerate(reports)
        )
    )
    phases, steps = figure.subplots(1, 2)
    _plot_phases(phases, reports)
    _plot_steps(steps, reports)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png")


def _letter(index: int, reports: list[dict]) -> str:
    """The letter, A or B, that names one of two reports; nothing for a single one."""
    return f"{'AB'[index]}: " if len(reports) > 1 else ""


def _describe(report: dict) -> str:
    percent = report["percent_of_peak"]
    return title(report) + ("" if percent is None else f", {percent:.1f} % of peak")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _plot_phases(axes, reports: list[dict]) -> None:
    """A waterfall: each phase begins where the phase before it ended. The residual comes last.

    The pale bar before a phase is the time that it ran at the same time as those before it.
    """
    present = {phase["name"] for report in reports for phase in report["phases"]}
    names = [name for name in PHASES if name in present] + ["residual"]
    height = 0.8 / len(reports)
    for index, report in enumerate(reports):
        color, end = f"C{index}", 0.0
        residual = {"name": "residual", "seconds": report["residual_seconds"]}
        labels: dict[str, tuple[float, float, float]] = {}  # name -> end, row, seconds in all
        for phase in [*report["phases"], residual]:
            name, seconds = phase["name"], phase["seconds"]
            row = names.index(name) + (index + 0.5) * height - 0.4
            style = {"color": color}
            if name == "residual":  # hollow: it lay between the phases, not after them
                style = {"fill": False, "edgecolor": color, "hatch": "////"}
            axes.barh(row, seconds, 0.9 * height, end, **style)
            if overlapped := phase.get("overlapped_seconds"):
                axes.barh(row, -min(overlapped, end), 0.9 * height, end, color=color, alpha=0.3)
            end += seconds
            # A phase that comes back is labelled once, with its sum.
            labels[name] = (end, row, seconds + labels.get(name, (0, 0, 0.0))[2])
        for label_end, row, seconds in labels.values():
            axes.text(label_end, row, f" {seconds:.2f}", va="center", fontsize=8)
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
    """Lines of warm steps, hollow marks for cold ones. The scale is logarithmic where cold steps
    are far slower than warm ones."""
    all_steps = [0.0]
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
                all_steps += steps
    axes.plot(
        [], [], "o", color="0.3", fillstyle="none", markersize=10, label="hollow: cold first step"
    )
    logarithmic = max(all_steps) > 10 * statistics.median(all_steps) > 0
    axes.set(
        title="Denoise steps",
        xlabel="step of its stage",
        ylabel="milliseconds, log scale" if logarithmic else "milliseconds",
    )
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * max(all_steps) or 1)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=9)
