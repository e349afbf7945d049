"""The page in a real browser, Chromium without a screen, on a real server and the tiny checkpoint."""

import re
import shutil
from contextlib import closing

import pytest
from conftest import SCRIPT_SECONDS, needs
from helpers import wait_for

needs("fastapi", "openai", "playwright", extras="dev,serve")

import serving  # noqa: E402

openai, setup, service = serving.openai, serving.setup, serving.service  # fixtures

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The Sora API"),
    pytest.mark.skipif(not CHROMIUM, reason="no page was opened in a browser: apt-get install chromium"),
]

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
VIDEOS = re.compile(r"/v1/videos(\?|$)")
VIDEO = "document.querySelector('#screen video')"
WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"
DROP = """(file) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([new Uint8Array(file.bytes)], file.name, { type: file.type }));
    return transfer;
}"""
MODELS = "fetch('v1/models').then((answer) => answer.json())"
FOCUS = "document.activeElement.id"


@pytest.fixture(scope="module")
def browser():
    from playwright import sync_api  # not when tests are collected: importing it takes seconds

    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, service):  # noqa: F811
    """opened(owner, **settings) gives the page as an owner of a token sees it; at the end, no request has left the
    service, no script has failed, and the browser has refused nothing by the page's Content-Security-Policy."""
    root, requested, failed, contexts = service.url[: -len("v1")], [], [], []

    def note(message) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            failed.append(message.text)

    def open_page(owner: str | None, **settings):
        contexts.append(context := browser.new_context(**settings))
        context.on("request", lambda request: requested.append(request.url))
        context.on("weberror", lambda error: failed.append(str(error.error)))
        context.on("console", note)
        context.on("dialog", lambda dialog: dialog.accept())
        context.set_default_timeout(SCRIPT_SECONDS * 1000 / 5)
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
    for video in service.client("bob").videos.list().data:
        service.client("bob").videos.delete(video.id)
    assert requested and all(url.startswith(root) for url in requested) and failed == [], (requested, failed)


def generate(page, prompt: str, size: str | None = "64x64") -> None:
    page.fill("#prompt", prompt)
    if size:
        page.select_option("#size", size)
    page.click("#generate")


def wait_for_text(page, selector: str, text: str) -> None:
    page.wait_for_selector(f"{selector}:has-text('{text}')")


def test_the_page_asks_for_a_token_and_takes_none_that_is_not_known(opened, service):  # noqa: F811
    page = opened(None)
    page.wait_for_selector("#door:visible")
    for token, then in (("ltxn_wrong", "text=This token is not known here."), (service.tokens["ada"], "#desk:visible")):
        assert not page.is_visible("#desk")
        page.fill("#token", token)
        page.click("#door button")
        page.wait_for_selector(then)
    assert not page.is_visible("#door")
    assert page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
    page.click("text=Sign out ada")
    page.wait_for_selector("#door:visible")
    page.reload()
    page.wait_for_selector("#door:visible")


def test_from_a_prompt_to_a_video_that_plays_with_sound_and_is_its_owners(opened, service, tmp_path):  # noqa: F811
    page, streamed = opened("ada"), []
    page.on("response", lambda response: response.status == 206 and streamed.append(response.url))
    generate(page, "waves crash on the shore", "128x128")
    page.wait_for_selector("#screen video")
    page.evaluate(f"{VIDEO}.play()")
    for progress in ("currentTime", "webkitAudioDecodedByteCount"):
        wait_for(lambda progress=progress: page.evaluate(f"{VIDEO}.{progress}") > 0)
    assert page.evaluate(f"{VIDEO}.videoWidth") == 128 and any("/content?variant=video" in url for url in streamed)
    assert "Done · stage 1: 8 steps, median" in page.text_content("#step")
    assert "Done" in page.text_content("#announced")
    page.wait_for_selector("#gallery li[data-status=completed] img")
    with page.expect_download() as download:
        page.click("#download")
    download.value.save_as(tmp_path / "video.mp4")
    (video,) = service.client("ada").videos.list(limit=1).data
    stored = service.folder / "data/jobs" / video.id / "video.mp4"
    assert (tmp_path / "video.mp4").read_bytes() == stored.read_bytes()
    other = opened("bob")
    other.wait_for_selector("#none:visible")
    assert other.locator("#gallery li").count() == 0


