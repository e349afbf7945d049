"""JobFields: a user's settings of one video. Each field is a flag and a key of a prompts file's
line. Those of SamplingFields, GuidanceFields and VideoFields are fields of an HTTP body as well.

These fields define the flags and their help, the validation of flags, lines, bodies and the Python
API, the schema of a body, and a job's line and flags. A field's description is the flag's help, and
its title is the name of the flag's value.
"""

# Pydantic evaluates Literals of other modules' tuples.
# pyright: reportInvalidTypeForm=false

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from annotated_types import MaxLen
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ArgsKwargs, PydanticCustomError

from ltx_neuron.errors import FieldError, UserError, flag_of
from ltx_neuron.sampling import conditions
from ltx_neuron.sampling.guidance import IDENTITY_SCALE, NAG_ALPHA, NAG_TAU
from ltx_neuron.sampling.rules import PICTURE_FIELDS
from ltx_neuron.sampling.shapes import GUIDED_MAX_STEPS, UPSCALES
from ltx_neuron.sampling.size import FRAME_RATES, AutoDuration, Size

SEED = 10  # the default
RANDOM_SEED = -1  # the command draws a seed, prints and records it
RECIPES = "distilled", "dev"
DETAILING = 0.5  # strength of the detailing LoRA
HQ_STRENGTHS = 0.25, 0.5  # of the distilled LoRA in stage 1 and stage 2


def _option(
    help: Any, value: str | None = None, *, default: Any = None, names: Any = (), **limits: Any
) -> Any:
    """A field. value: the name of the flag's value in its help. names: the field's own name and its
    aliases."""
    alias = AliasChoices(*names) if names else None
    return Field(default, description=help, title=value, validation_alias=alias, **limits)


def _switch(help: str) -> Any:
    return _option(help, default=False)


def described_as(field: str, **more: Any) -> Any:
    """A field of a request, None by default, with the description of a job's."""
    return Field(default=None, description=JobFields.model_fields[field].description, **more)


class LoraFile(NamedTuple):
    """PATH [STRENGTH], by default 1."""

    path: str
    strength: float | None = None


def _repeats(value: Any) -> Any:
    """Normalise a repeatable flag's values: one path, [path, ...] or [[path, ...], ...]."""
    if isinstance(value, tuple):  # of another job
        return value
    nested = isinstance(value, list) and value and not isinstance(value[0], str)
    entries = value if nested else [value]
    return [[entry] if isinstance(entry, str) else entry for entry in entries if entry != []]


def _image(value: Any) -> Any:
    return ArgsKwargs(tuple(value)) if isinstance(value, list) else value


def _image_values(image: conditions.ImageCondition) -> list:
    values = [str(image.path), image.frame_index, image.strength]
    return values if image.crf is None else [*values, image.crf]


_Image = Annotated[
    conditions.ImageCondition, BeforeValidator(_image), PlainSerializer(_image_values)
]
Images = Annotated[tuple[_Image, ...], BeforeValidator(_repeats)]
WeightedFiles = Annotated[tuple[conditions.WeightedFile, ...], BeforeValidator(_repeats)]
LoraFiles = Annotated[tuple[LoraFile, ...], BeforeValidator(_repeats)]


def _listed(value: Any) -> Any:
    return value if value is None or isinstance(value, list | tuple) else [value]


Duration = Annotated[
    AutoDuration | None, BeforeValidator(lambda value: AutoDuration() if value == [] else value)
]
Texts = Annotated[tuple[str, ...] | None, BeforeValidator(_listed)]
Blocks = Annotated[tuple[int, ...] | None, BeforeValidator(_listed)]


def _rate(value: Any) -> Any:
    """A fraction such as "30000/1001" as a number; anything else as it is."""
    try:
        return float(Fraction(value)) if isinstance(value, str) and "/" in value else value
    except (ValueError, ZeroDivisionError):
        return value


# The limits are those of MP4 and of the sound's latents.
_Rate = Annotated[float, Field(ge=FRAME_RATES[0], le=FRAME_RATES[1]), BeforeValidator(_rate)]


def _has_switch(value: Any, depth: int = 2) -> bool:
    """Whether a value is True or False, or a list with one up to `depth` levels deep."""
    if isinstance(value, list) and depth:
        return any(_has_switch(item, depth - 1) for item in value)
    return isinstance(value, bool)


