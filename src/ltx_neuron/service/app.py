"""The HTTP API: OpenAI's /v1/videos, the models, the queue, health and metrics.

Every answer but a file is JSON. Every error is {"error": {message, type, param, code}}, except
uvicorn's own 503 for too many connections.
"""

import asyncio
import base64
import errno
import logging
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from python_multipart.exceptions import FormParserError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from ltx_neuron.report.price import Price
from ltx_neuron.sampling.spec import got_and_wanted
from ltx_neuron.service import openapi, reference
from ltx_neuron.service.api_error import ApiError, busy, invalid, too_large
from ltx_neuron.service.database import StorageError
from ltx_neuron.service.fields import MAX_FILES, kind_of, parse_json, read_request
from ltx_neuron.service.jobs import FILES, PREVIEW, JobSubmitter, VideoObject, video_object
from ltx_neuron.service.limits import MAX_JSON_BYTES, RequestLimits, TokenBucket
from ltx_neuron.service.metrics import CONTENT_TYPE_LATEST, Metrics
from ltx_neuron.service.page import add_page, cookie_authorization
from ltx_neuron.service.queue import COMPLETED, IN_PROGRESS, OPEN, QUEUED, Entry, QueueFull
from ltx_neuron.service.settings import Limits
from ltx_neuron.service.sizes import SizeObject
from ltx_neuron.service.tokens import Tokens

_MAX_FIELDS, _MAX_PAGE = 64, 100
_SYNC_SECONDS = 3600.0  # the longest wait of /v1/videos/sync
_POLL_MS = {True: 2000, False: 500}  # of a waiting job, of a running job
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
# Codes of the errors that Starlette and FastAPI raise.
_CODES = {404: "not_found", 405: "method_not_allowed", 400: "invalid_body"}