def test_progress_and_a_preview_are_seen_and_a_clip_is_cancelled_while_it_is_made(opened, service):  # noqa: F811
    page, worker = opened("ada"), service.worker
    with closing(service.queue()) as queue:

        def is_stopped_with_a_preview() -> bool:
            (entry,), _ = queue.page("ada", limit=1)
            if "preview" not in (entry.detail or {}):
                assert entry.status != "completed"
                return False
            worker.suspend()
            (entry,), _ = queue.page("ada", limit=1)
            return entry.status == "in_progress"

        try:
            generate(page, "birds sing", "128x128")
            wait_for_text(page, "#shown-prompt", "birds sing")
            wait_for(is_stopped_with_a_preview, every=0.002)
            page.wait_for_selector("#screen img")
            page.evaluate("document.querySelector('#screen img').decode()")  # there is a picture
            assert re.search(r"\d+ % · stage \d, step \d of \d", page.text_content("#step"))
            assert re.fullmatch(r"\d+ %", page.text_content("#announced"))
            page.click("#remove:has-text('Cancel')")
            page.wait_for_selector("#shown-prompt:not(:has-text('birds sing'))", state="attached")
        finally:
            worker.resume()
        assert "birds sing" not in [video.prompt for video in service.client("ada").videos.list()]
        wait_for(lambda: not queue.counts()["cancelled"])  # the worker has let it go


def test_a_dropped_picture_is_seen_and_sent_and_a_file_of_another_type_refused(opened, service, tiny):  # noqa: F811
    page, posts = opened("ada"), []
    page.on("request", lambda request: request.method == "POST" and posts.append(request.url))
    zone = page.locator(".drop:has(#input_reference)")
    for kind, name in (("text/plain", "notes.txt"), ("image/png", "a.png")):
        file = {"bytes": [*tiny.image.read_bytes()], "name": name, "type": kind}
        zone.dispatch_event("drop", {"dataTransfer": page.evaluate_handle(DROP, file)})
        if kind == "text/plain":
            wait_for_text(page, "#error", "First frame: notes.txt is of another type")
            assert not zone.locator("canvas").is_visible()
    zone.locator("canvas").wait_for()
    assert page.text_content("#error") == "" and zone.locator("canvas").bounding_box()["height"] >= 80
    generate(page, "a golden retriever")
    wait_for_text(page, "#shown-prompt", "a golden retriever")
    page.wait_for_selector("#screen video")
    assert posts == [service.url + "/videos"]
    (video,) = service.client("ada").videos.list(limit=1).data
    assert (service.folder / "data/jobs" / video.id / "image-0.png").is_file()
    page.click("#files button")
    assert not page.is_visible("#files canvas")


def test_a_seed_is_random_and_a_videos_settings_are_used_again(opened, service):  # noqa: F811
    page, seeds = opened("bob", **PHONE), []
    assert page.input_value("#seed") == "" and not page.is_visible("#new-seed")
    for prompt in ("the first", "the second"):
        generate(page, prompt, "128x128")
        wait_for_text(page, "#shown-prompt", prompt)
        page.wait_for_selector("#screen video")
        seeds.append(re.search(r"seed (\d+)", page.text_content("#facts"))[1])
        assert page.evaluate(f"{VIDEO}.loop")
    assert seeds[0] != seeds[1]
    page.select_option("#size", "64x64")
    page.locator("#gallery li:has-text('the first') button").click()
    page.click("#reuse")
    assert [page.input_value(f"#{name}") for name in ("prompt", "seed", "size")] == ["the first", seeds[0], "128x128"]
    page.click("#new-seed")
    assert page.input_value("#seed") == ""


def test_a_failed_video_has_its_reason_its_remedy_and_another_try(opened, service):  # noqa: F811
    page, worker = opened("bob"), service.worker
    worker.suspend()
    try:
        generate(page, "the first")
        wait_for_text(page, "#step", "Waiting")
        generate(page, "the second")
        wait_for_text(page, "#step", "Waiting: 1 ahead")
        page.click("#remove:has-text('Cancel')")
        wait_for_text(page, "#step", "Waiting")
        with closing(service.queue()) as queue:
            (entry,) = queue.claim("w", queue.next_batch_key(), 1)
            queue.fail(entry, "invalid_value", "input_reference: no such file")
        wait_for_text(page, "#step", "Failed: First frame: no such file")
        assert "choose its files again" in page.text_content("#remedy")
        page.locator("#retry").press("Enter")  # while the page may still scroll to the video
        wait_for_text(page, "#step", "Waiting")
        assert not page.is_visible("#retry") and page.text_content("#remedy") == ""
    finally:
        worker.resume()
    page.wait_for_selector("#screen video")


def test_the_workers_absence_its_start_and_a_missing_size_are_told_apart(opened, service):  # noqa: F811
    page = opened("bob", **PHONE)
    state = {"object": "queue", "waiting": 0, "in_progress": 0, "workers": 0, "starting": True}
    page.route("**/v1/queue", lambda route: route.fulfill(json=state))
    told = [("The worker is starting", {}), ("No worker is running", {"starting": False}), ("1 worker", {"workers": 1})]
    for text, queue in told:
        state |= queue
        page.reload()
        wait_for_text(page, "#state", text)
    page.unroute("**/v1/queue")
    assert not page.is_visible("#no-size")
    model = page.evaluate(MODELS)
    model["data"][0] |= {"sizes": [], "inputs": {}}
    page.route("**/v1/models", lambda route: route.fulfill(json=model))
    page.reload()
    wait_for_text(page, "#no-size", "ltx-neuron prepare")
    assert page.is_disabled("#generate")
    page.unroute("**/v1/models")  # the size is compiled now
    page.wait_for_selector("#size:visible")
    assert not page.is_visible("#no-size") and page.is_enabled("#generate")


