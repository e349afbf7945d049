"""What a client is told where its request cannot be met: OpenAI's error object, with a status."""

from typing import Any

from typing_extensions import TypedDict

# What a status is to OpenAI's clients.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_MAX_MESSAGE = 4000
_SECONDS = 5  # until the same request may succeed


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorObject(TypedDict):
    error: ErrorFields


class ApiError(Exception):
    """A request that is refused, and why.

    code   for programs: "profile_mismatch"
    param  the field that is wrong
    retry  seconds after which the same request may succeed; None where it never will
    more   further keys of the error object
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry: float | None = None,
        **more: Any,
    ):
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retry, self.more = retry, more

    @property
    def content(self) -> ErrorObject:
        kind = _TYPES.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        # What a client sent may be in it: long, and with characters that no UTF-8 has.
        message = self.message[:_MAX_MESSAGE].encode(errors="replace").decode()
        param = self.param and self.param.encode(errors="replace").decode()
        error: Any = {"message": message, "type": kind, "param": param, "code": self.code}
        return {"error": error | self.more}

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's clients repeat 408, 409, 429 and all of 500 and above unless they are told."""
        headers = {"x-should-retry": "false" if self.retry is None else "true"}
        if self.retry is not None:
            headers["Retry-After"] = str(max(1, round(self.retry)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param)


def busy(message: str, code: str, retry: float = _SECONDS) -> ApiError:
    return ApiError(429, code, message, retry=retry)