class VideoList(TypedDict):
    object: str
    data: list[VideoObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedVideo(TypedDict):
    id: str
    object: str
    deleted: bool


class LoraObject(TypedDict):
    name: str
    strength: float


class ModelObject(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    recipes: list[str]
    loras: list[LoraObject]
    lora_sets: dict[str, list[LoraObject]]
    sizes: list[SizeObject]
    inputs: dict[str, list[SizeObject]]
    reference_audio_seconds: list[float]
    default: SizeObject | None


class ModelList(TypedDict):
    object: str
    data: list[ModelObject]


class QueueObject(TypedDict):
    """starting: no worker is alive yet, and the service is starting one."""

    object: str
    waiting: int
    in_progress: int
    workers: int
    starting: bool


class Api:
    """The route functions. Those that only query the database are synchronous: threads run them."""

    def __init__(self, jobs: JobSubmitter, tokens: Tokens, price: Price | None, supervised: bool):
        self.jobs, self.queue, self.tokens, self.supervised = jobs, jobs.queue, tokens, supervised
        self.rate = TokenBucket(jobs.limits.rate)
        self.metrics_of = Metrics(self.queue, price)

    async def create(self, request: Request) -> Response:
        return self._answer(await self._accept(request))

    async def create_and_wait(self, request: Request) -> Response:
        """/v1/videos/sync: the video itself. If the client disconnects, its job is cancelled."""
        owner, entry = request.state.owner, await self._accept(request)
        waited = 0.0
        try:
            while entry.status in OPEN:
                if waited > _SYNC_SECONDS:
                    raise ApiError(504, "timeout", "the video took too long; use POST /v1/videos")
                if await request.is_disconnected():
                    raise ClientDisconnect
                await asyncio.sleep(_POLL_MS[False] / 1000)
                waited += _POLL_MS[False] / 1000
                entry = await run_in_threadpool(self._entry, owner, entry.id)
        except BaseException:  # the server's end cancels this task
            await asyncio.shield(run_in_threadpool(self.queue.cancel, owner, entry.id))
            raise
        if error := entry.error:
            raise ApiError(500, error["code"], error["message"])
        return self._file(entry, "video")

    async def _accept(self, request: Request) -> Entry:
        owner = request.state.owner
        self.rate.take(owner)
        key = request.headers.get("idempotency-key")
        if key is not None and not _KEY.fullmatch(key):
            message = "Idempotency-Key: wanted 1 to 255 visible ASCII characters"
            raise invalid("Idempotency-Key", message)
        form = None
        try:
            fields, form = await _read_body(request, self.jobs.limits)
            return await run_in_threadpool(
                lambda: self.jobs.accept(read_request(fields), owner, key)
            )
        finally:
            if form:
                await form.close()

    def retrieve(self, request: Request, id: str) -> Response:
        return self._answer(self._entry(request.state.owner, id))

    def list(
        self,
        request: Request,
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        owner = request.state.owner
        number = self._entry(owner, after, "after").number if after else None
        entries, more = self.queue.page(owner, number, limit, order == "desc")
        data = [video_object(entry, self.jobs.limits.keep_days) for entry in entries]
        ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        content = {"object": "list", "data": data, "first_id": ends[0], "last_id": ends[1]}
        return JSONResponse(content | {"has_more": more})

    def delete(self, request: Request, id: str) -> Response:
        if not self.queue.cancel(request.state.owner, id):
            raise _not_found(id)
        return JSONResponse({"id": id, "object": "video.deleted", "deleted": True})

    def retry(self, request: Request, id: str) -> Response:
        owner = request.state.owner
        self.rate.take(owner)
        entry = self._entry(owner, id)
        try:
            waits = self.queue.retry(entry, self.jobs.room)
        except QueueFull as error:
            raise busy(str(error), "queue_full") from None
        if not waits:
            message = f"this video is {entry.status}; only a failed one can be tried again"
            raise ApiError(409, "not_failed", message)
        return self._answer(self._entry(owner, id))

    def content(self, request: Request, id: str, variant: str = "video") -> Response:
        entry = self._entry(request.state.owner, id)
        if variant == PREVIEW:
            return _preview(entry)
        if variant not in FILES:
            code = "feature_not_supported" if variant == "spritesheet" else "invalid_value"
            known = ", ".join((*FILES, PREVIEW))
            raise invalid("variant", f"variant: wanted one of {known}", code)
        if error := entry.error:
            raise ApiError(409, "video_failed", f"this video failed: {error['message']}")
        if entry.status != COMPLETED:
            message = f"this video is {entry.status} ({entry.progress} %); poll it until completed"
            raise ApiError(409, "not_ready", message)
        return self._file(entry, variant)

    def unsupported(self) -> Response:
        message = "remix, edits, extensions and characters are not supported here"
        raise invalid(None, message, "feature_not_supported")

    def _file(self, entry: Entry, variant: str) -> Response:
        name, kind = FILES[variant]
        path = self.queue.folder_of(entry.id) / name
        if not path.is_file():
            raise _not_found(entry.id)
        headers = {"x-video-id": entry.id, "Cache-Control": "private"}
        filename = f"{entry.id}{path.suffix}"
        return FileResponse(path, media_type=kind, filename=filename, headers=headers)

    def _answer(self, entry: Entry) -> Response:
        headers, waits = {}, entry.status == QUEUED
        if entry.status in OPEN:
            headers["openai-poll-after-ms"] = str(_POLL_MS[waits])
        ahead = self.queue.ahead_of(entry) if waits else None
        return JSONResponse(video_object(entry, self.jobs.limits.keep_days, ahead), headers=headers)

    def _entry(self, owner: str, id: str, param: str | None = None) -> Entry:
        entry = self.queue.get(owner, id)
        if entry is None:
            raise _not_found(id, param)
        return entry

    async def authorize(self, request: Request) -> None:
        """Store a request's owner. Raises ApiError for a wrong token or a refused origin."""
        if refusal := request.state.refusal:
            raise refusal
        authorization = request.headers.get("authorization") or cookie_authorization(request)
        request.state.owner = self.tokens.owner_of(authorization)
        if request.state.owner is None:
            raise ApiError(401, "invalid_api_key", "send a token: Authorization: Bearer TOKEN")

    def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    def model(self, id: str) -> Response:
        if id != self.jobs.model:
            message = f"unknown model; this service has only {self.jobs.model!r}"
            raise ApiError(404, "model_not_found", message, "model")
        return JSONResponse(self._model())

    def _model(self) -> ModelObject:
        sizes = self.jobs.sizes
        compiled, default = sizes.compiled, sizes.served_default
        loras: Any = {
            name: [{"name": lora.path.name, "strength": lora.strength} for lora in job.all_loras]
            for name, job in sizes.lora_sets.items()
        }
        return {
            "id": self.jobs.model,
            "object": "model",
            "created": int(sizes.workspace.checkpoint_path.stat().st_mtime),
            "owned_by": "ltx-neuron",
            "recipes": sorted({size.recipe for size in compiled}),
            "loras": loras["default"],
            "lora_sets": loras,
            "sizes": [size.as_dict() for size in compiled],
            "inputs": {
                field: [size.as_dict() for size in of_input]
                for field, of_input in sizes.inputs.items()
            },
            "reference_audio_seconds": sizes.voice_seconds,
            "default": default and default.as_dict(),
        }

    def queue_state(self) -> Response:
        """The number of jobs of all owners, and the workers' states."""
        counts = self.queue.counts()
        content = {"waiting": counts[QUEUED], "in_progress": counts[IN_PROGRESS]}
        alive = self._live_workers()
        content |= {"workers": alive, "starting": self.supervised and not alive}
        return JSONResponse({"object": "queue", **content})

    def index(self, request: Request) -> Response:
        """Pointers for a person, and the endpoints for a program, such as GET /v1/models."""
        paths = request.app.openapi()["paths"].items()
        endpoints = [f"{method.upper()} {path}" for path, methods in paths for method in methods]
        content = {"object": "service", "page": request.app.state.page, "docs": "/docs"}
        return JSONResponse(content | {"openapi": "/openapi.json", "endpoints": endpoints})

    def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    def ready(self) -> Response:
        """Whether a worker is alive to run a new job."""
        alive = self._live_workers()
        content = {"status": "ready" if alive else "no worker is alive", "workers": alive}
        return JSONResponse(content, 200 if alive else 503)

    def _live_workers(self) -> int:
        return sum(state["alive"] for state in self.queue.workers().values())

    def metrics(self) -> Response:
        return Response(self.metrics_of.text(), media_type=CONTENT_TYPE_LATEST)


def _add_routes(app: FastAPI, api: Api) -> None:
    owned = [Depends(api.authorize)]
    new = 400, 408, 409, 413, 415, 429, 507
    for method, path, function, answer, summary, errors in (
        ("POST", "/v1/videos", api.create, VideoObject, "Make a video", new),
        (
            "POST",
            "/v1/videos/sync",
            api.create_and_wait,
            "video/mp4",
            "Make a video and wait for it; disconnecting cancels it",
            (*new, 504),
        ),
        *(
            ("POST", f"/v1/videos/{other}", api.unsupported, None, "", ())
            for other in ("edits", "extensions", "characters", "{id}/remix")
        ),
        ("GET", "/v1/videos", api.list, VideoList, "List your videos", (400, 404)),
        ("GET", "/v1/videos/{id}", api.retrieve, VideoObject, "Poll a video", (404,)),
        (
            "GET",
            "/v1/videos/{id}/content",
            api.content,
            "video/mp4",
            "Download a video, its thumbnail, or a preview while it is made",
            (400, 404, 409),
        ),
        (
            "POST",
            "/v1/videos/{id}/retry",
            api.retry,
            VideoObject,
            "Make a failed video again, with the same seed and files",
            (404, 409, 429),
        ),
        ("DELETE", "/v1/videos/{id}", api.delete, DeletedVideo, "Cancel or delete a video", (404,)),
        ("GET", "/v1/models", api.models, ModelList, "List the model, its sizes and LoRAs", ()),
        ("GET", "/v1/models/{id}", api.model, ModelObject, "Get the model by its name", (404,)),
        ("GET", "/v1/queue", api.queue_state, QueueObject, "Count all owners' jobs", ()),
        ("GET", "/metrics", api.metrics, "text/plain", "For Prometheus", ()),
    ):
        content = {"content": {answer: {}}} if isinstance(answer, str) else {"model": answer}
        app.add_api_route(
            path,
            function,
            methods=[method],
            summary=summary,
            description="",
            response_model=None,
            response_class=Response,
            dependencies=owned,
            responses={200: content, **openapi.responses(errors)},
            openapi_extra=openapi.body() if 415 in errors else None,
            include_in_schema=answer is not None,
        )


def create_app(
    jobs: JobSubmitter,
    tokens: Tokens,
    price: Price | None = None,
    page: bool = False,
    supervised: bool = False,
) -> Callable:
    """The ASGI application of a service, with a page at / or without one. price: of the machine,
    for the metrics. supervised: whether this process keeps a worker running."""
    api = Api(jobs, tokens, price, supervised)
    # Malformed uploads must not fill the service's log.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    app = FastAPI(
        title="ltx-neuron",
        description=openapi.DESCRIPTION,
        docs_url=None,  # FastAPI's page loads scripts from another site; see reference.py
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.page = "/" if page else None
    _add_routes(app, api)
    for path, function, summary in (
        ("/v1", api.index, "Find the page, the documentation and the endpoints"),
        ("/health", api.health, "Check that the process runs"),
        ("/ready", api.ready, "Check that a worker is alive, else 503"),
    ):
        app.add_api_route(path, function, response_model=None, summary=summary)
    if page:
        add_page(app, tokens, api.authorize)
    app.router.routes += reference.routes(openapi.describe(app, jobs.model))
    expected = ApiError, HTTPException, RequestValidationError, ClientDisconnect, StorageError
    for kind in (*expected, Exception):
        app.add_exception_handler(kind, handle_error)
    app.add_exception_handler(OSError, handle_disk_error)
    most = jobs.limits.bytes_of("body")
    return RequestLimits(_counting(app, api), most, local=not tokens.hashes)


class _Form(MultiPartParser):
    """A parser of a multipart body that writes files to disk and refuses too large ones."""

    def __init__(self, request: Request, limits: Limits):
        sizes = {"max_files": MAX_FILES, "max_fields": _MAX_FIELDS, "max_part_size": MAX_JSON_BYTES}
        super().__init__(request.headers, request.stream(), **sizes)
        self.limits, self.received = limits, 0

    def on_part_begin(self) -> None:
        self.received = 0
        super().on_part_begin()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._current_part
        self.received += end - start
        if part.file and self.received > (most := self.limits.bytes_of(kind_of(part.field_name))):
            raise too_large(part.field_name[:64], most)
        super().on_part_data(data, start, end)


async def _read_body(request: Request, limits: Limits) -> tuple[dict[str, Any], Any]:
    """A body's fields. The second value is a form, which the caller closes, or None for JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return parse_json(await request.body()), None
    if kind not in ("multipart/form-data", "application/x-www-form-urlencoded"):
        raise ApiError(415, "unsupported_media_type", "send multipart/form-data or JSON")
    try:
        if kind == "multipart/form-data":
            form = await _Form(request, limits).parse()
        else:
            form = await request.form(max_fields=_MAX_FIELDS, max_part_size=MAX_JSON_BYTES)
    except (FormParserError, MultiPartException, UnicodeError):
        # UnicodeError: the body does not match its charset
        raise ApiError(400, "invalid_body", "the body is not valid multipart/form-data") from None
    fields: dict[str, Any] = {}
    if len(form) == 1 and next(iter(form)).lstrip().startswith("{"):  # curl -d
        message = "send JSON with Content-Type: application/json"
        raise ApiError(415, "unsupported_media_type", message)
    for key, value in form.multi_items():
        if key in fields:
            raise invalid(key[:64], f"{key[:64]} is sent twice; leave one out")
        fields[key] = value
    return fields, form


def _preview(entry: Entry) -> Response:
    picture = entry.status in OPEN and (entry.detail or {}).get(PREVIEW)
    if not picture:
        message = f"no preview is available; this video is {entry.status}"
        raise ApiError(404, "preview_not_found", message)
    headers = {"Cache-Control": "no-store"}
    return Response(base64.b64decode(picture), media_type="image/jpeg", headers=headers)


def _not_found(id: str, param: str | None = None) -> ApiError:
    return ApiError(404, "video_not_found", f"you have no video {id[:64]!r}", param)


def _counting(app: Callable, api: Api) -> Callable:
    """The application, with its answers counted for /metrics. BaseHTTPMiddleware would wrap errors
    raised while a body is received into an ExceptionGroup. Starlette answers an unexpected error
    and raises it again. uvicorn would then close a connection that may carry the client's next
    request. So the error is logged here and not raised again."""

    async def counted(scope: dict, receive: Callable, send: Callable) -> None:
        answered = False

        async def count(message: dict) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                method = scope["method"] if scope["method"] in _METHODS else "other"
                api.metrics_of.requests.labels(method, str(message["status"])).inc()
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            await send(message)

        try:
            await app(scope, receive, count)
        except Exception:
            if not answered:
                raise
            logging.getLogger("uvicorn.error").exception(
                "unexpected error in %s %s", scope["method"], scope["path"]
            )

    return counted


def handle_disk_error(request: Request, error: Exception) -> Response:
    """The answer where a disk is full, which is no fault of the service's. Other errors are raised:
    they are logged before `handle_error` answers them."""
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    return handle_error(request, error)


def handle_error(_: Request, error: Exception) -> Response:
    """The API's answer to an error."""
    match error:
        case ApiError():
            answer = error
        case HTTPException():
            code = _CODES.get(error.status_code, "error")
            answer = ApiError(error.status_code, code, str(error.detail))
        case RequestValidationError():  # in the query string
            mistake = error.errors()[0]
            name, (got, wanted) = mistake["loc"][-1], got_and_wanted(mistake)
            answer = invalid(name, f"{name}: got {got}, {wanted}")
        case ClientDisconnect():
            return Response(status_code=499)  # as nginx counts it; nobody reads it
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            answer = ApiError(507, "storage_full", "the service's disk is full", retry=60)
        case StorageError(errno=errno.EBUSY):
            message = "the queue's database is locked by another program"
            answer = ApiError(503, "storage_unavailable", message, retry=5)
        case StorageError():
            message = "the queue's database cannot be used; the service's log says why"
            answer = ApiError(500, "storage_failed", message)
        case _:
            answer = ApiError(500, "internal_error", "an internal error of the service")
    return JSONResponse(answer.content, answer.status, answer.headers)