class Fields(BaseModel):
    """Base class: True and False are invalid as text and as numbers, numpy's numbers are valid."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        loc_by_alias=False,
        allow_inf_nan=False,
        revalidate_instances="always",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_list(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a too long list before its values are validated, and True and False."""
        assert info.field_name
        value = conditions.plain(value)
        field = cls.model_fields[info.field_name]
        most = next((x.max_length for x in field.metadata if isinstance(x, MaxLen)), None)
        if most is not None and isinstance(value, list) and len(value) > most:
            raise PydanticCustomError("too_many_values", "wanted at most {most}", {"most": most})
        if _has_switch(value) and field.annotation not in (bool, bool | None):
            raise ValueError("wanted text or a number")
        return value


class SamplingFields(Fields):
    negative_prompt: str | None = _option(
        "content to avoid, with the dev recipe or --nag-scale (default: built in)", "TEXT"
    )
    seed: int = _option(
        f"seed of the noise; -1: a random one (default: {SEED})",
        "N",
        default=SEED,
        ge=-(2**63),
        lt=2**64,
    )
    num_inference_steps: int | None = _option(
        "dev recipe: steps of stage 1 (default: 30; res_2s sampler: 15)",
        "N",
        names=("num_inference_steps", "num_steps"),
        ge=1,
        le=GUIDED_MAX_STEPS,
    )
    upscale: Literal[tuple(UPSCALES)] | None = _option(
        "after one stage: double the size (spatial), the frame rate (temporal), or both"
    )
    nag_scale: float | None = _option(
        "distilled recipe: avoid --negative-prompt by normalized attention guidance (NAG), for"
        " example 11; 1: off (default: off)",
        "SCALE",
        ge=1,
        le=100,
    )
    nag_alpha: float = _option(
        f"share of NAG in a text attention (default: {NAG_ALPHA:g})",
        "SHARE",
        default=NAG_ALPHA,
        ge=0,
        le=1,
    )
    nag_tau: float = _option(
        f"NAG's limit of a token's growth in a text attention (default: {NAG_TAU:g})",
        "FACTOR",
        default=NAG_TAU,
        ge=0,
        le=10,
    )


class VideoFields(Fields):
    """The video's size and recipe, the same for flags, lines and HTTP bodies."""

    height: int | None = _option(
        f"a multiple of 32; of 64 in two stages (default: {Size.height})", "PIXELS", ge=1, le=16_384
    )
    width: int | None = _option(
        f"a multiple of 32; of 64 in two stages (default: {Size.width})", "PIXELS", ge=1, le=16_384
    )
    num_frames: int | None = _option(
        f"a multiple of 8, plus 1 (default: {Size.num_frames})", "N", ge=1, le=100_000
    )
    frame_rate: _Rate | None = _option(
        f"frames per second, also as 30000/1001 (default: {Size.frame_rate:g})",
        "FPS",
        names=("frame_rate", "fps"),
    )
    recipe: Literal[RECIPES] | None = _option(
        "kind of checkpoint (default: from its file name, else distilled)"
    )


class SizeFields(VideoFields):
    two_stage: StrictBool = _switch("denoise at half the size, then double it and refine")
    image: Images = _option(
        "condition on this image at frame FRAME_IDX, -1: the last; repeatable (default: frame 0,"
        " strength 1, the release's CRF)",
        "PATH [FRAME_IDX [STRENGTH [CRF]]]",
        default=(),
    )


def _loras(help: str) -> Any:
    return _option(f"{help}; repeatable", "PATH [STRENGTH]", default=())


def _strength(stage: int) -> Any:
    help = f"merge --distilled-lora into both stages; its strength in stage {stage}"
    return _option(f"{help} (default: {HQ_STRENGTHS[stage - 1]:g})", "STRENGTH")


class LoraFields(Fields):
    lora: LoraFiles = _loras("merge a LoRA into all stages (default strength: 1)")
    ic_lora: LoraFiles = _loras("merge an IC-LoRA into stage 1 (default strength: 1)")
    distilled_lora: LoraFiles = _loras("dev recipe: the distilled LoRA of stage 2, or of both")
    detailing_lora: LoraFiles = _option(
        f"merge the detailing LoRA into stage 2 of --dfr (default strength: {DETAILING:g})",
        "PATH [STRENGTH]",
        default=(),
    )
    distilled_lora_strength_stage_1: float | None = _strength(1)
    distilled_lora_strength_stage_2: float | None = _strength(2)


