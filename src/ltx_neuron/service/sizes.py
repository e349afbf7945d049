"""The compiled video sizes, and the selection of one for a request.

A manifest records the sizes that its graphs were compiled for. The transformer's graphs depend only
on the number of tokens. So a recorded size also offers its transpose, and a two-stage size those of
its stages.
"""

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST
from ltx_neuron.job import LORA_FIELDS, Job, Size
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ImageCondition,
    ReferenceAudio,
    ReferenceVideo,
    Retake,
    SoundCondition,
    TailFrames,
)
from ltx_neuron.sampling.latents import (
    AUDIO_LATENTS_PER_SECOND,
    SPACE_SCALE,
    TIME_SCALE,
    seconds_of_latents,
)
from ltx_neuron.sampling.size import NO_PICTURE
from ltx_neuron.sampling.spec import SIZES, VideoFields, described_as
from ltx_neuron.service.api_error import ApiError, invalid
from ltx_neuron.weights.lora import dubbing_scale, reference_scale
from ltx_neuron.workspace import Workspace

NO_LORAS: dict[str, dict[str, tuple]] = {"default": dict.fromkeys(LORA_FIELDS, ())}
_MAX_LISTED = 12  # sizes in a message
_AS_THESE = {
    "images": "images at these frames",
    "references": "such reference videos",
    "attention_mask": "their mask",
    "stage_2_ic_lora": "them in stage 2",
    "tile": "such tiles",
    "nag_scale": "nag_scale",
    "num_generated_keyframes": "this number of generated keyframes",
    "reference_audio": "such a voice",
}
# Inputs whose graphs may be the only ones of their size -> the request's field
_OWN_GRAPHS = {
    "references": "video_conditioning",
    "tile": "tile",
    "reference_audio": "reference_audio",
    "nag_scale": "nag_scale",
    "num_generated_keyframes": "num_generated_keyframes",
}
_KEYFRAMES = range(1, 9)  # counts whose graphs are searched


class RequestedSize(VideoFields):
    """The size fields of a request; None for an omitted field."""

    seconds: float | None = Field(
        default=None, ge=0.01, le=3600, description="duration from the first to the last frame"
    )
    two_stage: bool | None = described_as("two_stage")
    tail_frames: TailFrames | None = described_as("tail_frames")

    def frames(self, rate: float) -> int | None:
        """The number of frames at a frame rate; whole seconds have one more than their product."""
        if self.seconds is None or self.num_frames is not None:
            return self.num_frames
        return round(self.seconds * rate) + 1

    @property
    def tail(self) -> int:
        """Frames of the compiled size that are cut off."""
        return self.tail_frames or 0


class SizeObject(TypedDict):
    """A compiled size in the API's answers."""

    size: str
    seconds: str
    num_frames: int
    fps: float
    two_stage: bool
    recipe: str


class CompiledSize(NamedTuple):
    """A video size and the recipe that its graphs were compiled for."""

    size: Size
    recipe: str

    @property
    def refines(self) -> bool:
        """Whether stage 2 needs the distilled LoRA."""
        return self.size.two_stage and self.recipe == "dev"

    def as_dict(self) -> SizeObject:
        size = self.size
        return {
            "size": f"{size.width}x{size.height}",
            "seconds": seconds_of(size),
            "num_frames": size.num_frames,
            "fps": size.frame_rate,
            "two_stage": size.two_stage,
            "recipe": self.recipe,
        }

    def __str__(self) -> str:
        size, stages = self.size, "two stages" if self.size.two_stage else "one stage"
        return (
            f"{size.width}x{size.height}, {size.num_frames} frames at {size.frame_rate:g} fps"
            f" ({seconds_of(size)} s), {stages}, {self.recipe}"
        )


def seconds_of(size: Size) -> str:
    """Seconds from the first to the last frame: whole for 8k+1 frames at 24 fps, as 121 are 5 s."""
    return f"{(size.num_frames - 1) / size.frame_rate:.4g}"


