"""What the API answers, to strangers too, whose requests leave nothing; and what it says of itself."""

import json
import random
import re

import pytest
from conftest import ROOT
from fuzz import times
from helpers import within
from service_app import FORM, MOST_BODY, SIZE, VIDEOS, Sent, Service, form, opened

from ltx_neuron.errors import UserError
from ltx_neuron.report.price import Price
from ltx_neuron.service import limits
from ltx_neuron.service.api_error import ERRORS, ApiError
from ltx_neuron.service.tokens import LOCAL, Tokens, new_token

STRANGE = (
    *(None, True, False, "", " ", "\0", "\ud800", "é" * 300, "../../etc/passwd", "%00", "nan"),
    *(0, -1, 1.5, 1e308, 10**40, float("inf"), float("nan"), "1" * 400, [], {}, [[]], {"a": {}}),
    *("768x512", "x", "1x", [None], {"image_url": "data:image/png;base64,AAAA"}, "[" * 3000),
    *({"file_id": "a"}, {"image_url": "http://169.254.169.254/"}, [{"frame": 1}], ["a"] * 500),
)
# A size that is not compiled, mostly: the images of its requests are not read.
FIELDS = {"prompt": "waves crash", "size": "64x64", "seconds": "5", "seed": 5, "two_stage": False, "images": []}
FIELDS |= {"extra_params": {"negative_prompt": None}, "upscale": None, "model": "tiny", "fps": 24}
IDS = "video_" + "0" * 32, "../x", "\0", "é" * 99, "video_\ufffd", ""
METHODS = "GET", "GET", "DELETE", "HEAD", "PUT", "PATCH", "OPTIONS", "G\xe9T"
QUERIES = b"limit=2&order=asc", b"variant=thumbnail", b"after=x&variant=../x", b""
POSTED = *(VIDEOS,) * 9, "/v1/videos/edits", "/v1/videos/é/remix"
KEYS = b"a", b"b", b"\xff", b"a" * 300, b""
FIELD = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nwaves\r\n'
URLENCODED = b"application/x-www-form-urlencoded"
UNREADABLE = [
    (URLENCODED, b'{"prompt": "waves"}', 415, "unsupported_media_type", "Content-Type: application/json"),
    (b"text/plain", b"waves", 415, "unsupported_media_type", "send multipart/form-data or JSON"),
    (FORM + b"; charset=undefined", FIELD + b"--b--\r\n", 400, "invalid_body", "multipart/form-data"),
    (FORM, FIELD.replace(b": ", b"\0: "), 400, "invalid_body", "multipart/form-data"),
    (b"multipart/form-data", FIELD, 400, "invalid_body", "multipart/form-data"),
    (URLENCODED, b"prompt=waves&" * 100, 400, "invalid_body", "Too many fields"),
    (FORM, FIELD + FIELD + b"--b--\r\n", 400, "invalid_value", "prompt is sent twice"),
    (b"application/json", b"[1]", 400, "invalid_json", "not a JSON object"),
]


def flipped(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(changed) + 1)
        changed[at : at + rng.choice((0, 1, 1, 9))] = rng.randbytes(rng.choice((0, 1, 1, 3)))
    return bytes(changed)


