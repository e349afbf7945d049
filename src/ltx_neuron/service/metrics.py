"""/metrics for Prometheus: the queue's state, the workers' totals and the counts of answers."""

from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ltx_neuron.report.price import Price
from ltx_neuron.service.queue import QUEUED, Queue

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]


# Totals of all workers, by their names in a worker's state.
_TOTALS = {
    "videos": "videos made",
    "steps": "denoising steps",
    "step_seconds": "seconds in denoising steps",
    "busy_seconds": "seconds in phases, each moment once",
    "video_seconds": "seconds of the videos made",
}


class Metrics:
    def __init__(self, queue: Queue, price: Price | None = None):
        self.queue, self.price, self.registry = queue, price, CollectorRegistry()
        what = "answered requests"
        self.requests = Counter("ltx_requests", what, ["method", "status"], registry=self.registry)
        self.registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator:
        """Read the metrics from the database, at each scrape."""
        counts = self.queue.counts()
        jobs = GaugeMetricFamily("ltx_jobs", "jobs by status", labels=["status"])
        for status, count in counts.items():
            jobs.add_metric([status], count)
        yield jobs
        yield GaugeMetricFamily("ltx_queue_length", "waiting jobs", counts[QUEUED])
        what = "waiting time of the oldest waiting job"
        yield GaugeMetricFamily("ltx_queue_wait_seconds", what, self.queue.oldest_wait())
        states = list(self.queue.workers().values())
        yield GaugeMetricFamily("ltx_workers", "live workers", sum(s["alive"] for s in states))
        totals = {name: sum(state.get(name, 0) for state in states) for name in _TOTALS}
        for name, what in _TOTALS.items():
            yield CounterMetricFamily(f"ltx_{name}", what, totals[name])
        phases = CounterMetricFamily("ltx_phase_seconds", "seconds by phase", labels=["phase"])
        seconds = Counts()
        for state in states:
            seconds.update(state.get("phases", {}))
        for name in sorted(seconds):
            phases.add_metric([name], seconds[name])
        yield phases
        if self.price:
            costs = (totals[name] for name in ("busy_seconds", "videos", "video_seconds"))
            for name, dollars in self.price.of(*costs).items():
                yield GaugeMetricFamily(f"ltx_{name}", name.replace("_", " "), dollars)

    def describe(self) -> list:
        """Return nothing: the registry then collects nothing at registration."""
        return []
