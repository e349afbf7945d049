"""The page at / without a browser: what is served, that it asks no other site, and that of Gradio's
own routes none is there that takes, reads or runs anything."""

import re
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from service_app import FORM, MOST_BODY, SIZE, Sent, form, get, opened

from ltx_neuron.service import fields
from ltx_neuron.service.page import GRADIOS, Page

PAGE = Page()  # Gradio takes seconds to import: once for all tests


@pytest.fixture
def service(tmp_path):
    pytest.importorskip("gradio", reason="the extra is not installed: pip install -e .[serve]")
    with opened(tmp_path, PAGE) as made:
        yield made


def links(text: str) -> list[str]:
    """Addresses that a browser would ask by itself."""
    found = re.findall(r"(?:src|href|content)=[\"']([^\"']*)|url\(([^)]*)\)", text)
    stripped = [link.strip("\"' ") for pair in found for link in pair]
    return [link for link in stripped if link and not link.startswith("data:")]


def files(service) -> dict[str, str]:
    """The page and the files that it names, by their paths."""
    found = {"/": get(service, "/").body.decode()}
    for link in links(found["/"]):
        if link.startswith("./") and len(link) > 2:
            got = get(service, link[1:])
            assert got.status == 200, link
            found[link[1:]] = got.body.decode()
    return found | {"/theme.css": get(service, "/theme.css").body.decode()}


def test_the_page_and_its_styles_name_no_other_site(service):
    found = files(service)
    assert {"/web/page.js", "/web/page.css", "/web/icon.svg"} < found.keys()
    assert any(path.startswith("/assets/") for path in found)
    away = {path: [link for link in links(text) if "//" in link] for path, text in found.items()}
    assert {path: them for path, them in away.items() if them and not path.endswith(".js")} == {}
    ours = found["/web/page.js"] + found["/web/page.css"]
    assert set(re.findall("https?://[^\"']*", ours)) <= {"http://www.w3.org/2000/svg"}


def test_the_page_tells_the_browser_to_ask_no_other_site(service):
    policy = get(service, "/").headers[b"content-security-policy"].decode()
    sources = {source for part in policy.split(";") for source in part.split()[1:]}
    assert sources <= {"'self'", "'none'", "'unsafe-inline'", "'unsafe-eval'", "blob:", "data:"}
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy


def test_the_page_tells_nobody_that_it_is_used(service):
    import gradio

    assert not gradio.analytics.analytics_enabled()
    config = get(service, "/").body.decode()
    assert '"analytics_enabled":false' in config.replace(" ", "")


def test_no_function_of_the_page_runs_in_the_server(service):
    blocks = next(r.app for r in PAGE.gradio().routes if hasattr(r.app, "get_blocks")).get_blocks()
    assert blocks.fns and all(function.fn is None for function in blocks.fns.values())


def test_every_field_of_the_page_is_one_that_the_api_knows(service):
    names = re.search(r"ltx\.send\(\[(.*?)\]", get(service, "/").body.decode())[1]
    said = set(re.findall(r"[a-z_]+", names.replace("\\u0022", '"').replace('\\"', '"')))
    assert said - {"length"} <= set(fields.KNOWN)
    assert {"prompt", "size", "recipe", "two_stage", "seed", "num_inference_steps"} < said


# --- red team -------------------------------------------------------------------------------------


def gradios_own_paths() -> set[str]:
    """Every path of Gradio's application, with something where it takes any."""
    app = next(route.app for route in PAGE.gradio().routes if hasattr(route.app, "get_blocks"))
    paths, waiting = set(), [(app.router, "")]
    while waiting:
        router, prefix = waiting.pop()
        for route in router.routes:
            inner = getattr(route, "original_router", None) or getattr(route, "app", None)
            if hasattr(inner, "routes"):
                waiting.append((inner, prefix + getattr(route, "path", "")))
            paths.add(prefix + getattr(route, "path", ""))
    return {re.sub(r"\{[^}]*\}", "x", path) for path in paths if path}


def test_of_gradios_routes_only_its_own_files_are_there(service):
    served = {"/", "/openapi.json", *(path.split("{")[0] for path in GRADIOS)}  # the API's own
    known = gradios_own_paths()
    assert {"/config", "/gradio_api/upload", "/gradio_api/queue/join"} <= known
    for path in sorted(known):
        for method in ("GET", "POST", "PUT", "DELETE"):
            got = service.ask(Sent(method, path, b"", service.headers()))
            if path not in served:
                assert got.status in (404, 405), (method, path)
                assert "error" in got.body.decode() or path.startswith(("/assets", "/static"))


