"""The service: jobs that come, are cancelled and are shown while its worker works, and none lost or
made twice however its processes die."""

import base64
import json
import signal
import threading
from contextlib import closing
from io import BytesIO

import pytest
from conftest import SCRIPT_SECONDS, succeeded
from helpers import wait_for
from PIL import Image

pytest.importorskip("fastapi", reason="an extra is not installed: pip install -e .[dev,serve]")
pytest.importorskip("prometheus_client", reason="an extra is not installed: pip install -e .[dev,serve]")

import serving
from serving import ASKED, TP, ask, stop_after, worker

from ltx_neuron.job import Size
from ltx_neuron.service import preview
from ltx_neuron.service import worker as work
from ltx_neuron.service.jobs import VIDEO

# The wire format lives on.
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")

# Fixtures.
openai, setup, wanted, service = serving.openai, serving.setup, serving.wanted, serving.service


def test_a_size_that_shares_another_ones_graph_is_listed_once_it_is_compiled(service, setup, tiny):
    def listed() -> set[str]:
        (model,) = service.client().models.list().data
        return {size["size"] for size in model.sizes}

    def manifests() -> dict[str, dict]:
        """Of as many tokens and ranks."""
        paths = setup.artifacts.glob(f"graphs/dit-v8-*-tp{TP}-*/manifest.json")
        return {path.parent.name: json.loads(path.read_text()) for path in paths}

    assert not {"128x32", "32x128"} & listed()  # as many pixels as 64x64
    before = manifests()
    size = {"height": 32, "width": 128, "num_frames": 9}
    for _ in range(2):  # nothing is compiled; the second time nothing is recorded
        flags = size | {"image": ((tiny.image, 0, 1.0),)}
        succeeded(setup.run("compile/compile_transformer.py", gemma=False, **flags))
    assert {"128x32", "32x128"} <= listed()
    after, said = manifests(), {"recipe": "distilled", **vars(Size(**size))}
    (changed,) = (name for name in after if said in after[name].get("sizes", []))
    # Another test may record a size of its own meanwhile.
    ours, theirs = after[changed].pop("sizes"), before[changed].pop("sizes")
    assert after[changed].pop("checksum") != before[changed].pop("checksum")
    assert ours.count(said) == 1 and said not in theirs and after[changed] == before[changed]


def test_previews_and_times_of_steps_are_seen_while_a_job_is_made_and_change_no_bit(
    setup, tiny, wanted, tmp_path, monkeypatch
):
    monkeypatch.setattr(preview, "SECONDS", 0.0)  # a tiny job's steps take milliseconds
    monkeypatch.setattr(work, "REPORT_SECONDS", 0.0)
    with worker(setup, tiny, tmp_path, previews=True) as (working, intake):
        queue, asked, seen = working.queue, ask(intake, 1), []
        on_step_end = working.engine.on_step_end

        def look(stage, number):
            on_step_end(stage, number)
            seen.append(queue.get("ada", asked.id).detail)

        working.engine.on_step_end = look
        watching = stop_after(working, asked)
        working.run()
        watching.join()
        assert len({detail["preview"] for detail in seen}) == len(seen) == 11
        picture = Image.open(BytesIO(base64.b64decode(seen[-1]["preview"])))
        assert (picture.format, picture.size) == ("JPEG", (256, 256))
        times = {stage: len(all) for stage, all in seen[-1]["denoise_steps_ms"].items()}
        assert times == {"stage_1": 8, "stage_2": 3}
        ended = queue.get("ada", asked.id).detail
        assert ended == {"denoise_steps_ms": seen[-1]["denoise_steps_ms"]}
        assert (queue.folder_of(asked.id) / VIDEO).read_bytes() == wanted[1]
        assert working.engine.stage_run is None  # what was looked at is not kept


def test_jobs_that_come_meanwhile_join_the_run_and_denoise_while_the_last_one_is_decoded(setup, tiny, wanted, tmp_path):
    with worker(setup, tiny, tmp_path, "overlap_decode=true") as (working, intake):
        queue, asked, both = working.queue, [ask(intake, 0)], threading.Event()
        runs, run, write, on_step_end = [], working.engine.run, working._write, working._step
        working.engine.run = lambda *args, **more: runs.append(1) or run(*args, **more)

        def step(stage, number):
            if len(asked) < 3:
                asked.append(ask(intake, 2))
            if working.engine.job.seed == 4:
                both.set()
            on_step_end(stage, number)

        def write_after_the_others_began(clip):
            assert both.wait(SCRIPT_SECONDS)
            write(clip)

        working.engine.on_step_end, working._write = step, write_after_the_others_began
        ask_later = ask(intake, 1)  # of another size: a run of its own
        watching = stop_after(working, asked[0], ask_later)
        working.run()
        watching.join()
        assert [queue.get("ada", entry.id).status for entry in asked] == ["completed"] * 3
        assert len(runs) == 2
        videos = [(queue.folder_of(e.id) / VIDEO).read_bytes() for e in [*asked, ask_later]]
        assert videos == [wanted[0], wanted[2], wanted[2], wanted[1]]


def test_jobs_cancelled_while_they_wait_and_while_they_are_decoded_leave_nothing(setup, tiny, wanted, tmp_path):
    with worker(setup, tiny, tmp_path) as (working, intake):
        queue, begun, on_step_end, hold = working.queue, [], working._step, working._while_owned
        decoded, waiting, last = ask(intake, 0), ask(intake, 1), ask(intake, 2)
        assert queue.cancel("ada", waiting.id)
        assert not queue.folder_of(waiting.id).exists()  # at once

        def cancel_between_chunks(entry, chunks):
            for chunk in hold(entry, chunks):
                yield chunk
                if entry.id == decoded.id:
                    assert queue.cancel("ada", decoded.id)

        working._while_owned = cancel_between_chunks
        working.engine.on_step_end = lambda stage, number: (
            begun.append(working.engine.job.prompt),
            on_step_end(stage, number),
        )
        watching = stop_after(working, last)
        working.run()
        watching.join()
        assert {*begun} == {ASKED[0][0]["prompt"], ASKED[2][0]["prompt"]}
        assert [folder.name for folder in queue.folder.iterdir()] == [last.id]
        assert (queue.folder_of(last.id) / VIDEO).read_bytes() == wanted[2]


# --- kill -9 --------------------------------------------------------------------------------------


def test_a_killed_worker_and_a_killed_server_lose_nothing_and_change_no_bit(service, wanted):
    client = service.client()
    videos = [client.videos.create(**fields) for fields, _ in [*ASKED, *ASKED[:2]]]
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
        client = service.client()
        wait_for(lambda: not queue.counts()["queued"] + queue.counts()["in_progress"])
        assert queue.counts()["failed"] == queue.counts()["cancelled"] == 0
    for index, video in enumerate(videos):
        content = client.videos.download_content(video.id).read()
        assert content == wanted[index % len(ASKED)]
    log = (service.folder / "log").read_text()
    assert "the worker ended with -9" in log and "resumed, 0 stages left" in log
    assert "may differ" not in log  # the next worker computes as the one before it did
