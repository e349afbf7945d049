"""Limits of requests: body size, rate and origin. server.py and the proxy limit connections."""

import asyncio
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from ltx_neuron.service.api_error import ApiError, busy

BODY_SECONDS = 60.0  # to receive a body, plus 1 s for each MiB
MAX_JSON_BYTES = 32 * 2**20  # held in memory, unlike uploads
LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}


class RequestLimits:
    """ASGI middleware: limits bodies' size and time, and refuses other sites' pages. max_bytes: of
    a body; of JSON at most MAX_JSON_BYTES. local: without tokens, only Host names of this machine
    are accepted."""

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
        """The error of a request with unacceptable headers; the app raises it."""
        host = headers.get("host", "")
        if self.local and _name(host) not in LOCAL_HOSTS:
            # DNS rebinding: another site's name may resolve to this machine.
            return ApiError(403, "wrong_host", "this service accepts only localhost as its host")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return ApiError(403, "wrong_origin", "this service refuses requests of other sites")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > max_bytes:
            return _too_large(max_bytes)
        return None


def _name(host: str) -> str | None:
    """The name in a Host header; None if the header is not a host with an optional port."""
    plain = all(char.isalnum() or char in ".-:[]" for char in host)
    try:
        return urlsplit(f"//{host}").hostname if plain else None
    except ValueError:  # brackets without an IPv6 address
        return None


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is larger than {max_bytes} bytes")


class _Body:
    def __init__(self, receive: Callable, max_bytes: int):
        self.receive, self.left, self.max_bytes = receive, max_bytes, max_bytes
        self.until, self.whole = time.monotonic() + BODY_SECONDS, False

    async def __call__(self) -> dict:
        if self.whole:  # the next message is the disconnect
            return await self.receive()
        try:
            seconds = max(0.0, self.until - time.monotonic())
            message = await asyncio.wait_for(self.receive(), seconds)
        except TimeoutError:
            text = f"the body did not arrive within {BODY_SECONDS:g} s and 1 s for each MiB"
            raise ApiError(408, "request_timeout", text) from None
        size = len(message.get("body", b""))
        self.left, self.until = self.left - size, self.until + size / 2**20
        self.whole = not message.get("more_body", False)
        if self.left < 0:
            raise _too_large(self.max_bytes)
        return message


class TokenBucket:
    """Limits each owner to `per_minute` requests, a third of them at once."""

    def __init__(self, per_minute: float):
        self.per_second, self.max_burst = per_minute / 60, max(1.0, per_minute / 3)
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, owner: str) -> None:
        """Count an owner's request. Raises ApiError above the limit."""
        now = time.monotonic()
        left, before = self._left.get(owner, (self.max_burst, now))
        left = min(self.max_burst, left + (now - before) * self.per_second)
        if left < 1:
            retry = (1 - left) / self.per_second
            raise busy("too many requests; wait, then repeat this one", "rate_limited", retry)
        self._left[owner] = left - 1, now
