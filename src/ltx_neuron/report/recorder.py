"""Records a run's time and memory by phase, as the latency report of schema 1."""

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ltx_neuron.report.price import Price

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