class ConditionFields(Fields):
    """Inputs besides prompt and images that graphs depend on."""

    audio_path: str | None = _option("generate the video for the sound in this file", "FILE")
    video_path: str | None = _option(
        "retake: regenerate this video from START_S to END_S, in seconds", "FILE"
    )
    extend: float | None = _option(
        "extend the video of --video-path at its end or, below 0, at its beginning, in windows of"
        " --num-frames",
        "SECONDS",
    )
    video_conditioning: WeightedFiles = _option(
        "a reference video or image for --ic-lora; repeatable", "PATH STRENGTH", default=()
    )
    upscale_video: str | None = _option(
        "upscale this video by the upscaler of --ic-lora, in tiles: length, frame rate and sound"
        " are its own, --height and --width too by default, times the upscaler's factor",
        "FILE",
    )
    conditioning_attention_mask: WeightedFiles = _option(
        "attention weights of the references as a video: white is 1, black 0",
        "PATH STRENGTH",
        default=(),
    )
    reference_video: str | None = _option(
        "dub this video: its speakers say the prompt's words; needs the dubbing LoRA as --lora",
        "FILE",
    )
    reference_audio: str | None = _option(
        "the speaker gets the voice in this file; needs its LoRA as --ic-lora", "FILE"
    )
    reference_audio_max_duration: float | None = _option(
        "seconds of --reference-audio to use, so that one graph serves many voices (default: all)",
        "SECONDS",
        gt=0,
    )
    identity_guidance_scale: float | None = _option(
        "dev recipe: guidance of the sound towards --reference-audio, by a fifth pass; 0: off"
        f" (default: {IDENTITY_SCALE:g})",
        "SCALE",
    )
    sound_only: StrictBool = _switch(
        "generate the sound alone, as .wav, of --num-frames at --frame-rate (dev recipe)"
    )
    skip_stage_2: StrictBool = _switch("end --two-stage after stage 1, at half size")
    stage_2_ic_lora: StrictBool = _switch(
        "merge --ic-lora into stage 2 too, which has the references at full size"
    )
    tile: StrictBool = _switch("with --ic-lora: predict the picture in overlapping tiles")
    tile_height: conditions.TileSide | None = _option(
        f"of --tile, a multiple of 32 (default: {conditions.TILE[0]})", "PIXELS"
    )
    tile_width: conditions.TileSide | None = _option(
        f"of --tile, a multiple of 32 (default: {conditions.TILE[1]})", "PIXELS"
    )
    text_embeddings: str | None = _option(
        "HDR of --video-conditioning by --ic-lora, with these embeddings as prompt", "FILE"
    )
    input_colorspace: Literal["srgb_gamma", "srgb", "acescg", "acescct"] = _option(
        "of HDR: colour space of the input (default: srgb_gamma)", default="srgb_gamma"
    )
    exr_colorspace: Literal["acescg", "srgb_linear", "acescct"] = _option(
        "of HDR: colour space of the written EXR files (default: acescg)", default="acescg"
    )
    high_quality: StrictBool = _switch("of HDR: generate each frame twice, and keep one of them")
    no_keyframes: StrictBool = _switch("of HDR: no keyframes between its segments")
    alpha_gen: StrictBool = _switch(
        "dev recipe: matte of --video-conditioning by --ic-lora; with a .mov, as its alpha"
    )
    images_as_guides: StrictBool = _switch(
        "keyframe interpolation: append every --image as a guide, also at frame 0 (dev recipe, two"
        " stages)"
    )
    tail_frames: conditions.TailFrames | None = _option(
        "generate N more frames, a multiple of 8, and cut them off, with their sound", "N"
    )
    num_generated_keyframes: conditions.Keyframes | None = _option(
        "LTX-2.5: generate N keyframes beside the clip, at equal distances, so that it"
        " follows faster motion",
        "N",
    )
    dfr: StrictBool = _switch(
        "LTX-2.5, two stages: diffusion fidelity rendering, with keyframes at equal distances and"
        " --detailing-lora"
    )
    chunked: StrictBool = _switch("a clip of any length, in windows that continue each other")
    chunk_pixel_frames: conditions.Frames | None = _option(
        f"frames of a window of --chunked, 8k+1 (default: {conditions.WINDOW_FRAMES})", "N"
    )
    chunk_carry_frames: conditions.Frames | None = _option(
        f"frames of the last window that a window keeps (default: {conditions.CARRY_FRAMES})", "N"
    )
    chunk_blend_frames: conditions.Keyframes | None = _option(
        "frames over which two windows are blended; 0: a hard cut (default: the carry)", "N"
    )
    temporal_upsample_rounds: conditions.Rounds | None = _option(
        "of --dfr, at most 2: double the frame rate so many times, each time denoising in windows",
        "N",
        names=("temporal_upsample_rounds", "temporal_upscalings"),
    )


