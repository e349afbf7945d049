"""The fields of a request: OpenAI's, those of other servers with this API, and the SamplingFields,
GuidanceFields, VideoFields and DetailFields of a job. Requests upload a job's files."""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Annotated, Any, BinaryIO, NamedTuple

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
from ltx_neuron.job import Job
from ltx_neuron.sampling import spec
from ltx_neuron.sampling.conditions import Crf, FrameIndex, Frames, Keyframes, Strength, TileSide
from ltx_neuron.sampling.spec import described_as
from ltx_neuron.service.api_error import ApiError, field_of, invalid
from ltx_neuron.service.sizes import RequestedSize

MAX_PROMPT = 10_000  # characters; the model reads 1024 tokens
MAX_PROMPTS = 64  # next_prompts
MAX_IMAGES = 8
MAX_REFERENCES = 4  # for an IC-LoRA
MAX_FILES = MAX_IMAGES + MAX_REFERENCES + 3  # with a sound, a video and a mask
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")
_BRACKETS = re.compile(r"(\w+)\[(\w+)\]")
_FLAG = re.compile(r"--([a-z][a-z0-9-]*[a-z0-9])")
# Fields that are refused, with the values that ask for nothing.
UNSUPPORTED = {"lora": (), "image_url": (), "n": (1, "1"), "sound_only": (False, "false")}
_LISTS = ("images", "video_conditioning")
_IMAGES = ("input_reference", "image_reference", "images")
# Fields for sounds and videos: the job's field and their kind.
_MEDIA = {
    "audio_reference": ("audio_path", "audio"),
    "video_reference": ("video_path", "video"),
    "video_conditioning": ("video_conditioning", "video"),
    "conditioning_attention_mask": ("conditioning_attention_mask", "video"),
    "reference_video": ("reference_video", "video"),
    "reference_audio": ("reference_audio", "audio"),
}
# Fields with the same meaning.
_EITHER = (
    ("seconds", "num_frames"),
    ("size", "width"),
    ("size", "height"),
    ("image_reference", "input_reference"),
)
_NOT_SUPPORTED = "feature_not_supported"


def _file(value: Any) -> BinaryIO:
    if isinstance(value, UploadFile):
        value.file.seek(0)
        return value.file
    if not isinstance(value, str):
        raise ValueError("wanted a file, or an object with a data URL")
    if not value.startswith("data:"):
        # The service downloads nothing: a URL could name a file that only this machine may read.
        message = "only data URLs are supported, as in data:image/png;base64,..."
        raise PydanticCustomError(_NOT_SUPPORTED, message)
    head, _, content = value.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError
        return BytesIO(base64.b64decode(content, validate=True))
    except (ValueError, binascii.Error):
        raise ValueError("wanted data:image/png;base64,...") from None


_File = Annotated[Any, BeforeValidator(_file)]
_IMAGE_URL, _AUDIO_URL, _VIDEO_URL = (
    {"type": "string", "description": f"data:{example};base64,..."}
    for example in ("image/png", "audio/wav", "video/mp4")
)


class HeldImage(spec.Fields):
    """An image condition, not yet decoded."""

    data: Annotated[
        bytes, BeforeValidator(lambda value: _file(value).read()), WithJsonSchema(_IMAGE_URL)
    ] = Field(validation_alias="image_url")
    frame: FrameIndex = 0
    strength: Strength = 1.0
    crf: Crf | None = None  # the release's


class HeldSound(spec.Fields):
    """A sound, not yet decoded."""

    file: Annotated[_File, WithJsonSchema(_AUDIO_URL)] = Field(validation_alias="audio_url")


class HeldVideo(spec.Fields):
    """A video, not yet decoded."""

    file: Annotated[_File, WithJsonSchema(_VIDEO_URL)] = Field(validation_alias="video_url")


class WeightedVideo(HeldVideo):
    """The attention mask of all references."""

    strength: Strength = 1.0


class WeightedReference(WeightedVideo):
    """A reference: a video, or a still image."""

    file: Annotated[_File, WithJsonSchema(_VIDEO_URL)] = Field(
        validation_alias=AliasChoices("video_url", "image_url")
    )


class Media(NamedTuple):
    """A sound or a video of a request. param: its request field. field: the job's field. kind:
    "audio" or "video"."""

    param: str
    field: str
    kind: str
    held: HeldSound | HeldVideo

    @property
    def digest(self) -> list:
        self.held.file.seek(0)
        sha256 = hashlib.file_digest(self.held.file, "sha256").hexdigest()
        return [sha256, getattr(self.held, "strength", None)]


