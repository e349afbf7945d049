"""The compiled video sizes, and that of a request.

A manifest records the sizes and inputs that its graphs were compiled for. The transformer's graphs
depend only on the number of tokens. So a recorded size also offers its transpose, and a two-stage
size those of its stages. With --neuron-vae each also needs the graphs of its decoder.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST
from ltx_neuron.job import Job
from ltx_neuron.sampling.conditions import TailFrames
from ltx_neuron.sampling.shapes import AUDIO_LATENTS_PER_SECOND
from ltx_neuron.sampling.size import NO_PICTURE, Size
from ltx_neuron.sampling.spec import SIZES, LoraFile, VideoFields, described_as
from ltx_neuron.service.api_error import ApiError, field_of, invalid
from ltx_neuron.weights.lora import WeightSet

TEXT_TO_VIDEO = Job()
NO_LORAS = {"default": TEXT_TO_VIDEO}
_MAX_LISTED = 12  # sizes in a message
# Fields of a job that need graphs of their own
_OWN_GRAPHS = (
    *("image", "video_path", "video_conditioning", "conditioning_attention_mask"),
    *("reference_video", "stage_2_ic_lora", "tile", "reference_audio", "nag_scale"),
    *("num_generated_keyframes", "chunked"),
)
_OF_REFERENCES = {"video_conditioning", "conditioning_attention_mask", "reference_audio"}
_OF_REFERENCES |= {"stage_2_ic_lora", "tile"}


class RequestedSize(VideoFields):
    """The size fields of a request; None for an omitted field."""

    seconds: float | None = Field(
        default=None, ge=0.01, le=3600, description="duration from the first to the last frame"
    )
    two_stage: bool | None = described_as("two_stage")
    tail_frames: TailFrames | None = described_as("tail_frames")

    def applied(self, base: "CompiledSize") -> "CompiledSize | None":
        """A size with this request's values in place of its own, and with the tail; whole seconds
        have one frame more than their product with the rate. None if a video cannot have them."""
        frames = self.num_frames or base.size.num_frames
        if self.seconds is not None and self.num_frames is None:
            frames = round(self.seconds * (self.frame_rate or base.size.frame_rate)) + 1
        values = {name: value for name in SIZES if (value := getattr(self, name)) is not None}
        values["num_frames"] = frames + (self.tail_frames or 0)
        size = replace(base.size, **values)
        with suppress(UserError):
            size.check()
            return CompiledSize(size, self.recipe or base.recipe)


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
    def orientations(self) -> set["CompiledSize"]:
        """The size and its transpose, whose graphs are the same."""
        size = self.size
        return {self, self._replace(size=replace(size, height=size.width, width=size.height))}

    @property
    def pixels(self) -> int:
        return self.size.height * self.size.width * self.size.num_frames

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


class Record(NamedTuple):
    """A manifest's entry: the bucket, the size and the inputs, as a job's fields, of its graphs."""

    bucket: str
    compiled: CompiledSize
    inputs: tuple[str, ...]

    @property
    def offered(self) -> set[CompiledSize]:
        """The sizes that text to video can have with these graphs."""
        size = self.compiled.size
        stages = {size, size.first, replace(size, two_stage=False)}
        return set().union(*(self.compiled._replace(size=stage).orientations for stage in stages))

    @property
    def voice(self) -> int:
        """The number of audio latents of the reference voice, if the bucket has one; or 0."""
        tokens = re.search(r"-a(\d+)t2", self.bucket)
        if tokens is None or "reference_audio" not in self.inputs:
            return 0
        return int(tokens[1]) - self.compiled.size.audio_frames


@dataclass
class SizeRegistry:
    """The sizes that a workspace has graphs for."""

    workspace: Workspace
    default: CompiledSize  # size and recipe of requests that omit them
    upsamplers: Collection[str]  # kinds of available ones; two stages need the spatial one
    # A job with the LoRAs by the set's name, which a request sends; "default": without a name.
    lora_sets: Mapping[str, Job] = field(default_factory=NO_LORAS.copy)
    neuron_vae: bool = False  # videos are decoded by graphs, too

    def __post_init__(self):
        self._manifests: dict[Path, int] | None = None  # their change times, as last read
        self._records: list[Record] = []
        self._recorded: list[CompiledSize] = []
        self._compiled: list[CompiledSize] = []

    @property
    def compiled(self) -> list[CompiledSize]:
        """Every recorded size that can run, the smallest first. Manifests are read again if one was
        added, changed or removed."""
        manifests = {}
        for path in (Path(self.workspace.artifacts) / "graphs").glob(f"*/{MANIFEST}"):
            with suppress(FileNotFoundError):
                manifests[path] = path.stat().st_mtime_ns
        if manifests != self._manifests:
            self._records = [*_records(self.workspace.compiled_sizes())]
            offered = {self.default}.union(*(record.offered for record in self._records))
            self._recorded = sorted(offered, key=lambda s: (s.recipe, s.pixels, str(s)))
            self._compiled = [*filter(self._fits, self._recorded)]
            self._manifests = manifests
        return self._compiled

    @property
    def served_default(self) -> CompiledSize | None:
        """The size of a request without size and inputs."""
        return min(self.compiled, key=self._away, default=None)

    @property
    def inputs(self) -> dict[str, list[CompiledSize]]:
        """The sizes that were compiled with an input, by its request field. Those of text to video
        also serve a sound and an image at frame 0. For video_reference, the sizes that the file may
        have."""
        offered: dict[str, set[CompiledSize]] = {"audio_reference": {*self.compiled}}
        for record in self._records:
            if not record.inputs:
                offered.setdefault("input_reference", set()).update(record.offered)
            elif {*record.inputs} <= {*_OWN_GRAPHS}:
                for field in map(field_of, record.inputs):
                    offered.setdefault(field, set()).update(record.compiled.orientations)
        lacking = set() if self.reference_sets else _OF_REFERENCES
        lacking |= set() if self.dubbing_sets else {"reference_video"}
        can_run = [*filter(self._can_run, self._recorded)]
        of_field = {field: [s for s in can_run if s in offered[field]] for field in offered}
        return {f: sizes for f, sizes in of_field.items() if sizes and f not in lacking}

    @property
    def reference_sets(self) -> list[str]:
        """The names of the LoRA sets that use reference videos or voices: with a LoRA for stage 1
        alone."""
        return [
            name
            for name, job in self.lora_sets.items()
            if {lora.path for lora in job.stage_1_loras} - {lora.path for lora in job.stage_2_loras}
        ]

    @property
    def voice_seconds(self) -> list[float]:
        """The compiled lengths of reference voices, in seconds."""
        _ = self.compiled  # read again
        return sorted({_voice_seconds(r.voice) for r in self._records if r.voice > 0})

    @property
    def dubbing_sets(self) -> list[str]:
        """The names of the LoRA sets with one LoRA for all stages, as dubbing needs."""
        sets = self.lora_sets.items()
        return [name for name, job in sets if len(job.loras) == 1 and not job.stage_1_loras]

    def loras(self, name: str | None, chosen: CompiledSize) -> dict[str, Any]:
        """A LoRA set's fields of a job; those of stage 2 only with the dev recipe. Raises ApiError
        for an unknown name."""

        def files(loras: WeightSet) -> tuple[LoraFile, ...]:
            return tuple(LoraFile(str(lora.path.absolute()), lora.strength) for lora in loras)

        if (key := name or "default") not in self.lora_sets:
            known = ", ".join(map(repr, self.lora_sets))
            raise invalid("lora_set", f"unknown lora_set {key[:64]!r}; known: {known}")
        job = self.lora_sets[key]
        return {
            "lora": files(job.loras),
            "ic_lora": files(job.stage_1_loras),
            "distilled_lora": files(job.stage_2_loras) if chosen.refines else (),
            "detailing_lora": files(job.detailing_loras),
        }

    def _can_run(self, chosen: CompiledSize) -> bool:
        """Whether the upsampler and the LoRAs of a size are here."""
        if chosen.size.two_stage and "spatial" not in self.upsamplers:
            return False
        return not chosen.refines or all(job.stage_2_loras for job in self.lora_sets.values())

    def _fits(self, chosen: CompiledSize, job: Job = TEXT_TO_VIDEO) -> bool:
        """Whether every stage of a legal size has a graph for a job's inputs."""
        if not self._can_run(chosen) or job.stage_2_ic_lora > chosen.size.two_stage:
            return False
        try:
            job = job.resized(chosen.size).replaced(recipe=chosen.recipe)
            job = self.workspace.resolved(job)
            for reference in job.references:
                reference.check(job.size.first)
            if job.dubbing:
                job.dubbing.check(job.size)
            for stage in job.stages:
                self.workspace.dit_programs_for(job, stage)
            if self.neuron_vae:
                clip = job.decoded_shape
                graphs = self.workspace.decoder_graphs(clip) + self.workspace.encoder_graphs(job)
                return all(map(self.workspace.is_made, graphs))
        except UserError:  # absent, damaged, or with other blocks_per_graph
            return False
        return True

    def choose(self, requested: RequestedSize, job: Job = TEXT_TO_VIDEO) -> CompiledSize:
        """The size of a request with a job's inputs. It has the values given. Omitted ones are the
        default's or, without graphs for those, another compiled size's. Raises ApiError with the
        compiled sizes if there are no graphs."""
        _ = self.compiled  # read again
        bases = sorted(self._recorded, key=self._away)
        for chosen in dict.fromkeys(filter(None, map(requested.applied, bases))):
            if self._fits(chosen, job):
                return chosen
        fields = requested.model_dump(exclude_none=True)
        what = ", ".join(f"{name} {value}" for name, value in fields.items()) or "the default size"
        by_seconds = "seconds" in fields and not {"height", "width"} & fields.keys()
        raise self._not_compiled(what, "seconds" if by_seconds else "size", job)

    def check_retake(self, job: Job) -> None:
        """Raise ApiError if no graph can regenerate or extend the job's video."""
        chosen = CompiledSize(job.size, job.recipe)
        if not self._fits(chosen, job):
            name = f"{chosen} (with extend: its windows)"
            raise self._not_compiled(name, "video_reference", job)

    def _not_compiled(self, what: str, param: str, job: Job) -> ApiError:
        """The error for a size, in words, without graphs for a job's inputs."""
        compiled, fields = self.compiled, [field_of(f) for f in _OWN_GRAPHS if job.holds(f)]
        for name in fields:
            param = name if name in ("reference_audio", "reference_video") else param
            compiled = compiled if name == "images" else self.inputs.get(name, [])
        what += f" with {' and '.join(fields)}" if fields else ""
        if job.holds("chunked"):
            window, carry, _ = job.window_frames
            what += f" in windows ({window} + n x {window - carry} frames need no shorter last one)"
        if sound := job.reference_sound:
            what += f" of {_voice_seconds(sound.latents):.2f} s of sound"
        if job.voice:
            lengths = ", ".join(f"{seconds:.2f}" for seconds in self.voice_seconds) or "none"
            what += f" (compiled: {lengths})"
        listed = "; ".join(map(str, compiled[:_MAX_LISTED])) or "nothing"
        more = len(compiled) - _MAX_LISTED
        listed += f"; and {more} more" if more > 0 else ""
        return ApiError(
            400,
            "profile_mismatch",
            f"{what} is not compiled. Compiled: {listed}. GET /v1/models lists all",
            param,
            compiled=[candidate.as_dict() for candidate in compiled[: 4 * _MAX_LISTED]],
        )

    def _away(self, chosen: CompiledSize) -> tuple:
        """The differences of a size from the default, the most important first."""
        size, default = chosen.size, self.default.size
        return (
            chosen.recipe != self.default.recipe,
            abs(size.num_frames - default.num_frames),
            (size.height - default.height) ** 2 + (size.width - default.width) ** 2,
            size.two_stage != default.two_stage,
            size.frame_rate != default.frame_rate,
        )


def _voice_seconds(latents: int) -> float:
    """Seconds of the shortest sound with this number of latents."""
    return (latents - 1) / AUDIO_LATENTS_PER_SECOND


def _records(recorded: Mapping[str, list]) -> Iterator[Record]:
    """The entries of manifests by bucket, except damaged ones and those of sound alone."""
    for bucket, entries in recorded.items():
        for entry in entries:
            with suppress(KeyError, TypeError, ValueError, UserError):
                fields = dict(entry)
                recipe, inputs = fields.pop("recipe"), map(str, fields.pop("inputs", ()))
                size = Size(**fields)
                size.check()
                if size.sides != NO_PICTURE:  # the service makes videos
                    yield Record(bucket, CompiledSize(size, recipe), (*inputs,))
