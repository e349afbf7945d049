"""Where a run's time goes: record it, print it, compare two runs, plot them, and guard it with thresholds.

python -m ltx_neuron.report run.json
python -m ltx_neuron.report before.json after.json --plot steps.png
python -m ltx_neuron.report run.json --max warm_step_ms.stage_1.median=300 phases.decode_video.seconds=5
"""

import argparse
import contextlib
import difflib
import json
import math
import os
import statistics
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ltx_neuron.errors import UserError, run

PHASES = (
    "load_gemma3",
    "encode_text",
    "unload_gemma3",
    "load_transformer",
    "warmup",
    "denoise_stage_1",
    "upsample",
    "denoise_stage_2",
    "unload_transformer",
    "decode_video",
    "decode_audio",
    "encode_mp4",
)
STAGES = ("stage_1", "stage_2")

_SCHEMA = {
    "schema": int,
    "job": dict,
    "profile": str,
    "tp": int,
    "versions": dict,
    "identity": dict,
    "phases": [{"name": str, "seconds": int | float, "peak_rss_bytes": int}],
    "denoise_steps_ms": {stage: [int | float] for stage in STAGES},
    "warm_step_ms": {stage: dict.fromkeys(("median", "p90", "host", "device"), int | float | None) for stage in STAGES},
    "bytes_to_device_per_step": int | float,
    "collectives_per_step": {"count": int | float, "bytes": int | float},
    "flops_per_step": int | float | None,
    "percent_of_peak": int | float | None,
    "end_to_end_seconds": int | float,
    "residual_seconds": int | float,
}


@dataclass(slots=True)
class Counters:
    """What one denoise step moves and computes. `flops_per_step` may differ per stage: a number or {stage: number}."""

    bytes_to_device_per_step: int = 0
    collectives_per_step: dict[str, int] = field(default_factory=lambda: {"count": 0, "bytes": 0})
    flops_per_step: float | dict[str, float] | None = None
    peak_flops: float | None = None  # FLOP/s of all ranks together; None where the profile has no peak


class _PeakMemory:
    """The highest sum, in bytes, of this process's and its descendants' resident memory while the block runs.

    Pages that several processes share count once for each. Listing descendants reads the whole process table, reading
    their sizes does not, so each has its own rhythm, and each stays within SHARE_OF_CORE.
    """

    INTERVAL_SECONDS = 0.020
    SHARE_OF_CORE = 0.0025

    def __enter__(self) -> "_PeakMemory":
        self.bytes = 0
        self._stopped, self._files = threading.Event(), contextlib.ExitStack()
        self._list_and_read()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._list_and_read()
        self._files.close()

    def _list_and_read(self) -> None:
        began, this_process = time.thread_time(), psutil.Process()
        self._files.close()
        self._sizes = []
        for process in (this_process, *this_process.children(recursive=True)):
            with contextlib.suppress(FileNotFoundError):  # it ended since it was listed
                self._sizes.append(self._files.enter_context(open(f"/proc/{process.pid}/statm", "rb", buffering=0)))
        self._list_again_at = time.perf_counter() + (time.thread_time() - began) / self.SHARE_OF_CORE
        self._read()

    def _read(self) -> None:
        pages = 0
        for file in self._sizes:  # kept open: opening anew costs three times as much as reading
            with contextlib.suppress(ProcessLookupError):  # it ended since
                pages += int(os.pread(file.fileno(), 100, 0).split()[1])
        self.bytes = max(self.bytes, pages * os.sysconf("SC_PAGE_SIZE"))

    def _sample(self) -> None:
        pause = self.INTERVAL_SECONDS
        while not self._stopped.wait(pause):
            if time.perf_counter() > self._list_again_at:
                self._list_and_read()
            began = time.thread_time()
            self._read()
            pause = max(self.INTERVAL_SECONDS, (time.thread_time() - began) / self.SHARE_OF_CORE)


