"""The latency report of schema 1: records a run's time and memory by phase, prints and compares
reports, and checks limits on their numbers."""

import contextlib
import difflib
import math
import os
import re
import statistics
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json, write_json
from ltx_neuron.format import WIDTH, columns
from ltx_neuron.invocation import command
from ltx_neuron.report.price import Price, format_price

PHASES = (
    "load_gemma3",
    "encode_text",
    "unload_gemma3",
    "load_transformer",
    "encode_inputs",
    "warmup",
    "denoise_stage_1",
    "upsample",
    "denoise_stage_2",
    "denoise_stage_3",
    "unload_transformer",
    "load_vae",
    "decode_video",
    "decode_audio",
    "encode_mp4",
    "write_wav",
)
STAGES = ("stage_1", "stage_2")  # of every report
_FIELDS = {
    "": (
        "job profile tp versions identity phases denoise_steps_ms warm_step_ms"
        " bytes_to_device_per_step collectives_per_step flops_per_step percent_of_peak"
        " end_to_end_seconds residual_seconds"
    ),
    "phases": "name seconds peak_rss_bytes",
    "warm_step_ms": "median p90 host device",
}


@dataclass(slots=True)
class Counters:
    """Costs of one denoising step."""

    bytes_to_device_per_step: int = 0
    # "count" of one rank's graphs, and "host_ms" for launching them in the last step
    launches_per_step: dict[str, float] = field(default_factory=lambda: {"count": 0, "host_ms": 0})
    # "count", and "bytes" that one rank contributes
    collectives_per_step: dict[str, int] = field(default_factory=lambda: {"count": 0, "bytes": 0})
    # Of all ranks: one number, or {stage: number}
    flops_per_step: float | dict[str, float] | None = None
    peak_flops: float | None = None  # FLOP/s of all ranks together; None if the profile has no peak
    # "count" of replaced weight sets, and their "seconds", part of the phase load_transformer
    weight_swaps: int = 0
    weight_swap_seconds: float = 0.0


class _PeakMemory:
    """The highest sum, in bytes, of the resident memory of this process and its descendants while
    the block runs, sampled by a thread. Pages that several processes share count once for each. A
    process that starts within the block and ends before the next listing is missed."""

    SAMPLE_SECONDS = 0.05
    # Listing descendants reads the whole process table, far slower than reading their sizes.
    LIST_SECONDS = 1.0

    def __enter__(self) -> "_PeakMemory":
        self.bytes, self.paused = 0, False
        self._stopped = threading.Event()
        self._list_processes()
        self._sample()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._list_processes()
        self._sample()

    def _watch(self) -> None:
        while not self._stopped.wait(self.SAMPLE_SECONDS):
            if self.paused:
                continue
            if time.monotonic() - self._listed_at > self.LIST_SECONDS:
                self._list_processes()
            self._sample()

    def _list_processes(self) -> None:
        this_process = psutil.Process()
        self._processes = [this_process, *this_process.children(recursive=True)]
        self._listed_at = time.monotonic()

    def _sample(self) -> None:
        total = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):  # it has ended since it was listed
                total += process.memory_info().rss
        self.bytes = max(self.bytes, total)


@dataclass
class _Phase:
    """A phase. `seconds` counts towards the total, `overlapped_seconds` to another phase."""

    name: str
    memory: _PeakMemory
    seconds: float = 0.0
    overlapped_seconds: float = 0.0

    def entry(self) -> dict:
        """The phase's entry in the report, with `overlapped_seconds` if there are any."""
        entry = {"name": self.name, "seconds": self.seconds}
        if self.overlapped_seconds:
            entry["overlapped_seconds"] = self.overlapped_seconds
        return entry | {"peak_rss_bytes": self.memory.bytes}