class DetailFields(Fields):
    """Settings of these inputs that no graph depends on."""

    audio_start_time: float | None = _option(
        "where in --audio-path the video begins (default: 0)", "SECONDS", ge=0
    )
    audio_max_duration: float | None = _option(
        "seconds of --audio-path to use (default: the video's length)", "SECONDS", gt=0
    )
    audio_bed: conditions.BedLevel | None = _option(
        "level in dBFS of noise added to what the model hears of --audio-path, as in -50; the"
        " video's sound has none",
        "DB",
    )
    start_time: float | None = _option("beginning of the retake in --video-path", "SECONDS")
    end_time: float | None = _option("end of the retake in --video-path", "SECONDS")
    regenerate: Literal["both", "video", "audio"] | None = _option(
        "streams of --video-path that a retake generates again (default: both)"
    )
    motion_speed: float = _option(
        "speed of the motion for the Slow-Motion-Control LoRA, from 1 to 0.025: scales the time of"
        " the video's positions; frame rate and sound stay (default: 1)",
        "SPEED",
        default=1.0,
        ge=0.025,
        le=1,
    )
    decode_with_keyframes: StrictBool = _switch(
        "of --num-generated-keyframes: the diffusion decoder reads the keyframes, on the host"
    )
    reference_strength: float | None = _option(
        "strength of --reference-video, 1: its pictures, 0: noise (default: 1)",
        "STRENGTH",
        ge=0,
        le=1,
    )


def _scale(help: str) -> Any:
    return _option(help, "SCALE")


def _blocks(stream: str) -> Any:
    help = f"transformer blocks in which STG skips the {stream}'s self-attention"
    return _option(help, "[BLOCK ...]", max_length=256)


def _skip(stream: str) -> Any:
    help = f"after each guided step, steps that reuse its prediction of the {stream}; 0: none"
    return _option(help, "STEPS", ge=0)


class GuidanceFields(Fields):
    """Named as in ltx-pipelines: a stream's modality scale after the cross-attention into it."""

    video_cfg_guidance_scale: float | None = _scale("classifier-free guidance of the video; 1: off")
    video_stg_guidance_scale: float | None = _scale(
        "spatio-temporal guidance (STG) of the video; 0: off"
    )
    video_stg_blocks: Blocks = _blocks("video")
    video_rescale_scale: float | None = _scale(
        "how far the guided video's standard deviation is restored, 0 to 1; 0: off"
    )
    a2v_guidance_scale: float | None = _scale("guidance of the video by the sound; 1: off")
    video_skip_step: int | None = _skip("video")
    audio_cfg_guidance_scale: float | None = _scale("classifier-free guidance of the sound; 1: off")
    audio_stg_guidance_scale: float | None = _scale(
        "spatio-temporal guidance (STG) of the sound; 0: off"
    )
    audio_stg_blocks: Blocks = _blocks("sound")
    audio_rescale_scale: float | None = _scale(
        "how far the guided sound's standard deviation is restored, 0 to 1; 0: off"
    )
    v2a_guidance_scale: float | None = _scale("guidance of the sound by the video; 1: off")
    audio_skip_step: int | None = _skip("sound")


# Keys of --guidance -> fields.
GUIDANCE_KEYS = {
    field.removesuffix("_scale").removesuffix("_guidance"): field
    for field in GuidanceFields.model_fields
}


