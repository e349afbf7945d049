"""The API as a stranger finds it, in this process: requests that are mutated at random, slow ones
and large ones are refused in words, soon, and leave nothing behind."""

import http.client
import json
import random
import re
import socket
import threading
import time
from io import BytesIO

import pytest
import torch
import uvicorn
from fuzz import on_random
from PIL import Image
from safetensors.torch import save_file

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from jobs import make_job
from service_app import FORM, MOST_BODY, SIZE, Got, Sent, Service, form, get, opened

from ltx_neuron.report.price import Price
from ltx_neuron.service import limits
from ltx_neuron.service.api_error import ERRORS
from ltx_neuron.service.jobs import JobSubmitter, job_of
from ltx_neuron.service.tokens import new_token
from ltx_neuron.weights.lora import Lora

LONGEST_SECONDS = 20  # of one request; a picture takes a process of its own


@pytest.fixture
def service(tmp_path):
    with opened(tmp_path) as made:
        yield made


# --- requests that are mutated --------------------------------------------------------------------

STRANGE = (
    *(None, True, False, "", " ", "\0", "\ud800", "é" * 300, "../../etc/passwd", "%00", "nan"),
    *(0, -1, 1.5, 1e308, 10**40, float("inf"), float("nan"), "1" * 400, [], {}, [[]], {"a": {}}),
    *("768x512", "x", "1x", [None], {"image_url": "data:image/png;base64,AAAA"}, "[" * 3000),
    *({"file_id": "a"}, {"image_url": "http://169.254.169.254/"}, [{"frame": 1}], ["a"] * 500),
)


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


def mutated(rng: random.Random, service: Service, id: str) -> Sent:
    """A request that is wrong somewhere, or nowhere; id: of a video that there is."""
    if rng.random() < 0.7:
        sent = mutated_post(rng, service)
    else:
        id = rng.choice([id, id, id, "video_" + "0" * 32, "../x", "\0", "é" * 99, "video_\ufffd", ""])
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


def test_requests_mutated_at_random_are_refused_in_words_and_soon(service):
    answers, ids = [], [accepted(service)]

    def check(chance: random.Random) -> None:
        sent, began = mutated(chance, service, ids[-1]), time.monotonic()
        got = service.ask(sent)
        answers.append(got.status)
        if sent.method == "POST" and got.status == 200:
            ids.append(json.loads(got.body)["id"])
        assert got.status < 500 and time.monotonic() - began < LONGEST_SECONDS
        assert b"Traceback" not in got.body and b'File "' not in got.body
        if got.status >= 400 and sent.method != "HEAD":
            assert set(got.error) >= {"message", "type", "param", "code"}
            assert got.error["code"] in ERRORS[got.status]
            assert str(service.queue.folder) not in got.body.decode()

    on_random(check)
    assert len({*answers}) > 2  # several ways were gone
    left = {entry.id for entry in service.queue.page("ada", limit=len(answers))[0]}
    # Of what was refused, and of what was deleted, nothing is left.
    assert {folder.name for folder in service.queue.folder.iterdir()} == left


# --- one by one -----------------------------------------------------------------------------------


def post(service: Service, fields: dict[str, object]) -> Got:
    return service.ask(Sent("POST", "/v1/videos", b"", service.headers(FORM), form(fields)))


def test_an_unexpected_error_is_answered_and_the_connection_serves_the_next_request(service, monkeypatch):
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
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {service.token.decode()}"}
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
        (b"\0\0\0\x18ftypmp42" + bytes(1000), "not a readable picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a readable picture"),
        (picture((12_000, 12_000)), "12000x12000 pixels"),
        (picture((64, 64))[:-30], "not a readable picture"),
        (picture((1, 1)), "input_reference: a video cannot have its size; wanted 2 to"),
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
        ({"negative_prompt": "rain"}, "negative_prompt", "needs nag_scale"),
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
    for header, code in (({"origin": b"http://evil.example"}, "wrong_origin"), ({"origin": b"null"}, "wrong_origin")):
        got = service.ask(Sent("GET", "/v1/videos", b"", service.headers(**header)))
        assert (got.status, got.error["code"]) == (403, code)


# --- a video that is being made -------------------------------------------------------------------


def accepted(service: Service, **fields) -> str:
    body = json.dumps({"prompt": "waves", "size": SIZE, **fields}).encode()
    got = service.ask(Sent("POST", "/v1/videos", b"", service.headers(), body))
    assert got.status == 200, got.body
    return json.loads(got.body)["id"]


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


def retried(service: Service, id: str, **headers) -> Got:
    return service.ask(Sent("POST", f"/v1/videos/{id}/retry", b"", service.headers(**headers)))


