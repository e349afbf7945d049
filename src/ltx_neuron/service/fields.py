"""What a request says: OpenAI's fields, those that other servers of its video API have, and the
SamplingFields, GuidanceFields and VideoFields of a JobSpec."""

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError
from starlette.datastructures import UploadFile

from ltx_neuron.config.common import digest
from ltx_neuron.sampling.conditions import Crf, FrameIndex, Strength
from ltx_neuron.sampling.spec import (
    Fields,
    GuidanceFields,
    JobSpec,
    SamplingFields,
    got_and_wanted,
    names_of,
)
from ltx_neuron.service.api_error import ApiError, invalid
from ltx_neuron.service.sizes import RequestedSize

MAX_PROMPT = 10_000  # characters; the model reads 1024 tokens
MAX_IMAGES = 8
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")
_BRACKETS = re.compile(r"(\w+)\[(\w+)\]")
UNSUPPORTED = ("lora", "video_reference", "audio_reference", "image_url", "n")
# Fields that say the same.
_EITHER = (
    ("seconds", "num_frames"),
    ("size", "width"),
    ("size", "height"),
    ("image_reference", "input_reference"),
)
_NOT_SUPPORTED = "feature_not_supported"


def _data(value: Any) -> bytes:
    """What an upload or a data URL holds."""
    if isinstance(value, UploadFile):
        value.file.seek(0)
        return value.file.read()
    if not isinstance(value, str):
        raise ValueError("wanted a file, or an object with image_url")
    if not value.startswith("data:"):
        # The service fetches nothing: a URL could name what only this machine may read.
        message = "only data URLs are read, as in data:image/png;base64,..."
        raise PydanticCustomError(_NOT_SUPPORTED, message)
    head, _, content = value.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError
        return base64.b64decode(content, validate=True)
    except (ValueError, binascii.Error):
        raise ValueError("wanted data:image/png;base64,...") from None


_DATA_URL = {"type": "string", "description": "data:image/png;base64,..."}


class HeldImage(Fields):
    """An image to be held, not yet decoded."""

    data: Annotated[bytes, BeforeValidator(_data), WithJsonSchema(_DATA_URL)] = Field(
        validation_alias="image_url"
    )
    frame: FrameIndex = 0
    strength: Strength = 1.0
    crf: Crf = 33


def _reference(value: Any) -> Any:
    """input_reference as an object: it may be a file, or a data URL."""
    if isinstance(value, UploadFile | str):
        return {"image_url": value}
    if isinstance(value, dict) and value.get("file_id") is not None:
        message = "file_id is not supported here; send the file, or a data URL"
        raise PydanticCustomError(_NOT_SUPPORTED, message)
    if isinstance(value, dict):  # other keys are OpenAI's own
        return {"image_url": value.get("image_url")}
    return value


def _sides(value: Any) -> Any:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ValueError("wanted WIDTHxHEIGHT, as in 768x512")
    return int(match[1]), int(match[2])


_REFERENCE = {
    "anyOf": [
        {"type": "object", "properties": {"image_url": _DATA_URL}, "required": ["image_url"]},
        _DATA_URL,
        {"type": "string", "format": "binary", "description": "a file of a multipart body"},
        {"type": "null"},
    ]
}
Reference = Annotated[HeldImage | None, BeforeValidator(_reference), WithJsonSchema(_REFERENCE)]
_AS_TEXT = WithJsonSchema({"type": "string", "pattern": f"^{_SIZE.pattern}$|^auto$"})


def _names_of(model: type[Fields]) -> dict[str, list[str]]:
    """Every field with the names that it may be said by."""
    return {field: names_of(field, model) for field in model.model_fields}


def _finish_schema(schema: dict[str, Any], model: type[Fields]) -> None:
    """What a client reads: all names of a field; the flags' defaults are not the service's."""
    for field, names in _names_of(model).items():
        for other in names[1:]:
            schema["properties"][other] = schema["properties"][field] | {
                "description": f"{field} by another name"
            }
    extra = {"type": "object", "description": "any of these fields"}
    schema["properties"] |= {"extra_params": extra}
    for field in schema["properties"].values():
        field.pop("title", None)
        if "description" in field:
            field["description"] = field["description"].partition(" (default")[0]


