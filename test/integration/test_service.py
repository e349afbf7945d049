"""The service as a process of its own, spoken to by OpenAI's own client: its videos are the
script's bit for bit, and no job is lost or made twice however its processes die."""

import base64
import json
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager, suppress
from io import BytesIO

import psutil
import pytest
import torch
from conftest import ROOT, SCRIPT_SECONDS, succeeded, words
from helpers import read_video, wait_for
from PIL import Image

pytest.importorskip("fastapi", reason="an extra is not installed: pip install -e .[dev,serve]")
pytest.importorskip(
    "prometheus_client", reason="an extra is not installed: pip install -e .[dev,serve]"
)

from pydantic import TypeAdapter, ValidationError

from ltx_neuron.engine import Engine, RunOptions
from ltx_neuron.host.arithmetic import choices_file
from ltx_neuron.job import Size
from ltx_neuron.profiles import resolve
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.service import preview
from ltx_neuron.service import worker as work
from ltx_neuron.service.fields import read_request
from ltx_neuron.service.jobs import VIDEO, JobSubmitter
from ltx_neuron.service.queue import Queue
from ltx_neuron.service.server import MAX_CONNECTIONS
from ltx_neuron.service.sizes import CompiledSize, SizeRegistry
from ltx_neuron.service.tokens import new_token
from ltx_neuron.service.worker import Worker
from ltx_neuron.workspace import Workspace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The Sora API"),  # the wire format lives on
]

TP = 1
SIZE = {"height": 128, "width": 128, "num_frames": 9, "two_stage": True}  # and its half, in one
SMALL = {"height": 64, "width": 64, "num_frames": 9}
OWNERS = ("ada", "bob")
# What a client says of a job, and the line of a prompts file that says the same.
ASKED = [
    ({"prompt": "waves crash on the shore", "size": "64x64"}, SMALL),
    ({"prompt": "birds sing", "size": "128x128", "extra_body": {"two_stage": True}}, SIZE),
    ({"prompt": "« hello » says a man", "size": "64x64", "extra_body": {"seed": 4}}, SMALL),
]


@pytest.fixture(scope="module")
def openai():
    """Not when tests are collected: importing it takes seconds."""
    reason = "an extra is not installed: pip install -e .[dev,serve]"
    return pytest.importorskip("openai", reason=reason)


@pytest.fixture(scope="module")
def setup(scripts, tiny):
    made = scripts(tiny, TP)
    made.prepare(**SIZE, image=((tiny.image, 0, 1.0),))
    return made


@pytest.fixture(scope="module")
def wanted(setup, tiny, tmp_path_factory) -> list[bytes]:
    """The videos of ASKED and of one with an image, as generate_ltx23.py makes them."""
    folder = tmp_path_factory.mktemp("wanted")
    said = [*ASKED, ({"prompt": "a golden retriever"}, SMALL | {"image": [str(tiny.image), 0]})]
    lines = [
        {"prompt": fields["prompt"], "seed": fields.get("extra_body", {}).get("seed", 10), **line}
        for fields, line in said
    ]
    (folder / "jobs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    process = setup.run(
        "src/generate_ltx23.py",
        neuron_gemma=True,
        spatial_upsampler_path=tiny.spatial_upsampler,
        prompts_file=folder / "jobs.jsonl",
        output_dir=folder / "out",
    )
    succeeded(process)
    return [path.read_bytes() for path in sorted((folder / "out").glob("*.mp4"))]


class Service:
    """python -m ltx_neuron.serve on a data folder, which outlives it."""

    def __init__(self, setup, tiny, folder):
        self.folder, self.tokens_file = folder, folder / "tokens.json"
        self.tokens = {name: new_token(self.tokens_file, name) for name in OWNERS}
        flags = words(
            neuron_gemma=True,
            checkpoint_path=tiny.checkpoint,
            gemma_root=tiny.gemma_root,
            spatial_upsampler_path=tiny.spatial_upsampler,
            artifacts_dir=setup.artifacts,
            profile="cpu",
            tp_degree=TP,
            dtype="float32",
            data_dir=folder / "data",
            tokens_file=self.tokens_file,
            port=0,
        )
        self.command = [sys.executable, "-m", "ltx_neuron.serve", *flags]

    def start(self) -> None:
        self.log = open(self.folder / "log", "ab")
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.url = next(
            line.split()[1] for line in self.process.stdout if line.startswith("serving: ")
        )
        threading.Thread(target=self._copy, daemon=True).start()
        wait_for(lambda: self.client()._client.get(self.url[:-3] + "/ready").status_code == 200)

    def _copy(self) -> None:
        for line in self.process.stdout:
            self.log.write(line.encode())
            self.log.flush()

    def client(self, owner: str = "ada", **more):
        import openai

        return openai.OpenAI(base_url=self.url, api_key=self.tokens[owner], **more)

    def queue(self) -> Queue:
        return Queue(self.folder / "data/queue.sqlite", self.folder / "data/jobs")

    @property
    def worker(self) -> psutil.Process | None:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                if "--role" in child.cmdline():
                    return child
        return None

    def stop(self, kind: int = signal.SIGTERM) -> int:
        self.process.send_signal(kind)
        return self.process.wait(SCRIPT_SECONDS)


