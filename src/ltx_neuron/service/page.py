"""The page at /: Gradio's components, which speak to the API from the visitor's browser.

Every event of the page runs in the browser (web/page.js) and asks /v1/..., with the token that was
typed there: nothing comes in by another door. Of Gradio's own routes those that serve its files are
there, and no others: none that takes an upload, reads a file, runs a function or forwards a URL.
"""

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from ltx_neuron.job import Job
from ltx_neuron.sampling.schedules import GUIDED_MAX_STEPS
from ltx_neuron.sampling.spec import RECIPES
from ltx_neuron.service.fields import MAX_PROMPT
from ltx_neuron.service.picture import FORMATS

GRADIOS = ("/theme.css", "/assets/{path:path}", "/static/{path:path}")
OURS = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
_HEAD = (
    '<link rel="icon" href="./web/icon.svg"><link rel="stylesheet" href="./web/page.css">'
    '<script src="./web/page.js"></script></head>'
)
TITLE = "ltx-neuron"
_WEB = Path(__file__).parent / "web"
# What a header must look like to be passed on to Gradio, which builds addresses of the first two.
_PASSED = {
    b"host": rb"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9.-]{1,253})(:[0-9]{1,5})?",
    b"x-forwarded-proto": rb"https?",
    b"if-none-match": rb".{1,100}",
    b"accept-encoding": rb".{1,100}",
}
_OF_OUR_ROUTES = ("app", "router", "endpoint", "route", "path_params", "state")
_MISSING = "The page is not installed. Type: pip install -e .[serve]\nThe API is at /v1\n"
# Even where a file of Gradio's names another site, the browser asks none.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self'"
    " 'unsafe-inline'; img-src 'self' blob: data:; media-src 'self' blob:; font-src 'self' data:;"
    " object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
# For other sites' previews of a link, some of them with those sites' addresses; a manifest of an
# app to be installed; a script for pages within pages.
_NOT_OURS = re.compile(
    r"<meta\s+(?:property|name)=\"(?:og|twitter):[^>]*>|<link rel=\"manifest\"[^>]*>"
    r"|<script>\s*\(\(\) => \{(?:(?!</script>).)*?iframeResizer.*?</script>",
    re.DOTALL,
)


class Page:
    """The page's routes. Gradio takes seconds to import and is when somebody first asks for it."""

    def __init__(self):
        self._lock, self._app = threading.Lock(), None

    @property
    def routes(self) -> list[Route]:
        own = Route("/web/{name}", self._own, methods=["GET"])
        gradios = [Route(path, _Files(self), methods=["GET"]) for path in GRADIOS]
        return [Route("/", self._index, methods=["GET"]), own, *gradios]

    def gradio(self) -> Callable:
        """Gradio's application. ImportError where it is not installed."""
        with self._lock:
            if self._app is None:
                self._app = _open_gradio()
            return self._app

    async def _index(self, request) -> Response:
        _check(request.scope)
        try:
            app = await run_in_threadpool(self.gradio)
        except ImportError:
            return PlainTextResponse(_MISSING)
        html = await _read(app, _passed_on(request.scope, without=b"accept-encoding"))
        html = _NOT_OURS.sub("", html.decode()).replace("</head>", _HEAD, 1)
        return Response(html, media_type="text/html", headers=_HEADERS)

    def _own(self, request) -> Response:
        _check(request.scope)
        name = request.path_params["name"]
        if name not in OURS:
            raise HTTPException(404)
        return FileResponse(_WEB / name, media_type=OURS[name], headers=_HEADERS)


class _Files:
    """ASGI: files of Gradio's own package."""

    def __init__(self, page: Page):
        self.page = page

    async def __call__(self, scope, receive, send) -> None:
        _check(scope)
        try:
            app = await run_in_threadpool(self.page.gradio)
        except ImportError:
            raise HTTPException(404) from None
        await app(_passed_on(scope), receive, send)


def _check(scope: dict) -> None:
    """Refuse what the guard refuses: another site's request, another name of this machine."""
    if refusal := scope["state"]["refusal"]:
        raise refusal


def _passed_on(scope: dict, without: bytes = b"") -> dict:
    """A request as Gradio sees it: its path, and of its headers what files need. No query, in which
    Gradio would look for links to what others have left, no cookie and no token."""
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name != without and re.fullmatch(_PASSED.get(name, rb"(?!)"), value)
    ]
    left_out = {"headers", "query_string", "root_path", *_OF_OUR_ROUTES}
    new = {key: value for key, value in scope.items() if key not in left_out}
    return new | {"headers": headers, "query_string": b"", "root_path": ""}


