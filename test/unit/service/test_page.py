"""The page at / without a browser: its files ask no other site, and its session cookie stands for a token."""

import re
from pathlib import Path

import pytest
from service_app import FORM, MOST_BODY, SIZE, VIDEOS, Got, Sent, form, opened

from ltx_neuron.service import page
from ltx_neuron.service.fields import KNOWN
from ltx_neuron.service.picture import FORMATS

OWN, EVIL = b"http://127.0.0.1:8000", b"http://evil.example"
FILES = ("/", "/web/page.js", "/web/page.css", "/web/icon.svg")


def test_the_page_and_its_files_name_no_other_site_run_no_other_script_and_show_nothing_of_the_service(service):
    answers = {path: service.get(path, authorization=b"") for path in FILES}
    html = answers["/"].body.decode()
    assert {f"/{name}" for name in re.findall(r"(?:src|href)=\"([^\"]*)", html)} == {*FILES, "/docs"} - {"/"}
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", html)
    text = "".join(got.body.decode() for got in answers.values())
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not [word for word in (SIZE, '"tiny"', "ada", str(service.queue.folder)) if word in text]
    for got in answers.values():
        policy = got.headers[b"content-security-policy"].decode()
        assert got.status == 200 and "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert {source for part in policy.split(";") for source in part.split()[1:]} == {"'self'", "'none'"}
    assert not {"/", "/session"} & service.get("/openapi.json", authorization=b"").json["paths"].keys()


def test_every_field_of_the_page_is_one_that_the_api_knows():
    script, html = ((Path(page.__file__).parent / "web" / name).read_text() for name in ("page.js", "index.html"))
    names = {*re.findall(r" name=\"(\w+)\"", html), *re.findall(r"body\.set\(\"(\w+)", script)}
    assert {"prompt", "size", "recipe", "two_stage", "num_frames", "negative_prompt"} < names
    assert names - {"viewport", "duration"} <= KNOWN
    files = re.search(r"const FILES = \{(.*?)\};", script, re.DOTALL)[1]
    sent = {*re.findall(r"^  (\w+):", files, re.MULTILINE), *re.findall(r"\"([a-z_]+)\"", files)}
    assert {"input_reference", "audio_reference", "start_time"} < sent <= KNOWN
    kinds = re.search(r"input_reference: \[.*?((?:image/\w+(?:, )?)+)", script)[1].split(", ")
    assert kinds == [f"image/{name.lower()}" for name in FORMATS]


def signed_in(service, **headers) -> bytes:
    got = service.send("POST", "/session", **{"origin": OWN} | headers)
    assert (got.status, got.json) == (200, {"owner": "ada"})
    return got.headers[b"set-cookie"]


def ask(service, cookie: bytes, method: str = "GET", path: str = VIDEOS, **headers) -> Got:
    """What the page asks: the browser adds the cookie, and the page no token."""
    said = {"authorization": b"", "cookie": cookie.split(b";")[0]} | headers
    body = form({"prompt": "waves", "size": SIZE}) if method == "POST" else b""
    return service.ask(Sent(method, path, b"", service.headers(FORM, **said), body))


def test_a_token_becomes_a_cookie_that_no_script_and_no_other_site_gets(service):
    for method in ("GET", "POST", "DELETE"):
        got = service.send(method, "/session", authorization=b"")
        assert got.status == 401 and b"set-cookie" not in got.headers
    parts = {*(cookie := signed_in(service)).lower().split(b"; ")}
    assert {b"httponly", b"samesite=strict"} <= parts and b"secure" not in parts
    assert b"secure" in signed_in(service, origin=b"https://a", host=b"a").lower()
    deleted = ask(service, cookie, "DELETE", "/session", origin=OWN).headers[b"set-cookie"].lower()
    assert b'ltx_session=""' in deleted and b"max-age=0" in deleted


def test_the_cookie_stands_for_its_token_in_what_the_page_asks(service, tmp_path):
    cookie = signed_in(service)
    assert ask(service, cookie, path="/session").json == {"owner": "ada"}
    video = f"{VIDEOS}/{ask(service, cookie, 'POST', origin=OWN).json['id']}"
    assert ask(service, cookie, path=video, sec_fetch_site=b"same-origin").status == 200
    assert ask(service, cookie, "DELETE", video, origin=OWN).status == 200
    assert ask(service, b"ltx_session=ltxn_wrong").status == 401
    assert ask(service, cookie, authorization=b"Bearer wrong").status == 401
    with opened(tmp_path, page=True, tokens=False) as local:
        assert local.get("/session", authorization=b"").json == {"owner": None}


# No page that it came from, another site, another port (the same site for SameSite), a page of another host there
STRANGE = {}, {"origin": EVIL}, {"origin": b"null"}, {"origin": b"http://127.0.0.1:9000"}
STRANGE += ({"origin": OWN, "sec_fetch_site": b"same-site"},)
ASKED = [*(("POST", headers) for headers in STRANGE), ("DELETE", {}), ("GET", {"sec_fetch_site": b"cross-site"})]


@pytest.mark.parametrize(("method", "headers"), ASKED)
def test_the_cookie_is_no_token_in_what_others_have_the_browser_ask(service, method, headers):
    cookie, id = signed_in(service), service.accepted()
    path = f"{VIDEOS}/{id}" if method == "DELETE" else VIDEOS
    assert ask(service, cookie, method, path, **headers).status in (401, 403)
    assert len(service.get(VIDEOS).json["data"]) == 1


def test_requests_of_other_sites_for_other_files_and_large_ones_are_refused(service, tmp_path):
    outside = "/web/../page.py /web/.. /web//etc/passwd /web/%2e%2e/page.py /web/..\\page.py /web/ /index.html /page.py"
    for path in outside.split():
        assert service.get(path, b"name=../page.py").refused == (404, "not_found")
    body = b"x" * (MOST_BODY + 1)
    for method, path in (("GET", "/"), ("POST", "/session")):
        headers = service.headers(content_length=b"%d" % len(body))
        assert service.ask(Sent(method, path, b"", headers, body)).status == 413
    for path in (*FILES, "/session", VIDEOS):
        assert service.get(path, origin=EVIL).refused == (403, "wrong_origin"), path
    (tmp_path / "local").mkdir()
    with opened(tmp_path / "local", page=True, tokens=False) as local:
        assert local.get("/").status == 200
        assert local.get("/", host=b"evil.example").refused == (403, "wrong_host")  # a name that was rebound
    with opened(tmp_path) as without_page:
        for path in (*FILES, "/session"):
            assert without_page.get(path).error["code"] == "not_found"
