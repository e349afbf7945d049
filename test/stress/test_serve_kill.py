"""Kill -9 of the service's front and of its worker at random moments, while jobs are sent and made."""

import json
import random
import threading
import time
from contextlib import nullcontext

import pytest
from conftest import succeeded
from helpers import stress_count, wait_for
from lib.service import PROMPTS, Service

from ltx_neuron.service.queue import Queue

LONG = 3 * 3600  # three Ray nodes on two cores took most of one hour, beside other work
pytestmark = pytest.mark.timeout(LONG)
JOBS, SEED = stress_count(1000), 1
KILLS = stress_count(20)  # of the front, and as many of the worker
SIZE = {"height": 32, "width": 32, "num_frames": 9}


def send(service: Service, ids: list[str], queue: Queue) -> None:
    """Send all jobs; at most 300 wait. A request that was not answered is sent again with its Idempotency-Key."""
    for number in range(JOBS):
        wait_for(lambda number=number: number - queue.counts()["completed"] <= 300, LONG, 0.1)
        body = {"prompt": PROMPTS[number % len(PROMPTS)], "size": "32x32"}
        ids.append(json.loads(service.ask("/videos", body, key=f"job-{number}"))["id"])


def disturb(service: Service, queue: Queue) -> None:
    """Kill the front and the worker, or a replica, in turn, and half-way a Ray node, for which another joins."""
    chance, most = random.Random(SEED), round(1.8 * JOBS / (2 * KILLS + 1))
    for number in range(2 * KILLS):
        until = min(queue.counts()["completed"] + chance.randint(0, most), JOBS)
        wait_for(lambda until=until: queue.counts()["completed"] >= until, LONG)
        time.sleep(chance.uniform(0, 1))
        if number % 2:
            service.kill("front", queue)
            service.process.wait()
            service.start()
        else:  # once one is there again
            wait_for(lambda: service.kill("replica" if service.ray else "worker", queue), LONG)
        if service.ray and number == KILLS:
            service.ray.kill()
            service.ray.join()


@pytest.mark.parametrize("nodes", [0, 3])
def test_no_job_is_lost_made_twice_or_changed_by_kills(scripts, tiny, tmp_path, nodes):
    """By one worker, and by three Ray nodes."""
    reason = "an extra is not installed: pip install -e .[dev,fleet]"
    ray = pytest.importorskip("lib.local_ray", reason=reason, exc_type=ImportError).LocalRay(nodes) if nodes else None
    setup, flags = scripts(tiny, 1), {"neuron_gemma": True, "spatial_upsampler_path": tiny.spatial_upsampler, **SIZE}
    setup.prepare(**SIZE)
    (tmp_path / "jobs.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    files = {"prompts_file": tmp_path / "jobs.jsonl", "output_dir": tmp_path / "out"}
    succeeded(setup.run("src/generate_ltx23.py", **flags, **files))
    expected = [video.read_bytes() for video in sorted((tmp_path / "out").glob("*.mp4"))]
    queue, ids = Queue(tmp_path / "data/queue.sqlite", tmp_path / "data/jobs"), []
    with ray or nullcontext():
        service = Service(setup.command("src/generate_ltx23.py", **flags)[1:], tmp_path, JOBS, ray)
        service.start()
        sending = threading.Thread(target=send, args=(service, ids, queue), daemon=True)
        sending.start()
        try:
            disturb(service, queue)
            sending.join()
            wait_for(lambda: not queue.counts()["queued"] + queue.counts()["in_progress"], LONG, 1)
            statuses = {video["id"]: video["status"] for video in service.videos()}
            assert statuses == dict.fromkeys(ids, "completed") and len(ids) == len(statuses) == JOBS
            contents = (service.ask(f"/videos/{id}/content") for id in ids)
            assert [n for n, x in enumerate(contents) if x != expected[n % len(expected)]] == []
        finally:
            service.process.terminate()
            service.process.wait()
