"""The service as a process of its own, spoken to by OpenAI's own client, and its worker in this process."""

import json
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pytest
from conftest import needs
from helpers import read_video
from PIL import Image
from pydantic import TypeAdapter, ValidationError

needs("fastapi", "prometheus_client", extras="dev,serve")

import serving  # noqa: E402
from serving import ASKED, ask, run_until, worker  # noqa: E402

from ltx_neuron.service import database  # noqa: E402
from ltx_neuron.service.jobs import VIDEO  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")  # the wire format lives on
openai, setup, wanted, service = serving.openai, serving.setup, serving.wanted, serving.service  # fixtures


def test_openais_client_and_the_sync_route_get_the_scripts_bytes(openai, service, wanted, tiny, shared, tmp_path):
    """Of two stages, of a seed, of a picture that a video holds, and of a sound that it is made for."""
    client = service.client("bob")
    held = {"prompt": "a golden retriever", "size": "64x64", "input_reference": tiny.image}
    ids = [client.videos.create(**fields).id for fields in (ASKED[1][0], ASKED[2][0], held)]
    sent = {"data": {"prompt": "a man says hello", "size": "64x64"}, "headers": client.auth_headers}
    sent["files"] = {"audio_reference": serving.sound_file(shared).read_bytes()}  # its method takes no other file
    ids.append(client._client.post(service.url + "/videos", **sent).json()["id"])
    sent = {"json": {"prompt": ASKED[0][0]["prompt"], "size": "64x64"}, "headers": service.client().auth_headers}
    answer = client._client.post(service.url + "/videos/sync", **sent, timeout=300)
    assert answer.headers["content-type"] == "video/mp4" and answer.content == wanted[0]
    for id, content in zip(ids, wanted[1:], strict=True):
        video = client.videos.poll(id, poll_interval_ms=100)
        assert (video.status, video.progress, video.error) == ("completed", 100, None)
        assert client.videos.download_content(id).read() == content
    assert [v.id for v in client.videos.list(limit=2)] == ids[::-1]
    assert [v.id for v in client.videos.list(order="asc")] == ids
    client.videos.download_content(ids[1]).write_to_file(tmp_path / "video.mp4")
    facts = read_video(tmp_path / "video.mp4")
    assert (facts["width"], facts["frame_count"], facts["audio_codec"]) == (64, 9, "aac")
    thumbnail = client.videos.download_content(ids[1], variant="thumbnail").read()
    assert Image.open(BytesIO(thumbnail)).size == (64, 64)
    assert client.videos.delete(ids[1]).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(ids[1])
    assert [v.id for v in client.videos.list()] == [ids[3], ids[2], ids[0]]


def test_answers_are_openais_types_and_the_model_says_which_sizes_are_compiled(openai, service):
    client, adapter = service.client(), TypeAdapter(openai.types.Video)
    id = (created := client.videos.with_raw_response.create(**ASKED[0][0])).http_response.json()["id"]
    for raw in (created, client.videos.with_raw_response.retrieve(id)):
        with pytest.raises(ValidationError) as caught:
            adapter.validate_json(raw.content, strict=True)
        # Its sizes are Sora's four, 720x1280 and so on; a multiple of 32 is none of them.
        assert {error["loc"][0] for error in caught.value.errors()} == {"size"}
        adapter.validate_json(json.dumps(raw.http_response.json() | {"size": "720x1280"}), strict=True)
    client.videos.delete(id)
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    sizes = {(s["size"], s["num_frames"], s["two_stage"]) for s in model.sizes}
    assert {("64x64", 9, False), ("128x128", 9, True), ("128x128", 9, False)} <= sizes
    with pytest.raises(openai.BadRequestError) as caught:
        client.videos.create(prompt="waves", size="1280x720")
    assert caught.value.code == "profile_mismatch" and "64x64, 9 frames" in caught.value.message