class VideoRequest(GuidanceFields, SamplingFields, RequestedSize):
    """The body of POST /v1/videos. Left out, the size is the service's default or the nearest one
    that is compiled."""

    model_config = ConfigDict(json_schema_extra=_finish_schema)

    prompt: str = Field(max_length=MAX_PROMPT, pattern=r"\S")
    negative_prompt: str | None = Field(None, max_length=MAX_PROMPT, description="dev recipe only")
    video_cfg_guidance_scale: float | None = Field(
        None, validation_alias=AliasChoices("video_cfg_guidance_scale", "guidance_scale")
    )
    model: str | None = Field(None, description="the name that GET /v1/models lists")
    lora_set: str | None = Field(None, description="one of the model's lora_sets")
    size: Annotated[tuple[int, int] | None, BeforeValidator(_sides), _AS_TEXT] = Field(
        None, description="WIDTHxHEIGHT"
    )
    input_reference: Reference = Field(
        None, description="an image held at frame 0: a file, or {image_url: a data URL}"
    )
    image_reference: Reference = Field(None, description="input_reference by another name")
    images: tuple[HeldImage, ...] = Field((), max_length=MAX_IMAGES)

    @field_validator("images", "video_stg_blocks", "audio_stg_blocks", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """A list, which a form spells as text."""
        return _json(value) if isinstance(value, str) else value

    @property
    def held(self) -> dict[str, HeldImage]:
        """The images by the fields that they came in; the references at frame 0."""
        references = {name: getattr(self, name) for name in ("input_reference", "image_reference")}
        several = {f"images[{index}]": image for index, image in enumerate(self.images)}
        return {name: image for name, image in (references | several).items() if image}

    @property
    def wanted(self) -> RequestedSize:
        values = {name: getattr(self, name) for name in RequestedSize.model_fields}
        if self.size:
            values["width"], values["height"] = self.size
        return RequestedSize.model_construct(**values)

    @property
    def spec(self) -> JobSpec:
        """What is said but the size and the images."""
        names = {"prompt", *GuidanceFields.model_fields, *SamplingFields.model_fields}
        return JobSpec(**self.model_dump(include=names))

    @property
    def digest(self) -> str:
        """Of all that was said: what an idempotency key stands for."""
        images = {
            name: [digest(image.data.hex()), image.frame, image.strength, image.crf]
            for name, image in self.held.items()
        }
        said = self.model_dump(exclude={"images", "input_reference", "image_reference"})
        return digest([said, images])


_NAMES = _names_of(VideoRequest)
KNOWN = {name for names in _NAMES.values() for name in names}


def field_of(name: str) -> str:
    """A request's field for a JobSpec's."""
    return {"image": "images"}.get(name, name)


def read_request(fields: Mapping[str, Any]) -> VideoRequest:
    """Read a body's fields: JSON values, or texts and files of a multipart body. Raises ApiError
    that names the first field that is wrong."""
    said = _merged(fields)
    try:
        request = VideoRequest.model_validate(said)
    except ValidationError as error:
        mistake = error.errors(include_url=False, include_context=False)[0]
        raise _api_error(mistake, said) from None
    if (count := len(request.held)) > MAX_IMAGES:  # a reference is one of them
        raise invalid("images", f"got {count} images in all, wanted at most {MAX_IMAGES}")
    return request


def _api_error(mistake: Mapping[str, Any], said: dict[str, Any]) -> ApiError:
    """An error of pydantic's, under the name that was said."""
    kind, (field, *place) = mistake["type"], mistake["loc"]
    if field == "prompt":
        if kind == "string_too_long":
            message = f"prompt has {len(mistake['input'])} characters, {MAX_PROMPT} at most"
            return invalid("prompt", message, "prompt_too_long")
        message = "prompt is missing: a text that says what to show"
        return invalid("prompt", message, "missing_field")
    name = next((name for name in _NAMES[field] if name in said), field)
    # A client knows a field by the name that it is sent under.
    place = ["image_url" if part == "data" else part for part in place]
    param = f"{name}[{place.pop(0)}]" if name == "images" and place else name
    code = _NOT_SUPPORTED if kind == _NOT_SUPPORTED else "invalid_value"
    got, wanted = got_and_wanted(mistake)
    return invalid(param, f"{'.'.join(map(str, (param, *place)))}: got {got}, {wanted}", code)


def _merged(fields: Mapping[str, Any]) -> dict[str, Any]:
    """All fields that say something, those of extra_params beside the others."""
    merged = _unbracketed(fields)
    extra = merged.pop("extra_params", None) or {}
    try:
        extra = _json(extra) if isinstance(extra, str) else extra
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise invalid("extra_params", "extra_params is a JSON object")
    if twice := sorted(merged.keys() & extra.keys()):
        raise invalid(twice[0], f"{twice[0]} is a field and a key of extra_params; leave one out")
    said = {}
    for key, value in (merged | extra).items():
        if key in UNSUPPORTED:
            if value not in (None, "", 1, "1"):
                raise invalid(key, f"{key} is not supported here", _NOT_SUPPORTED)
        elif key not in KNOWN:
            known = ", ".join(sorted(KNOWN))
            raise invalid(key[:64], f"unknown field {key[:64]!r}; known: {known}", "unknown_field")
        elif value is None or (key, value) == ("size", "auto"):
            continue
        elif value != "" or key in ("prompt", "negative_prompt"):  # "" is a text as well
            said[key] = value
    for names in (*_EITHER, *_NAMES.values()):
        both = [name for name in names if name in said]
        if len(both) > 1:
            raise invalid(both[0], f"{' and '.join(both)} say the same; leave one out")
    return said


def _unbracketed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """input_reference[image_url], as OpenAI's client writes an object in a multipart body, as an
    object; name[] as a list's name."""
    plain: dict[str, Any] = {}
    for key, value in fields.items():
        if match := _BRACKETS.fullmatch(key):
            inner = plain.setdefault(match[1], {})
            if not isinstance(inner, dict):
                raise invalid(match[1], f"{match[1]} is there as a value and as an object")
            inner[match[2]] = value
        else:
            name = key.removesuffix("[]")
            if name in plain:
                raise invalid(name[:64], f"{name[:64]} is there twice; leave one out")
            plain[name] = value
    return plain


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("wanted JSON") from None


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON body's fields."""
    try:
        content = _json(body)
    except ValueError:
        raise ApiError(400, "invalid_json", "the body is not JSON") from None
    if not isinstance(content, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    return content