class Recorder:
    """Collects one run's times, by time.perf_counter, from its construction to `report()`, and its
    price if the machine's is known. A thread has at most one phase at a time. Each moment counts
    for one phase, so that phases and residual add up to the total: for the phase of the thread that
    made the recorder if it has one, otherwise for the phase that began first."""

    def __init__(self, price: Price | None = None) -> None:
        self.counters, self.price = Counters(), price
        self._finished: list[float] = []  # seconds of each clip
        self._start_to_first_clip: float | None = None
        self._began = self._counted_until = time.perf_counter()
        self._lock = threading.Lock()
        self._main_thread = threading.get_ident()
        self._open: dict[int, _Phase] = {}  # thread -> its phase, in the order they began
        self._ended: list[_Phase] = []  # in the order they ended
        self._steps: dict[str, list[tuple[float, float]]] = {stage: [] for stage in STAGES}
        # Stage -> (guidance group, pass) -> milliseconds.
        self._passes: dict[str, dict[tuple[int, str], list[float]]] = {s: {} for s in STAGES}
        self.lost_groups: list[str] = []  # a line for every lost guidance group
        # Shows a phase while it runs
        self.show: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext

    @contextlib.contextmanager
    def phase(self, name: str, shown: bool = True) -> Iterator[None]:
        """Time the block as one of PHASES and sample its peak memory. Raises ValueError for an
        unknown name and RuntimeError inside another phase of this thread. shown: False where the
        block shows a bar."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}; phases are {', '.join(PHASES)}")
        thread = threading.get_ident()
        if outer := self._open.get(thread):
            raise RuntimeError(
                f"phase {name} starts inside phase {outer.name}; phases must not nest"
            )
        with _PeakMemory() as memory:
            phase = _Phase(name, memory)
            with self._counted_to_now():
                self._open[thread] = phase
            try:
                with self.show(name) if shown else contextlib.nullcontext():
                    yield
            finally:
                with self._counted_to_now():
                    self._ended.append(self._open.pop(thread))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend this thread's phase while the block runs: it waits for another thread."""
        thread = threading.get_ident()
        with self._counted_to_now():
            phase = self._open.pop(thread, None)
        if not phase:
            yield
            return
        phase.memory.paused = True
        try:
            yield
        finally:
            phase.memory.paused = False
            with self._counted_to_now():
                self._open[thread] = phase

    @contextlib.contextmanager
    def _counted_to_now(self) -> Iterator[float]:
        """Hold the lock on the phases and count the time up to now. Yields the clock."""
        with self._lock:
            now = time.perf_counter()
            passed, self._counted_until = now - self._counted_until, now
            counted = self._open.get(self._main_thread) or next(iter(self._open.values()), None)
            for phase in self._open.values():
                if phase is counted:
                    phase.seconds += passed
                else:
                    phase.overlapped_seconds += passed
            yield now

    def step(
        self,
        stage: str,
        total_ms: float,
        device_ms: float,
        passes: Iterable[tuple[int, str, float]] = (),
    ) -> None:
        """Add one denoise step of a stage, such as "stage_1", in milliseconds. The rest of the
        total is host time. passes: (guidance group, pass, milliseconds)."""
        self._steps.setdefault(stage, []).append((total_ms, device_ms))
        for group, name, milliseconds in passes:
            self._passes.setdefault(stage, {}).setdefault((group, name), []).append(milliseconds)

    def finished(self, seconds: float) -> None:
        """Add a finished clip of so many seconds."""
        if not self._finished:
            self._start_to_first_clip = _seconds_since_start()
        self._finished.append(seconds)

    def last_step(self, stage: str) -> float:
        """Milliseconds of the stage's last denoise step."""
        return self._steps[stage][-1][0]

    def report(self, job: dict, profile: str, tp: int, versions: dict, identity: dict) -> dict:
        """The latency report, schema 1, of the run up to now, with running phases of other threads.
        versions: of packages. identity: digests of the weights, graphs and code."""
        if phase := self._open.get(threading.get_ident()):
            raise RuntimeError(f"report() was called inside phase {phase.name}")
        with self._counted_to_now() as now:
            end_to_end = now - self._began
            phases = [phase.entry() for phase in (*self._ended, *self._open.values())]
        warm = {stage: _warm_step(steps) for stage, steps in self._steps.items()}
        last_stage = max(filter(self._steps.get, self._steps), default=STAGES[0])
        counters, output = self.counters, (len(self._finished), sum(self._finished))
        flops, median = counters.flops_per_step, warm[last_stage]["median"]
        flops = flops.get(last_stage) if isinstance(flops, dict) else flops
        peak = counters.peak_flops
        percent = 100 * flops / (median / 1000) / peak if flops and median and peak else None
        swaps = {"count": counters.weight_swaps, "seconds": counters.weight_swap_seconds}
        return {
            "schema": 1,
            "job": job,
            "profile": profile,
            "tp": tp,
            "versions": versions,
            "identity": identity,
            "phases": phases,
            "denoise_steps_ms": {
                stage: [total for total, _ in steps] for stage, steps in self._steps.items()
            },
            "warm_step_ms": warm,
            "bytes_to_device_per_step": counters.bytes_to_device_per_step,
            "launches_per_step": dict(counters.launches_per_step),
            "collectives_per_step": dict(counters.collectives_per_step),
            "flops_per_step": flops,
            "weight_swaps": swaps,
            "percent_of_peak": percent,
            **self._guidance_groups(),
            "end_to_end_seconds": end_to_end,
            "residual_seconds": end_to_end - sum(phase["seconds"] for phase in phases),
            "clips": output[0],
            "video_seconds": output[1],
            "start_to_first_clip": self._start_to_first_clip,
            **({"price": self.price.of(end_to_end, *output)} if self.price else {}),
        }

    def _guidance_groups(self) -> dict:
        passes = {
            stage: [
                {"group": group, "pass": name, "runs": len(ms), "median_ms": statistics.median(ms)}
                for (group, name), ms in sorted(times.items(), key=lambda item: item[0][0])
            ]
            for stage, times in self._passes.items()
            if times
        }
        entry = {"passes": passes, "lost": [*self.lost_groups]}
        return {"guidance_groups": entry} if passes or self.lost_groups else {}


def _seconds_since_start() -> float:
    """Seconds since this process started. psutil rounds the time of the boot to a second."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


def _warm_step(steps: list[tuple[float, float]]) -> dict[str, float | None]:
    warm = steps[1:]
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


# --- reports --------------------------------------------------------------------------------------


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


def show(report: dict, path: Path | None) -> None:
    """Print the latency table, and write the report to a JSON file if requested."""
    if path:
        write_json(path, report)
    print(table(report))


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