@pytest.fixture(scope="module")
def service(openai, setup, tiny, tmp_path_factory):
    made = Service(setup, tiny, tmp_path_factory.mktemp("service"))
    made.start()
    yield made
    made.stop()


def made(client, **fields) -> bytes:
    """A video from first to last, through OpenAI's client."""
    video = client.videos.create_and_poll(**fields)
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    return client.videos.download_content(video.id).read()


# --- OpenAI's client ------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(ASKED)))
def test_openais_client_gets_the_bytes_that_the_script_writes(service, wanted, index):
    assert made(service.client(), **ASKED[index][0]) == wanted[index]


def test_a_picture_of_a_client_is_held_as_the_scripts_is(service, wanted, tiny):
    fields = {"prompt": "a golden retriever", "size": "64x64"}
    with open(tiny.image, "rb") as file:
        assert made(service.client(), **fields, input_reference=file) == wanted[-1]


def test_a_job_is_seen_listed_downloaded_and_deleted(openai, service, tmp_path):
    client = service.client("bob")
    assert client.videos.list().data == []
    videos = [client.videos.create_and_poll(**ASKED[0][0]) for _ in range(3)]
    assert [v.id for v in client.videos.list(limit=2)] == [v.id for v in reversed(videos)]
    assert [v.id for v in client.videos.list(order="asc")] == [v.id for v in videos]
    path = tmp_path / "video.mp4"
    client.videos.download_content(videos[0].id).write_to_file(path)
    seen = read_video(path)
    assert (seen["width"], seen["frame_count"], seen["audio_codec"]) == (64, 9, "aac")
    thumbnail = client.videos.download_content(videos[0].id, variant="thumbnail").read()
    assert Image.open(BytesIO(thumbnail)).size == (64, 64)
    for video in videos:
        assert client.videos.delete(video.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video.id)
    assert client.videos.list().data == []


def test_what_is_answered_is_openais_type_word_for_word(openai, service):
    adapter = TypeAdapter(openai.types.Video)
    client = service.client()
    for raw in (
        client.videos.with_raw_response.create(**ASKED[0][0]),
        client.videos.with_raw_response.retrieve(client.videos.list(limit=1).data[0].id),
    ):
        with pytest.raises(ValidationError) as caught:
            adapter.validate_json(raw.content, strict=True)
        # Its sizes are Sora's four, 720x1280 and so on; a multiple of 32 is none of them.
        assert {error["loc"][0] for error in caught.value.errors()} == {"size"}
        content = raw.http_response.json() | {"size": "720x1280"}
        adapter.validate_json(json.dumps(content), strict=True)


def test_the_model_says_which_sizes_are_compiled(openai, service):
    (model,) = service.client().models.list().data
    assert service.client().models.retrieve(model.id).id == model.id
    sizes = {(s["size"], s["num_frames"], s["two_stage"]) for s in model.sizes}
    assert {("64x64", 9, False), ("128x128", 9, True), ("128x128", 9, False)} <= sizes
    with pytest.raises(openai.BadRequestError) as caught:
        service.client().videos.create(prompt="waves", size="1280x720")
    assert caught.value.code == "profile_mismatch" and "64x64, 9 frames" in caught.value.message


