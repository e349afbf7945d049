"""What stands between a network and the API: how much may come, how fast, and from whom."""

import asyncio
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import h11
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from ltx_neuron.service.refusal import Refusal, busy

HEAD_SECONDS = 10.0  # until a request's head is there
BODY_SECONDS = 60.0  # until its body is
LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}


class Guard:
    """ASGI middleware: bounds a body's size and the time that it takes, and refuses what a foreign
    web page sends through its visitor's browser.

    local  the service is for this machine alone, without tokens: so are the hosts it is called by
    """

    def __init__(self, app: Callable, most_bytes: int, local: bool):
        self.app, self.most_bytes, self.local = app, most_bytes, local

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        scope.setdefault("state", {})["refusal"] = self._refused(headers)
        await self.app(scope, _Body(receive, self.most_bytes), send)

    def _refused(self, headers: dict[str, str]) -> Refusal | None:
        """Why a request is refused by its headers alone; the app says so."""
        host = headers.get("host", "")
        if self.local and _name(host) not in LOCAL_HOSTS:
            # A page whose name was rebound to this machine would be taken for its own.
            return Refusal(403, "wrong_host", "this service answers to localhost alone")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return Refusal(403, "wrong_origin", "this service takes no requests of other sites")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.most_bytes:
            return _too_large(self.most_bytes)
        return None


def _name(host: str) -> str | None:
    """The name in a Host header; None where that is not only a host and a port."""
    plain = all(char.isalnum() or char in ".-:[]" for char in host)
    try:
        return urlsplit(f"//{host}").hostname if plain else None
    except ValueError:  # brackets around what is no address
        return None


def _too_large(most: int) -> Refusal:
    return Refusal(413, "body_too_large", f"the body is larger than {most} bytes")


class _Body:
    """What receives a request's body: no more than so many bytes, and in a bounded time."""

    def __init__(self, receive: Callable, most_bytes: int):
        self.receive, self.left, self.most_bytes = receive, most_bytes, most_bytes
        self.until, self.whole = time.monotonic() + BODY_SECONDS, False

    async def __call__(self) -> dict:
        if self.whole:  # what comes now is that the client has left
            return await self.receive()
        try:
            seconds = max(0.0, self.until - time.monotonic())
            message = await asyncio.wait_for(self.receive(), seconds)
        except TimeoutError:
            text = f"the body was not there within {BODY_SECONDS:g} s"
            raise Refusal(408, "request_timeout", text) from None
        self.left -= len(message.get("body", b""))
        self.whole = not message.get("more_body", False)
        if self.left < 0:
            raise _too_large(self.most_bytes)
        return message


class Rate:
    """How many requests an owner may make: `per_minute`, a third of them at once."""

    def __init__(self, per_minute: float):
        self.per_second, self.most = per_minute / 60, max(1.0, per_minute / 3)
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, owner: str) -> None:
        """Count a request of an owner; Refusal where it is one too many."""
        now = time.monotonic()
        left, before = self._left.get(owner, (self.most, now))
        left = min(self.most, left + (now - before) * self.per_second)
        if left < 1:
            retry = (1 - left) / self.per_second
            raise busy("too many requests in too short a time", "rate_limited", retry)
        self._left[owner] = left - 1, now


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, which closes a connection whose request's head does not come in time:
    uvicorn would wait for ever. What comes on one connection too many is refused as all else is:
    uvicorn would say so in plain text."""

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._service, self.app = self.app, self._bounded

    async def _bounded(self, scope, receive, send) -> None:
        app = self._service
        if len(self.connections) > self._most:
            text = f"more than {self._most} connections are open"
            refusal = Refusal(503, "overloaded", text, retry=1)
            headers = {**refusal.headers, "Connection": "close"}
            app = JSONResponse(refusal.content, refusal.status, headers)
        await app(scope, receive, send)

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._timer is None and self.timeout_keep_alive_task is None:
            self._wait_for_head()  # the head of a further request has begun

    def connection_lost(self, exc) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None
