"""What a request says: OpenAI's fields, those that other servers of its video API have, and those
of a JobSpec that name no path. `VideoRequest.model_json_schema()` is their schema."""

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from ltx_neuron.config import digest
from ltx_neuron.sampling.spec import Fields, GuidanceFields, JobSpec, SamplingFields, first_mistake
from ltx_neuron.service.api_error import ApiError, invalid
from ltx_neuron.service.sizes import RequestedSize

MAX_PROMPT = 10_000  # characters; the model reads 1024 tokens
MAX_IMAGES = 8
_MAX_SIDE, _MAX_FRAMES, _MAX_LIST = 16_384, 100_000, 256
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


@dataclass(frozen=True)
class Upload:
    """A file of a multipart body. `read` gives its bytes."""

    read: Callable[[], bytes]


def _unsupported(message: str) -> PydanticCustomError:
    return PydanticCustomError("feature_not_supported", message)


def _data(value: Any) -> bytes:
    """What an upload or a data URL holds."""
    if isinstance(value, Upload):
        return value.read()
    if not isinstance(value, str):
        raise ValueError("wanted a file, or an object with image_url")
    if not value.startswith("data:"):
        # The service fetches nothing: a URL could name what only this machine may read.
        raise _unsupported("only data URLs are read, as in data:image/png;base64,...")
    head, _, content = value.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError
        return base64.b64decode(content, validate=True)
    except (ValueError, binascii.Error):
        raise ValueError("wanted data:image/png;base64,...") from None


class HeldImage(Fields):
    """An image to be held, not yet decoded."""

    data: Annotated[bytes, BeforeValidator(_data)] = Field(validation_alias="image_url")
    frame: int = Field(0, ge=0, le=_MAX_FRAMES)
    strength: float = Field(1.0, ge=0, le=1)
    crf: int = Field(33, ge=0, le=51)


def _reference(value: Any) -> Any:
    """input_reference as an object: it may be a file, or a data URL."""
    if isinstance(value, Upload | str):
        return {"image_url": value}
    if isinstance(value, dict) and value.get("file_id") is not None:
        raise _unsupported("file_id is not supported here; send the file, or a data URL")
    if isinstance(value, dict):  # other keys are OpenAI's own
        return {"image_url": value.get("image_url")}
    return value


def _sides(value: Any) -> Any:
    if value == "auto":
        return None
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ValueError("wanted WIDTHxHEIGHT, as in 768x512")
    return int(match[1]), int(match[2])


Reference = Annotated[HeldImage | None, BeforeValidator(_reference)]


class VideoRequest(GuidanceFields, SamplingFields):
    """The body of POST /v1/videos. What is not said of the size is free."""

    prompt: str = Field(max_length=MAX_PROMPT, pattern=r"\S")
    negative_prompt: str | None = Field(None, max_length=MAX_PROMPT)
    video_cfg_guidance_scale: float | None = Field(
        None, validation_alias=AliasChoices("video_cfg_guidance_scale", "guidance_scale")
    )
    model: str | None = None
    lora_set: str | None = None  # one of SizeRegistry.lora_sets
    size: Annotated[tuple[int, int] | None, BeforeValidator(_sides)] = None
    seconds: float | None = Field(None, ge=0.01, le=3600)
    width: int | None = Field(None, ge=1, le=_MAX_SIDE)
    height: int | None = Field(None, ge=1, le=_MAX_SIDE)
    num_frames: int | None = Field(None, ge=1, le=_MAX_FRAMES)
    frame_rate: float | None = Field(
        None, ge=1, le=1000, validation_alias=AliasChoices("frame_rate", "fps")
    )
    two_stage: bool | None = None
    recipe: Literal["distilled", "dev"] | None = None
    input_reference: Reference = None
    image_reference: Reference = None
    images: tuple[HeldImage, ...] = ()

    @field_validator("images", "video_stg_blocks", "audio_stg_blocks", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """A list, which a form spells as text."""
        value = _json(value) if isinstance(value, str) else value
        if isinstance(value, list) and len(value) > _MAX_LIST:
            raise ValueError(f"wanted {_MAX_LIST} values at most")
        return value

    @property
    def held(self) -> dict[str, HeldImage]:
        """The images by the fields that they came in; the references at frame 0."""
        references = {name: getattr(self, name) for name in ("input_reference", "image_reference")}
        several = {f"images[{index}]": image for index, image in enumerate(self.images)}
        return {name: image for name, image in (references | several).items() if image}

    @property
    def wanted(self) -> RequestedSize:
        width, height = self.size or (self.width, self.height)
        names = ("num_frames", "seconds", "frame_rate", "two_stage", "recipe")
        return RequestedSize(height, width, *(getattr(self, name) for name in names))

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


# Every field with the names that it may be said by.
_NAMES = {
    field: info.validation_alias.choices if info.validation_alias else [field]
    for field, info in VideoRequest.model_fields.items()
}
KNOWN = {name for names in _NAMES.values() for name in names}


def field_of(name: str) -> str:
    """A request's field for a JobSpec's."""
    return {"image": "images"}.get(name, name)


def read_request(fields: Mapping[str, Any]) -> VideoRequest:
    """Read a body's fields: JSON values, or texts and Uploads of a multipart body. Raises ApiError
    that names the first field that is wrong."""
    merged = _merged(fields)
    try:
        request = VideoRequest.model_validate(merged)
    except ValidationError as error:
        raise _api_error(error, merged) from None
    if (count := len(request.held)) > MAX_IMAGES:
        raise invalid("images", f"{count} images, {MAX_IMAGES} at most")
    return request


def _api_error(error: ValidationError, said: dict[str, Any]) -> ApiError:
    """The first mistake among the fields, under the name that was said."""
    first = error.errors(include_url=False, include_context=False)[0]
    field, got, wanted = first_mistake(error)
    name = next((name for name in _NAMES[field] if name in said), field)
    # A client knows a field by the name that it is sent under.
    place = tuple("image_url" if part == "data" else part for part in first["loc"][1:])
    param = f"{name}[{place[0]}]" if name == "images" and place else name
    if name == "prompt":
        if first["type"] == "string_too_long":
            message = f"prompt has {len(first['input'])} characters, {MAX_PROMPT} at most"
            return invalid("prompt", message, "prompt_too_long")
        message = "prompt is missing: a text that says what to show"
        return invalid("prompt", message, "missing_field")
    code = "feature_not_supported" if first["type"] == "feature_not_supported" else "invalid_value"
    where = ".".join(map(str, (param, *place[1:])))
    return invalid(param, f"{where}: got {got}, {wanted}", code)


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
    merged |= extra
    for key, value in merged.items():
        if key in UNSUPPORTED and value not in (None, "", 1, "1"):
            raise invalid(key, f"{key} is not supported here", "feature_not_supported")
        if key not in KNOWN and key not in UNSUPPORTED:
            known = ", ".join(sorted(KNOWN))
            raise invalid(key[:64], f"unknown field {key[:64]!r}; known: {known}", "unknown_field")
    texts = "prompt", "negative_prompt"  # "" is one as well
    said = {
        key: value
        for key, value in merged.items()
        if key not in UNSUPPORTED
        and value is not None
        and (value != "" or key in texts)
        and (key, value) != ("size", "auto")
    }
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


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("wanted JSON") from None


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON body's fields."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the body is not JSON") from None
    if not isinstance(content, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    return content