async def _read(app: Callable, scope: dict) -> bytes:
    """The body of an answer."""
    parts = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return b"".join(parts)


# --- what is on it --------------------------------------------------------------------------------


def _open_gradio() -> Callable:
    """Gradio with the page, as an application of which the routes above are all that is reached."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when it is imported
    import gradio

    return gradio.mount_gradio_app(
        FastAPI(openapi_url=None),
        build(gradio),
        "/",
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        theme=_theme(gradio),
    )


def _theme(gradio):
    """Calm, of the fonts that the machine has."""
    hues = {"primary_hue": "teal", "secondary_hue": "teal", "neutral_hue": "slate"}
    plain, fixed = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    return gradio.themes.Base(**hues, font=plain, font_mono=fixed).set(
        body_background_fill="#f6f7f9",
        body_background_fill_dark="#0f1419",
        block_radius="12px",
        input_radius="8px",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_text_color="white",
    )


def build(gradio):
    """The page. Limits and defaults are those of the request's fields and of a Job."""

    def html(name: str, **names: str):
        text = (_WEB / f"{name}.html").read_text()
        for key, value in names.items():
            text = text.replace(key, value)
        return gradio.HTML(text, elem_id=name)

    with gradio.Blocks(analytics_enabled=False, title=TITLE, fill_width=True) as blocks:
        html("head")
        with gradio.Row(elem_id="desk"):
            with gradio.Column(elem_id="form", min_width=300):
                fields = {"prompt": _prompt(gradio)}
                html("image", FORMATS=", ".join(f"image/{name.lower()}" for name in FORMATS))
                fields |= _choices(gradio)
                more = gradio.Accordion("Guidance", open=False, visible=False, elem_id="guidance")
                with more:
                    fields |= _guidance(gradio)
                send = gradio.Button("Generate", variant="primary", elem_id="send")
                html("error")
            with gradio.Column(elem_id="stage", min_width=300):
                html("screen")
        html("clips")
        _connect(blocks, fields, more, send)
    return blocks


def _prompt(gradio):
    return gradio.Textbox(
        label="Prompt",
        placeholder="What is to be seen, and what is to be heard",
        lines=4,
        max_lines=12,
        max_length=MAX_PROMPT,
        elem_id="prompt",
    )


def _choices(gradio) -> dict:
    """What is chosen among what is compiled. A size may be typed as well: it is sent as it is, and
    the API rounds it or says what there is."""
    recipe = gradio.Radio(list(RECIPES), label="Recipe", visible=False, elem_id="recipe")
    with gradio.Row():
        size = gradio.Dropdown([], label="Size", allow_custom_value=True, elem_id="size")
        length = gradio.Dropdown([], label="Length", elem_id="length")
    with gradio.Row():
        stages = gradio.Dropdown([], label="Stages", elem_id="stages")
        seed = gradio.Number(Job.seed, label="Seed", precision=0, minimum=0, elem_id="seed")
    return {"recipe": recipe, "size": size, "length": length, "two_stage": stages, "seed": seed}


def _guidance(gradio) -> dict:
    """Fields of the dev recipe; an empty one is the model's own."""
    usual = Job("", recipe="dev")
    negative = gradio.Textbox(
        label="Negative prompt", placeholder="the model's own", lines=2, max_length=MAX_PROMPT
    )
    with gradio.Row():
        steps = gradio.Number(
            label="Steps",
            placeholder=str(usual.steps),
            precision=0,
            minimum=1,
            maximum=GUIDED_MAX_STEPS,
        )
        scale = gradio.Number(
            label="Guidance scale", placeholder=f"{usual.resolved_guidance.video.cfg_scale:g}"
        )
    return {"negative_prompt": negative, "num_inference_steps": steps, "guidance_scale": scale}


def _connect(blocks, fields: dict, more, send) -> None:
    """Have the browser's functions called. fn=None: the server takes no part."""
    chosen = [fields[name] for name in ("recipe", "size", "length", "two_stage")]
    known = {"fn": None, "show_progress": "hidden", "queue": False}
    blocks.load(outputs=[*chosen, more], js="() => ltx.begin()", **known)
    for component in chosen[:3]:
        component.input(
            inputs=chosen, outputs=[*chosen, more], js="(...values) => ltx.choose(values)", **known
        )
    names = ", ".join(f'"{name}"' for name in fields)
    said = {"inputs": list(fields.values()), **known}
    for event in (send.click, fields["prompt"].submit):
        event(js=f"(...values) => ltx.send([{names}], values)", **said)
