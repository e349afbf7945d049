"""Job: the settings of one generation, checked before a model loads, and its stages."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Self

from torch import Tensor

from ltx_neuron import hub
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.errors import FieldError, flag_of
from ltx_neuron.host.facts import read_media, upscaling
from ltx_neuron.models.signatures import NO_VOICE
from ltx_neuron.sampling import dfr, rules
from ltx_neuron.sampling.chunks import Chunk
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.extension import Window
from ltx_neuron.sampling.guidance import (
    IDENTITY_SCALE,
    MATTE_NEGATIVE_PROMPT,
    NEGATIVE_PROMPT,
    SHORT_NEGATIVE_PROMPT,
    default_steps,
)
from ltx_neuron.sampling.inputs import JobInputs, Media
from ltx_neuron.sampling.samplers import SAMPLERS, STAGE_SEED
from ltx_neuron.sampling.schedules import (
    DISTILLED_MAX_STEPS,
    DISTILLED_SIGMAS,
    SCHEDULE_TOKENS,
    STAGE_2_SIGMAS,
    ltx2_schedule,
)
from ltx_neuron.sampling.shapes import GUIDED_MAX_STEPS, UPSCALES, upscaled, video_latent_shape
from ltx_neuron.sampling.size import Size
from ltx_neuron.sampling.spec import (
    DETAILING,
    HQ_STRENGTHS,
    LORAS,
    SIZES,
    ConditionFields,
    LoraFields,
    LoraFile,
    SizeFields,
)
from ltx_neuron.sampling.tiles import Tile
from ltx_neuron.weights.lora import Lora, WeightSet, check_guided_stage_1, identity_of

_RETAKE_STEPS = 40  # of the dev recipe, without --num-inference-steps
LORA_FIELDS = ("loras", "stage_1_loras", "stage_2_loras", "detailing_loras")  # of a Job


class Stage(NamedTuple):
    """One denoising run over a noise schedule at one pixel size."""

    name: str  # "stage_1", "stage_2", or "stage_3" of all windows of DFR
    height: int
    width: int
    # The noise levels from the first step's to 0: one more than there are steps
    sigmas: tuple[float, ...]
    # Each step runs several passes and combines their predictions (stage 1 of dev)
    guided: bool = False
    # Starts from the previous stage's upsampled latents, not from noise alone
    upsampled: bool = False
    loras: WeightSet = ()  # merged into its weights
    sampler: str = "euler"  # a key of SAMPLERS
    window: Window | None = None  # of an extended video: each has its own stage 1
    temporal: dfr.TemporalWindow | None = None  # of DFR: each window of a round is a stage
    chunk: Chunk | None = None  # of a chunked clip: the window whose stage it is

    @property
    def key(self) -> str:
        """The prefix of its tensors in --save-tensors: "s1", "s2", "window_1"."""
        window = self.window or self.temporal
        return window.key if window else self.name.replace("stage_", "s")

    @property
    def title(self) -> str:
        """Its name for users: "stage 1", "window 2 of 3"."""
        window, name = self.window or self.temporal, self.name.replace("_", " ")
        if self.chunk:
            return f"{self.chunk.title}, {name}"
        return window.title if window else name

    @property
    def noise(self) -> tuple[int, float]:
        """Of the ancestral sampler: what is added to the seed, and eta."""
        if self.temporal:
            return self.temporal.seed, dfr.ETA
        return STAGE_SEED * (1 + self.upsampled) + (self.chunk.number if self.chunk else 0), 1.0

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def evaluations(self) -> tuple[int, ...]:
        """The stage's evaluations of the model in order, each with the step number that guidance
        uses. Their number is that of the used rows of the graph's schedule tables."""
        return SAMPLERS[self.sampler].evaluations(self.steps)

    @property
    def max_steps(self) -> int:
        """Rows of the compiled graph's schedule tables."""
        return GUIDED_MAX_STEPS if self.guided else DISTILLED_MAX_STEPS


