"""The service: jobs that come while its worker works, and none lost however its processes die."""

import signal
import threading
from contextlib import closing

import pytest
from conftest import SCRIPT_SECONDS, needs
from helpers import wait_for

needs("fastapi", "prometheus_client", extras="dev,serve")

import serving  # noqa: E402
from serving import ASKED, ask, run_until, worker  # noqa: E402

from ltx_neuron.service.jobs import VIDEO  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")  # the wire format lives on
openai, setup, wanted, service = serving.openai, serving.setup, serving.wanted, serving.service  # fixtures


def test_jobs_that_come_meanwhile_join_the_run_and_denoise_while_the_last_one_is_decoded(setup, tiny, wanted, tmp_path):
    with worker(setup, tiny, tmp_path, "overlap_decode=true") as (working, intake):
        queue, jobs, both = working.queue, [ask(intake, 0)], threading.Event()
        runs, run, write, on_step_end = [], working.engine.run, working._write, working._step

        def step(stage, number):
            if len(jobs) < 3:
                jobs.append(ask(intake, 2))
            if working.engine.job.seed == 4:
                both.set()
            on_step_end(stage, number)

        def write_after_the_others_began(clip):
            assert both.wait(SCRIPT_SECONDS)
            write(clip)

        later = ask(intake, 1)  # of another size: a run of its own
        working.engine.run = lambda *args, **more: runs.append(1) or run(*args, **more)
        working.engine.on_step_end, working._write = step, write_after_the_others_began
        run_until(working, jobs[0], later)
        assert [queue.get("ada", job.id).status for job in jobs] == ["completed"] * 3 and len(runs) == 2
        videos = [(queue.folder_of(job.id) / VIDEO).read_bytes() for job in (*jobs, later)]
        assert videos == [wanted[0], wanted[2], wanted[2], wanted[1]]


def test_a_killed_worker_and_a_killed_server_lose_nothing_and_change_no_bit(service, wanted):
    videos = [service.client().videos.create(**fields) for fields, _ in [*ASKED, *ASKED[:2]]]
    with closing(service.queue()) as queue:

        def decodes() -> bool:
            entries = [queue.get("ada", video.id) for video in videos]
            return any((entry.detail or {}).get("stage") == "decode" for entry in entries)

        wait_for(decodes)  # its latents are on the disk
        service.worker.kill()
        before = queue.counts()["completed"]
        wait_for(lambda: queue.counts()["completed"] > before)
        service.stop(signal.SIGKILL)
        service.start()
        wait_for(lambda: not queue.counts()["queued"] + queue.counts()["in_progress"])
        assert queue.counts()["failed"] == queue.counts()["cancelled"] == 0
    for index, made in enumerate(videos):
        assert service.client().videos.download_content(made.id).read() == wanted[index % len(ASKED)]
    log = (service.folder / "log").read_text()
    assert "the worker ended with -9" in log and "resumed, 0 stages left" in log
    assert "may differ" not in log  # the next worker computes as the one before it did
