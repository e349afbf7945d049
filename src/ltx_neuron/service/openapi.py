"""Additions to FastAPI's /openapi.json: the body of a new video with an example of each kind of
job, examples of parameters, and error codes.

A test sends every example to the service.
"""

from typing import Any

from fastapi import FastAPI

from ltx_neuron.service.api_error import ERRORS, ErrorObject
from ltx_neuron.service.fields import VideoRequest

DESCRIPTION = (
    "OpenAI's video API for LTX-2. Send a token as `Authorization: Bearer TOKEN` where the"
    " service has tokens. Every error is an `ErrorObject`; its `code` is for programs."
)
_PNG = (  # 2x2 pixels
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAE0lEQVR4nGNggAIBBhYGBgYG"
    "BgAAcQAJ2aVyXwAAAABJRU5ErkJggg=="
)
_WAVES, _SIZE = "waves crash on the shore", {"size": "768x512"}
# A JSON body of each kind of job.
JSON_EXAMPLES: dict[str, dict[str, Any]] = {
    "text to video": {"prompt": _WAVES, "size": "768x512", "seconds": 5, "seed": 7},
    "image to video": {"prompt": _WAVES, **_SIZE, "input_reference": {"image_url": _PNG}},
    "keyframes": {
        "prompt": "day turns into night",
        **_SIZE,
        "images": [{"image_url": _PNG}, {"image_url": _PNG, "frame": 120, "strength": 0.8}],
    },
    "dev recipe": {
        "prompt": _WAVES,
        **_SIZE,
        "recipe": "dev",
        "num_inference_steps": 30,
        "guidance_scale": 3.0,
        "negative_prompt": "blurry",
    },
}
# A multipart body of each kind of job. A value with a dot is a file's name.
FORM_EXAMPLES: dict[str, dict[str, str]] = {
    "text to video": {"prompt": _WAVES, "size": "768x512", "seconds": "5"},
    "image to video": {"prompt": _WAVES, "input_reference": "beach.png"},
    "audio to video": {"prompt": "a man says hello", "audio_reference": "hello.wav"},
    "retake": {
        "prompt": "the dog jumps",
        "video_reference": "dog.mp4",
        "start_time": "1",
        "end_time": "2",
    },
    "extend": {"prompt": "the dog runs away", "video_reference": "dog.mp4", "extend": "2"},
    "dubbing": {"prompt": "a man says: bonjour", "lora_set": "dub", "reference_video": "hello.mkv"},
    "IC-LoRA": {"prompt": "a robot dances", "lora_set": "pose", "video_conditioning": "pose.mp4"},
    "IC-LoRA in tiles": {
        "prompt": "a robot dances",
        "lora_set": "pose",
        "video_conditioning": "pose.mp4",
        "stage_2_ic_lora": "true",
        "tile": "true",
    },
}
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
    kinds = {"application/json": JSON_EXAMPLES, "multipart/form-data": FORM_EXAMPLES}
    content = {
        kind: {"schema": schema, "examples": {name: {"value": v} for name, v in examples.items()}}
        for kind, examples in kinds.items()
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
