"""Kill -9 of the service's front and of its worker at random moments, while jobs are sent and made:
every accepted job is completed, once, with the bytes that generate_ltx23.py writes."""

import hashlib
import json
import random
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import succeeded
from helpers import stress_count
from lib.service import PROMPTS, Service

from ltx_neuron.service.queue import Queue

HOURS = 3  # three Ray nodes on two cores took most of one, beside other work
pytestmark = pytest.mark.timeout(HOURS * 3600)
JOBS, SEED = stress_count(1000), 1
KILLS = stress_count(20)  # of the front, and as many of the worker
SIZE = {"height": 32, "width": 32, "num_frames": 9}
LEFT = ("queued", "in_progress")
AHEAD = 300  # jobs that wait at most


@pytest.fixture(scope="module")
def setup(scripts, tiny):
    made = scripts(tiny, 1)
    made.prepare(**SIZE)
    return made


def flags_of(setup) -> dict:
    return SIZE | {"neuron_gemma": True, "spatial_upsampler_path": setup.assets.spatial_upsampler}


@pytest.fixture(scope="module")
def digests(setup, tmp_path_factory) -> list[str]:
    """Of the script's own videos of PROMPTS."""
    folder = tmp_path_factory.mktemp("wanted")
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (folder / "jobs.jsonl").write_text("\n".join(lines))
    flags = flags_of(setup) | {"prompts_file": folder / "jobs.jsonl", "output_dir": folder / "out"}
    succeeded(setup.run("src/generate_ltx23.py", **flags))
    videos = sorted((folder / "out").glob("*.mp4"))
    return [hashlib.sha256(video.read_bytes()).hexdigest() for video in videos]


def send(service: Service, ids: list[str], queue: Queue) -> None:
    """Send all jobs. A request that was not answered is sent again with its Idempotency-Key."""
    for number in range(JOBS):
        while number - queue.counts()["completed"] > AHEAD:
            time.sleep(0.1)
        body = {"prompt": PROMPTS[number % len(PROMPTS)], "size": "32x32"}
        ids.append(json.loads(service.ask("/videos", body, key=f"job-{number}"))["id"])


def disturb(service: Service, queue: Queue) -> None:
    """Kill the front and the worker, or a replica, in turn; before each kill a random number of
    videos are made. Half-way a Ray node is killed as well, and another joins."""
    what, moment = ("replica" if service.ray else "worker", "front"), random.Random(SEED)
    most = round(1.8 * JOBS / (2 * KILLS + 1))
    for number in range(2 * KILLS):
        until = min(queue.counts()["completed"] + moment.randint(0, most), JOBS)
        while queue.counts()["completed"] < until:
            time.sleep(0.05)
        time.sleep(moment.uniform(0, 1))
        while not service.kill(what[number % 2], queue):  # until one is there again
            time.sleep(0.05)
        if what[number % 2] == "front":
            service.process.wait()
            service.start()
        if service.ray and number == KILLS:
            service.ray.kill()
            service.ray.join()


def wrong(service: Service, ids: list[str], digests: list[str]) -> list[str]:
    """Jobs that are not as they should be, in words."""
    videos = service.videos()
    problems = [f"{v['id']} is {v['status']}" for v in videos if v["status"] != "completed"]
    if len(set(ids)) != JOBS or {video["id"] for video in videos} != set(ids):
        problems.append(f"{len(ids)} accepted, {len(videos)} there")
    for number, id in enumerate(ids):
        content = service.ask(f"/videos/{id}/content")
        if hashlib.sha256(content).hexdigest() != digests[number % len(digests)]:
            problems.append(f"{id} has other bytes")
    return problems


@pytest.fixture(params=[0, 3], ids=["one worker", "three Ray nodes"])
def ray(request):
    if not request.param:
        return nullcontext()
    pytest.importorskip("ray", reason="an extra is not installed: pip install -e .[dev,fleet]")
    from lib.local_ray import LocalRay

    return LocalRay(request.param)


def test_no_job_is_lost_made_twice_or_changed_by_kills(setup, digests, ray, tmp_path: Path):
    words = setup.command("src/generate_ltx23.py", **flags_of(setup))[1:]
    queue, ids = Queue(tmp_path / "data/queue.sqlite", tmp_path / "data/jobs"), []
    with ray as cluster:
        service = Service(words, tmp_path, JOBS, cluster)
        service.start()
        sending = threading.Thread(target=send, args=(service, ids, queue), daemon=True)
        sending.start()
        try:
            disturb(service, queue)
            sending.join()
            while sum(queue.counts()[status] for status in LEFT):
                time.sleep(1)
            assert wrong(service, ids, digests) == []
        finally:
            service.process.terminate()
            service.process.wait()