class SizeRegistry:
    """The sizes that a workspace has graphs for.

    default     size and recipe of requests that omit them
    upsamplers  kinds of available latent upsamplers; two stages need the spatial one
    lora_sets   a Job's LoRA fields by the set's name, which a request sends; "default" is for
                requests without a name
    """

    def __init__(
        self,
        workspace: Workspace,
        default: CompiledSize,
        upsamplers: Collection[str],
        lora_sets: Mapping[str, dict[str, tuple]] = NO_LORAS,
    ):
        self.workspace, self.default, self.upsamplers = workspace, default, upsamplers
        self.lora_sets = lora_sets
        self._read: dict[Path, int] | None = None  # manifests and their change times, as last read
        self._recorded: list[CompiledSize] = []
        self._compiled: list[CompiledSize] = []
        self._inputs: dict[str, list[CompiledSize]] = {}
        self._voices: set[int] = set()  # audio latents of reference voices that have graphs
        # Buckets without a recorded size. Only a request for exactly that size uses them.
        self.unrecorded: list[str] = []

    # --- the compiled sizes -----------------------------------------------------------------------

    @property
    def compiled(self) -> list[CompiledSize]:
        """Every recorded size that can run, the smallest first. Manifests are read again if one was
        added, changed or removed."""
        found = {}
        for path in (Path(self.workspace.artifacts) / "graphs").glob(f"*/{MANIFEST}"):
            with suppress(FileNotFoundError):
                found[path] = path.stat().st_mtime_ns
        if found != self._read:
            recorded = self.workspace.compiled_sizes()
            self.unrecorded = sorted(name for name, records in recorded.items() if not records)
            offered = set().union({self.default}, *map(_offered, chain(*recorded.values())))
            self._recorded = sorted(offered, key=lambda s: (s.recipe, _pixels(s.size), str(s)))
            self._compiled = [*filter(self._fits, self._recorded)]
            counts = re.findall(r"-a(\d+)t2", " ".join(recorded))  # of buckets with a voice
            self._inputs = self._sizes_of_inputs({*map(int, counts)})
            self._read = found
        return self._compiled

    @property
    def inputs(self) -> dict[str, list[CompiledSize]]:
        """The sizes that accept a file or nag_scale, by the request field. For video_reference, the
        sizes that the file may have."""
        _ = self.compiled  # read again
        return self._inputs

    @property
    def reference_sets(self) -> list[str]:
        """The names of the LoRA sets that use reference videos or voices: with a LoRA for stage 1
        alone."""

        def only_first(fields: dict[str, tuple]) -> bool:
            first, second = fields["stage_1_loras"], fields["stage_2_loras"]
            return any(lora.path not in {other.path for other in second} for lora in first)

        return [name for name, fields in self.lora_sets.items() if only_first(fields)]

    @property
    def voice_seconds(self) -> list[float]:
        """The compiled lengths of reference voices, in seconds. A longer voice is cut to one."""
        _ = self.compiled  # read again
        return sorted(map(_voice_seconds, self._voices))

    @property
    def dubbing_sets(self) -> list[str]:
        """The names of the LoRA sets with one LoRA for all stages, as dubbing needs."""
        sets = self.lora_sets.items()
        return [name for name, f in sets if len(f["loras"]) == 1 and not f["stage_1_loras"]]

    def _sizes_of_inputs(self, audio_tokens: set[int]) -> dict[str, list[CompiledSize]]:
        """audio_tokens: the numbers that buckets with some held ones have."""
        dubbed = {dubbing_scale(*self.lora_sets[name]["loras"]) for name in self.dubbing_sets}
        scales = {reference_scale(self.lora_sets[n]["stage_1_loras"]) for n in self.reference_sets}
        found: dict[str, list[CompiledSize]] = {}
        self._voices = set()
        for each in self._recorded:
            size = each.size
            lengths = {n - size.audio_frames for n in audio_tokens if n > size.audio_frames}
            references = [ReferenceVideo("x", 1.0, size.num_frames, *scale) for scale in scales]
            inputs: dict[str, list[dict[str, Any]]] = {
                "input_reference": [{"images": (ImageCondition("x"),)}],
                "audio_reference": [{"sound": SoundCondition("x")}],
                "nag_scale": [{"nag_scale": 11.0}],  # of any scale
                "num_generated_keyframes": [{"num_generated_keyframes": n} for n in _KEYFRAMES],
                "video_reference": [{"retake": Retake("x")}] if not size.two_stage else [],
                "video_conditioning": [{"references": (one,)} for one in references],
                "tile": [
                    {"references": (one,), "tile": True, "stage_2_ic_lora": True}
                    for one in references
                ],
                "conditioning_attention_mask": [
                    {"references": (one,), "attention_mask": AttentionMask("x")}
                    for one in references
                ],
            }
            if size.two_stage and each.recipe == "distilled":
                clips = [ReferenceVideo("x", 1.0, size.num_frames, scale) for scale in dubbed]
                inputs["reference_video"] = [
                    {"dubbing": clip, "reference_audio": ReferenceAudio("x", n)}
                    for n in lengths
                    for clip in clips
                ]
            else:
                inputs["video_conditioning"] = inputs["conditioning_attention_mask"] = []
                inputs["tile"] = []
            for field, several in inputs.items():
                if any(self._fits(each, **given) for given in several):
                    found.setdefault(field, []).append(each)
            voices = (ReferenceAudio("x", n, identity_scale=s) for n in lengths for s in (None, 0))
            voices = [voice for voice in voices if self._fits(each, reference_audio=voice)]
            if voices and self.reference_sets:
                found.setdefault("reference_audio", []).append(each)
                self._voices |= {voice.latents for voice in voices}
        return found

    def loras(self, name: str | None, chosen: CompiledSize) -> dict[str, Any]:
        """A LoRA set's fields of a Job; those of stage 2 only with the dev recipe. Raises ApiError
        for an unknown name."""
        if (key := name or "default") not in self.lora_sets:
            known = ", ".join(map(repr, self.lora_sets))
            raise invalid("lora_set", f"unknown lora_set {key[:64]!r}; known: {known}")
        fields = self.lora_sets[key]
        return fields if chosen.refines else fields | {"stage_2_loras": ()}

    def _fits(self, chosen: CompiledSize, **inputs: Any) -> bool:
        """Whether every stage of a legal size has a graph for a Job's inputs."""
        if chosen.size.two_stage and "spatial" not in self.upsamplers:
            return False
        if inputs.get("stage_2_ic_lora") and not chosen.size.two_stage:
            return False
        if chosen.refines and not all(f["stage_2_loras"] for f in self.lora_sets.values()):
            return False
        job = Job("", chosen.size, recipe=chosen.recipe, **inputs)
        try:
            job = self.workspace.resolved(job)
            for reference in job.references:
                reference.check(job.size.first)
            if job.dubbing:
                job.dubbing.check(job.size)
            for stage in job.stages:
                self.workspace.dit_programs_for(job, stage)
        except UserError:  # absent, damaged, or with other blocks_per_graph
            return False
        return True

    # --- selection --------------------------------------------------------------------------------

    def choose(self, requested: RequestedSize, **inputs: Any) -> tuple[CompiledSize, list[str]]:
        """The compiled size for a request with a Job's inputs, and notes on rounded values.

        Omitted fields get the values nearest to the default. Raises ApiError if no compiled size
        matches the other fields within a rounding.
        """
        exact = self._exact(requested)
        if exact and self._fits(exact, **inputs):
            return exact, []
        compiled = self.compiled
        own_graphs = any(map(inputs.get, _OWN_GRAPHS))
        candidates = self._recorded if own_graphs else compiled
        near = [candidate for candidate in candidates if _is_near(requested, candidate)]
        fitting = [candidate for candidate in near if self._fits(candidate, **inputs)]
        if not fitting:
            raise self._mismatch(requested, [n for n in _AS_THESE if inputs.get(n)] if near else [])
        chosen = min(fitting, key=lambda candidate: _distance(requested, candidate, self.default))
        return chosen, _rounded(requested, chosen)

    def _exact(self, requested: RequestedSize) -> CompiledSize | None:
        """The default with a request's exact values; None if a video cannot have them."""
        default = self.default.size
        frames = requested.frames(requested.frame_rate or default.frame_rate)
        frames = default.num_frames if frames is None else frames
        given = dict(requested) | {"num_frames": frames + requested.tail}
        size = replace(default, **{name: given[name] for name in SIZES if given[name] is not None})
        try:
            size.check()
        except UserError:
            return None
        return CompiledSize(size, requested.recipe or self.default.recipe)

    def choose_dubbed(
        self, requested: RequestedSize, clip: Size, dubbing: dict[str, Any]
    ) -> CompiledSize:
        """The compiled size for a video to dub that is nearest to the default. Raises ApiError if
        there is none.

        clip     has the video's frames and frame rate
        dubbing  the Job's fields for it
        """
        compiled = self.inputs.get("reference_video", [])
        fitting = [
            each
            for height, width in {each.size.sides for each in compiled}
            if requested.height in (None, height) and requested.width in (None, width)
            for each in [CompiledSize(replace(clip, height=height, width=width), "distilled")]
            if self._fits(each, **dubbing)
        ]
        if not fitting:
            seconds = dubbing["reference_audio"].latents / AUDIO_LATENTS_PER_SECOND
            message = (
                f"reference_video of {clip.num_frames} frames at {clip.frame_rate:g} fps with"
                f" {seconds:.2f} s of sound is not compiled at this size"
            )
            raise _not_compiled(message, compiled, "reference_video")
        return min(fitting, key=lambda each: _distance(requested, each, self.default))

    def choose_voiced(
        self, requested: RequestedSize, voice: ReferenceAudio, **inputs: Any
    ) -> tuple[CompiledSize, list[str], ReferenceAudio]:
        """The compiled size as in `choose`, and the voice, cut to the longest compiled length.
        Raises ApiError also for a voice that is shorter than all of them."""
        seconds, lengths = _voice_seconds(voice.latents), self.voice_seconds
        for latents in sorted(self._voices, reverse=True):
            if latents > voice.latents:
                continue
            cut, notes = voice, []
            if latents < voice.latents:
                cut = replace(voice, latents=latents, max_duration=seconds_of_latents(latents))
                used = _voice_seconds(latents)
                notes = [f"reference_audio: {used:.2f} of {seconds:.2f} s are used, as compiled"]
            with suppress(ApiError):
                chosen, rounded = self.choose(requested, **inputs, reference_audio=cut)
                return chosen, [*rounded, *notes], cut
        listed = ", ".join(f"{each:.2f}" for each in lengths) or "none"
        message = (
            f"reference_audio of {seconds:.2f} s is not compiled for this request; compiled"
            f" lengths, to which the service cuts a longer sound: {listed} s"
        )
        raise _not_compiled(message, self._inputs.get("reference_audio", []), "reference_audio")

    def check_retake(self, job: Job) -> None:
        """Raise ApiError if no graph can regenerate or extend the job's video."""
        chosen = CompiledSize(job.size, job.recipe)
        if not self._fits(chosen, retake=job.retake, nag_scale=job.nag_scale):
            message = f"video_reference of {chosen} is not compiled (with extend: its windows)"
            compiled = self.inputs.get("video_reference", [])
            raise _not_compiled(message, compiled, "video_reference")

    def _mismatch(self, requested: RequestedSize, inputs: list[str]) -> ApiError:
        """inputs: names of the inputs without a fitting graph."""
        given = requested.model_dump(exclude_none=True)
        what = ", ".join(f"{name} {value}" for name, value in given.items()) or "the default size"
        if inputs:
            files = " and ".join(_AS_THESE[name] for name in inputs)
            message = f"{what} is compiled for text alone, not for {files}"
        else:
            message = f"{what} is not compiled, and no compiled size is within a rounding"
        by_seconds = "seconds" in given and not {"height", "width"} & given.keys()
        compiled = self.compiled
        for name, field in _OWN_GRAPHS.items():
            if name in inputs:
                compiled = self.inputs.get(field, [])
        return _not_compiled(message, compiled, "seconds" if by_seconds else "size")


