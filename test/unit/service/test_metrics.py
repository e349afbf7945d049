"""/metrics: the workers' totals, and what their clips cost."""

import pytest

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from ltx_neuron.report.price import Price
from unit.service.client import get, opened

STATES = {
    "busy": {"videos": 3, "video_seconds": 12.0, "busy_seconds": 50.0, "phases": {"upsample": 2.0}},
    "earlier": {"videos": 1, "phases": {}},  # of a version without these
    "other": {"videos": 1, "video_seconds": 4.0, "busy_seconds": 30.0},
}
DOLLARS = 80.0 * 36 / 3600 / 4  # of the busy seconds of all workers


@pytest.mark.parametrize("price", [None, Price(36.0, 4)])
def test_the_metrics_add_up_the_workers_and_have_the_price_of_a_clip_where_the_machine_has_one(tmp_path, price):
    from prometheus_client.parser import text_string_to_metric_families

    with opened(tmp_path, price=price) as service:
        for name, state in STATES.items():
            service.queue.renew(name, state)
        families = text_string_to_metric_families(get(service, "/metrics").body.decode())
        metrics = {sample.name: sample.value for family in families for sample in family.samples}
    assert metrics["ltx_busy_seconds_total"] == 80 and metrics["ltx_video_seconds_total"] == 16
    assert metrics["ltx_videos_total"] == 5 and metrics["ltx_phase_seconds_total"] == 2 and metrics["ltx_workers"] == 3
    dollars = {name.removeprefix("ltx_dollars_per_"): value for name, value in metrics.items() if "dollars" in name}
    costs = {"clip": DOLLARS / 5, "video_second": DOLLARS / 16, "hour": 36}
    assert dollars == (pytest.approx(costs) if price else {})