def _reference(key: str) -> Callable[[Any], Any]:
    """A validator of a file, a data URL, or an object with the data URL under `key`."""

    def read(value: Any) -> Any:
        if isinstance(value, UploadFile | str):
            return {key: value}
        if isinstance(value, dict) and value.get("file_id") is not None:
            message = "file_id is not supported here; send the file, or a data URL"
            raise PydanticCustomError(_NOT_SUPPORTED, message)
        if isinstance(value, dict) and key == "image_url":  # OpenAI's object may have other keys
            return {key: value.get(key)}
        return value

    return read


def _references(value: Any) -> Any:
    if isinstance(value, str) and not value.startswith("data:"):
        value = _json(value)
    return [*map(_reference("video_url"), value if isinstance(value, list | tuple) else [value])]


def _sides(value: Any) -> Any:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ValueError("wanted WIDTHxHEIGHT, as in 768x512")
    return int(match[1]), int(match[2])


def _schema(key: str, url: dict[str, str], **more: Any) -> WithJsonSchema:
    """The schema of a field that `_reference` reads. more: further properties of the object."""
    described = {"type": "object", "properties": {key: url, **more}, "required": [key]}
    file = {"type": "string", "format": "binary", "description": "a file of a multipart body"}
    return WithJsonSchema({"anyOf": [described, url, file, {"type": "null"}]})


_STRENGTH = {"type": "number", "minimum": 0, "maximum": 1, "default": 1.0}
Reference = Annotated[
    HeldImage | None, BeforeValidator(_reference("image_url")), _schema("image_url", _IMAGE_URL)
]
SoundReference = Annotated[
    HeldSound | None, BeforeValidator(_reference("audio_url")), _schema("audio_url", _AUDIO_URL)
]
VideoReference = Annotated[
    HeldVideo | None, BeforeValidator(_reference("video_url")), _schema("video_url", _VIDEO_URL)
]
MaskReference = Annotated[
    WeightedVideo | None,
    BeforeValidator(_reference("video_url")),
    _schema("video_url", _VIDEO_URL, strength=_STRENGTH),
]
_AS_TEXT = WithJsonSchema({"type": "string", "pattern": f"^{_SIZE.pattern}$|^auto$"})


def _names_of(model: type[spec.Fields]) -> dict[str, list[str]]:
    return {field: spec.names_of(field, model) for field in model.model_fields}


def _finish_schema(schema: dict[str, Any], model: type[spec.Fields]) -> None:
    """Complete the schema: add all names of a field, remove the flags' defaults."""
    for field, names in _names_of(model).items():
        for other in names[1:]:
            schema["properties"][other] = schema["properties"][field] | {
                "description": f"same as {field}"
            }
    extra = {"type": "object", "description": "any of these fields"}
    schema["properties"] |= {"extra_params": extra}
    for field in schema["properties"].values():
        field.pop("title", None)
        if field.get("default", ...) is None:
            del field["default"]
        if "description" in field:
            field["description"] = with_field_names(field["description"].partition(" (default")[0])


