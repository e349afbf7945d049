"""The API as a stranger finds it, in this process: requests that are mutated at random, slow ones
and large ones are refused in words, soon, and leave nothing behind."""

import asyncio
import http.client
import json
import random
import re
import socket
import threading
import time
from contextlib import closing, contextmanager
from io import BytesIO
from types import SimpleNamespace
from typing import NamedTuple
from urllib.parse import quote

import pytest
import torch
import uvicorn
from PIL import Image
from safetensors.torch import save_file

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from ltx_neuron.config.transformer import Bucket
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.service import limits
from ltx_neuron.service.app import Settings, create_app
from ltx_neuron.service.jobs import JobSubmitter, job_of
from ltx_neuron.service.queue import Queue
from ltx_neuron.service.sizes import CompiledSize, SizeRegistry
from ltx_neuron.service.tokens import Tokens, new_token
from ltx_neuron.weights.lora import Lora
from unit.test_service_sizes import SMALL, Compiled

MUTATED, SEED = 5000, 15
LONGEST_SECONDS = 20  # of one request; a picture takes a process of its own
MOST_BODY, PIECE = 2**20, 2**16  # bytes; the second of a body as the server hands it on
SIZE = f"{SMALL.width}x{SMALL.height}"


class Sent(NamedTuple):
    """A request as it comes from a connection."""

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
    def error(self) -> dict:
        return json.loads(self.body)["error"]


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

    raw = quote(sent.path).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": sent.method,
        "scheme": "http",
        "path": sent.path,
        "raw_path": raw,
        "root_path": "",
        "query_string": sent.query,
        "headers": list(sent.headers),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in bodies)
    return Got(starts[0]["status"], dict(starts[0]["headers"]), body)


class Service(NamedTuple):
    app: object
    queue: Queue
    token: bytes
    sizes: SizeRegistry

    def ask(self, sent: Sent, **more) -> Got:
        return asyncio.run(answer(self.app, sent, **more))

    def headers(self, kind: bytes = b"application/json", **more) -> tuple:
        said = {"host": b"127.0.0.1:8000", "authorization": b"Bearer " + self.token}
        said |= {"content-type": kind} | more
        return tuple((name.replace("_", "-").encode(), value) for name, value in said.items())


class Workspace(Compiled):
    """Of a machine where graphs for SMALL are compiled."""

    transformer = SimpleNamespace(num_layers=48)

    def dit_program_for(self, job, stage):
        super().dit_program_for(job, stage)
        return Bucket(1, 1, 1, 1), None


@contextmanager
def opened(tmp_path, page=None, tokens: bool = True):
    """The service on a folder, in this process."""
    workspace = Workspace(SMALL, images=(ImageCondition("x"),))
    workspace.recorded |= Workspace(SMALL).recorded
    workspace.checkpoint_path = tmp_path / "tiny.safetensors"
    workspace.checkpoint_path.touch()
    token = new_token(tmp_path / "tokens.json", "ada")
    sizes = SizeRegistry(workspace, CompiledSize(SMALL, "distilled"), upsamplers=())
    with closing(Queue(tmp_path / "queue.sqlite", tmp_path / "jobs")) as queue:
        submitter = JobSubmitter(queue, sizes, "tiny", max_queued=(10, 10))
        settings = Settings(max_body_bytes=MOST_BODY, per_minute=1e9)
        owners = Tokens.load(tmp_path / "tokens.json" if tokens else None)
        app = create_app(submitter, owners, settings, page)
        yield Service(app, queue, token.encode(), sizes)


@pytest.fixture
def service(tmp_path):
    with opened(tmp_path) as made:
        yield made


# --- requests that are mutated --------------------------------------------------------------------

FORM = b"multipart/form-data; boundary=b"
STRANGE = (
    *(None, True, False, "", " ", "\0", "\ud800", "é" * 300, "../../etc/passwd", "%00", "nan"),
    *(0, -1, 1.5, 1e308, 10**40, float("inf"), float("nan"), "1" * 400, [], {}, [[]], {"a": {}}),
    *("768x512", "x", "1x", [None], {"image_url": "data:image/png;base64,AAAA"}, "[" * 3000),
    *({"file_id": "a"}, {"image_url": "http://169.254.169.254/"}, [{"frame": 1}], ["a"] * 500),
)