class JobFields(
    GuidanceFields, DetailFields, ConditionFields, LoraFields, SizeFields, SamplingFields
):
    """All settings of one video; None: not given."""

    prompt: str = _option("description of the video and its sound", "TEXT", default="")
    prompts: Texts = _option(
        "of --chunked: several descriptions in order, dealt out evenly to the windows", "[TEXT ...]"
    )
    recipe: Literal[RECIPES] = _option(
        VideoFields.model_fields["recipe"].description, default="distilled"
    )
    auto_duration: Duration = _option(
        "LTX-2.5: predict --num-frames from the prompt, between these seconds (default: 1 20)",
        "[MIN_SECONDS MAX_SECONDS]",
    )
    sampler: Literal["euler", "res_2s", "gradient_estimation"] = _option(
        "dev recipe: res_2s (HQ, for --two-stage) or gradient_estimation (default: euler)",
        default="euler",
    )

    @classmethod
    def validated(cls, values: Mapping[str, Any], strict: bool | None = None) -> Self:
        """A job with these fields' values. strict: without conversions from text. Raises
        FieldError."""
        try:
            return cls.model_validate(dict(values), strict=strict)
        except ValidationError as error:
            mistake = error.errors(include_url=False, include_context=False)[0]
            raise _field_error(mistake, values) from None

    def replaced(self, **values: Any) -> Self:
        """A copy with other values, which are not validated."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return self.model_construct(**fields | values)

    def updated(self, line: Mapping[str, Any]) -> Self:
        """A copy with the values of a prompts file's line, whose keys are flags without dashes.
        false and null mean not given. A line's images and references are added; its LoRAs, also [],
        replace these. Raises UserError."""
        line = {key: None if value is False else value for key, value in line.items()}
        of_line, values = JobFields.validated(resolve_aliases(line)), {}
        if "video_path" in of_line.model_fields_set:  # its file determines the size
            names = (*SIZES, "tail_frames", "auto_duration")
            values = {name: JobFields.model_fields[name].default for name in names}
        elif of_line.model_fields_set & {"reference_video", "upscale_video"}:
            # Their file determines the length.
            values = dict.fromkeys((*_LENGTH, "frame_rate", "tail_frames"))
        elif of_line.sound_only:  # nor has it the command's picture
            values = {"two_stage": False, **dict.fromkeys((*PICTURE_FIELDS, "tail_frames"))}
        if of_line.model_fields_set & {*_LENGTH}:
            values |= dict.fromkeys(_LENGTH)
        values |= {name: getattr(of_line, name) for name in of_line.model_fields_set}
        for name in ("image", "video_conditioning", "conditioning_attention_mask"):
            values[name] = getattr(self, name) + getattr(of_line, name)
        return self.replaced(**values)

    @property
    def input_paths(self) -> list[tuple[str, str | Path]]:
        """(field, path) of each input file, in the order of INPUT_FILES."""
        paths = []
        for name in INPUT_FILES:
            value = getattr(self, name)
            files = [file.path for file in value] if isinstance(value, tuple) else [value]
            paths += [(name, path) for path in files if path is not None]
        return paths

    def moved(self, rename: Callable[[Path], str]) -> Self:
        rename = cache(rename)

        def renamed(value: Any) -> Any:
            if isinstance(value, conditions.WeightedFile):
                return value._replace(path=rename(Path(value.path)))
            if isinstance(value, conditions.ImageCondition):
                return dataclasses.replace(value, path=rename(Path(value.path)))
            return tuple(map(renamed, value)) if isinstance(value, tuple) else rename(Path(value))

        values = {name: getattr(self, name) for name in INPUT_FILES}
        return self.replaced(**{name: value and renamed(value) for name, value in values.items()})

    def holds(self, term: str) -> bool:
        """Whether a term of rules.RULES holds."""
        if term.startswith("!"):
            return not self.holds(term.removeprefix("!"))
        if term == "guidance":
            return any(getattr(self, name) is not None for name in GuidanceFields.model_fields)
        if term == "chunked" and any(getattr(self, name) is not None for name in _OF_WINDOWS):
            return True
        name, _, expected = term.partition("=")
        value = getattr(self, name)
        if expected:
            return value == expected
        if value is None or (name in _COUNTS and not value):
            return False
        return value != JobFields.model_fields[name].default

    def to_json(self) -> dict[str, Any]:
        """The equivalent line of a prompts file."""
        fields = {*JobFields.model_fields}
        return self.model_dump(mode="json", include=fields, exclude_none=True)


SIZES = tuple(  # as the flags are named
    field.name for field in dataclasses.fields(Size) if field.name != "spatial_scale"
)
_OF_WINDOWS = "chunk_pixel_frames", "chunk_carry_frames", "chunk_blend_frames"
_LENGTH = "num_frames", "auto_duration"
_COUNTS = "tail_frames", "num_generated_keyframes", "temporal_upsample_rounds"  # 0: without
LORAS = ("lora", "ic_lora", "distilled_lora", "detailing_lora")
# Field -> its kind of file, and the flag's values.
INPUT_FILES = {
    "image": ("an image", "FILE [FRAME_IDX [STRENGTH [CRF]]]"),
    "video_conditioning": ("a video or an image", "FILE STRENGTH"),
    "audio_path": ("a sound", "FILE"),
    "video_path": ("a video", "FILE"),
    "conditioning_attention_mask": ("a video", "FILE STRENGTH"),
    "upscale_video": ("a video", "FILE"),
    "reference_video": ("a video with sound", "FILE"),
    "reference_audio": ("a sound", "FILE"),
    "text_embeddings": ("text embeddings", "FILE"),
}


def names_of(field: str, model: type[BaseModel] | None = None) -> list[str]:
    """A field's names, its own first, in a model, by default JobFields."""
    alias = (model or JobFields).model_fields[field].validation_alias
    return [*map(str, alias.choices)] if isinstance(alias, AliasChoices) else [field]


