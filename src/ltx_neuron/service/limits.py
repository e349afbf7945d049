"""Limits of requests: their bodies, their rate, and the sites that may send them. Limits of
connections are uvicorn's (server.py), and those of the proxy in front."""

import asyncio
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from ltx_neuron.service.api_error import ApiError, busy

BODY_SECONDS = 60.0  # until a request's body is there, and a second more for each MiB of it
MAX_JSON_BYTES = 32 * 2**20  # of what is held in memory: uploads go to the disk
LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}


class RequestLimits:
    """ASGI middleware: bounds a body's size and the time that it takes, and refuses what a foreign
    web page sends through its visitor's browser.

    max_bytes  of a body; JSON may have MAX_JSON_BYTES of them
    local      the service has no tokens: only this machine's own names are accepted as its host
    """

    def __init__(self, app: Callable, max_bytes: int, local: bool):
        self.app, self.max_bytes, self.local = app, max_bytes, local

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        form = "multipart/form-data" in headers.get("content-type", "").lower()
        most = self.max_bytes if form else min(self.max_bytes, MAX_JSON_BYTES)
        scope.setdefault("state", {})["refusal"] = self._refused(headers, most)
        await self.app(scope, _Body(receive, most), send)

    def _refused(self, headers: Headers, max_bytes: int) -> ApiError | None:
        """Why a request is refused by its headers alone; the app says so."""
        host = headers.get("host", "")
        if self.local and _name(host) not in LOCAL_HOSTS:
            # A page whose name was rebound to this machine would be taken for its own.
            return ApiError(403, "wrong_host", "this service answers to localhost alone")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return ApiError(403, "wrong_origin", "this service takes no requests of other sites")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > max_bytes:
            return _too_large(max_bytes)
        return None


def _name(host: str) -> str | None:
    """The name in a Host header; None where that is not only a host and a port."""
    plain = all(char.isalnum() or char in ".-:[]" for char in host)
    try:
        return urlsplit(f"//{host}").hostname if plain else None
    except ValueError:  # brackets around what is no address
        return None


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is larger than {max_bytes} bytes")


class _Body:
    """What receives a request's body: no more than so many bytes, and in a bounded time."""

    def __init__(self, receive: Callable, max_bytes: int):
        self.receive, self.left, self.max_bytes = receive, max_bytes, max_bytes
        self.until, self.whole = time.monotonic() + BODY_SECONDS, False

    async def __call__(self) -> dict:
        if self.whole:  # what comes now is that the client has left
            return await self.receive()
        try:
            seconds = max(0.0, self.until - time.monotonic())
            message = await asyncio.wait_for(self.receive(), seconds)
        except TimeoutError:
            text = f"the body was not there within {BODY_SECONDS:g} s and 1 s for each MiB"
            raise ApiError(408, "request_timeout", text) from None
        size = len(message.get("body", b""))
        self.left, self.until = self.left - size, self.until + size / 2**20
        self.whole = not message.get("more_body", False)
        if self.left < 0:
            raise _too_large(self.max_bytes)
        return message


class TokenBucket:
    """How many requests an owner may make: `per_minute`, a third of them at once."""

    def __init__(self, per_minute: float):
        self.per_second, self.max_burst = per_minute / 60, max(1.0, per_minute / 3)
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, owner: str) -> None:
        """Count a request of an owner; ApiError if it is one too many."""
        now = time.monotonic()
        left, before = self._left.get(owner, (self.max_burst, now))
        left = min(self.max_burst, left + (now - before) * self.per_second)
        if left < 1:
            retry = (1 - left) / self.per_second
            raise busy("too many requests in too short a time", "rate_limited", retry)
        self._left[owner] = left - 1, now