def _voice_seconds(latents: int) -> float:
    """Seconds of the shortest sound with this number of latents."""
    return (latents - 1) / AUDIO_LATENTS_PER_SECOND


def _not_compiled(message: str, compiled: list[CompiledSize], param: str) -> ApiError:
    listed = "; ".join(map(str, compiled[:_MAX_LISTED])) or "nothing"
    more = len(compiled) - _MAX_LISTED
    listed += f"; and {more} more" if more > 0 else ""
    return ApiError(
        400,
        "profile_mismatch",
        f"{message}. Compiled: {listed}. GET /v1/models lists all",
        param,
        compiled=[candidate.as_dict() for candidate in compiled[: 4 * _MAX_LISTED]],
    )


def _compared(requested: RequestedSize, size: Size) -> dict[str, tuple[float | None, float, float]]:
    """By field: the requested value or None, the size's value, and the tolerance for a rounding to
    the model's multiples: `fps` 23.976 is 24, and 29.97 is 30."""
    unit = SPACE_SCALE * (2 if size.two_stage else 1)
    frames, rate = requested.frames(size.frame_rate), size.frame_rate
    return {
        "height": (requested.height, size.height, unit),
        "width": (requested.width, size.width, unit),
        "num_frames": (frames, size.num_frames - requested.tail, TIME_SCALE),
        "fps": (requested.frame_rate, rate, 2e-3 * rate),
    }