def resolve_aliases(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line's values by field, without nulls. Raises UserError for an unknown key, and for two
    keys of one field."""
    known = {name: field for field in JobFields.model_fields for name in names_of(field)}
    keys = {}
    for key, value in line.items():
        field = known.get(key.replace("-", "_"))
        if field is None:
            near = get_close_matches(key.replace("-", "_"), known, 1)
            hint = f"did you mean {near[0].replace('_', '-')!r}?" if near else ""
            listed = hint or "keys are the flags of a video, such as 'prompt', 'seed' and 'height'"
            raise UserError(f"unknown key {key!r}; {listed}")
        if value is not None and (other := keys.setdefault(field, key)) != key:
            raise UserError(f"{other!r} and {key!r} are the same flag; leave one out")
    return {field: line[key] for field, key in keys.items()}


def _field_error(mistake: Mapping[str, Any], values: Mapping[str, Any]) -> FieldError:
    name, (got, wanted) = str(mistake["loc"][0]), got_and_wanted(mistake)
    path, part = _place(mistake, values)
    title = JobFields.model_fields[name].title or ""
    if title.startswith("PATH"):
        wanted += f"; type {flag_of(name)} {title}"
    return FieldError(
        f"{{{name}}}{{path}}: {{part}} {{got}}, {{wanted}}",
        path=path,
        part=part,
        got=got,
        wanted=wanted,
    )


def _place(mistake: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[str, str]:
    """A mistake's file of a repeatable flag, after a space, and the name of its value; "" and "got"
    if unknown."""
    name, *place = mistake["loc"]
    if len(place) < 2 or place[1] in (0, "path"):
        return "", "got"
    entry, part = _repeats(values[name])[place[0]], place[1]
    if isinstance(entry, dict):
        path = entry.get("path")
    else:
        path = entry[0] if isinstance(entry, list | tuple) else entry.path
    parts = ("path", "frame_index", "strength", "crf") if name == "image" else LoraFile._fields
    if isinstance(part, int):
        part = parts[part] if part < len(parts) else None
    known = part in parts and mistake["type"] != "missing"
    return f" {path}", str(part).replace("_", " ") if known else "got"


_WORDS = {
    "Value error, ": "",
    "Input should be": "wanted",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}


def got_and_wanted(mistake: Mapping[str, Any]) -> tuple[str, str]:
    """The given value, shortened, and the wanted one, from a pydantic error."""
    got, wanted = mistake["input"], mistake["msg"].partition(", unable to parse")[0]
    got = [*got.args] if isinstance(got, ArgsKwargs) else got
    if mistake["type"] == "too_many_values":
        return f"{len(got)} values", wanted
    for words, ours in _WORDS.items():
        wanted = wanted.replace(words, ours)
    return reprlib.repr(got), wanted[0].lower() + wanted[1:]