def test_a_worker_adds_up_the_seconds_of_its_work(setup, tiny, tmp_path):
    """Busy seconds count every moment once, also where phases overlap: a clip's price is made of them."""
    with worker(setup, tiny, tmp_path) as (working, _), ThreadPoolExecutor(1) as other:
        working.stop.set()
        working.run()
        engine = working.engine

        def decode_sound() -> None:
            with engine.recorder.phase("decode_audio"):
                time.sleep(0.1)

        for seconds in (2.0, 3.0):
            with engine.recorder.phase("decode_video"):
                other.submit(decode_sound).result()
            engine.recorder.finished(seconds)
            working._keep_records()
    videos, busy, phases = (working._state[name] for name in ("video_seconds", "busy_seconds", "phases"))
    assert videos == 5.0 and 0.2 <= busy < sum(phases.values()) - 0.15


def test_a_worker_whose_leases_ended_on_a_full_disk_does_not_take_its_own_jobs(setup, tiny, tmp_path):
    with worker(setup, tiny, tmp_path) as (working, intake):
        queue, entry = working.queue, ask(intake, 0)
        working.batch_key = entry.batch_key
        assert len(working._take()) == 1
        queue.monotonic = lambda: time.monotonic() + queue.lease + 1  # without a heartbeat
        assert working._take() == [] and queue.get("ada", entry.id).attempt == 1


def test_a_worker_waits_for_a_locked_database_and_one_attempt_outlives_a_clock_that_is_set(
    setup, tiny, wanted, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.05)
    with worker(setup, tiny, tmp_path) as (working, intake):
        queue, moves = working.queue, [-3600.0, 7 * 86400.0, -1e9]
        entries, on_step_end = (ask(intake, 0), ask(intake, 2)), working.engine.on_step_end

        def move(stage, number):
            if moves:
                ahead = moves.pop()
                queue.clock = lambda: time.time() + ahead
                queue.sweep(1e9, 10**18)
            on_step_end(stage, number)

        working.engine.on_step_end = move
        queue.database.write("UPDATE jobs SET crash_count = 1")  # which a finished stage clears
        other = sqlite3.connect(queue.database.path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(5, other.execute, ("COMMIT",)).start()
        run_until(working, *entries)
        other.close()
        ended = [queue.get("ada", entry.id) for entry in entries]
        assert [(entry.attempt, entry.crash_count) for entry in ended] == [(1, 0), (1, 0)]
        assert (queue.folder_of(entries[0].id) / VIDEO).read_bytes() == wanted[0]
    printed = capsys.readouterr()
    assert printed.out.count("database is locked") == 1 and "Traceback" not in printed.err


def test_jobs_cancelled_between_steps_while_decoded_or_waiting_leave_nothing_and_the_next_is_what_it_was(
    setup, tiny, wanted, tmp_path
):
    with worker(setup, tiny, tmp_path) as (working, intake):
        queue, steps, on_step_end, hold = working.queue, [], working.engine.on_step_end, working._while_owned
        denoised, decoded, waiting, last = (ask(intake, number) for number in (0, 0, 1, 2))
        assert queue.cancel("ada", waiting.id)

        def cancel_between_steps(stage, number):
            steps.append((working.engine.job.prompt, number))
            if len(steps) == 3:
                assert queue.cancel("ada", denoised.id)
            on_step_end(stage, number)

        def cancel_between_chunks(entry, chunks):
            for chunk in hold(entry, chunks):
                yield chunk
                if entry.id == decoded.id:
                    assert queue.cancel("ada", decoded.id)

        working.engine.on_step_end, working._while_owned = cancel_between_steps, cancel_between_chunks
        run_until(working, last)
        same, other = ASKED[0][0]["prompt"], ASKED[2][0]["prompt"]
        numbers = [*((same, number) for number in (0, 1, 2, *range(8))), *((other, number) for number in range(8))]
        assert steps == numbers  # and none of the one that waited
        assert [folder.name for folder in queue.folder.iterdir()] == [last.id]
        assert (queue.folder_of(last.id) / VIDEO).read_bytes() == wanted[2]