def _is_near(requested: RequestedSize, candidate: CompiledSize) -> bool:
    """Whether a compiled size matches a request within a rounding."""
    return (
        all(
            value is None or abs(value - got) < limit
            for value, got, limit in _compared(requested, candidate.size).values()
        )
        and candidate.size.num_frames > requested.tail
        and requested.two_stage in (None, candidate.size.two_stage)
        and requested.recipe in (None, candidate.recipe)
    )


def _distance(requested: RequestedSize, candidate: CompiledSize, default: CompiledSize) -> tuple:
    """The distances of a compiled size from the requested values and from the default."""
    size, defaults = candidate.size, _compared(RequestedSize(), default.size)
    away = {
        name: abs(got / (defaults[name][1] if value is None else value) - 1)
        for name, (value, got, _) in _compared(requested, size).items()
    }
    return (
        away["height"] + away["width"] + away["num_frames"],
        candidate.recipe != default.recipe,
        size.two_stage != default.size.two_stage,
        away["fps"],
    )


def _rounded(requested: RequestedSize, candidate: CompiledSize) -> list[str]:
    """Notes on the rounded values of a request."""
    return [
        f"{name} {value:g} was rounded to {got:g}, a compiled value"
        for name, (value, got, _) in _compared(requested, candidate.size).items()
        if value not in (None, got)
    ]


def _pixels(size: Size) -> int:
    return size.height * size.width * size.num_frames


def _offered(record: dict) -> set[CompiledSize]:
    """The sizes that a recorded size's graphs can make; empty for a damaged record."""
    try:
        recipe, whole = record["recipe"], Size(**{k: v for k, v in record.items() if k != "recipe"})
        whole.check()
        if whole.sides == NO_PICTURE:  # the service makes videos
            return set()
    except (KeyError, TypeError, UserError):
        return set()
    sizes = {whole, whole.first, replace(whole, two_stage=False)}
    sizes |= {replace(size, height=size.width, width=size.height) for size in sizes}
    return {CompiledSize(size, recipe) for size in sizes}
