"""The page in a real browser, Chromium without a screen, on a real server and the tiny checkpoint:
from a prompt to a video that plays with sound. No request leaves this machine."""

import os
import re
import shutil
from contextlib import closing

import pytest
from conftest import SCRIPT_SECONDS, needs
from helpers import wait_for

needs("fastapi", "openai", "playwright", extras="dev,serve")

import serving  # noqa: E402

# Fixtures.
openai, setup, service = serving.openai, serving.setup, serving.service

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The Sora API"),
    pytest.mark.skipif(
        not CHROMIUM, reason="no page was opened in a browser: apt-get install chromium"
    ),
]

MOBILE = {"width": 390, "height": 844}
PROMPT = "waves crash on the shore"
# How far a video has come and what was decoded of its sound, once there is some of both; its width.
PLAYED = """async () => {
    const video = document.querySelector("#ltx-screen video"), seen = [0, 0];
    await video.play();
    for (let i = 0; i < 600 && !(seen[0] && seen[1]); i++) {
        await new Promise((done) => setTimeout(done, 50));
        seen[0] = Math.max(seen[0], video.currentTime);
        seen[1] = Math.max(seen[1], video.webkitAudioDecodedByteCount);
    }
    return [...seen, video.videoWidth];
}"""
WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"
# Ids of what has the focus, and around it, from the innermost.
FOCUS = """() => {
    const ids = [];
    for (let e = document.activeElement; e; e = e.parentElement) if (e.id) ids.push(e.id);
    return ids;
}"""


@pytest.fixture(scope="module")
def browser():
    # Not when tests are collected: importing it takes seconds.
    pytest.importorskip("gradio", reason="an extra is not installed: pip install -e .[dev,serve]")
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, service):  # noqa: F811
    """opened(owner, **settings) gives the page as an owner of a token sees it; at the end, no
    request has left this machine and no script has failed."""
    root, asked, failed, contexts = service.url[: -len("v1")], [], [], []

    def open_page(owner: str | None, **settings):
        contexts.append(context := browser.new_context(**settings))
        context.on("request", lambda request: asked.append(request.url))
        context.on("weberror", lambda error: failed.append(str(error.error)))
        context.set_default_timeout(SCRIPT_SECONDS * 1000)
        page = context.new_page()
        page.goto(root)
        if owner:
            page.fill("#ltx-token", service.tokens[owner])
            page.keyboard.press("Enter")
            page.wait_for_function("document.querySelector('#size input')?.value")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert asked and all(url.startswith((root, "blob:", "data:")) for url in asked), asked
    assert failed == []


def generate(page, prompt: str = PROMPT, size: str = "64 × 64") -> None:
    page.fill("#prompt textarea", prompt)
    page.fill("#size input", size)
    page.keyboard.press("Enter")
    page.click("#send")


def take_pictures(page) -> None:
    """The pictures of docs/serving.md, where a folder for them is named."""
    if folder := os.environ.get("PAGE_PICTURES"):
        for name, size in (("page", {"width": 1180, "height": 900}), ("page-phone", MOBILE)):
            page.set_viewport_size(size)
            page.wait_for_timeout(500)
            path = os.path.join(folder, f"{name}.jpg")
            page.screenshot(path=path, type="jpeg", quality=60, full_page=True)


def test_the_page_asks_for_a_token_and_takes_none_that_is_not_known(opened, service):  # noqa: F811
    page = opened(None)
    page.wait_for_selector("#ltx-door:visible")
    assert not page.is_visible("#desk") and not page.is_visible("#clips")
    page.fill("#ltx-token", "ltxn_wrong")
    page.click("#ltx-door button")
    page.wait_for_selector("text=This token is not known here.")
    page.fill("#ltx-token", service.tokens["ada"])
    page.click("#ltx-door button")
    page.wait_for_selector("#desk:visible")
    assert not page.is_visible("#ltx-door")
    page.click("#ltx-forget")
    page.wait_for_selector("#ltx-door:visible")


def test_from_a_prompt_to_a_video_that_plays_with_sound(opened, service):  # noqa: F811
    page = opened("ada")
    generate(page, size="128 × 128")
    page.wait_for_selector("#ltx-screen video")
    assert page.text_content("#ltx-step") == "done" and page.is_visible("#ltx-save")
    seconds, sound, width = page.evaluate(PLAYED)
    assert seconds > 0 and sound > 0 and width == 128, (seconds, sound, width)
    # One stage of 8 steps, a bar each.
    assert page.locator("#ltx-bars rect").count() == 8
    assert "stage 1: 8 steps" in page.text_content("#ltx-plot-said")
    page.wait_for_selector("#ltx-gallery li[data-status=completed] img")
    take_pictures(page)
    # Another owner's page has none of it.
    other = opened("bob")
    other.wait_for_selector("#ltx-none:visible")
    assert other.locator("#ltx-gallery li").count() == 0