def form(fields: dict[str, object]) -> bytes:
    """Fields as multipart; bytes are files."""
    parts = []
    for name, value in fields.items():
        file = b'; filename="a.png"' if isinstance(value, bytes) else b""
        content = value if isinstance(value, bytes) else text_of(value).encode(errors="replace")
        head = b'Content-Disposition: form-data; name="' + name.encode(errors="replace") + b'"'
        parts.append(b"--b\r\n" + head + file + b"\r\n\r\n" + content + b"\r\n")
    return b"".join(parts) + b"--b--\r\n"


def text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def fields_of(rng: random.Random) -> dict[str, object]:
    """What a request may say; mostly of a size that is not compiled, whose images are not read."""
    fields = {
        "prompt": "waves crash",
        "size": SIZE if rng.random() < 0.1 else "64x64",
        "seconds": "5",
        "seed": 5,
        "two_stage": False,
        "recipe": "distilled",
        "model": "tiny",
        "fps": 24,
        "num_inference_steps": None,
        "images": [],
        "extra_params": {"negative_prompt": None},
        "upscale": None,
    }
    return {name: value for name, value in fields.items() if rng.random() < 0.7}


def mutated_fields(rng: random.Random) -> dict[str, object]:
    fields = fields_of(rng)
    for _ in range(rng.randint(0, 3)):
        names = [*fields, "input_reference", "video_stg_blocks", "guidance_scale", "lora", "x"]
        name = rng.choice(names)
        what = rng.random()
        if what < 0.2:
            fields.pop(name, None)
        elif what < 0.3:
            fields[name + rng.choice(("[]", "[a]", "[image_url]", "\0", "é"))] = "5"
        else:
            fields[name] = rng.choice(STRANGE)
    return fields


def flipped(rng: random.Random, content: bytes) -> bytes:
    """Some bytes changed, left out or put in."""
    changed = bytearray(content)
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(changed) + 1)
        changed[at : at + rng.choice((0, 1, 1, 9))] = rng.randbytes(rng.choice((0, 1, 1, 3)))
    return bytes(changed)


def mutated(rng: random.Random, service: Service, ids: list[str]) -> Sent:
    """A request that is wrong somewhere, or nowhere."""
    if rng.random() < 0.7:
        sent = mutated_post(rng, service)
    else:
        id = rng.choice([*ids, "video_" + "0" * 32, "../x", "\0", "é" * 99, "video_\ufffd", ""])
        path = rng.choice(("/v1/videos", "/v1/models", f"/v1/videos/{id}"))
        path += rng.choice(("", "", "/content", "/remix", "/..", f"/{id}"))
        method = rng.choice(("GET", "GET", "DELETE", "HEAD", "PUT", "PATCH", "OPTIONS", "G\xe9T"))
        query = rng.choice((b"limit=2&order=asc", b"after=" + id.encode(errors="replace"), b""))
        query = flipped(rng, query + rng.choice((b"", b"variant=thumbnail", b"&variant=../x")))
        query = bytes(byte for byte in query if 0x20 < byte < 0x7F)  # as h11 lets them through
        sent = Sent(method, path, query, service.headers())
    if rng.random() < 0.2:
        headers = [list(header) for header in sent.headers]
        header = rng.choice(headers)
        header[1] = rng.choice((b"", b"\xff", b"a" * 9000, flipped(rng, header[1]), b"-1", b"1e9"))
        sent = sent._replace(headers=tuple(map(tuple, headers)))
    return sent


def mutated_post(rng: random.Random, service: Service) -> Sent:
    fields, more = mutated_fields(rng), {}
    if rng.random() < 0.2:
        more["idempotency_key"] = rng.choice((b"a", b"b", b"\xff", b"a" * 300, b""))
    if rng.random() < 0.1:
        more["content_length"] = rng.choice((b"-1", b"9" * 30, b"x", b"5"))
    if rng.random() < 0.5:
        try:
            body = json.dumps(fields, ensure_ascii=rng.random() < 0.9).encode()
        except UnicodeEncodeError:
            body = b'"\xed\xa0\x80"'
        kind = b"application/json"
    else:
        if rng.random() < 0.1:
            fields["input_reference"] = b"\x89PNG\r\n"
        body, kind = form(fields), FORM
    path = rng.choice(("/v1/videos",) * 9 + ("/v1/videos/edits", "/v1/videos/é/remix"))
    body = flipped(rng, body) if rng.random() < 0.4 else body
    return Sent("POST", path, b"", service.headers(kind, **more), body)