class Recorder:
    """Collects one run's times from its construction to `report()`, with the clock time.perf_counter."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._began = time.perf_counter()
        self._open_phase: str | None = None
        self._phases: list[dict] = []
        self._steps: dict[str, list[tuple[float, float]]] = {stage: [] for stage in STAGES}
        self._report: dict | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as one of PHASES (seconds) and watch its peak memory (bytes). Phases follow, never nest."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}; phases are {', '.join(PHASES)}")
        if self._open_phase:
            raise RuntimeError(f"phase {name} starts inside phase {self._open_phase}; phases must not nest")
        self._open_phase = name
        with _PeakMemory() as memory:
            began = time.perf_counter()
            try:
                yield
            finally:
                seconds = time.perf_counter() - began
                self._open_phase = None
        self._phases.append({"name": name, "seconds": seconds, "peak_rss_bytes": memory.bytes})

    def step(self, stage: str, total_ms: float, device_ms: float) -> None:
        """Add one denoise step of "stage_1" or "stage_2", in milliseconds; what is not device time is host time."""
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r}; stages are {', '.join(STAGES)}")
        if not 0 <= device_ms <= total_ms:
            raise ValueError(f"a {stage} step took {total_ms} ms, {device_ms} ms of it on the device: impossible")
        self._steps[stage].append((total_ms, device_ms))

    def report(self, job: dict, profile: str, tp: int, versions: dict, identity: dict) -> dict:
        """Close the run's clock and return its latency report, schema 1."""
        if self._open_phase:
            raise RuntimeError(f"the report is asked for inside phase {self._open_phase}")
        end_to_end = time.perf_counter() - self._began
        warm = {stage: _warm_step(steps) for stage, steps in self._steps.items()}
        last_stage = max((stage for stage in STAGES if self._steps[stage]), default=STAGES[0])
        flops = self.counters.flops_per_step
        flops = flops.get(last_stage) if isinstance(flops, dict) else flops
        peak, median = self.counters.peak_flops, warm[last_stage]["median"]
        self._report = {
            "schema": 1,
            "job": job,
            "profile": profile,
            "tp": tp,
            "versions": versions,
            "identity": identity,
            "phases": [dict(phase) for phase in self._phases],
            "denoise_steps_ms": {stage: [total for total, _ in steps] for stage, steps in self._steps.items()},
            "warm_step_ms": warm,
            "bytes_to_device_per_step": self.counters.bytes_to_device_per_step,
            "collectives_per_step": dict(self.counters.collectives_per_step),
            "flops_per_step": flops,
            "percent_of_peak": 100 * flops / (median / 1000) / peak if flops and median and peak else None,
            "end_to_end_seconds": end_to_end,
            "residual_seconds": end_to_end - sum(phase["seconds"] for phase in self._phases),
        }
        return self._report

    def write(self, path: str | Path) -> None:
        """Write the report made last as JSON; the file appears under its name only when it is whole."""
        if self._report is None:
            raise RuntimeError("nothing to write: call report() first")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(self._report, indent=1, default=str) + "\n")
        os.replace(unfinished, path)


def _warm_step(steps: list[tuple[float, float]]) -> dict[str, float | None]:
    warm = steps[1:]  # the first step is cold: it pays for allocation, compilation and caches
    if not warm:
        return dict.fromkeys(("median", "p90", "host", "device"))
    totals = [total for total, _ in warm]
    p90 = statistics.quantiles(totals, n=10, method="inclusive")[-1] if totals[1:] else totals[0]
    return {
        "median": statistics.median(totals),
        "p90": p90,
        "host": statistics.median(total - device for total, device in warm),
        "device": statistics.median(device for _, device in warm),
    }


def validate(report: object, source: str = "report") -> None:
    """Raise UserError, naming `source` and the field, unless the report has the fields and types of schema 1."""
    schema = report.get("schema") if isinstance(report, dict) else None
    if schema != 1:
        raise UserError(
            f"{source} is not a latency report of schema 1: its schema is {schema}; "
            "make one with generate_ltx23.py --perf-dump-path"
        )
    _check(report, _SCHEMA, source)
    for phase in report["phases"]:
        if phase["name"] not in PHASES:
            raise UserError(f"{source}: unknown phase {phase['name']!r}; phases are {', '.join(PHASES)}")