def test_a_size_that_shares_another_ones_graph_is_listed_once_it_is_compiled(service, setup, tiny):
    def listed() -> set[str]:
        (model,) = service.client().models.list().data
        return {size["size"] for size in model.sizes}

    def manifests() -> dict[str, dict]:
        paths = sorted(setup.artifacts.glob("graphs/dit-*/manifest.json"))
        return {path.parent.name: json.loads(path.read_text()) for path in paths}

    assert not {"128x32", "32x128"} & listed()  # as many pixels as 64x64
    before = manifests()
    size = {"height": 32, "width": 128, "num_frames": 9}
    for _ in range(2):  # nothing is compiled; the second time nothing is recorded
        flags = size | {"image": ((tiny.image, 0, 1.0),)}
        succeeded(setup.run("compile/compile_transformer.py", gemma=False, **flags))
    assert {"128x32", "32x128"} <= listed()
    after = manifests()
    (changed,) = (name for name in before if before[name] != after[name])
    sizes = [*before[changed]["sizes"], {"recipe": "distilled", **vars(Size(**size))}]
    assert after == before | {changed: before[changed] | {"sizes": sizes}}


def test_the_sync_route_answers_with_the_video(service, wanted):
    client = service.client()
    body = {"prompt": ASKED[0][0]["prompt"], "size": "64x64"}
    answer = client._client.post(
        service.url + "/videos/sync", json=body, headers=client.auth_headers, timeout=300
    )
    assert answer.headers["content-type"] == "video/mp4" and answer.content == wanted[0]


def test_a_key_makes_one_job_of_a_request_that_is_sent_twice(openai, service):
    client = service.client("bob")
    header = {"extra_headers": {"Idempotency-Key": "k"}}
    first = client.videos.create(**ASKED[0][0], **header)
    assert client.videos.create(**ASKED[0][0], **header).id == first.id
    with pytest.raises(openai.ConflictError):
        client.with_options(max_retries=0).videos.create(prompt="other", size="64x64", **header)
    client.videos.delete(first.id)


# --- what strangers send --------------------------------------------------------------------------


def test_another_token_sees_no_job_and_without_one_nothing_is_seen(openai, service):
    video = service.client("ada").videos.create(**ASKED[0][0])
    bob = service.client("bob").videos
    for call in (bob.retrieve, bob.delete, bob.download_content):
        with pytest.raises(openai.NotFoundError):
            call(video.id)
    stranger = openai.OpenAI(base_url=service.url, api_key="x", max_retries=0)
    for call in (stranger.videos.list, stranger.models.list):
        with pytest.raises(openai.AuthenticationError):
            call()
    service.client("ada").videos.delete(video.id)


def bomb() -> bytes:
    file = BytesIO()
    Image.new("1", (12_000, 12_000)).save(file, format="PNG")
    return file.getvalue()