def test_a_last_frame_and_a_negative_prompt_are_sent_as_the_api_takes_them(opened, service, tiny):  # noqa: F811
    posts, model = [], (page := opened("bob")).evaluate(MODELS)
    (*_, last) = sizes = model["data"][0]["sizes"]
    model["data"][0]["inputs"] |= {"images": sizes, "nag_scale": [last]}
    refusal = {"message": "images[0]: it is not a readable picture", "param": "images[0]"}

    def refuse(route) -> None:
        if route.request.method == "POST":
            posts.append(route.request.post_data_buffer)
            route.fulfill(status=400, json={"error": refusal})
        else:
            route.continue_()

    page.route("**/v1/models", lambda route: route.fulfill(json=model))
    page.route(VIDEOS, refuse)
    page.reload()
    page.wait_for_selector("#desk:visible")
    page.get_by_label("Last frame", exact=True).set_input_files(tiny.image)
    assert not page.is_visible("#nag_scale")
    page.fill("#negative_prompt", "fog")
    page.wait_for_selector("#nag_scale:visible")
    assert page.input_value("#size") == last["size"]  # the only one that is compiled with it
    generate(page, "waves", size=None)
    wait_for_text(page, "#error", "Last frame: it is not a readable picture")
    assert page.get_attribute("#images", "aria-invalid") == "true"
    (body,) = posts
    assert b'"frame":-1' in body and b"data:image/png;base64," in body and b"fog" in body
    assert re.search(rb'name="nag_scale"\r\n\r\n11\r', body)


def test_the_time_left_is_that_of_the_steps_and_of_the_last_video_like_it(opened):
    page = opened("bob")
    like = {"size": "64x64", "num_frames": 9, "two_stage": True, "recipe": "distilled", "seconds": "1", "seed": 3}
    like |= {"prompt": "x", "created_at": 1000, "started_at": 1000, "error": None}
    detail = {"denoise_steps_ms": {"stage_1": [2000.0] * 8, "stage_2": [5000.0] * 3}}
    done = like | {"id": "video_1", "status": "completed", "completed_at": 1041, "progress": 100, "detail": detail}
    detail = {"stage": "stage_1", "step": 2, "steps": 8, "denoise_steps_ms": {"stage_1": [9e3, 3e3]}}
    listed = [like | {"id": "video_2", "status": "in_progress", "progress": 9, "detail": detail}]
    page.route(VIDEOS, lambda route: route.fulfill(json={"has_more": False, "data": listed}))
    page.route(re.compile("variant="), lambda route: route.fulfill(status=404, json={}))
    page.reload()
    wait_for_text(page, "#step", "step 2 of 8 · about 54 s left in this stage")
    listed.append(done)  # its second stage took 15 s, and its decoding 10 s
    wait_for_text(page, "#step", "about 79 s left")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_also_with_a_long_refusal(opened, service, scheme):  # noqa: F811
    page = opened("bob", **PHONE, color_scheme=scheme)
    assert page.evaluate(WIDTHS) == [390, 390]
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == (scheme == "dark"), ground
    # As on a page that was opened before the size was removed.
    page.evaluate("document.querySelector('#size').selectedOptions[0].value = '1920x1088'")
    generate(page, "x" * 300, size=None)
    wait_for_text(page, "#error", "not compiled")
    assert page.evaluate(WIDTHS) == [390, 390]
    message = page.text_content("#error")
    assert "64x64, 9 frames" in message and "profile_mismatch" not in message and "GET" not in message
    assert service.client("bob").videos.list().data == []


def test_everything_is_reached_and_named_without_a_mouse(opened):
    page = opened("bob")
    assert page.evaluate(FOCUS) == "prompt"  # after signing in
    assert page.is_visible("text=or Ctrl+Enter in the prompt")
    page.locator("#ideas button").first.press("Enter")
    assert len(page.input_value("#prompt")) > 40 and page.evaluate(FOCUS) == "prompt"
    assert not page.is_visible("#ideas")  # it would replace what was typed
    page.select_option("#size", "128x128")  # other tests may compile more
    page.focus("#prompt")
    order, met = ["input_reference", "size", "duration", "two_stage", "seed"], []
    for _ in range(len(order) + 1):  # and the field of a sound
        page.keyboard.press("Tab")
        met.append(page.evaluate(FOCUS))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", met
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