def test_a_failed_video_is_tried_again_with_its_seed_and_files_and_no_other_is(service):
    queue, id = service.queue, accepted(service, seed=7)
    assert (retried(service, id).status, retried(service, id).error["code"]) == (409, "not_failed")
    (entry,) = queue.claim("w", queue.next_batch_key(), 1)
    (queue.folder_of(id) / "image-0.png").write_bytes(b"x")
    assert queue.report(entry, 10) and queue.fail(entry, "profile_mismatch", "y")
    assert retried(service, id, authorization=b"").status == 401
    other = new_token(service.queue.folder.parent / "tokens.json", "bob")
    with opened(service.queue.folder.parent) as again:  # which knows both tokens
        bob = retried(again, id, authorization=f"Bearer {other}".encode())
        assert (bob.status, bob.error["code"]) == (404, "video_not_found")
    video = json.loads(retried(service, id).body)
    assert (video["id"], video["status"], video["progress"]) == (id, "queued", 0)
    assert video["error"] is video["completed_at"] is video["started_at"] is None
    assert (video["seed"], video["ahead"]) == (7, 0)
    assert not queue.complete(entry)  # the worker of the failed attempt comes too late
    (entry,) = queue.claim("w", queue.next_batch_key(), 1)
    assert entry.id == id and (queue.folder_of(id) / "image-0.png").is_file()


def test_a_full_queue_takes_no_failed_video_back(service):
    queue, id = service.queue, accepted(service)
    (entry,) = queue.claim("w", queue.next_batch_key(), 1)
    queue.fail(entry, "x", "y")
    for _ in range(service.submitter.limits.max_queue):
        accepted(service)
    assert (retried(service, id).status, retried(service, id).error["code"]) == (429, "queue_full")
    assert queue.get("ada", id).status == "failed"


def test_a_video_has_the_fields_that_a_request_like_it_needs(service):
    off = {"nag_scale": 1.0}  # needs no graphs
    sent = {"seed": 7, "two_stage": False, "negative_prompt": "fog", "extra_params": off}
    video = json.loads(get(service, f"/v1/videos/{accepted(service, **sent)}").body)
    assert video["settings"] == {"negative_prompt": "fog", "nag_scale": 1.0}
    assert (video["seed"], video["two_stage"], video["inputs"]) == (7, False, [])
    picture = BytesIO()
    Image.new("RGB", (64, 64)).save(picture, "PNG")
    body = form({"prompt": "waves", "size": SIZE, "input_reference": picture.getvalue()})
    got = service.ask(Sent("POST", "/v1/videos", b"", service.headers(FORM), body))
    assert json.loads(got.body)["inputs"] == ["input_reference"]
    (entry,) = service.queue.claim("w", service.queue.next_batch_key(), 1)
    before = int(time.time())
    service.queue.report(entry, 10)
    started = json.loads(get(service, f"/v1/videos/{entry.id}").body)["started_at"]
    assert before <= started <= time.time()


def test_a_waiting_video_says_how_many_are_before_it_and_the_queue_how_many_wait(service):
    first, second = accepted(service), accepted(service)
    places = [json.loads(get(service, f"/v1/videos/{id}").body)["ahead"] for id in (first, second)]
    assert places == [0, 1]
    wanted = {"object": "queue", "waiting": 2, "in_progress": 0, "workers": 0}
    wanted |= {"starting": False}
    assert json.loads(get(service, "/v1/queue").body) == wanted
    assert get(service, "/v1/queue", authorization=b"").status == 401


def test_a_service_that_starts_its_worker_says_so_until_the_worker_is_alive(service):
    with opened(service.queue.folder.parent, supervised=True) as supervised:

        def state() -> dict:
            return json.loads(get(supervised, "/v1/queue").body)

        assert (state()["workers"], state()["starting"]) == (0, True)
        supervised.queue.renew("w", {})
        assert (state()["workers"], state()["starting"]) == (1, False)


def test_the_apis_address_points_at_the_page_the_documentation_and_the_endpoints(service):
    content = json.loads(get(service, "/v1", authorization=b"").body)
    assert (content["page"], content["docs"]) == (None, "/docs")  # this service has no page
    assert {"POST /v1/videos", "GET /v1/models", "GET /metrics"} <= {*content["endpoints"]}
    assert get(service, content["docs"]).status == get(service, content["openapi"]).status == 200
    with opened(service.queue.folder.parent, page=True) as with_page:
        address = json.loads(get(with_page, "/v1").body)["page"]
        assert b"<html" in get(with_page, address).body


def test_the_metrics_have_the_price_of_a_clip_where_the_machine_has_one(service):
    service.queue.renew("w", {"busy_seconds": 36.0, "videos": 2, "video_seconds": 10.0})
    assert b"ltx_dollars" not in get(service, "/metrics").body
    with opened(service.queue.folder.parent, price=Price(10.0, 1)) as priced:
        text = get(priced, "/metrics").body.decode()
    assert "ltx_dollars_per_clip 0.05" in text and "ltx_dollars_per_video_second 0.01" in text


def test_a_request_chooses_among_the_commands_sets_of_loras(service, tmp_path):
    style = tmp_path / "style.safetensors"
    save_file({"x": torch.zeros(2)}, style)
    sets = {"default": make_job(), "anime": make_job(loras=(Lora(style, 0.8),))}
    service.sizes.lora_sets = sets
    (model,) = json.loads(get(service, "/v1/models").body)["data"]
    assert model["lora_sets"] == {"default": [], "anime": [{"name": "style.safetensors", "strength": 0.8}]}
    for name, loras in (("anime", sets["anime"].loras), ("default", ()), (None, ())):
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
