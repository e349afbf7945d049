"""Additions to FastAPI's /openapi.json: the body of a new video with an example of each kind of
job, examples of parameters, and error codes.

A test sends every example to the service.
"""

import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from ltx_neuron.service.api_error import ERRORS, ErrorObject
from ltx_neuron.service.fields import VideoRequest

DESCRIPTION = (
    "OpenAI's video API for LTX-2. Send a token as `Authorization: Bearer TOKEN` where the"
    " service has tokens. Every error is an `ErrorObject`; its `code` is for programs."
)
# Bodies of each kind of job, by content type. In a form, a value with a dot is a file's name.
EXAMPLES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("examples.json").read_text()
)
_ID = "video_00000000000000000000000000000000"
_PARAMETERS = {"id": _ID, "after": _ID, "limit": 20, "order": "desc", "variant": "thumbnail"}
_REFERENCE = "#/components/schemas/{model}"


def responses(statuses: tuple[int, ...]) -> dict[int | str, dict[str, Any]]:
    """FastAPI's description of an operation's errors: these, and those of every operation."""
    return {
        status: {"model": ErrorObject, "description": " or ".join(f"`{c}`" for c in ERRORS[status])}
        for status in sorted({*statuses, 401, 403, 500, 503})
    }


def body() -> dict[str, Any]:
    """The body of a new video, for FastAPI's `openapi_extra`."""
    schema = {"$ref": _REFERENCE.format(model=VideoRequest.__name__)}
    content = {
        kind: {"schema": schema, "examples": {name: {"value": v} for name, v in examples.items()}}
        for kind, examples in EXAMPLES.items()
    }
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI, model: str) -> dict[str, Any]:
    """The complete OpenAPI description. model: the served model's name."""
    described = app.openapi()
    schema = VideoRequest.model_json_schema(ref_template=_REFERENCE)
    components = described["components"]
    components["schemas"] |= schema.pop("$defs") | {VideoRequest.__name__: schema}
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    described["security"] = [{"token": []}, {}]  # {}: a service without tokens
    for path, operations in described["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # a validation error is a 400 here
            for parameter in operation.get("parameters", ()):
                example = _PARAMETERS[parameter["name"]]
                parameter["example"] = model if "/models/" in path else example
    return described
