"""The API's errors: OpenAI's error object and an HTTP status."""

from typing import Any

from typing_extensions import TypedDict

# OpenAI's error type for each status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# The error codes of each status.
ERRORS = {
    400: (
        *("profile_mismatch", "invalid_value", "missing_field", "unknown_field"),
        *("prompt_too_long", "invalid_image", "invalid_audio", "invalid_video"),
        *("feature_not_supported", "invalid_json", "invalid_body"),
    ),
    401: ("invalid_api_key",),
    403: ("wrong_host", "wrong_origin"),
    404: ("video_not_found", "preview_not_found", "model_not_found", "not_found"),
    405: ("method_not_allowed",),
    408: ("request_timeout",),
    409: ("not_ready", "not_failed", "video_failed", "idempotency_conflict"),
    413: ("body_too_large", "file_too_large"),
    415: ("unsupported_media_type",),
    429: ("queue_full", "rate_limited"),
    500: ("internal_error", "storage_failed"),
    503: ("storage_unavailable",),
    504: ("timeout",),
    507: ("storage_full",),
}
# Fields of a job with other names in requests.
_REQUEST_NAMES = {
    "image": "images",
    "audio_path": "audio_reference",
    "video_path": "video_reference",
    "ic_lora": "lora_set",
}
_MAX_MESSAGE = 4000
_SECONDS = 5  # before a client should retry


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorObject(TypedDict):
    error: ErrorFields


class ApiError(Exception):
    """A refused request. more: further keys of the error object."""

    def __init__(
        self,
        status: int,
        code: str,  # for programs: "profile_mismatch"
        message: str,
        param: str | None = None,  # the wrong field
        retry: float | None = None,  # seconds after which the same request may succeed; None: never
        **more: Any,
    ):
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retry, self.more = retry, more

    @property
    def content(self) -> ErrorObject:
        kind = _TYPES.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        # It may quote a client's text: long, or with lone surrogates.
        message = self.message[:_MAX_MESSAGE].encode(errors="replace").decode()
        param = self.param and self.param.encode(errors="replace").decode()
        error: Any = {"message": message, "type": kind, "param": param, "code": self.code}
        return {"error": error | self.more}

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's clients repeat 408, 409, 429 and every 5xx unless a header forbids it."""
        headers = {"x-should-retry": "false" if self.retry is None else "true"}
        if self.retry is not None:
            headers["Retry-After"] = str(max(1, round(self.retry)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):  # otherwise uvicorn reads and discards the rest of the body
            headers["Connection"] = "close"
        return headers


def field_of(name: str) -> str:
    """The request's name of a job's field."""
    return _REQUEST_NAMES.get(name, name)


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param)


def busy(message: str, code: str, retry: float = _SECONDS) -> ApiError:
    return ApiError(429, code, message, retry=retry)


def too_large(param: str, max_bytes: int) -> ApiError:
    message = f"{param}: the file is larger than {max_bytes} bytes"
    return ApiError(413, "file_too_large", message, param)