async def all_answers(service: Service, rng: random.Random) -> list[tuple[Sent, Got, float]]:
    answers, ids = [], []
    for _ in range(MUTATED):
        sent, began = mutated(rng, service, ids), time.monotonic()
        got = await answer(service.app, sent)
        answers.append((sent, got, time.monotonic() - began))
        if sent.method == "POST" and got.status == 200:
            ids.append(json.loads(got.body)["id"])
    return answers


def test_requests_mutated_at_random_are_refused_in_words_and_soon(service):
    answers = asyncio.run(all_answers(service, random.Random(SEED)))
    statuses = {got.status for _, got, _ in answers}
    assert statuses == {200, 400, 401, 404, 405, 409, 413, 415, 429}  # many ways were gone
    for sent, got, seconds in answers:
        assert got.status < 500, sent
        assert seconds < LONGEST_SECONDS, sent
        assert b"Traceback" not in got.body and b'File "' not in got.body, sent
        if got.status >= 400 and sent.method != "HEAD":
            assert set(got.error) >= {"message", "type", "param", "code"}, sent
            assert str(service.queue.folder) not in got.body.decode(), sent
    accepted = {entry.id for entry in service.queue.page("ada", limit=MUTATED)[0]}
    # Of what was refused, and of what was deleted, nothing is left.
    assert {folder.name for folder in service.queue.folder.iterdir()} == accepted


# --- one by one -----------------------------------------------------------------------------------


def post(service: Service, fields: dict[str, object]) -> Got:
    return service.ask(Sent("POST", "/v1/videos", b"", service.headers(FORM), form(fields)))


def test_an_unexpected_error_is_answered_and_the_connection_serves_the_next_request(
    service, monkeypatch
):
    """On a real server, with one connection kept."""

    def fail(*_):
        raise KeyError("planted")

    monkeypatch.setattr(JobSubmitter, "accept", fail)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(service.app, http="h11", limit_concurrency=8)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        client = http.client.HTTPConnection(*listener.getsockname(), timeout=20)
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {service.token.decode()}",
        }
        client.request("POST", "/v1/videos", json.dumps({"prompt": "rain"}), headers)
        kept, answer = client.sock, client.getresponse()
        error = json.loads(answer.read())["error"]
        assert (answer.status, error["code"]) == (500, "internal_error")
        client.request("GET", "/health")
        assert client.sock is kept is not None
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())) == (200, {"status": "ok"})
        client.close()
        server.should_exit = True
        thread.join(timeout=20)


def test_a_body_that_never_ends_is_given_up(service, monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    for kind, start in ((FORM, b"--b\r\n"), (b"application/json", b"{")):
        sent = Sent("POST", "/v1/videos", b"", service.headers(kind), start)
        got = service.ask(sent, hangs=True)
        assert (got.status, got.error["code"]) == (408, "request_timeout")


def test_a_body_beyond_the_limit_is_refused_whether_it_says_so_or_not(service):
    body = b'{"prompt": "' + b"x" * MOST_BODY + b'"}'
    for more in ({}, {"content_length": b"%d" % len(body)}):
        got = service.ask(Sent("POST", "/v1/videos", b"", service.headers(**more), body))
        assert (got.status, got.error["code"]) == (413, "body_too_large")


def test_a_prompt_of_a_megabyte_is_refused_without_repeating_it(service):
    got = post(service, {"prompt": "x" * 1_000_000})
    assert (got.status, got.error["code"]) == (400, "prompt_too_long") and len(got.body) < 500


def picture(size: tuple[int, int]) -> bytes:
    file = BytesIO()
    Image.new("1", size).save(file, format="PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\0\0\0\x18ftypmp42" + bytes(1000), "no picture that can be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture that can be read"),
        (picture((12_000, 12_000)), "12000x12000 pixels"),
        (picture((64, 64))[:-30], "no picture that can be read"),
        (picture((1, 1)), "input_reference: no video can have its size; wanted 2 to"),
    ],
    ids=["an mp4", "an svg", "a bomb", "half a picture", "one pixel"],
)
def test_what_is_called_png_and_is_none_is_refused(service, content, what):
    got = post(service, {"prompt": "waves", "size": SIZE, "input_reference": content})
    assert (got.status, got.error["code"]) == (400, "invalid_image")
    assert what in got.error["message"] and not list(service.queue.folder.iterdir())