class Job(JobInputs):
    """The settings of one generation."""

    def __hash__(self) -> int:  # pydantic's, which type checkers do not see
        return hash(tuple(getattr(self, name) for name in type(self).model_fields))

    @classmethod
    def of_size(cls, size: Size, **fields: Any) -> Self:
        """A job of a size. fields: are not validated."""
        return cls.model_construct(**fields).resized(size)

    @cached_property
    def media(self) -> Media:
        """The facts of the files, read once."""
        return read_media(self, self.loras, _weights(self.ic_lora), self.detailing_loras)

    def with_upscaling(self) -> Self:
        """This job, or a copy with the fields that upscale_video stands for, and without it."""
        if self.upscale_video is None:
            return self
        return self.replaced(**upscaling(self, _weights(self.ic_lora)))

    @property
    def steps(self) -> int:
        """Steps of stage 1."""
        if not self.guided:
            return DISTILLED_MAX_STEPS
        if self.num_inference_steps is not None:
            return self.num_inference_steps
        return _RETAKE_STEPS if self.retake else default_steps(self.sampler)

    def of(self, stage: Stage) -> Self:
        """The job as its stage sees it: in DFR with the canvas, or as the job of a window."""
        if stage.chunk and self.windows:
            return self.windows[stage.chunk.number]
        if not self.dfr or self.temporal:
            return self
        fields = self.rendering.fields_of(self.placed, stage.temporal)
        return self.resized(fields.pop("size")).replaced(**fields)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One stage at full size, or one at half size and a distilled one at full size, and the
        windows of DFR.

        Distilled: 8 steps (and 3, and 4 of a window). Dev: a guided first stage.
        """
        if self.windows:
            return tuple(chain.from_iterable(window.stages for window in self.windows))
        size, sampler, guided = self.size, self.sampler, self.guided
        first = size.first.sides
        clip = math.prod(video_latent_shape(*first, size.num_frames))
        tokens = clip if sampler == "res_2s" else SCHEDULE_TOKENS  # only HQ's depends on them
        sigmas = ltx2_schedule(self.steps, tokens) if guided else DISTILLED_SIGMAS
        references = self.stage_1_loras if self.stage_2_ic_lora else ()
        loras = self.loras + self.stage_1_loras, self.loras + references + self.stage_2_loras
        if self.dfr:
            loras = loras[1], loras[1] + self.detailing_loras
        stage_1 = "ancestral" if self.ancestral else sampler
        half = Stage("stage_1", *first, sigmas, guided, loras=loras[0], sampler=stage_1)
        half = half._replace(chunk=self.chunk)
        if self.extension:
            return tuple(half._replace(window=window) for window in self.extension.windows)
        if not size.two_stage or self.skip_stage_2:
            return (half,)
        refining = ("res_2s",) if COMPAT[self.compat].plain_stage_2 else ("res_2s", "ancestral")
        stage_2 = stage_1 if stage_1 in refining else "euler"
        full = Stage("stage_2", size.height, size.width, STAGE_2_SIGMAS, sampler=stage_2)
        full = full._replace(upsampled=True, loras=loras[1], chunk=self.chunk)
        third = full._replace(name="stage_3", loras=loras[0], sigmas=DISTILLED_SIGMAS[4:])
        third = third._replace(sampler="ancestral")
        return half, full, *(third._replace(temporal=window) for window in self.rendering.windows)

    @property
    def video_key(self) -> str:
        """The name of the latents of the video's frames: the last stage's, or the joined
        windows'. Sound alone has none."""
        if self.dfr:
            return "final_video"
        return "s1_video" if self.extension else f"{self.stages[-1].key}_video"

    @property
    def audio_key(self) -> str:
        """The name of the latents of the video's sound: the last stage's, or stage 1's if stage 2
        refines only the picture: in dubbing, with a reference voice, in DFR, and in dev without
        interpolated keyframes (ltx-pipelines 1.2.0, dubit.py, ti2vid_two_stages.py,
        keyframe_interpolation.py)."""
        if self.extension or self.reference_sound or self.dfr:
            return "s1_audio"
        refined = COMPAT[self.compat].refined_sound and self.sampler != "res_2s"
        dropped = self.recipe == "dev" and not (refined or self.images_as_guides)
        return f"{self.stages[0 if dropped else -1].key}_audio"

    def freezes_sound(self, upsampled: bool) -> bool:
        """Whether a stage does not change the sound: an input, stage 1's with a reference, or stage
        1's of the dev recipe (ltx-pipelines 1.4, ti2vid_two_stages.py)."""
        others = self.sampler == "res_2s" or self.references or self.images_as_guides
        plain = self.recipe == "dev" and not (others or COMPAT[self.compat].plain_stage_2)
        return super().freezes_sound(upsampled) or (upsampled and plain)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(F, h, w) of the decoded video latents, before --upscale; of a chunked clip, those of
        its first window."""
        stage, longer = self.stages[-1], self.extension
        frames = self.rendering.frames if self.dfr else self.clips[0].size.num_frames
        shape = video_latent_shape(stage.height, stage.width, frames)
        return (longer.video_latents, *shape[1:]) if longer else shape

    @property
    def decoded_shape(self) -> tuple[int, int, int]:
        """latent_shape after --upscale."""
        return upscaled(self.latent_shape, self.upscale)

    @property
    def audio_latents(self) -> int:
        """The number of decoded audio latents."""
        if self.extension:
            return self.extension.audio_latents
        return self.of(self.stages[0]).size.audio_frames

    @property
    def buckets(self) -> list[Bucket]:
        """The compiled shapes of all stages."""
        return list(dict.fromkeys(chain.from_iterable(map(self.stage_buckets, self.stages))))

    @property
    def buckets_to_compile(self) -> list[Bucket]:
        """Buckets of all jobs of this kind: text to video has one timestep per step, an image at
        frame 0 adds a second one, and each has its own, faster graph."""
        counts = [None] if self.fixes_timesteps else [1, 2]
        needed = (self.stage_buckets(stage, n) for stage in self.stages for n in counts)
        return list(dict.fromkeys(chain.from_iterable(needed)))  # windows share one

    def stage_tiles(self, stage: Stage) -> list[tuple[Tile, Tensor]]:
        """The tiles of a stage, each with the tokens that it sees; none if it is not tiled."""
        of = self.of(stage)
        canvas = _, *sides = video_latent_shape(stage.height, stage.width, of.size.num_frames)
        appended = of.appended(stage.upsampled, *sides)
        return [(tile, tile.tokens(canvas, appended)) for tile in self.tiles(*sides)]

    def stage_buckets(self, stage: Stage, timesteps: int | None = None) -> list[Bucket]:
        """The compiled shape that a stage needs, or that of each of its tiles."""
        whole = self.bucket(stage, timesteps)
        tokens = [len(tokens) for _, tokens in self.stage_tiles(stage)] or [whole.video_tokens]
        return [dataclasses.replace(whole, video_tokens=count) for count in tokens]

    def bucket(self, stage: Stage, timesteps: int | None = None) -> Bucket:
        """The compiled shape that a stage needs without tiles."""
        of = self.of(stage)
        canvas = _, *sides = video_latent_shape(stage.height, stage.width, of.size.num_frames)
        shapes = canvas, *(tokens.shape for tokens in of.appended(stage.upsampled, *sides))
        references, window = of.appended_references(stage.upsampled), of.temporal
        sounds = 0 if self.silent or (window and not window.holds) else of.size.audio_frames
        return Bucket(
            video_tokens=sum(map(math.prod, shapes)),
            audio_tokens=sounds + of.appended_audio(stage.upsampled),
            timesteps=timesteps or of.timesteps(stage.upsampled),
            max_steps=stage.max_steps,
            guided=stage.guided,
            audio_timesteps=of.audio_timesteps(stage.upsampled),
            biased=bool(references and self.attention_mask),
            nag=self.nag is not None,
            identity=stage.guided and self.identity_scale != 0,
            ancestral=stage.sampler == "ancestral",
        )

    # --- LoRAs ------------------------------------------------------------------------------------

    @cached_property
    def loras(self) -> WeightSet:
        return _weights(self.lora)

    @cached_property
    def stage_1_loras(self) -> WeightSet:
        """Further ones of stage 1: IC-LoRAs, and HQ's distilled LoRA."""
        both = self.distilled_strengths != (None, None)
        return _weights(self.ic_lora) + (self._distilled(0) if both else ())

    @cached_property
    def stage_2_loras(self) -> WeightSet:
        """Further ones of stage 2: the distilled LoRA. In DFR they are in all stages."""
        return self._distilled(1)

    @cached_property
    def detailing_loras(self) -> WeightSet:
        """Further ones of stage 2 of DFR."""
        return _weights(self.detailing_lora, DETAILING)

    def _distilled(self, stage: int) -> WeightSet:
        """The distilled LoRA of stage 1 (0) or stage 2 (1)."""
        if self.distilled_strengths == (None, None):
            return _weights(self.distilled_lora)
        strength = self.distilled_strengths[stage]
        return _weights(self.distilled_lora, HQ_STRENGTHS[stage] if strength is None else strength)

    @property
    def weight_sets(self) -> tuple[WeightSet, ...]:
        """The LoRAs that sharding merges: for stage 1 and for stage 2, whatever the stages are.
        Raises UserError."""
        rules.check(self.holds, among=LoraFields.model_fields)
        self.check_strengths()
        if self.detailing_lora:  # DFR has the distilled LoRA in all stages
            every = self.loras + self.stage_2_loras
            return every, every + self.detailing_loras
        sets = [self.loras + self.stage_1_loras, self.loras + self.stage_2_loras]
        return tuple(dict.fromkeys(sets))

    @property
    def all_loras(self) -> WeightSet:
        return self.loras + self.stage_1_loras + self.stage_2_loras + self.detailing_loras

    @property
    def identity_scale(self) -> float:
        """The scale of identity guidance, of a reference voice in the dev recipe; 0: off."""
        if self.voice is None or self.recipe == "distilled":
            return 0.0
        scale = self.identity_guidance_scale
        return IDENTITY_SCALE if scale is None else scale

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes of each evaluation of a guided stage."""
        return self.resolved_guidance.passes() + (NO_VOICE,) * (self.identity_scale != 0)

    @property
    def upsamplers(self) -> dict[str, str]:
        """The latent upsamplers that this job needs -> the flag that requires each."""
        kinds = {"spatial": "--two-stage"} if self.size.two_stage and not self.skip_stage_2 else {}
        if rounds := self.temporal_upsample_rounds:  # of DFR
            kinds["temporal"] = f"--temporal-upsample-rounds {rounds}"
        return kinds | dict.fromkeys(UPSCALES.get(self.upscale, ()), f"--upscale {self.upscale}")

    @property
    def output_frame_rate(self) -> float:
        """Frames per second of the file, doubled by the temporal upsampler."""
        doubled = "temporal" in UPSCALES.get(self.upscale, ())
        return self.size.frame_rate * 2 ** ((self.temporal_upsample_rounds or 0) + doubled)

    @property
    def output_frames(self) -> int:
        """Frames of the file. The temporal upsampler adds one between each two."""
        if self.dfr:
            return self.rendering.frames
        frames = self.output_size.num_frames
        return 2 * frames - 1 if "temporal" in UPSCALES.get(self.upscale, ()) else frames

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompts to encode: the prompt or those of the windows, and the negative one if a pass
        or NAG uses it; none of HDR."""
        if self.text_embeddings is not None:
            return ()
        uncond = self.guided and "uncond" in self.resolved_guidance.passes()
        if not uncond and self.nag is None:
            return self.texts_of_windows
        default = SHORT_NEGATIVE_PROMPT if COMPAT[self.compat].short_negative else NEGATIVE_PROMPT
        default = MATTE_NEGATIVE_PROMPT if self.alpha_gen else default
        negative = default if self.negative_prompt is None else self.negative_prompt
        return *self.texts_of_windows, negative

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise UserError for every mistake that can be detected before a model loads."""
        self.check_shape()
        prompts = self.texts_of_windows
        if not all(map(str.strip, prompts)) and not self.references:  # Alpha-Gen wants an empty one
            raise FieldError(
                "{prompt} is empty; type for example {prompt} 'a golden retriever runs across a"
                " meadow'"
            )
        try:
            f"{''.join(prompts)}{self.negative_prompt}".encode()
        except UnicodeEncodeError:
            raise FieldError(
                "{prompt} is not UTF-8 text; type it again in a UTF-8 terminal or file"
            ) from None
        self.check_rules()
        if not self.guided:
            if self.num_inference_steps not in (None, DISTILLED_MAX_STEPS):
                raise FieldError(
                    f"{{num_inference_steps}} {self.num_inference_steps}: the distilled recipe has"
                    f" one sigma table, of {DISTILLED_MAX_STEPS} steps (and 3 for stage 2); other"
                    " counts need {recipe} dev"
                )
        # res_2s predicts twice per step, and once more at the end.
        elif self.sampler == "res_2s" and self.steps > (most := (GUIDED_MAX_STEPS - 1) // 2):
            raise FieldError(
                f"{{num_inference_steps}} {self.steps}: type a number from 1 to {most}"
            )

    def check_shape(self) -> None:
        """Raise UserError for settings without a possible graph. The prompt does not matter."""
        self.check_rules(graphs=True)
        if self.auto_duration:
            self.auto_duration.check()
        if self.extension:
            self.extension.check()
        self.size.check()
        if self.recipe == "dev" and not (self.references or self.voice):
            check_guided_stage_1(self.stage_1_loras, self.stage_2_loras)
        self.check_inputs()

    # --- descriptions -----------------------------------------------------------------------------

    def describe(self) -> dict:
        """The job as JSON, for the sidecar and the report."""
        described = super().describe() | {name: getattr(self, name) for name in LORA_FIELDS}
        if described.pop("ancestral", False):
            described["sampler"] = self.stages[0].sampler
        if not self.detailing_loras:
            del described["detailing_loras"]
        return json.loads(json.dumps(described, default=_as_json))

    @property
    def identity(self) -> dict:
        """Everything on which the latents depend. LoRAs count by content, not by path."""
        described = {k: v for k, v in self.describe().items() if k not in LORA_FIELDS}
        return described | {"loras": {s.name: identity_of(s.loras) for s in self.stages}}

    def to_line(self) -> dict[str, Any]:
        """The line of a prompts file for this job in another process: with the size, and with
        absolute paths of LoRAs."""
        values: dict[str, Any] = {}
        if self.video_path is None and not self.media.hdr:
            values = {name: getattr(self.output_size, name) for name in SIZES}
            if self.sound_only:
                values |= {"height": None, "width": None}
            if self.reference_video is not None:
                values |= {"num_frames": None, "frame_rate": None}  # the clip's
        elif self.extend is not None:
            values = {"num_frames": self.size.num_frames}
        per_stage = self.distilled_strengths != (None, None)
        for name in LORAS:
            default = DETAILING if name == "detailing_lora" else 1.0
            default = None if per_stage and name == "distilled_lora" else default
            values[name] = tuple(
                LoraFile(
                    str(hub.local_path(path, "lora").absolute()),
                    default if strength is None else strength,
                )
                for path, strength in getattr(self, name)
            )
        return self.replaced(**values).to_json()

    def graph_flags(self) -> list:
        """The flags of compile transformer for this job's graphs."""
        # The metadata of a LoRA with references has their scale.
        loras = ["ic_lora"] * bool(self.references) + ["lora"] * bool(self.dubbing)
        loras += ["detailing_lora"] * self.dfr
        names = [*SizeFields.model_fields, "nag_scale", *loras, *ConditionFields.model_fields]
        return to_flags(self.to_line(), names)


def _weights(files: tuple[LoraFile, ...], strength: float = 1.0) -> WeightSet:
    """strength: the default of files without one."""
    return tuple(
        Lora(hub.local_path(path, "lora"), strength if typed is None else typed)
        for path, typed in files
    )


def to_flags(line: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    words = []
    for name in names:
        value = line.get(name, False)
        rows = value if isinstance(value, list) else [] if value is False else [[value]]
        for values in rows if all(isinstance(x, list) for x in rows) else [rows]:
            words += [
                flag_of(name),
                *(word for word in values if word is not True and word is not None),
            ]
    return words


def _as_json(value: Any) -> Any:
    if isinstance(value, Lora):
        return [str(value.path), value.strength]
    return os.fspath(value) if isinstance(value, os.PathLike) else vars(value)