def _check(value: object, wanted: object, where: str) -> None:
    kind = type(wanted) if isinstance(wanted, dict | list) else wanted
    finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, kind) or isinstance(value, bool) or not finite:
        raise UserError(f"{where}: got {value!r}, wanted {getattr(kind, '__name__', kind)}")
    if isinstance(wanted, dict):
        if wanted.keys() != value.keys():
            raise UserError(
                f"{where}: missing {sorted(wanted.keys() - value.keys())}, unexpected {sorted(value.keys() - wanted.keys())}"
            )
        for name, part in wanted.items():
            _check(value[name], part, f"{where}: {name}")
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
    """The report as a person reads it on a terminal, at most 100 columns wide. 1 GB is 1e9 bytes, 1 MB 1e6."""
    job = ", ".join(f"{name} {textwrap.shorten(str(value), 60)}" for name, value in report["job"].items())
    whole = report["end_to_end_seconds"]
    timed = [
        *_merged(report).items(),
        ("residual", {"seconds": report["residual_seconds"]}),
        ("end to end", {"seconds": whole}),
    ]
    phases = [("phase", "seconds", "share", "peak RSS GB")]
    phases += [
        (
            name,
            _text(part["seconds"]),
            f"{100 * part['seconds'] / whole:.1f} %" if whole else "-",
            _text(part["peak_rss_bytes"] / 1e9) if "peak_rss_bytes" in part else "",
        )
        for name, part in timed
    ]
    steps, each = [("denoise", "steps", "cold ms", "warm median ms", "p90 ms", "host ms", "device ms")], []
    for stage, values in report["denoise_steps_ms"].items():
        if values:
            warm = [report["warm_step_ms"][stage][key] for key in ("median", "p90", "host", "device")]
            steps.append((stage, str(len(values)), *map(_text, (values[0], *warm))))
            listed = " ".join(f"{value:,.1f}" for value in values)
            each += textwrap.wrap(f"each step of {stage}, ms: {listed}", 100, subsequent_indent="  ")
    collectives, percent = report["collectives_per_step"], report["percent_of_peak"]
    measured = any(warm["median"] for warm in report["warm_step_ms"].values())
    reason = "no peak for this profile" if report["flops_per_step"] and measured else "no flops or no warm step counted"
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
            f"collectives per step      {collectives['count']}, {_text(collectives['bytes'] / 1e6)} MB",
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
        described = name.startswith(("schema", "tp", "job.", "versions.", "identity.", "denoise_steps_ms."))
        if not described and (before, after) != (None, None):
            ratio = after / before if before and after is not None else None
            rows.append((name, _text(before), _text(after), _text(ratio)))
    return "\n".join([*lines, "", *_columns(rows)])


def numbers(report: dict) -> dict[str, float | None]:
    """Every number of a report by its dotted name; repeated phases as one, named as in phases.decode_video.seconds."""
    return dict(_named_numbers({**report, "phases": _merged(report)}, ""))


def _named_numbers(value: object, name: str) -> Iterator[tuple[str, float | None]]:
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _named_numbers(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, int | float | None) and not isinstance(value, bool):
        yield name, value


def _merged(report: dict) -> dict[str, dict]:
    """Phases in the order of their first appearance; repeats add their seconds and keep the higher peak."""
    merged: dict[str, dict] = {}
    for phase in report["phases"]:
        total = merged.setdefault(phase["name"], {"seconds": 0.0, "peak_rss_bytes": 0})
        total["seconds"] += phase["seconds"]
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
        else f"{number:,}"
        if isinstance(number, int)
        else (f"{number:,.3f}" if abs(number) < 1e9 else f"{number:.4g}")
    )


def exceeded(report: dict, limits: list[str], source: str = "report") -> list[str]:
    """One sentence for each limit "NAME=VALUE" the report exceeds; a name without a number is the user's mistake."""
    measured, sentences = numbers(report), []
    for limit in limits:
        name, _, text = limit.partition("=")
        try:
            allowed = float(text)
        except ValueError:
            allowed = math.nan
        if math.isnan(allowed):
            raise UserError(f"--max got {limit!r}, wanted NAME=VALUE with a number, such as end_to_end_seconds=20")
        if measured.get(name) is None:
            reason = "has no value in this run" if name in measured else "is not a number of this report"
            near = difflib.get_close_matches(name, [key for key in measured if key != name], 5, 0.3)
            raise UserError(f"{source}: {name} {reason}; near it: {', '.join(near)}")
        if measured[name] > allowed:
            sentences.append(f"{source}: {name} is {measured[name]:g}, allowed is {allowed:g}")
    return sentences


def main(argv: list[str] | None = None) -> None:
    """Print one report, compare two, plot them; exit with 1 when a report exceeds a limit."""
    parser = argparse.ArgumentParser(
        prog="python -m ltx_neuron.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", help="the JSON file of a run")
    parser.add_argument("other", nargs="?", help="a second run to compare with the first")
    parser.add_argument("--plot", metavar="PNG", help="draw phases and step times into this file")
    parser.add_argument(
        "--max",
        metavar="NAME=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="dotted names in the report that must not exceed a value, checked in every report given",
    )
    options = parser.parse_args(argv)
    paths = [path for path in (options.report, options.other) if path]
    runs = [load(path) for path in paths]
    sentences = [text for path, report in zip(paths, runs, strict=True) for text in exceeded(report, options.max, path)]
    print("\n\n".join([*map(table, runs), *([compare(*runs)] if runs[1:] else [])]))
    if options.plot:
        from ltx_neuron.report_plot import plot  # matplotlib, only where it is asked for

        plot(runs, options.plot)
    if sentences:
        print(*sentences, sep="\n", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