def test_uploads_that_are_no_pictures_are_refused_and_leave_nothing(openai, service, wanted):
    client = service.client(max_retries=0)
    folders = set((service.folder / "data/jobs").iterdir())
    for content, what in (
        (wanted[0], "no picture that can be read"),
        (b"", "no picture that can be read"),
        (bomb(), "12000x12000 pixels"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.videos.create(
                prompt="waves", size="64x64", input_reference=("a.png", content, "image/png")
            )
        assert caught.value.code == "invalid_image" and what in caught.value.message
    assert set((service.folder / "data/jobs").iterdir()) <= folders


def test_a_body_and_a_prompt_that_are_too_large_are_refused(openai, service):
    client = service.client(max_retries=0)
    with pytest.raises(openai.BadRequestError, match="1000000 characters, 10000 at most"):
        client.videos.create(prompt="x" * 1_000_000)
    with pytest.raises(openai.APIStatusError) as caught:
        client.videos.create(prompt="x", extra_body={"negative_prompt": "x" * 34_000_000})
    assert caught.value.status_code == 413


PATHS = [
    "/v1/videos/../../etc/passwd",
    "/v1/videos/..%2f..%2fetc%2fpasswd/content",
    "/v1/videos/%00/content",
    "/v1/videos/video_0/content?variant=../queue.sqlite",
    "/v1/videos/%ff%fe",
    "/v1/videos?after=%00&limit=1",
    "/v1/videos?limit=1e9",
    "/v1/videos?order=sideways",
    "/v1/models/%2e%2e",
    "/v1/videos/video_" + "0" * 5000,
]


def said(service, head: bytes, body: bytes = b"") -> bytes:
    """What is answered to bytes that no client library would send."""
    host, port = service.url.split("/")[2].split(":")
    token = service.tokens["ada"].encode()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        lines = [head, b"Host: " + host.encode(), b"Authorization: Bearer " + token]
        lines += [b"Connection: close", b"Content-Length: %d" % len(body), b"", b""]
        connection.sendall(b"\r\n".join(lines) + body)
        answer = b""
        while received := connection.recv(65536):
            answer += received
    return answer


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_to_a_file(service, path):
    for method in ("GET", "DELETE"):
        answer = said(service, f"{method} {path} HTTP/1.1".encode())
        status = int(answer.split()[1])
        assert 400 <= status < 500 and b"root:" not in answer and b"SQLite" not in answer


def test_requests_beyond_the_limit_of_connections_are_refused_until_others_close(service):
    host, port = service.url.split("/")[2].split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(MAX_CONNECTIONS)]
    try:
        assert b" 503 " in said(service, b"GET /v1/models HTTP/1.1")[:20]
    finally:
        for connection in idle:
            connection.close()
    wait_for(lambda: b" 200 " in said(service, b"GET /v1/models HTTP/1.1")[:20], every=0.5)


# --- one worker, in this process ------------------------------------------------------------------


@contextmanager
def worker(setup, tiny, folder, *settings: str, previews: bool = False):
    """A worker with its queue and what fills it. settings: of the profile."""
    workspace = Workspace(
        tiny.checkpoint, resolve("cpu", settings), setup.artifacts, TP, "float32", tiny.gemma_root
    )
    options = RunOptions(True, spatial_upsampler_path=tiny.spatial_upsampler, cache_prompts=True)
    threads = torch.get_num_threads()
    queue = Queue(folder / "queue.sqlite", folder / "jobs")
    with closing(queue), Engine(workspace, Recorder(), options) as engine:
        sizes = SizeRegistry(workspace, CompiledSize(Size(), "distilled"), upsamplers={"spatial"})
        yield Worker(queue, engine, "w1", previews), JobSubmitter(queue, sizes, "tiny")
    torch.set_num_threads(threads)


def ask(intake, index: int):
    fields = dict(ASKED[index][0])
    return intake.accept(read_request(fields | fields.pop("extra_body", {})), "ada")


def test_a_worker_stores_what_it_measured_before_its_first_job(tiny, tmp_path):
    artifacts = tmp_path / "artifacts"
    artifacts.mkdir()
    workspace = Workspace(
        tiny.checkpoint, resolve("cpu", ()), artifacts, TP, "float32", tiny.gemma_root
    )
    queue = Queue(tmp_path / "queue.sqlite", tmp_path / "jobs")
    with closing(queue), Engine(workspace, Recorder()) as engine:
        working = Worker(queue, engine, "w1")
        working.stop.set()
        working.run()
    # Else another process could choose otherwise, and the next worker go on to other bits.
    assert choices_file(artifacts).is_file()
    assert "float32_products" in choices_file(artifacts).read_text()


def stop_after(working, *entries) -> threading.Thread:
    """A thread that asks a worker to end once these jobs are made."""

    def watch() -> None:
        wait_for(lambda: all(working.queue.get("ada", e.id).status == "completed" for e in entries))
        working.stop.set()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_job_cancelled_between_steps_ends_there_and_the_next_is_what_it_was(
    setup, tiny, wanted, tmp_path
):
    with worker(setup, tiny, tmp_path) as (working, intake):
        queue, steps = working.queue, []
        first, second = ask(intake, 0), ask(intake, 2)
        on_step_end = working.engine.on_step_end

        def cancel(stage, number):
            steps.append((working.engine.job.prompt, number))
            if len(steps) == 3:
                assert queue.cancel("ada", first.id)
            on_step_end(stage, number)

        working.engine.on_step_end = cancel
        watching = stop_after(working, second)
        working.run()
        watching.join()
        assert [n for prompt, n in steps if prompt == ASKED[0][0]["prompt"]] == [0, 1, 2]
        assert (queue.folder_of(second.id) / VIDEO).read_bytes() == wanted[2]
        assert not queue.folder_of(first.id).exists()  # let go of


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


def test_jobs_that_come_meanwhile_join_the_run_and_denoise_while_the_last_one_is_decoded(
    setup, tiny, wanted, tmp_path
):
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


def test_jobs_cancelled_while_they_wait_and_while_they_are_decoded_leave_nothing(
    setup, tiny, wanted, tmp_path
):
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
