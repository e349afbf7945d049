"""The page in a real browser, Chromium without a screen, on a real server and the tiny checkpoint:
from a prompt to a video that plays with sound. No request leaves the service, and the browser
refuses nothing by its Content-Security-Policy."""

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
    const video = document.querySelector("#screen video"), seen = [0, 0];
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
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, service):  # noqa: F811
    """opened(owner, **settings) gives the page as an owner of a token sees it; at the end, no
    request has left the service, no script has failed, and the browser has refused nothing."""
    root, asked, failed, contexts = service.url[: -len("v1")], [], [], []

    def note(message) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            failed.append(message.text)

    def open_page(owner: str | None, **settings):
        contexts.append(context := browser.new_context(**settings))
        context.on("request", lambda request: asked.append(request.url))
        context.on("weberror", lambda error: failed.append(str(error.error)))
        context.on("console", note)
        context.on("dialog", lambda dialog: dialog.accept())
        context.set_default_timeout(SCRIPT_SECONDS * 1000)
        page = context.new_page()
        page.goto(root)
        if owner:
            page.fill("#token", service.tokens[owner])
            page.keyboard.press("Enter")
            page.wait_for_selector("#desk:visible")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert asked and all(url.startswith(root) for url in asked), asked
    assert failed == []


# As on a page that was opened before the size was removed.
OF_ANOTHER_SIZE = "document.querySelector('#size').selectedOptions[0].value = '1920x1088'"


def generate(page, prompt: str = PROMPT, size: str | None = "64x64") -> None:
    page.fill("#prompt", prompt)
    if size:
        page.select_option("#size", size)
    page.click("text=Generate")


def test_the_page_asks_for_a_token_and_takes_none_that_is_not_known(opened, service):  # noqa: F811
    page = opened(None)
    page.wait_for_selector("#door:visible")
    assert not page.is_visible("#desk")
    page.fill("#token", "ltxn_wrong")
    page.click("#door button")
    page.wait_for_selector("text=This token is not known here.")
    page.fill("#token", service.tokens["ada"])
    page.click("#door button")
    page.wait_for_selector("#desk:visible")
    assert not page.is_visible("#door")
    assert page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
    page.reload()
    page.wait_for_selector("#desk:visible")
    page.click("text=Sign out ada")
    page.wait_for_selector("#door:visible")
    page.reload()
    page.wait_for_selector("#door:visible")


def test_from_a_prompt_to_a_video_that_plays_with_sound(opened, service, tmp_path):  # noqa: F811
    page = opened("ada")
    streamed = []
    page.on("response", lambda got: got.status == 206 and streamed.append(got.url))
    generate(page, size="128x128")
    page.wait_for_selector("#screen video")
    seconds, sound, width = page.evaluate(PLAYED)
    assert seconds > 0 and sound > 0 and width == 128, (seconds, sound, width)
    assert any("/content?variant=video" in url for url in streamed)
    assert "Done · stage 1: 8 steps, median" in page.text_content("#step")
    assert "Done" in page.text_content("#announced")
    page.wait_for_selector("#gallery li[data-status=completed] img")
    with page.expect_download() as download:
        page.click("#download")
    download.value.save_as(tmp_path / "video.mp4")
    (video,) = service.client("ada").videos.list(limit=1).data
    made = service.folder / "data/jobs" / video.id / "video.mp4"
    assert (tmp_path / "video.mp4").read_bytes() == made.read_bytes()
    # Another owner's page has none of it.
    other = opened("bob")
    other.wait_for_selector("#none:visible")
    assert other.locator("#gallery li").count() == 0


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
            generate(page, "birds sing", size="128x128")
            page.wait_for_selector("#shown-prompt:has-text('birds sing')")
            wait_for(is_stopped_with_a_preview, every=0.002)
            page.wait_for_selector("#screen img")
            page.evaluate("document.querySelector('#screen img').decode()")  # there is a picture
            said = page.text_content("#step")
            assert re.search(r"\d+ % · stage \d, step \d of \d", said), said
            assert re.fullmatch(r"\d+ %", page.text_content("#announced"))
            page.click("#remove:has-text('Cancel')")
            page.wait_for_selector("#shown-prompt:not(:has-text('birds sing'))", state="attached")
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
        page.wait_for_selector("#gallery li:has-text('the first')")
        generate(page, "the second")
        page.wait_for_selector("#step:has-text('Waiting: 1 ahead')")
        page.wait_for_selector("#state:has-text('2 waiting')")
        page.click("#remove:has-text('Cancel')")
        page.wait_for_selector("#gallery li:only-child")
        assert [video.prompt for video in client.videos.list()] == ["the first"]
        page.click("#remove:has-text('Cancel')")
        page.wait_for_selector("#none:visible")
        assert client.videos.list().data == [] and not page.is_visible("#remove")
    finally:
        worker.resume()


