"""The service in this process, on a folder, and what is sent to it as from a connection."""

import asyncio
import json
import socket
import threading
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from urllib.parse import quote

import pytest
from jobs import make_job

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from ltx_neuron.artifacts.workspace import compiled_size, of_release
from ltx_neuron.config.release import RELEASES
from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.service.jobs import JobSubmitter
from ltx_neuron.service.queue import Entry, Queue
from ltx_neuron.service.settings import Limits
from ltx_neuron.service.sizes import CompiledSize, SizeRegistry
from ltx_neuron.service.tokens import Tokens, new_token

SMALL = Size(512, 768, 121)
FORM = b"multipart/form-data; boundary=b"
MOST_BODY, PIECE = 2**20, 2**16  # bytes; the second of a body as the server hands it on
SIZE = f"{SMALL.width}x{SMALL.height}"
VIDEOS = "/v1/videos"


class Sent(NamedTuple):
    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""


class Got(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        return self.json["error"]

    @property
    def refused(self) -> tuple[int, str]:
        return self.status, self.error["code"]


async def answer(app, sent: Sent, hangs: bool = False) -> Got:
    """What the application answers to a body that comes in pieces. hangs: it never ends."""
    pieces = [sent.body[at : at + PIECE] for at in range(0, max(1, len(sent.body)), PIECE)]
    parts = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    parts[-1]["more_body"] = hangs
    starts, bodies = [], []

    async def receive() -> dict:
        if parts:
            return parts.pop(0)
        if hangs:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        (starts if message["type"] == "http.response.start" else bodies).append(message)

    scope = {"type": "http", "http_version": "1.1", "scheme": "http", "method": sent.method, "path": sent.path}
    scope |= {"asgi": {"version": "3.0", "spec_version": "2.4"}}  # whose send fails where nobody reads
    scope |= {"raw_path": quote(sent.path).encode(), "root_path": "", "query_string": sent.query}
    scope |= {"headers": list(sent.headers), "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000)}
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in bodies)
    return Got(starts[0]["status"], dict(starts[0]["headers"]), body)


class Service(NamedTuple):
    app: object
    queue: Queue
    token: bytes
    sizes: SizeRegistry
    submitter: JobSubmitter

    def ask(self, sent: Sent, **more) -> Got:
        return asyncio.run(answer(self.app, sent, **more))

    def headers(self, kind: bytes = b"application/json", **more) -> tuple:
        said = {"host": b"127.0.0.1:8000", "authorization": b"Bearer " + self.token}
        said |= {"content-type": kind} | more
        return tuple((name.replace("_", "-").encode(), value) for name, value in said.items())

    def send(self, method: str, path: str, query: bytes = b"", **headers) -> Got:
        return self.ask(Sent(method, path, query, self.headers(**headers)))

    def get(self, path: str, query: bytes = b"", **headers) -> Got:
        return self.send("GET", path, query, **headers)

    def post(self, **fields) -> Got:
        """Fields as JSON, `waves` in the compiled size unless they say otherwise."""
        body = json.dumps({"prompt": "waves", "size": SIZE} | fields).encode()
        return self.ask(Sent("POST", VIDEOS, b"", self.headers(), body))

    def post_form(self, **fields) -> Got:
        """Fields as a form; bytes are files."""
        return self.ask(Sent("POST", VIDEOS, b"", self.headers(FORM), form({"prompt": "waves"} | fields)))

    def accepted(self, **fields) -> str:
        got = self.post(**fields)
        assert got.status == 200, got.body
        return got.json["id"]

    def claimed(self) -> Entry:
        (entry,) = self.queue.claim("w", self.queue.next_batch_key(), 1)
        return entry


class Compiled:
    """The workspace of a machine on which graphs were compiled for sizes."""

    transformer = SimpleNamespace(num_layers=48)

    def __init__(self, *sizes: Size, recipe="distilled", artifacts="/nonexistent", **inputs):
        self.artifacts, self.release, self.recorded = artifacts, RELEASES[0], {}
        for size in sizes:
            job = of_release(make_job("", size, recipe=recipe, **inputs), self.release)
            for bucket in job.buckets:
                self.recorded.setdefault(bucket.name, []).append(compiled_size(job))

    def source(self, model, loras=()):
        return SimpleNamespace(notes=[])

    def compiled_sizes(self) -> dict[str, list[dict]]:
        return self.recorded

    def resolved(self, job):
        return of_release(job, self.release)

    def dit_programs_for(self, job, stage):
        buckets = job.stage_buckets(stage)
        if any(bucket.name not in self.recorded for bucket in buckets):
            raise UserError("not compiled")
        return [(bucket, None) for bucket in buckets]


def open_queue(folder, **settings) -> closing[Queue]:
    return closing(Queue(folder / "queue.sqlite", folder / "jobs", **settings))


@contextmanager
def opened(tmp_path, tokens: bool = True, **settings):
    """The service on a folder, in this process. settings: of create_app."""
    from ltx_neuron.service.app import create_app

    workspace = Compiled(SMALL, images=(ImageCondition("x"),))
    workspace.recorded |= Compiled(SMALL).recorded
    workspace.checkpoint_path = tmp_path / "tiny.safetensors"
    workspace.checkpoint_path.touch()
    token = new_token(tmp_path / "tokens.json", "ada").encode()
    sizes = SizeRegistry(workspace, CompiledSize(SMALL, "distilled"), upsamplers=())
    with open_queue(tmp_path) as queue:
        limits = Limits(max_queue=10, max_body_mb=MOST_BODY / 2**20, rate=1e9)
        submitter = JobSubmitter(queue, sizes, "tiny", limits)
        app = create_app(submitter, Tokens.load(tmp_path / "tokens.json" if tokens else None), **settings)
        yield Service(app, queue, token, sizes, submitter)


@contextmanager
def listening(service: Service):
    """(host, port) of a server in this process that serves the application."""
    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(service.app, http="h11", log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.02)
        yield listener.getsockname()
        server.should_exit = True
        thread.join(timeout=20)


def form(fields: dict[str, object]) -> bytes:
    """Fields as multipart; bytes are files."""
    parts = []
    for name, value in fields.items():
        file = b'; filename="a.png"' if isinstance(value, bytes) else b""
        text = value if isinstance(value, str | bytes) else json.dumps(value)
        content = text if isinstance(text, bytes) else text.encode(errors="replace")
        head = b'Content-Disposition: form-data; name="' + name.encode(errors="replace") + b'"'
        parts.append(b"--b\r\n" + head + file + b"\r\n\r\n" + content + b"\r\n")
    return b"".join(parts) + b"--b--\r\n"