def test_what_the_model_cannot_do_is_said_in_the_names_of_fields(service):
    for fields, words in (
        ({"guidance_scale": "3"}, "takes no video_cfg_guidance_scale"),
        ({"seed": "abc"}, "seed: got 'abc', wanted a valid integer"),
        ({"upscale": "temporal"}, "no temporal upsampler"),
    ):
        got = post(service, {"prompt": "waves", "size": SIZE, **fields})
        assert got.status == 400 and words in got.error["message"]
        assert "--" not in got.error["message"]


def test_rules_between_fields_are_said_by_the_requests_field(service):
    for fields, param, words in (
        ({"negative_prompt": "rain"}, "negative_prompt", "takes no negative_prompt"),
        ({"num_steps": 20}, "num_inference_steps", "num_inference_steps 20: the distilled recipe"),
        ({"upscale": "spatial"}, "upscale", "this service has no spatial upsampler"),
    ):
        got = post(service, {"prompt": "waves", "size": SIZE, **fields})
        assert (got.status, got.error["param"]) == (400, param)
        assert words in got.error["message"] and "--" not in got.error["message"]


def test_the_api_describes_itself_as_it_answers(service):
    described = json.loads(service.ask(Sent("GET", "/openapi.json")).body)
    paths, schemas = described["paths"], described["components"]["schemas"]
    served = {path for path in paths if path.startswith("/v1")}
    assert served >= {"/v1/videos", "/v1/videos/{id}/content", "/v1/models", "/v1/queue"}
    body = paths["/v1/videos"]["post"]["requestBody"]["content"]
    assert set(body) == {"application/json", "multipart/form-data"}
    assert "requestBody" not in paths["/v1/videos"]["get"]
    references = {*re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described))}
    assert references <= set(schemas) and {"VideoRequest", "HeldImage"} <= references
    id = accepted(service)
    for path, route in (
        (f"/v1/videos/{id}", "/v1/videos/{id}"),
        ("/v1/videos", "/v1/videos"),
        ("/v1/models", "/v1/models"),
        ("/v1/models/tiny", "/v1/models/{id}"),
        ("/v1/queue", "/v1/queue"),
    ):
        answer = paths[route]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        fields = schemas[answer["$ref"].rpartition("/")[2]]["properties"]
        assert set(json.loads(get(service, path).body)) == set(fields), path
    assert set(get(service, "/v1/videos/x").error) == set(schemas["ErrorFields"]["properties"])


def test_a_list_of_videos_is_asked_for_within_limits(service):
    for query, param in ((b"limit=0", "limit"), (b"limit=1e9", "limit"), (b"order=up", "order")):
        got = get(service, "/v1/videos", query)
        assert (got.status, got.error["param"]) == (400, param)
    assert get(service, "/v1/videos", b"limit=0", authorization=b"").status == 401


def test_json_that_curl_sends_as_a_form_is_told_what_to_type(service):
    headers = service.headers(b"application/x-www-form-urlencoded")
    got = service.ask(Sent("POST", "/v1/videos", b"", headers, b'{"prompt": "waves"}'))
    assert got.status == 415 and "Content-Type: application/json" in got.error["message"]


def test_a_form_that_cannot_be_parsed_is_refused_in_words(service):
    field = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nwaves\r\n'
    for kind, body in (
        (FORM + b"; charset=undefined", field + b"--b--\r\n"),
        (FORM, field.replace(b": ", b"\0: ")),
        (b"multipart/form-data", field),
        (b"application/x-www-form-urlencoded", b"prompt=waves&" * 100),
    ):
        got = service.ask(Sent("POST", "/v1/videos", b"", service.headers(kind), body))
        assert (got.status, got.error["code"]) == (400, "invalid_body"), got.body


def test_a_page_of_another_site_can_send_nothing(service):
    for header, code in (
        ({"origin": b"http://evil.example"}, "wrong_origin"),
        ({"origin": b"null"}, "wrong_origin"),
    ):
        got = service.ask(Sent("GET", "/v1/videos", b"", service.headers(**header)))
        assert (got.status, got.error["code"]) == (403, code)