def test_a_size_that_is_not_compiled_is_refused_in_the_apis_words(opened, service):  # noqa: F811
    page, client = opened("ada"), service.client("ada", max_retries=0)
    page.evaluate(OF_ANOTHER_SIZE)
    generate(page, size=None)
    page.wait_for_selector("#error:has-text('not compiled')")
    said = page.text_content("#error")
    assert "64x64, 9 frames" in said and "profile_mismatch" in said
    assert page.get_attribute("#error", "role") == "alert"
    assert all(video.size != "1920x1088" for video in client.videos.list())


def test_an_image_is_sent_with_the_request_and_by_no_other_way(opened, service, tiny):  # noqa: F811
    page = opened("ada")
    posts = []
    page.on("request", lambda request: request.method == "POST" and posts.append(request))
    page.get_by_label("First frame", exact=True).set_input_files(tiny.image)
    page.wait_for_selector("#files canvas:visible")
    generate(page, "a golden retriever")
    page.wait_for_selector("#shown-prompt:has-text('a golden retriever')")
    page.wait_for_selector("#screen video")
    assert [post.url.removeprefix(service.url) for post in posts] == ["/videos"]
    (video,) = service.client("ada").videos.list(limit=1).data
    assert (service.folder / "data/jobs" / video.id / "image-0.png").is_file()
    page.click("#files button")
    assert not page.is_visible("#files canvas")
    service.client("ada").videos.delete(video.id)


def test_a_page_that_nobody_sees_asks_seldom(opened, service):  # noqa: F811
    page, asked = opened("bob"), []
    page.on("request", lambda request: asked.append(request.url))
    hide = "Object.defineProperty(document, 'hidden', {value: true}); 0"
    page.evaluate(hide)
    page.wait_for_timeout(6000)  # the next poll of a page that is seen, and then some
    asked.clear()
    page.wait_for_timeout(6000)
    assert asked == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(opened, service, scheme):  # noqa: F811
    page = opened("bob", viewport=MOBILE, is_mobile=True, has_touch=True, color_scheme=scheme)
    assert page.evaluate(WIDTHS) == [390, 390]
    for name in ("prompt", "input_reference", "size", "duration", "seed", "screen"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["height"] >= 30, name
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == (scheme == "dark"), ground
    page.evaluate(OF_ANOTHER_SIZE)
    generate(page, "x" * 300, size=None)
    page.wait_for_selector("#error:has-text('not compiled')")
    assert page.evaluate(WIDTHS) == [390, 390]  # a long message wraps


def test_everything_is_reached_and_named_without_a_mouse(opened, service):  # noqa: F811
    page = opened("bob")
    assert page.evaluate(FOCUS)[0] == "prompt"  # after signing in
    page.keyboard.type("birds sing")
    order = ["input_reference", "size", "duration", "two_stage", "seed", "new-seed"]
    met = []
    for _ in range(len(order) + 1):  # and the button
        page.keyboard.press("Tab")
        met += page.evaluate(FOCUS)[:1]
        if met[-1] == "size":
            page.keyboard.type("128")  # of which there are one stage and two
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) != "none", met
    places = [met.index(name) for name in order]
    assert places == sorted(places)
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#screen video")
    page.focus("#gallery button")
    page.keyboard.press("Enter")
    assert page.get_attribute("#gallery button", "aria-pressed") == "true"
    for name in ("Prompt", "First frame", "Size", "Length", "Stages", "Seed", "Progress"):
        assert page.get_by_label(name, exact=True).count() == 1, name
    page.focus("#remove")
    page.keyboard.press("Enter")
    page.wait_for_selector("#none:visible")
