"""What a request's fields say: OpenAI's, those that other servers of its video API have, and every
key of a prompts file's line. Nothing in them is a path."""

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ltx_neuron.config import digest
from ltx_neuron.service.api_error import ApiError, invalid
from ltx_neuron.service.sizes import RequestedSize

MAX_PROMPT = 10_000  # characters; the model reads 1024 tokens
MAX_IMAGES = 8
_MAX_SECONDS = 3600.0
_MAX_SIDE, _MAX_FRAMES, _MAX_LIST = 16_384, 100_000, 256
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")
_BRACKETS = re.compile(r"(\w+)\[(\w+)\]")
_TRUE_FALSE = {"true": True, "false": False, "1": True, "0": False}
# Keys of a prompts file's line that clients may say as they are, and other servers' names of them.
LINE_KEYS = {
    "seed": "seed",
    "negative_prompt": "negative_prompt",
    "num_inference_steps": "num_inference_steps",
    "num_steps": "num_inference_steps",
    "upscale": "upscale",
    **{
        f"{stream}_{name}": f"{stream}_{name}"
        for stream in ("video", "audio")
        for name in (
            "cfg_guidance_scale",
            "stg_guidance_scale",
            "stg_blocks",
            "rescale_scale",
            "skip_step",
        )
    },
    "a2v_guidance_scale": "a2v_guidance_scale",
    "v2a_guidance_scale": "v2a_guidance_scale",
    "guidance_scale": "video_cfg_guidance_scale",
}
_LISTS = {"video_stg_blocks", "audio_stg_blocks"}
SIZE_KEYS = (
    "size",
    "seconds",
    "width",
    "height",
    "num_frames",
    "fps",
    "frame_rate",
    "two_stage",
    "recipe",
)
IMAGE_KEYS = ("input_reference", "image_reference", "images")
KNOWN = ("prompt", "model", "lora_set", *SIZE_KEYS, *LINE_KEYS, *IMAGE_KEYS, "extra_params")
UNSUPPORTED = ("lora", "video_reference", "audio_reference", "image_url", "n")


@dataclass(frozen=True)
class Upload:
    """A file of a multipart body. `read` gives its bytes."""

    read: Callable[[], bytes]


@dataclass(frozen=True)
class AskedImage:
    """An image to be held, not yet decoded; `param` is the field that it came in."""

    data: bytes
    frame: int = 0
    strength: float = 1.0
    crf: int = 33
    param: str = "input_reference"


@dataclass
class Request:
    """What a request asks for. `line` has the keys of a prompts file but the size and images."""

    wanted: RequestedSize
    line: dict[str, Any]
    model: str | None = None
    images: list[AskedImage] = field(default_factory=list)
    lora_set: str | None = None  # a name of the catalogue's

    @property
    def digest(self) -> str:
        """Of all that was said: what an idempotency key stands for."""
        images = [
            [digest(image.data.hex()), *list(vars(image).values())[1:]] for image in self.images
        ]
        return digest([vars(self.wanted), self.line, self.model, images, self.lora_set])


def read_request(fields: Mapping[str, Any]) -> Request:
    """Read a body's fields: JSON values, or texts and Uploads of a multipart body. Raises ApiError
    that names the first field that is wrong."""
    fields = _merged(fields)
    line = {"prompt": _prompt(fields.pop("prompt", None))}
    model, lora_set = (_name(key, fields.pop(key, None)) for key in ("model", "lora_set"))
    wanted = _wanted({key: fields.pop(key) for key in SIZE_KEYS if key in fields})
    images = _images({key: fields.pop(key) for key in IMAGE_KEYS if key in fields})
    for key, value in fields.items():
        name = LINE_KEYS[key]
        if name in line:
            raise invalid(key, f"{key} says again what another field says; leave one out")
        line[name] = _value(key, value)
    return Request(wanted, line, model, images, lora_set)