# --- a video that is being made -------------------------------------------------------------------


def accepted(service: Service, **fields) -> str:
    body = json.dumps({"prompt": "waves", "size": SIZE, **fields}).encode()
    got = service.ask(Sent("POST", "/v1/videos", b"", service.headers(), body))
    assert got.status == 200, got.body
    return json.loads(got.body)["id"]


def get(service: Service, path: str, query: bytes = b"", **headers) -> Got:
    return service.ask(Sent("GET", path, query, service.headers(**headers)))


def test_a_preview_is_its_owners_while_the_video_is_made_and_no_longer(service, tmp_path):
    queue, id = service.queue, accepted(service)
    path, query = f"/v1/videos/{id}/content", b"variant=preview"
    assert get(service, path, query).error["code"] == "preview_not_found"
    (entry,) = queue.claim("w", queue.next_batch_key(), 1)
    times = {"denoise_steps_ms": {"stage_1": [1.5]}}
    assert queue.report(entry, 10, {"stage": "stage_1", "preview": "anBlZw=="} | times)
    got = get(service, path, query)
    assert (got.status, got.body) == (200, b"jpeg")
    assert got.headers[b"content-type"] == b"image/jpeg"
    assert got.headers[b"cache-control"] == b"no-store"
    # The object says that there is one; the picture is not in every answer.
    shown = json.loads(get(service, f"/v1/videos/{id}").body)
    assert shown["detail"] == {"stage": "stage_1", "preview": True} | times
    other = b"Bearer " + new_token(tmp_path / "tokens.json", "bob").encode()
    for token, status in ((other, 401), (b"", 401)):  # bob's came after the service began
        assert get(service, path, query, authorization=token).status == status
    assert queue.get("bob", id) is None
    assert queue.complete(entry, 0, times)
    assert get(service, path, query).error["code"] == "preview_not_found"
    assert json.loads(get(service, f"/v1/videos/{id}").body)["detail"] == times


def test_a_video_that_failed_keeps_no_preview(service):
    queue, id = service.queue, accepted(service)
    (entry,) = queue.claim("w", queue.next_batch_key(), 1)
    assert queue.report(entry, 10, {"preview": "anBlZw=="}) and queue.fail(entry, "x", "y")
    assert queue.get("ada", id).detail is None


def test_a_waiting_video_says_how_many_are_before_it_and_the_queue_how_many_wait(service):
    first, second = accepted(service), accepted(service)
    places = [json.loads(get(service, f"/v1/videos/{id}").body)["ahead"] for id in (first, second)]
    assert places == [0, 1]
    wanted = {"object": "queue", "waiting": 2, "in_progress": 0, "workers": 0}
    assert json.loads(get(service, "/v1/queue").body) == wanted
    assert get(service, "/v1/queue", authorization=b"").status == 401


def test_a_request_chooses_among_the_commands_sets_of_loras(service, tmp_path):
    style = tmp_path / "style.safetensors"
    save_file({"x": torch.zeros(2)}, style)
    none = dict.fromkeys(("loras", "stage_1_loras", "stage_2_loras"), ())
    sets = {"default": none, "anime": none | {"loras": (Lora(style, 0.8),)}}
    service.sizes.lora_sets = sets
    (model,) = json.loads(get(service, "/v1/models").body)["data"]
    assert model["lora_sets"] == {
        "default": [],
        "anime": [{"name": "style.safetensors", "strength": 0.8}],
    }
    for name, loras in (("anime", sets["anime"]["loras"]), ("default", ()), (None, ())):
        fields = {"prompt": "waves crash"} | ({"lora_set": name} if name else {})
        id = json.loads(post(service, fields).body)["id"]
        entry = service.queue.get("ada", id)
        assert job_of(entry.params, tmp_path).loras == loras
    keys = {entry.batch_key for entry in service.queue.page("ada")[0]}
    assert len(keys) == 2  # jobs of one set are made together
    refused = post(service, {"prompt": "waves crash", "lora_set": "noir"})
    assert (refused.status, refused.error["param"]) == (400, "lora_set")


def test_the_model_says_what_a_request_gets_that_says_nothing(service):
    (model,) = json.loads(get(service, "/v1/models").body)["data"]
    assert model["default"]["size"] == SIZE and model["default"] in model["sizes"]