class VideoRequest(spec.GuidanceFields, spec.DetailFields, spec.SamplingFields, RequestedSize):
    """The body of POST /v1/videos. Omitted size fields are the service's default or, if that has no
    graphs, a compiled size's."""

    model_config = ConfigDict(json_schema_extra=_finish_schema)

    prompt: str = Field(max_length=MAX_PROMPT, pattern=r"\S")
    negative_prompt: str | None = described_as("negative_prompt", max_length=MAX_PROMPT)
    video_cfg_guidance_scale: float | None = Field(
        None, validation_alias=AliasChoices("video_cfg_guidance_scale", "guidance_scale")
    )
    model: str | None = Field(None, description="the model's name in GET /v1/models")
    lora_set: str | None = Field(None, description="one of the model's lora_sets")
    size: Annotated[tuple[int, int] | None, BeforeValidator(_sides), _AS_TEXT] = Field(
        None, description="WIDTHxHEIGHT"
    )
    input_reference: Reference = Field(
        None, description="image condition at frame 0: a file, or {image_url: a data URL}"
    )
    image_reference: Reference = Field(None, description="same as input_reference")
    images: tuple[HeldImage, ...] = Field((), max_length=MAX_IMAGES)
    audio_reference: SoundReference = Field(
        None, description="sound to generate the video for: a file, or {audio_url: a data URL}"
    )
    video_reference: VideoReference = Field(
        None,
        description="video to regenerate from start_time to end_time, or to lengthen by extend"
        " seconds: a file, or {video_url: a data URL}",
    )
    reference_video: VideoReference = Field(
        None,
        description="video to dub with the prompt's words, which sets length and frame rate: a"
        " file, or {video_url: a data URL}",
    )
    reference_audio: SoundReference = Field(
        None,
        description="sound with the voice of the speaker, for the voice's lora_set: a file, or"
        " {audio_url: a data URL}; its length must be compiled, see GET /v1/models",
    )
    reference_audio_max_duration: float | None = described_as("reference_audio_max_duration", gt=0)
    identity_guidance_scale: float | None = described_as("identity_guidance_scale")
    num_generated_keyframes: Keyframes | None = described_as("num_generated_keyframes")
    decode_with_keyframes: bool | None = described_as("decode_with_keyframes")
    extend: float | None = described_as("extend")
    chunked: bool | None = described_as("chunked")
    chunk_pixel_frames: Frames | None = described_as("chunk_pixel_frames")
    chunk_carry_frames: Frames | None = described_as("chunk_carry_frames")
    chunk_blend_frames: int | None = described_as("chunk_blend_frames")
    next_prompts: tuple[Annotated[str, Field(max_length=MAX_PROMPT, pattern=r"\S")], ...] = Field(
        (),
        max_length=MAX_PROMPTS,
        description="of chunked: further prompts in order; with prompt dealt out to the windows",
    )
    video_conditioning: Annotated[tuple[WeightedReference, ...], BeforeValidator(_references)] = (
        Field(
            (),
            max_length=MAX_REFERENCES,
            description="references of an IC-LoRA, videos or images: a file, or a list of"
            " {video_url or image_url: a data URL, strength: 1}",
        )
    )
    conditioning_attention_mask: MaskReference = described_as("conditioning_attention_mask")
    stage_2_ic_lora: bool | None = described_as("stage_2_ic_lora")
    tile: bool | None = described_as("tile")
    tile_height: TileSide | None = described_as("tile_height")
    tile_width: TileSide | None = described_as("tile_width")

    @field_validator(
        "images", "video_stg_blocks", "audio_stg_blocks", "next_prompts", mode="before"
    )
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """Parse the JSON text of a form's list."""
        return _json(value) if isinstance(value, str) else value

    @property
    def held(self) -> dict[str, HeldImage]:
        """The image conditions by request field; the references are at frame 0."""
        images = {name: getattr(self, name) for name in ("input_reference", "image_reference")}
        images |= {f"images[{index}]": image for index, image in enumerate(self.images)}
        return {name: image for name, image in images.items() if image}

    @property
    def media(self) -> list[Media]:
        media = []
        for name, (field, kind) in _MEDIA.items():
            value = getattr(self, name)
            if isinstance(value, tuple):
                media += [Media(f"{name}[{n}]", field, kind, held) for n, held in enumerate(value)]
            elif value:
                media.append(Media(name, field, kind, value))
        return media

    @property
    def requested_size(self) -> RequestedSize:
        values = {name: getattr(self, name) for name in RequestedSize.model_fields}
        if self.size:
            values["width"], values["height"] = self.size
        return RequestedSize.model_construct(**values)

    @property
    def job(self) -> Job:
        """The job without the size and the files."""
        names = spec.JobFields.model_fields.keys() & VideoRequest.model_fields.keys()
        names -= RequestedSize.model_fields.keys() | _MEDIA.keys()
        fields = self.model_dump(include=names, exclude_none=True)
        if self.next_prompts:
            fields["prompts"] = fields.pop("prompt"), *self.next_prompts
        return Job(**fields)

    @property
    def inputs(self) -> list[str]:
        """The request fields with a file."""
        return [*self.held, *(file.param for file in self.media)]

    @property
    def settings(self) -> dict[str, Any]:
        """The fields sent, without files and what a video object has."""
        shown = {*_IMAGES, *_MEDIA, *spec.VideoFields.model_fields, "two_stage", "seconds"}
        shown |= {"prompt", "model", "size", "seed"}
        return self.model_dump(mode="json", exclude=shown, exclude_unset=True)

    @property
    def digest(self) -> str:
        """Digest of the request. A repeated idempotency key must match it."""
        images = {
            name: [digest(image.data.hex()), image.frame, image.strength, image.crf]
            for name, image in self.held.items()
        }
        media = [[file.param, file.digest] for file in self.media]
        fields = self.model_dump(exclude={*_IMAGES, *_MEDIA})
        return digest([fields, images, media])


