"""/metrics: the workers' totals, and what their clips cost."""

import pytest

pytest.importorskip("prometheus_client", reason="the extra is not installed: pip install -e .[serve]")

from prometheus_client.parser import text_string_to_metric_families

from ltx_neuron.report.price import Price
from ltx_neuron.service.metrics import Metrics
from ltx_neuron.service.queue import Queue

STATES = {
    "busy": {"videos": 3, "video_seconds": 12.0, "busy_seconds": 50.0, "phases": {"upsample": 2.0}},
    "earlier": {"videos": 1, "phases": {}},  # of a version without these
    "other": {"videos": 1, "video_seconds": 4.0, "busy_seconds": 30.0},
}


@pytest.fixture
def queue(tmp_path):
    made = Queue(tmp_path / "queue.sqlite", tmp_path / "jobs")
    for name, state in STATES.items():
        made.renew(name, state)
    yield made
    made.close()


def values(queue, price=None) -> dict[str, float]:
    families = text_string_to_metric_families(Metrics(queue, price).text().decode())
    samples = (sample for family in families for sample in family.samples)
    return {sample.name: sample.value for sample in samples}


def test_the_metrics_have_the_price_of_a_clip_by_the_busy_seconds_of_all_workers(queue):
    got, dollars = values(queue, Price(36.0, 4)), 80.0 * 36 / 3600 / 4
    assert got["ltx_busy_seconds_total"] == 80 and got["ltx_video_seconds_total"] == 16
    assert got["ltx_dollars_per_clip"] == pytest.approx(dollars / 5)
    assert got["ltx_dollars_per_video_second"] == pytest.approx(dollars / 16)
    assert (got["ltx_dollars_per_hour"], got["ltx_runs_at_once"]) == (36, 4)


def test_without_a_price_the_metrics_have_none(queue):
    got = values(queue)
    assert got["ltx_videos_total"] == 5 and not [name for name in got if "dollars" in name]
