"""A plot of every denoising step of latency reports."""

import itertools
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from ltx_neuron.files import whole_file
from ltx_neuron.report.latency import title


def plot(reports: list[dict], path: str | Path) -> None:
    """Draw the steps of one report or two as a PNG of 1200 x 500: warm steps as lines, cold ones as
    hollow marks, a colour a stage. The scale is logarithmic if cold steps are far slower than warm
    ones."""
    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    axes, all_steps = figure.subplots(), [0.0]
    letters = ["A: ", "B: "] if len(reports) > 1 else [""]
    colors = itertools.count()
    for letter, report in zip(letters, reports, strict=True):
        for stage, style in zip(report["denoise_steps_ms"], ("o-", "s--", "^:"), strict=False):
            if steps := report["denoise_steps_ms"][stage]:
                label, warm = letter + stage, report["warm_step_ms"][stage]
                color = f"C{next(colors)}"
                if warm["median"]:
                    median, host = map(_number, (warm["median"], warm["host"]))
                    label += f": warm {median} ms, host {host} ms of it"
                numbers = range(2, len(steps) + 1)
                axes.plot(numbers, steps[1:], style, color=color, label=label)
                axes.plot(1, steps[0], style[0], color=color, fillstyle="none", markersize=10)
                all_steps += steps
    hollow = {"color": "0.3", "fillstyle": "none", "markersize": 10}
    axes.plot([], [], "o", label="hollow: cold first step", **hollow)
    logarithmic = max(all_steps) > 10 * statistics.median(all_steps) > 0
    axes.set(
        title="   ".join(map("".join, zip(letters, map(_title, reports), strict=True))),
        xlabel="denoise step of its stage",
        ylabel="milliseconds, log scale" if logarithmic else "milliseconds",
    )
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * max(all_steps) or 1)
    axes.yaxis.set_major_formatter(lambda value, _: _number(value))
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=9)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png")


def _title(report: dict) -> str:
    """The video's size, where the job has one, and the profile."""
    job = report["job"]
    size = f"{job['width']}x{job['height']}, " if job.get("width") else ""
    frames = f"{job['num_frames']} frames, " if job.get("num_frames") else ""
    return f"{size}{frames}{title(report)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