def test_progress_and_a_preview_are_seen_and_a_clip_is_cancelled_while_it_is_made(
    opened,
    service,  # noqa: F811
):
    page, client, worker = opened("ada"), service.client("ada"), service.worker
    with closing(service.queue()) as queue:

        def is_stopped_with_a_preview() -> bool:
            """A tiny clip is made in less than a second: it is stopped in the middle."""
            (entry,), _ = queue.page("ada", limit=1)
            if "preview" not in (entry.detail or {}):
                assert entry.status != "completed"
                return False
            worker.suspend()
            (entry,), _ = queue.page("ada", limit=1)
            return entry.status == "in_progress"

        try:
            generate(page, "birds sing", size="128 × 128")
            page.wait_for_selector("#ltx-prompt:has-text('birds sing')")
            wait_for(is_stopped_with_a_preview, every=0.002)
            page.wait_for_selector("#ltx-screen img")
            assert re.search(r"\d+ % · stage \d · step \d of \d", page.text_content("#ltx-step"))
            assert page.locator("#ltx-bars rect").count() > 0
            page.click("#ltx-cancel")
            gone = "document.querySelector('#ltx-prompt').textContent !== 'birds sing'"
            page.wait_for_function(gone)
        finally:
            worker.resume()
        assert "birds sing" not in [video.prompt for video in client.videos.list()]
        wait_for(lambda: not queue.counts()["cancelled"])  # the worker has let it go


def test_a_clip_is_cancelled_and_no_worker_makes_it(opened, service):  # noqa: F811
    page, client = opened("bob"), service.client("bob")
    worker = service.worker
    worker.suspend()  # a tiny clip would be done before a hand is at the button
    try:
        generate(page, "the first")
        page.wait_for_selector("#ltx-gallery li:has-text('the first')")
        generate(page, "the second")
        page.wait_for_function(
            "document.querySelector('#ltx-step').textContent.includes('1 before')"
        )
        page.wait_for_function(
            "document.querySelector('#ltx-line').textContent.includes('waiting')"
        )
        page.click("#ltx-cancel")
        page.wait_for_function("document.querySelectorAll('#ltx-gallery li').length === 1")
        assert [video.prompt for video in client.videos.list()] == ["the first"]
        page.click("#ltx-cancel")
        page.wait_for_selector("#ltx-none:visible")
        assert client.videos.list().data == [] and not page.is_visible("#ltx-cancel")
    finally:
        worker.resume()


def test_a_size_that_is_not_compiled_is_refused_in_the_apis_words(opened, service):  # noqa: F811
    page, client = opened("ada"), service.client("ada", max_retries=0)
    generate(page, size="1920x1088")
    page.wait_for_selector("#ltx-error:has-text('not compiled')")
    said = page.text_content("#ltx-error")
    assert "not compiled" in said and "64x64, 9 frames" in said and "profile_mismatch" in said
    assert page.get_attribute("#ltx-error", "role") == "alert"
    generate(page, "", size="64 × 64")
    page.wait_for_selector("#ltx-error:has-text('missing_field')")
    assert all(video.size != "1920x1088" for video in client.videos.list())


def test_an_image_is_sent_with_the_request_and_by_no_other_way(opened, service, tiny):  # noqa: F811
    page = opened("ada")
    posts = []
    page.on("request", lambda request: request.method == "POST" and posts.append(request))
    page.set_input_files("#ltx-file", tiny.image)
    page.wait_for_selector("#ltx-file-shown:visible")
    generate(page, "a golden retriever")
    page.wait_for_selector("#ltx-prompt:has-text('a golden retriever')")
    page.wait_for_selector("#ltx-screen video")
    assert [post.url.removeprefix(service.url) for post in posts] == ["/videos"]
    (video,) = service.client("ada").videos.list(limit=1).data
    assert (service.folder / "data/jobs" / video.id / "image-0.png").is_file()
    page.click("#ltx-file-none")
    assert not page.is_visible("#ltx-file-shown")
    service.client("ada").videos.delete(video.id)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(opened, service, scheme):  # noqa: F811
    page = opened("bob", viewport=MOBILE, is_mobile=True, has_touch=True, color_scheme=scheme)
    assert page.evaluate(WIDTHS) == [390, 390]
    for name in ("prompt", "ltx-image", "size", "length", "stages", "seed", "send", "ltx-screen"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["height"] >= 30, name
    generate(page, "x" * 300, size="1920x1088")
    page.wait_for_selector("#ltx-error:has-text('not compiled')")
    assert page.evaluate(WIDTHS) == [390, 390]  # a long message wraps


def test_everything_is_reached_and_named_without_a_mouse(opened, service):  # noqa: F811
    page = opened("bob")
    page.focus("#prompt textarea")
    page.keyboard.type("birds sing")
    met = []
    for _ in range(12):
        page.keyboard.press("Tab")
        met.append(set(page.evaluate(FOCUS)))
    order = ["ltx-file", "size", "length", "stages", "seed", "send"]
    places = [next(i for i, ids in enumerate(met) if name in ids) for name in order]
    assert places == sorted(places)
    page.focus("#send")
    page.keyboard.press("Enter")
    page.wait_for_selector("#ltx-screen video")
    page.focus("#ltx-gallery button")
    page.keyboard.press("Enter")
    for name in ("Prompt", "Size", "Length", "Stages", "Seed"):
        assert page.get_by_label(name, exact=True).count() >= 1, name
    page.focus("#ltx-delete")
    page.keyboard.press("Enter")
    page.wait_for_selector("#ltx-none:visible")
