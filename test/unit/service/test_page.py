"""The page at / without a browser: its files ask no other site, and its session cookie stands for a token."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")


from ltx_neuron.service import page
from ltx_neuron.service.fields import KNOWN
from ltx_neuron.service.picture import FORMATS
from unit.service.client import FORM, MOST_BODY, SIZE, VIDEOS, Got, Sent, accepted, answer_of, form, get, opened, send

HOST = b"127.0.0.1:8000"
OWN, EVIL = b"http://" + HOST, b"http://evil.example"
FILES = ("/", "/web/page.js", "/web/page.css", "/web/icon.svg")
WEB = Path(page.__file__).parent / "web"


@pytest.fixture
def service(tmp_path):
    with opened(tmp_path, page=True) as service:
        yield service


def test_the_page_and_its_files_name_no_other_site_and_run_no_other_script(service):
    answers = {path: get(service, path) for path in FILES}
    assert all(got.status == 200 for got in answers.values())
    html = answers["/"].body.decode()
    assert {f"/{name}" for name in re.findall(r"(?:src|href)=\"([^\"]*)", html)} == {*FILES, "/docs"} - {"/"}
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", html)
    text = "".join(got.body.decode() for got in answers.values())
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}
    for got in answers.values():
        policy = got.headers[b"content-security-policy"].decode()
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert {source for part in policy.split(";") for source in part.split()[1:]} == {"'self'", "'none'"}


def test_every_field_of_the_page_is_one_that_the_api_knows():
    script, html = (WEB / "page.js").read_text(), (WEB / "index.html").read_text()
    names = {*re.findall(r" name=\"(\w+)\"", html), *re.findall(r"body\.set\(\"(\w+)", script)}
    assert {"prompt", "size", "recipe", "two_stage", "num_frames", "negative_prompt"} < names
    assert names - {"viewport", "duration"} <= KNOWN
    files = re.search(r"const FILES = \{(.*?)\};", script, re.DOTALL)[1]
    sent = {*re.findall(r"^  (\w+):", files, re.MULTILINE), *re.findall(r"\"([a-z_]+)\"", files)}
    assert {"input_reference", "audio_reference", "start_time"} < sent <= KNOWN
    kinds = re.search(r"input_reference: \[.*?((?:image/\w+(?:, )?)+)", script)[1].split(", ")
    assert kinds == [f"image/{name.lower()}" for name in FORMATS]


def test_without_a_token_the_page_shows_nothing_of_the_service_but_its_schema(service):
    for path in FILES:
        text = get(service, path, authorization=b"").body.decode()
        for word in (SIZE, '"tiny"', "ada", str(service.queue.folder)):
            assert word not in text, (path, word)
    for method in ("GET", "POST", "DELETE"):
        got = service.ask(Sent(method, "/session", b"", service.headers(authorization=b"")))
        assert got.status == 401 and b"set-cookie" not in got.headers
    described = json.loads(get(service, "/openapi.json", authorization=b"").body)
    assert "maxLength" in described["components"]["schemas"]["VideoRequest"]["properties"]["prompt"]
    assert not {"/", "/session"} & described["paths"].keys()


def signed_in(service, **headers) -> bytes:
    got = send(service, "POST", "/session", **{"origin": OWN} | headers)
    assert (got.status, json.loads(got.body)) == (200, {"owner": "ada"})
    return got.headers[b"set-cookie"]


def ask(service, cookie: bytes, method: str = "GET", path: str = VIDEOS, **headers) -> Got:
    """What the page asks: the browser adds the cookie, and the page no token."""
    sent = {"host": HOST, "cookie": cookie.split(b";")[0], "content_type": FORM} | headers
    head = tuple((name.replace("_", "-").encode(), value) for name, value in sent.items())
    body = form({"prompt": "waves", "size": SIZE}) if method == "POST" else b""
    return service.ask(Sent(method, path, b"", head, body))


def test_a_token_becomes_a_cookie_that_no_script_and_no_other_site_gets(service):
    cookie = signed_in(service).lower()
    assert b"httponly" in cookie and b"samesite=strict" in cookie and b"secure" not in cookie
    assert b"secure" in signed_in(service, origin=b"https://a", host=b"a").lower()
    deleted = ask(service, signed_in(service), "DELETE", "/session", origin=OWN).headers[b"set-cookie"].lower()
    assert b'ltx_session=""' in deleted and b"max-age=0" in deleted


def test_the_cookie_stands_for_its_token_in_what_the_page_asks(service, tmp_path):
    cookie = signed_in(service)
    assert ask(service, cookie, path="/session").body == b'{"owner":"ada"}'
    video = f"{VIDEOS}/{json.loads(ask(service, cookie, 'POST', origin=OWN).body)['id']}"
    assert [f"{VIDEOS}/{entry['id']}" for entry in answer_of(service, VIDEOS)["data"]] == [video]
    assert ask(service, cookie, path=video, sec_fetch_site=b"same-origin").status == 200
    assert ask(service, cookie, "DELETE", video, origin=OWN).status == 200
    assert ask(service, b"ltx_session=ltxn_wrong").status == 401
    assert ask(service, cookie, authorization=b"Bearer wrong").status == 401
    with opened(tmp_path, page=True, tokens=False) as local:
        got = get(local, "/session", authorization=b"")
        assert (got.status, json.loads(got.body)) == (200, {"owner": None})


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", {}),  # a request that names no page it came from
        ("DELETE", {}),
        ("POST", {"origin": EVIL}),
        ("POST", {"origin": b"null"}),
        ("POST", {"origin": b"http://127.0.0.1:9000"}),  # same site for SameSite, another port
        ("POST", {"origin": OWN, "sec_fetch_site": b"same-site"}),
        ("GET", {"sec_fetch_site": b"same-site"}),
        ("GET", {"sec_fetch_site": b"cross-site"}),
    ],
)
def test_the_cookie_is_no_token_in_what_others_have_the_browser_ask(service, method, headers):
    cookie, id = signed_in(service), accepted(service)
    path = f"{VIDEOS}/{id}" if method == "DELETE" else VIDEOS
    assert ask(service, cookie, method, path, **headers).status in (401, 403)
    assert len(answer_of(service, VIDEOS)["data"]) == 1


OUTSIDE = "/web/../page.py /web/.. /web//etc/passwd /web/%2e%2e/page.py /web/..\\page.py /web/ /index.html /page.py"


def test_no_path_of_the_page_leads_to_another_file_and_bodies_are_bounded(service):
    for path in OUTSIDE.split():
        got = get(service, path, b"name=../page.py")
        assert got.status == 404 and got.error["code"] == "not_found"
    body = b"x" * (MOST_BODY + 1)
    headers = service.headers(content_length=b"%d" % len(body))
    for method, path in (("GET", "/"), ("POST", "/session")):
        assert service.ask(Sent(method, path, b"", headers, body)).status == 413


def test_requests_of_other_sites_and_without_a_page_are_refused(service, tmp_path):
    for path in (*FILES, "/session"):
        got = get(service, path, origin=EVIL)
        assert (got.status, got.error["code"]) == (403, "wrong_origin"), path
    (tmp_path / "local").mkdir()
    with opened(tmp_path / "local", page=True, tokens=False) as local:
        got = get(local, "/", host=b"evil.example")  # a name that was rebound to this machine
        assert (got.status, got.error["code"]) == (403, "wrong_host")
        assert get(local, "/").status == 200
    with opened(tmp_path) as without_page:
        for path in (*FILES, "/session"):
            assert get(without_page, path).error["code"] == "not_found"
