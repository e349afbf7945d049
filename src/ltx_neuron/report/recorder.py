"""Records where a run's time goes; report.py shows it."""

import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

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


@dataclass(slots=True)
class Counters:
    """What one denoise step moves and computes. `flops_per_step` may differ per stage: a number or
    {stage: number}."""

    bytes_to_device_per_step: int = 0
    collectives_per_step: dict[str, int] = field(default_factory=lambda: {"count": 0, "bytes": 0})
    flops_per_step: float | dict[str, float] | None = None
    # FLOP/s of all ranks together; None where the profile has no peak
    peak_flops: float | None = None


class _PeakMemory:
    """The highest sum, in bytes, of this process's and its descendants' resident memory while the
    block runs.

    Pages that several processes share count once for each. Listing descendants reads the whole
    process table, reading their sizes does not, so each has its own rhythm, and each stays within
    SHARE_OF_CORE.
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
                self._sizes.append(
                    self._files.enter_context(open(f"/proc/{process.pid}/statm", "rb", buffering=0))
                )
        self._list_again_at = (
            time.perf_counter() + (time.thread_time() - began) / self.SHARE_OF_CORE
        )
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


@dataclass
class _Phase:
    """A phase under way, or done."""

    name: str
    memory: _PeakMemory
    seconds: float = 0.0  # while it was what the run waited for
    overlapped_seconds: float = 0.0  # while another phase was

    def entry(self) -> dict:
        """Its line of the report. Most phases have the run to themselves, and no word of
        overlapping."""
        beside = {"overlapped_seconds": self.overlapped_seconds} if self.overlapped_seconds else {}
        return {
            "name": self.name,
            "seconds": self.seconds,
            **beside,
            "peak_rss_bytes": self.memory.bytes,
        }


class Recorder:
    """Collects one run's times from its construction to `report()`, with the clock
    time.perf_counter.

    Threads may each have a phase at a time. Every moment of the run counts for one phase alone, so
    that phases and residual add up to the whole: for the phase of the thread that made the
    recorder, else for the one that began first.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self._began = self._counted_until = time.perf_counter()
        self._lock, self._main = threading.Lock(), threading.get_ident()
        self._open: dict[int, _Phase] = {}  # by thread, in the order they began
        self._phases: list[_Phase] = []  # in the order they ended
        self._steps: dict[str, list[tuple[float, float]]] = {stage: [] for stage in STAGES}
        self._report: dict | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as one of PHASES (seconds) and watch its peak memory (bytes). A thread's
        phases never nest."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}; phases are {', '.join(PHASES)}")
        if outer := self._own():
            raise RuntimeError(
                f"phase {name} starts inside phase {outer.name}; phases must not nest"
            )
        with _PeakMemory() as memory:
            phase = _Phase(name, memory)
            with self._counted():
                self._open[threading.get_ident()] = phase
            try:
                yield
            finally:
                with self._counted():
                    self._phases.append(self._open.pop(threading.get_ident()))

    def _own(self) -> _Phase | None:
        return self._open.get(threading.get_ident())

    @contextlib.contextmanager
    def _counted(self) -> Iterator[float]:
        """Hold the phases still; the time since this was last done is counted. Gives the clock."""
        with self._lock:
            now = time.perf_counter()
            passed, self._counted_until = now - self._counted_until, now
            first = self._open.get(self._main) or next(iter(self._open.values()), None)
            for phase in self._open.values():
                if phase is first:
                    phase.seconds += passed
                else:
                    phase.overlapped_seconds += passed
            yield now

    def step(self, stage: str, total_ms: float, device_ms: float) -> None:
        """Add one denoise step of "stage_1" or "stage_2", in milliseconds; what is not device time
        is host time."""
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r}; stages are {', '.join(STAGES)}")
        if not 0 <= device_ms <= total_ms:
            raise ValueError(
                f"a {stage} step took {total_ms} ms, {device_ms} ms of it on the device: impossible"
            )
        self._steps[stage].append((total_ms, device_ms))

    def report(self, job: dict, profile: str, tp: int, versions: dict, identity: dict) -> dict:
        """The latency report, schema 1, of the run up to now: phases that other threads are in
        count as far as they are."""
        if own := self._own():
            raise RuntimeError(f"the report is asked for inside phase {own.name}")
        with self._counted() as now:
            end_to_end = now - self._began
            phases = [phase.entry() for phase in (*self._phases, *self._open.values())]
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
            "phases": phases,
            "denoise_steps_ms": {
                stage: [total for total, _ in steps] for stage, steps in self._steps.items()
            },
            "warm_step_ms": warm,
            "bytes_to_device_per_step": self.counters.bytes_to_device_per_step,
            "collectives_per_step": dict(self.counters.collectives_per_step),
            "flops_per_step": flops,
            "percent_of_peak": (
                100 * flops / (median / 1000) / peak if flops and median and peak else None
            ),
            "end_to_end_seconds": end_to_end,
            "residual_seconds": end_to_end - sum(phase["seconds"] for phase in phases),
        }
        return self._report

    def write(self, path: str | Path) -> None:
        """Write the report made last as JSON; the file appears under its name only when it is
        whole."""
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