def mutated(rng: random.Random, service: Service, id: str) -> Sent:
    """A request with a body, or one without that may name a video that there is."""
    if rng.random() < 0.5:
        id = rng.choice([id, id, id, *IDS])
        path = rng.choice((VIDEOS, "/v1/models", f"{VIDEOS}/{id}")) + rng.choice(("", "", "/content", "/remix"))
        query = bytes(b for b in flipped(rng, rng.choice(QUERIES)) if 0x20 < b < 0x7F)  # as h11 lets them through
        return Sent(rng.choice(METHODS), path, query, service.headers())
    fields = {name: value for name, value in FIELDS.items() if rng.random() < 0.7}
    fields |= rng.choice(({},) * 4 + ({"size": SIZE},) * 5 + ({"input_reference": b"\x89PNG\r\n"},))
    for _ in range(rng.randint(0, 3)):
        name = rng.choice([*fields, "input_reference", "video_stg_blocks", "guidance_scale", "lora", "x"])
        fields[name + rng.choice(("",) * 9 + ("[]", "[a]", "[image_url]", "\0", "é"))] = rng.choice(STRANGE)
    body, kind = form(fields), FORM
    if rng.random() < 0.5 and not isinstance(fields.get("input_reference"), bytes):
        body = json.dumps(fields, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")
        kind = b"application/json"
    more = rng.choice(({},) * 5 + tuple({"idempotency_key": key} for key in KEYS) + ({"content_length": b"-1"},))
    body = flipped(rng, body) if rng.random() < 0.4 else body
    return Sent("POST", rng.choice(POSTED), b"", service.headers(kind, **more), body)


def test_requests_mutated_at_random_are_refused_with_a_documented_error_and_soon(service):
    statuses, ids = set(), [service.accepted()]
    for seed in range(times(100, 10_000)):  # seeds, not hypothesis: each machine sends the same requests
        chance = random.Random(seed)
        sent = mutated(chance, service, ids[-1])
        if chance.random() < 0.2:
            headers = dict(sent.headers)
            name = chance.choice([*headers])
            headers[name] = chance.choice((b"", b"\xff", b"a" * 9000, flipped(chance, headers[name]), b"-1", b"9" * 30))
            sent = sent._replace(headers=tuple(headers.items()))
        with within(20):  # a picture takes a process of its own
            got = service.ask(sent)
        statuses.add(got.status)
        ids += [got.json["id"]] if sent.method == "POST" and got.status == 200 else []
        assert got.status < 500 and b"Traceback" not in got.body and b'File "' not in got.body
        if got.status >= 400 and sent.method != "HEAD":
            assert set(got.error) >= {"message", "type", "param"} and got.error["code"] in ERRORS[got.status]
            assert str(service.queue.folder) not in got.body.decode()
    assert len(statuses) > 1
    # Of what was refused, and of what was deleted, nothing is left.
    stored = {entry.id for entry in service.queue.page("ada", limit=10_000)[0]}
    assert {folder.name for folder in service.queue.folder.iterdir()} == stored


@pytest.mark.parametrize(("kind", "start"), [(FORM, b"--b\r\n"), (b"application/json", b"{")])
def test_a_body_that_never_ends_times_out(service, monkeypatch, kind, start):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    got = service.ask(Sent("POST", VIDEOS, b"", service.headers(kind), start), hangs=True)
    assert got.refused == (408, "request_timeout")


def test_a_body_beyond_the_limit_is_refused_with_and_without_its_length(service):
    body = b'{"prompt": "' + b"x" * MOST_BODY + b'"}'
    for more in ({}, {"content_length": b"%d" % len(body)}):
        got = service.ask(Sent("POST", VIDEOS, b"", service.headers(**more), body))
        assert got.refused == (413, "body_too_large")
        assert got.headers[b"connection"] == b"close"  # the rest is not read


@pytest.mark.parametrize(("kind", "body", "status", "code", "message"), UNREADABLE)
def test_a_body_that_cannot_be_parsed_is_refused(service, kind, body, status, code, message):
    got = service.ask(Sent("POST", VIDEOS, b"", service.headers(kind), body))
    assert got.refused == (status, code) and message in got.error["message"]


def test_a_query_outside_its_limits_is_refused_by_its_name_and_without_a_token_not_read(service):
    for query, param in ((b"limit=0", "limit"), (b"order=up", "order")):
        got = service.get(VIDEOS, query)
        assert (got.status, got.error["param"]) == (400, param)
    assert service.get(VIDEOS, b"limit=0", authorization=b"").status == 401


def test_a_preview_is_its_owners_while_the_video_is_made_and_no_longer(service):
    queue, id = service.queue, service.accepted()
    path, query = f"{VIDEOS}/{id}/content", b"variant=preview"
    assert service.get(path, query).error["code"] == "preview_not_found"
    entry, times = service.claimed(), {"denoise_steps_ms": {"stage_1": [1.5]}}
    assert queue.report(entry, 10, {"stage": "stage_1", "preview": "anBlZw=="} | times)
    got = service.get(path, query)
    assert (got.status, got.body) == (200, b"jpeg")
    assert (got.headers[b"content-type"], got.headers[b"cache-control"]) == (b"image/jpeg", b"no-store")
    # The object says that there is one; the picture is not in every answer.
    assert service.get(f"{VIDEOS}/{id}").json["detail"] == {"stage": "stage_1", "preview": True} | times
    assert service.get(path, query, authorization=b"").status == 401
    assert queue.complete(entry, 0, times) and service.get(path, query).error["code"] == "preview_not_found"


def test_a_failed_video_is_tried_again_with_its_seed_and_files_and_no_other_is(service, tmp_path):
    queue, id = service.queue, service.accepted(seed=7)
    path = f"{VIDEOS}/{id}/retry"
    assert service.send("POST", path).refused == (409, "not_failed")
    entry = service.claimed()
    (queue.folder_of(id) / "image-0.png").write_bytes(b"x")
    assert queue.report(entry, 10) and queue.fail(entry, "profile_mismatch", "y")
    assert service.send("POST", path, authorization=b"").status == 401
    bob = f"Bearer {new_token(tmp_path / 'tokens.json', 'bob')}".encode()
    with opened(tmp_path) as again:  # which knows both tokens
        assert again.send("POST", path, authorization=bob).refused == (404, "video_not_found")
    video = service.send("POST", path).json
    assert (video["id"], video["status"], video["progress"], video["seed"]) == (id, "queued", 0, 7)
    assert video["error"] is video["completed_at"] is video["started_at"] is None and video["ahead"] == 0
    assert not queue.complete(entry)  # the worker of the failed attempt comes too late
    entry = service.claimed()
    assert entry.id == id and (queue.folder_of(id) / "image-0.png").is_file()
    queue.fail(entry, "x", "y")
    for _ in range(service.submitter.limits.max_queue):
        service.accepted()
    assert service.send("POST", path).refused == (429, "queue_full") and queue.get("ada", id).status == "failed"


def test_a_video_has_its_settings_and_place_and_the_queue_its_counts_and_workers(service, tmp_path, files):
    id = service.accepted(seed=7, two_stage=False, negative_prompt="fog", extra_params={"nag_scale": 1.0})
    video = service.get(f"{VIDEOS}/{id}").json
    assert video["settings"] == {"negative_prompt": "fog", "nag_scale": 1.0}
    assert (video["seed"], video["two_stage"], video["inputs"], video["ahead"]) == (7, False, [], 0)
    video = service.post_form(size=SIZE, input_reference=files["picture.png"]).json
    assert (video["inputs"], video["ahead"]) == (["input_reference"], 1)
    counts = {"object": "queue", "waiting": 2, "in_progress": 0, "workers": 0, "starting": False}
    assert service.get("/v1/queue").json == counts and service.get("/v1/queue", authorization=b"").status == 401
    with opened(tmp_path, supervised=True) as supervised:
        assert supervised.get("/v1/queue").json == counts | {"starting": True}
        supervised.queue.renew("w", {})
        assert supervised.get("/v1/queue").json == counts | {"workers": 1}


def test_the_metrics_add_up_the_workers_and_have_the_price_of_a_clip_where_the_machine_has_one(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    state = {"videos": 2, "video_seconds": 8.0, "busy_seconds": 40.0, "phases": {"upsample": 1.0}}
    dollars = 80.0 * 36 / 3600 / 4  # of the busy seconds of all workers
    costs = {"clip": dollars / 5, "video_second": dollars / 16, "hour": 36}
    for price, expected in ((None, {}), (Price(36.0, 4), costs)):
        with opened(tmp_path, price=price) as service:
            for name, its in {"busy": state, "earlier": {"videos": 1, "phases": {}}, "other": state}.items():
                service.queue.renew(name, its)
            families = text_string_to_metric_families(service.get("/metrics").body.decode())
        metrics = {sample.name.removeprefix("ltx_"): sample.value for family in families for sample in family.samples}
        totals = {"videos": 5, "video_seconds": 16, "busy_seconds": 80, "phase_seconds": 2}
        assert {name: metrics[f"{name}_total"] for name in totals} == totals and metrics["workers"] == 3
        found = {name.removeprefix("dollars_per_"): value for name, value in metrics.items() if "dollars" in name}
        assert found == pytest.approx(expected)


def test_a_token_is_told_once_and_kept_as_a_hash_and_a_broken_file_is_refused(tmp_path):
    path = tmp_path / "tokens.json"
    ada, bob = new_token(path, "ada"), new_token(path, "bob")
    assert ada not in path.read_text() and path.stat().st_mode & 0o077 == 0
    tokens = Tokens.load(path)
    assert tokens.owner_of(f"Bearer {ada}") == "ada" and tokens.owner_of(f"bearer {bob}") == "bob"
    for wrong in (None, "", ada, f"Basic {ada}", f"Bearer {ada[:-1]}", "Bearer ", "Bearer \udcff"):
        assert tokens.owner_of(wrong) is None
    again = new_token(path, "ada")
    assert [Tokens.load(path).owner_of(f"Bearer {token}") for token in (ada, again)] == [None, "ada"]
    assert Tokens.load(None).owner_of(None) == LOCAL  # without tokens there is one owner
    for content in ("{}", '{"tokens": {}}', '{"tokens": {"ada": "secret"}}', '{"tokens": []}'):
        path.write_text(content)
        with pytest.raises(UserError, match="--new-token NAME"):
            Tokens.load(path)
    with pytest.raises(UserError, match="wanted 1 to 64 characters"):
        new_token(path, "../ada")


def test_an_owner_may_ask_so_often_and_no_more(monkeypatch):
    now, rate = [100.0], limits.TokenBucket(per_minute=60)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for _ in range(20):
        rate.take("ada")
    with pytest.raises(ApiError) as caught:
        rate.take("ada")
    assert caught.value.status == 429 and caught.value.headers["x-should-retry"] == "true"
    rate.take("bob")
    now[0] += 1
    rate.take("ada")


@pytest.fixture
def described(service) -> dict:
    return service.get("/openapi.json").json


def operations(described: dict):
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_every_operation_is_answered_as_described_to_its_examples(service, described):
    id, entry, schemas, answered = service.accepted(), service.claimed(), described["components"]["schemas"], set()
    for name in ("video.mp4", "thumbnail.jpg"):
        (service.queue.folder_of(id) / name).write_bytes(b"x")
    service.queue.complete(entry)
    asked = [operation for operation in operations(described) if operation[0] != "POST"]
    for method, path, operation in sorted(asked, key=lambda operation: operation[0] == "DELETE"):
        query, place = [], path
        for parameter in operation.get("parameters", ()):
            value = str(parameter["example"])
            value = id if value.startswith("video_") else value  # one that there is
            place = place.replace(f"{{{parameter['name']}}}", value)
            query += [f"{parameter['name']}={value}".encode()] * (parameter["in"] == "query")
        got = service.send(method, place, b"&".join(query))
        assert got.status == (503 if path == "/ready" else 200), (path, got.body)
        answer = operation["responses"]["200"]["content"].get("application/json", {}).get("schema", {})
        if "$ref" in answer:
            assert set(got.json) == set(schemas[answer["$ref"].rpartition("/")[2]]["properties"]), path
            answered.add(path)
    assert answered == {VIDEOS, f"{VIDEOS}/{{id}}", "/v1/models", "/v1/models/{id}", "/v1/queue"}
    assert set(service.get(f"{VIDEOS}/x").error) == set(schemas["ErrorFields"]["properties"])


def test_the_description_is_valid_and_has_every_error_with_its_codes(described):
    pytest.importorskip("openapi_spec_validator").validate(described)
    paths, schemas = described["paths"], described["components"]["schemas"]
    assert set(paths[VIDEOS]["post"]["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    references = {*re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described))}
    assert references <= set(schemas) and {"VideoRequest", "HeldImage"} <= references
    for _, path, operation in operations(described):
        if path.startswith("/v1/"):  # /v1 itself needs no token
            answers = operation["responses"]
            assert {"401", "403", "500", "503"} <= set(answers), path
            for status in set(answers) - {"200"}:
                assert tuple(re.findall(r"`(\w+)`", answers[status]["description"])) == ERRORS[int(status)]


def test_the_page_of_the_description_needs_no_token_has_every_operation_and_asks_no_other_site(service, described):
    for path in ("/openapi.json", "/docs", "/docs.css"):
        got = service.get(path, authorization=b"")
        assert got.status == 200 and str(ROOT).encode() not in got.body
    got = service.get("/docs")
    policy, page = got.headers[b"content-security-policy"].decode(), got.body.decode()
    assert "default-src 'self'" in policy and "unsafe" not in policy
    assert not re.search(r"<(?:script|style|iframe)|<[^>]* (?:on\w+|style)=", page)
    ids, addresses = re.findall(r' id="([^"]*)"', page), re.findall(r' (?:href|src)="([^"]*)"', page)
    links = {address[1:] for address in addresses if address.startswith("#")}
    assert links <= {*ids} and len({*ids}) == len(ids) and "VideoRequest" in ids
    assert {address for address in addresses if address[0] != "#"} == {"docs.css", "openapi.json"}
    assert {operation["operationId"] for _, _, operation in operations(described)} <= links