_NAMES = _names_of(VideoRequest)
KNOWN = {name for names in _NAMES.values() for name in names}


def with_field_names(text: str) -> str:
    """Replace the flags in a text by request fields."""
    return _FLAG.sub(lambda match: field_of(match[1].replace("-", "_")), text)


def kind_of(name: str) -> str:
    """The kind of a multipart body's file, by its field: "image", "audio" or "video"."""
    _, kind = _MEDIA.get(name.partition("[")[0], ("image", "image"))
    return kind


def read_request(fields: Mapping[str, Any]) -> VideoRequest:
    """Read a body's fields: JSON values, or texts and files of a multipart body. Raises ApiError
    for the first wrong field."""
    values = _merged(fields)
    try:
        request = VideoRequest.model_validate(values)
    except ValidationError as error:
        mistake = error.errors(include_url=False, include_context=False)[0]
        raise _api_error(mistake, values) from None
    if (count := len(request.held)) > MAX_IMAGES:  # references included
        raise invalid("images", f"got {count} images in all, wanted at most {MAX_IMAGES}")
    return request


def _api_error(mistake: Mapping[str, Any], values: dict[str, Any]) -> ApiError:
    """The ApiError of a pydantic error, with the field's name in the request."""
    kind, (field, *place) = mistake["type"], mistake["loc"]
    if field == "prompt":
        if kind == "string_too_long":
            message = f"prompt: got {len(mistake['input'])} characters, wanted at most {MAX_PROMPT}"
            return invalid("prompt", message, "prompt_too_long")
        message = "prompt is missing; send a text that describes the video"
        return invalid("prompt", message, "missing_field")
    name = next((name for name in _NAMES[field] if name in values), field)
    # Name the field as the client sent it.
    url = {"data": "image_url", "file": f"{kind_of(name)}_url"}
    place = [url.get(part, part) for part in place]
    param = f"{name}[{place.pop(0)}]" if name in _LISTS and place else name
    code = _NOT_SUPPORTED if kind == _NOT_SUPPORTED else "invalid_value"
    got, wanted = spec.got_and_wanted(mistake)
    return invalid(param, f"{'.'.join(map(str, (param, *place)))}: got {got}, {wanted}", code)


def _merged(fields: Mapping[str, Any]) -> dict[str, Any]:
    """All fields with a value, including those of extra_params."""
    merged = _unbracketed(fields)
    extra = merged.pop("extra_params", None)
    try:
        extra = {} if extra in (None, "") else _json(extra) if isinstance(extra, str) else extra
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise invalid("extra_params", "extra_params: wanted a JSON object")
    if twice := sorted(merged.keys() & extra.keys()):
        raise invalid(twice[0], f"{twice[0]} is a field and a key of extra_params; leave one out")
    values = {}
    for key, value in (merged | extra).items():
        if key in UNSUPPORTED:
            if value not in (None, "", *UNSUPPORTED[key]):
                raise invalid(key, f"{key} is not supported here", _NOT_SUPPORTED)
        elif key not in KNOWN:
            known = ", ".join(sorted(KNOWN))
            raise invalid(key[:64], f"unknown field {key[:64]!r}; known: {known}", "unknown_field")
        elif value is None or (key, value) == ("size", "auto"):
            continue
        elif value != "" or key in ("prompt", "negative_prompt"):  # "" is a valid prompt
            values[key] = value
    for names in (*_EITHER, *_NAMES.values()):
        both = [name for name in names if name in values]
        if len(both) > 1:
            raise invalid(both[0], f"{' and '.join(both)} set the same value; leave one out")
    return values


def _unbracketed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a multipart body's names: input_reference[image_url], as OpenAI's client sends an
    object, to an object; name[] to a list."""
    plain: dict[str, Any] = {}
    for key, value in fields.items():
        if match := _BRACKETS.fullmatch(key):
            inner = plain.setdefault(match[1], {})
            if not isinstance(inner, dict):
                raise invalid(match[1], f"{match[1]} is sent as a value and as an object")
            inner[match[2]] = value
        else:
            name = key.removesuffix("[]")
            if name in plain:
                raise invalid(name[:64], f"{name[:64]} is sent twice; leave one out")
            plain[name] = value
    return plain


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("wanted JSON") from None


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        content = _json(body)
    except ValueError:
        raise ApiError(400, "invalid_json", "the body is not JSON") from None
    if not isinstance(content, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    return content