OUTSIDE = [
    "/gradio_api/file=/etc/passwd",
    "/gradio_api/file=../../../../etc/passwd",
    "/file=/etc/passwd",
    "/gradio_api/file/etc/passwd",
    "/gradio_api/proxy=http://169.254.169.254/latest/meta-data",
    "/gradio_api/stream/a/b/c/playlist.m3u8",
    "/assets/../../../../../../../../etc/passwd",
    "/assets//etc/passwd",
    "/static/../index.html",
    "/static/..\\..\\..\\routes.py",
    "/web/../page.py",
    "/web/..",
    "/web//etc/passwd",
    "/theme.css/../config",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_of_the_page_leads_to_another_file(service, path):
    for query in (b"", b"path=/etc/passwd&deep_link=../../../etc/passwd"):
        got = get(service, path, query)
        assert 400 <= got.status < 500, got
        assert b"root:" not in got.body and b"import " not in got.body


def test_an_upload_by_gradios_route_is_refused_and_kept_nowhere(service, monkeypatch, tmp_path):
    for name in ("GRADIO_TEMP_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()
    for size in (100, 60 * 2**20):
        body = form({"files": b"x" * size})
        for path in ("/gradio_api/upload", "/upload", "/gradio_api/component_server", "/"):
            got = service.ask(Sent("POST", path, b"", service.headers(FORM), body))
            assert got.status in (404, 405, 413), path
    assert not list((tmp_path / "tmp").iterdir())


def test_a_body_sent_to_the_pages_own_routes_is_bounded(service):
    body = b"x" * (MOST_BODY + 1)
    headers = service.headers(content_length=b"%d" % len(body))
    assert service.ask(Sent("GET", "/", b"", headers, body)).status == 413


def test_the_page_knows_no_links_to_what_others_have_left(service):
    plain = get(service, "/").body
    assert get(service, "/", b"deep_link=abc&view=api&__theme=dark").body == plain


def test_what_other_sites_ask_of_the_page_is_refused(service, tmp_path):
    for path in ("/", "/web/page.js", "/theme.css"):
        got = get(service, path, origin=b"http://evil.example")
        assert (got.status, got.error["code"]) == (403, "wrong_origin"), path
    (tmp_path / "local").mkdir()
    with opened(tmp_path / "local", PAGE, tokens=False) as local:
        got = get(local, "/", host=b"evil.example")  # a name that was rebound to this machine
        assert (got.status, got.error["code"]) == (403, "wrong_host")
        assert get(local, "/").status == 200


HOSTS = (
    b"",
    b"\xff\xfe",
    b"a b",
    b"[::1",
    b"x" * 9000,
    b"a:99999",
    b'"><script>',
    b"//evil/",
    b"@",
)


@pytest.mark.parametrize("host", HOSTS)
def test_no_host_that_a_client_sends_breaks_the_page_or_gets_into_it(service, host):
    for path in ("/", "/theme.css", "/web/page.js"):
        got = get(service, path, host=host, x_forwarded_proto=b"javascript", x_forwarded_host=host)
        assert got.status < 500 and b"Traceback" not in got.body, got
        assert b'"><script>' not in got.body and b"evil" not in got.body


def test_the_page_tells_nothing_of_the_service_to_who_has_no_token(service):
    page = get(service, "/", authorization=b"").body.decode()
    for word in (SIZE, '"tiny"', str(service.queue.folder)):
        assert word not in page, word
    assert not re.search(r"\bada\b", page)  # the owner; Gradio's random numbers may have it inside


# --- without it -----------------------------------------------------------------------------------


def test_without_gradio_the_page_says_what_to_type_and_the_api_is_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with opened(tmp_path, Page()) as service:
        got = get(service, "/")
        assert got.status == 200 and b"pip install -e .[serve]" in got.body
        assert get(service, "/theme.css").status == 404
        assert get(service, "/v1/models").status == 200


def test_without_a_page_there_is_no_route_of_it(tmp_path):
    with opened(tmp_path) as service:
        for path in ("/", "/web/page.js", "/theme.css", "/assets/x"):
            assert get(service, path).error["code"] == "not_found"


def test_the_pages_files_go_with_the_package():
    import tomllib

    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["ltx_neuron.service"] == ["web/*"]
    packages = project["project"]["optional-dependencies"]["serve"]
    assert any(package.startswith("gradio") for package in packages)