def _name(key: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise invalid(key, f"{key} is a name")
    return value


def _merged(fields: Mapping[str, Any]) -> dict[str, Any]:
    """All fields that say something, those of extra_params beside the others."""
    merged = _unbracketed(fields)
    extra = merged.pop("extra_params", None)
    extra = _json("extra_params", extra) if isinstance(extra, str) else extra or {}
    if not isinstance(extra, dict):
        raise invalid("extra_params", "extra_params is a JSON object")
    if twice := sorted(merged.keys() & extra.keys()):
        raise invalid(twice[0], f"{twice[0]} is a field and a key of extra_params; leave one out")
    merged |= extra
    for key in merged:
        if key in UNSUPPORTED and merged[key] not in (None, "", 1, "1"):
            raise invalid(key, f"{key} is not supported here", "feature_not_supported")
        nested = key == "extra_params"  # one within another
        if nested or key not in KNOWN and key not in UNSUPPORTED:
            known = ", ".join(sorted({*KNOWN} - {"extra_params"}))
            raise invalid(key[:64], f"unknown field {key[:64]!r}; known: {known}", "unknown_field")
    return {
        key: value for key, value in merged.items() if value is not None and key not in UNSUPPORTED
    }


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


def _prompt(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise invalid("prompt", "prompt is missing: a text that says what to show", "missing_field")
    if len(value) > MAX_PROMPT:
        raise invalid(
            "prompt", f"prompt has {len(value)} characters, {MAX_PROMPT} at most", "prompt_too_long"
        )
    return value


def _wanted(fields: dict[str, Any]) -> RequestedSize:
    """The size, however it is said."""
    width, height = _sides(fields)
    if "num_frames" in fields and "seconds" in fields:
        raise invalid("seconds", "seconds and num_frames say the same; leave one out")
    if "fps" in fields and "frame_rate" in fields:
        raise invalid("fps", "fps and frame_rate are the same; leave one out")
    rate = "fps" if "fps" in fields else "frame_rate"
    two_stage, recipe = fields.get("two_stage"), fields.get("recipe")
    if isinstance(two_stage, str):
        two_stage = _TRUE_FALSE.get(two_stage.lower(), two_stage)
    if two_stage not in (None, True, False):
        raise invalid("two_stage", "two_stage is true or false")
    if recipe not in (None, "distilled", "dev"):
        raise invalid("recipe", "recipe is 'distilled' or 'dev'")
    return RequestedSize(
        height,
        width,
        _number(fields, "num_frames", 1, _MAX_FRAMES, whole=True),
        _number(fields, "seconds", 0.01, _MAX_SECONDS),
        _number(fields, rate, 1, 1000),
        None if two_stage is None else bool(two_stage),
        recipe,
    )


def _sides(fields: dict[str, Any]) -> tuple[int | None, int | None]:
    """Width and height; None where they are not said."""
    sides = [_number(fields, name, 1, _MAX_SIDE, whole=True) for name in ("width", "height")]
    if (size := fields.get("size")) in (None, "", "auto"):
        return sides[0], sides[1]
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if not match or sides != [None, None]:
        raise invalid("size", "size is WIDTHxHEIGHT, as in 768x512, without width and height")
    return int(match[1]), int(match[2])


def _number(fields: dict[str, Any], name: str, low: float, high: float, whole: bool = False) -> Any:
    """A number that may be spelled as text; None where it is not there."""
    value = fields.get(name)
    if value in (None, ""):
        return None
    try:
        if isinstance(value, bool | list | dict) or len(str(value)) > 32:
            raise ValueError
        number = float(value)
        if not low <= number <= high or whole and number != int(number):
            raise ValueError
    except (TypeError, ValueError):
        kind = "a whole number" if whole else "a number"
        raise invalid(name, f"{name} is {kind} from {low:g} to {high:g}") from None
    return int(number) if whole else number


def _value(key: str, value: Any) -> Any:
    """A key of a line, as JSON has it; flags.job_of_line checks its type."""
    if isinstance(value, Upload):
        raise invalid(key, f"{key} is a file; wanted text or a number")
    if isinstance(value, str) and len(value) > MAX_PROMPT:
        raise invalid(key, f"{key} has {len(value)} characters, {MAX_PROMPT} at most")
    if key in _LISTS and isinstance(value, str):
        value = _json(key, value)
    if isinstance(value, list) and len(value) > _MAX_LIST:
        raise invalid(key, f"{key} has {len(value)} values, {_MAX_LIST} at most")
    return value


# --- images ---------------------------------------------------------------------------------------


def _images(fields: dict[str, Any]) -> list[AskedImage]:
    """The images that a request holds; the references at frame 0."""
    references = [(key, fields[key]) for key in IMAGE_KEYS[:2] if fields.get(key) not in (None, "")]
    if len(references) > 1:
        raise invalid("image_reference", "input_reference and image_reference are the same")
    images = [AskedImage(_bytes_of(key, value), param=key) for key, value in references]
    several = fields.get("images", [])
    several = _json("images", several) if isinstance(several, str) else several
    if not isinstance(several, list):
        raise invalid("images", "images is a list of objects with image_url")
    if len(images) + len(several) > MAX_IMAGES:
        raise invalid("images", f"{len(images) + len(several)} images, {MAX_IMAGES} at most")
    return images + [_image(f"images[{index}]", entry) for index, entry in enumerate(several)]


def _image(name: str, entry: Any) -> AskedImage:
    if not isinstance(entry, dict) or (unknown := entry.keys() - _IMAGE_FIELDS.keys()):
        wrong = f", unknown: {sorted(unknown)[0][:64]}" if isinstance(entry, dict) else ""
        raise invalid(name, f"{name} is an object of {', '.join(_IMAGE_FIELDS)}{wrong}")
    numbers = {}
    for key, limits in _IMAGE_FIELDS.items():
        if limits and (value := _number(entry, key, *limits)) is not None:
            numbers[key] = value
    return AskedImage(_bytes_of(name, entry), **numbers, param=name)


# Of an image: the least, the most, whether it is a whole number.
_IMAGE_FIELDS: dict[str, tuple[float, float, bool] | None] = {
    "image_url": None,
    "frame": (0, _MAX_FRAMES, True),
    "strength": (0, 1, False),
    "crf": (0, 51, True),
}


def _bytes_of(name: str, value: Any) -> bytes:
    """What an upload, a data URL, or an object with one holds."""
    if isinstance(value, Upload):
        return value.read()
    if isinstance(value, dict):
        if value.get("file_id") is not None:
            message = f"{name}: file_id is not supported here; send the file, or a data URL"
            raise invalid(name, message, "feature_not_supported")
        value = value.get("image_url")
    if not isinstance(value, str):
        raise invalid(name, f"{name} is a file, or an object with image_url")
    if not value.startswith("data:"):
        # The service fetches nothing: a URL could name what only this machine may read.
        message = f"{name}: only data URLs are read, as in data:image/png;base64,..."
        raise invalid(name, message, "feature_not_supported")
    head, _, content = value.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError
        return base64.b64decode(content, validate=True)
    except (ValueError, binascii.Error):
        raise invalid(name, f"{name}: wanted data:image/png;base64,...") from None


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise invalid(name, f"{name} is not JSON") from None


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON body's fields."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the body is not JSON") from None
    if not isinstance(content, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    return content
