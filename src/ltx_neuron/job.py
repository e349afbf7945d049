"""Job: the settings of one generation, checked before a model loads."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from itertools import chain
from typing import Self

from torch import Tensor

from ltx_neuron.config.transformer import Bucket
from ltx_neuron.errors import FieldError, UserError
from ltx_neuron.models.signatures import NO_VOICE
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import LATER_FIELDS, Inputs, check_together
from ltx_neuron.sampling.duration import AutoDuration
from ltx_neuron.sampling.fields import check_fields
from ltx_neuron.sampling.guidance import (
    IDENTITY_SCALE,
    NEGATIVE_PROMPT,
    SHORT_NEGATIVE_PROMPT,
    Guidance,
    StreamGuidance,
    check_guidable,
    default_guidance,
    default_steps,
)
from ltx_neuron.sampling.latents import video_latent_shape
from ltx_neuron.sampling.schedules import (
    DISTILLED_MAX_STEPS,
    DISTILLED_SIGMAS,
    GUIDED_MAX_STEPS,
    SCHEDULE_TOKENS,
    STAGE_2_SIGMAS,
    ltx2_schedule,
)
from ltx_neuron.sampling.size import NO_PICTURE, Size
from ltx_neuron.sampling.spec import LORAS, SEED, JobSpec, spec_of, validated
from ltx_neuron.sampling.tiles import Tile
from ltx_neuron.sampling.upscaling import UPSCALES
from ltx_neuron.stage import Stage
from ltx_neuron.weights.lora import WeightSet, check_guided_stage_1, identity_of

_RETAKE_STEPS = 40  # of the dev recipe, without --num-inference-steps
VOICE_WITHOUT_LORA = (
    "{reference_audio} goes with {ic_lora}, got no {ic_lora}; type {ic_lora} PATH as well, or leave"
    " out {reference_audio}"
)
LORA_FIELDS = ("loras", "stage_1_loras", "stage_2_loras", "detailing_loras")  # of a Job


@dataclass(frozen=True)
class Job(Inputs):
    """The settings of one generation.

    ancestral  the stages use the ancestral Euler sampler; the checkpoint's release determines this
    """

    prompt: str
    size: Size = Size()
    seed: int = SEED
    num_inference_steps: int | None = None
    negative_prompt: str | None = None
    recipe: str = "distilled"
    guidance: Guidance | None = None  # dev recipe; None: the model version's defaults
    auto_duration: AutoDuration | None = None  # if not None, `size` has the maximum length
    upscale: str | None = None  # after a one-stage run: "spatial", "temporal" or "both"
    loras: WeightSet = ()  # in all stages
    stage_1_loras: WeightSet = ()  # further ones: IC-LoRAs or HQ's distilled LoRA
    stage_2_loras: WeightSet = ()  # further ones: the distilled LoRA; in DFR in all stages
    detailing_loras: WeightSet = ()  # further ones in stage 2 of DFR
    ancestral: bool = False

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
        if not self.dfr or self.temporal:
            return self
        return dataclasses.replace(self, **self.rendering.seen(self.placed, stage.temporal))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One stage at full size, or one at half size and a distilled one at full size, and the
        windows of DFR.

        Distilled: 8 steps (and 3, and 4 of a window). Dev: a guided first stage.
        """
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
        if self.extension:
            return tuple(half._replace(window=window) for window in self.extension.windows)
        if not size.two_stage or self.skip_stage_2:
            return (half,)
        refining = ("res_2s",) if COMPAT[self.compat].plain_stage_2 else ("res_2s", "ancestral")
        stage_2 = stage_1 if stage_1 in refining else "euler"
        full = Stage("stage_2", size.height, size.width, STAGE_2_SIGMAS, sampler=stage_2)
        full = full._replace(upsampled=True, loras=loras[1])
        third = full._replace(name="stage_3", loras=loras[0], sigmas=DISTILLED_SIGMAS[4:])
        third = third._replace(sampler="ancestral")
        return half, full, *(third._replace(temporal=each) for each in self.rendering.windows)

    @property
    def seen(self) -> str:
        """The name of the latents of the video's frames: the last stage's, or the joined
        windows'. Sound alone has none."""
        if self.dfr:
            return "final_video"
        return "s1_video" if self.extension else f"{self.stages[-1].key}_video"

    @property
    def heard(self) -> str:
        """The name of the latents of the video's sound: the last stage's, or stage 1's if stage 2
        refines only the picture: in dubbing, with a reference voice, in DFR, and in dev without
        interpolated keyframes (ltx-pipelines 1.2.0, dubit.py, ti2vid_two_stages.py,
        keyframe_interpolation.py)."""
        if self.extension or self.reference_audio or self.dfr:
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
        """(F, h, w) of the decoded video latents, before --upscale."""
        stage, longer = self.stages[-1], self.extension
        frames = self.rendering.frames if self.dfr else self.size.num_frames
        shape = video_latent_shape(stage.height, stage.width, frames)
        return (longer.video_latents, *shape[1:]) if longer else shape

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
        canvas = _, *sides = video_latent_shape(stage.height, stage.width, self.size.num_frames)
        appended = self.appended(stage.upsampled, *sides)
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
        shapes = canvas, *(each.shape for each in of.appended(stage.upsampled, *sides))
        references, silent = self.appended_references(stage.upsampled), of.temporal
        sounds = 0 if silent and not silent.holds else of.size.audio_frames
        return Bucket(
            video_tokens=sum(map(math.prod, shapes)),
            audio_tokens=sounds + self.appended_audio(stage.upsampled),
            timesteps=timesteps or of.timesteps(stage.upsampled),
            max_steps=stage.max_steps,
            guided=stage.guided,
            audio_timesteps=self.audio_timesteps(stage.upsampled),
            biased=bool(references and self.attention_mask),
            nag=self.nag is not None,
            identity=stage.guided and self.identity_scale != 0,
            ancestral=stage.sampler == "ancestral",
        )

    @property
    def all_loras(self) -> WeightSet:
        """The LoRAs of all stages."""
        return self.loras + self.stage_1_loras + self.stage_2_loras + self.detailing_loras

    @property
    def resolved_guidance(self) -> Guidance:
        given = self.sampler, self.sound is not None, self.sound_only
        return self.guidance or default_guidance(*given, self.reference_audio is not None)

    @property
    def identity_scale(self) -> float:
        """The scale of identity guidance, of a reference voice in the dev recipe; 0: off."""
        if self.reference_audio is None or self.recipe == "distilled":
            return 0.0
        scale = self.reference_audio.identity_scale
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
    def prompts(self) -> tuple[str, ...]:
        """The prompts to encode: the prompt, and the negative one if a pass or NAG uses it."""
        uncond = self.guided and "uncond" in self.resolved_guidance.passes()
        if not uncond and self.nag is None:
            return (self.prompt,)
        default = SHORT_NEGATIVE_PROMPT if COMPAT[self.compat].short_negative else NEGATIVE_PROMPT
        return self.prompt, default if self.negative_prompt is None else self.negative_prompt

    def check(self) -> None:
        """Raise UserError for every mistake that can be detected before a model loads."""
        self.check_shape()
        if not self.prompt.strip() and not self.references:  # Alpha-Gen wants an empty one
            raise FieldError(
                "{prompt} is empty; type for example {prompt} 'a golden retriever runs across a"
                " meadow'"
            )
        try:
            f"{self.prompt}{self.negative_prompt}".encode()
        except UnicodeEncodeError:
            raise FieldError(
                "{prompt} is not UTF-8 text; type it again in a UTF-8 terminal or file"
            ) from None
        self.check_voice()
        if not self.guided:
            self._check_unguided()
        # res_2s predicts twice per step, and once more at the end.
        elif self.sampler == "res_2s" and self.steps > (most := (GUIDED_MAX_STEPS - 1) // 2):
            raise FieldError(
                f"{{num_inference_steps}} {self.steps}: type a number from 1 to {most}"
            )
        elif self.sound and self.guidance and self.guidance.audio != StreamGuidance():
            raise UserError(
                "guidance.audio: an input sound is not predicted and has no guidance; pass"
                " audio=StreamGuidance()"
            )
        elif self.sound_only and self.resolved_guidance.video != StreamGuidance():
            raise UserError(
                "guidance.video: sound alone has no video to guide; pass video=StreamGuidance()"
            )

    def check_voice(self) -> None:
        """Raise FieldError for a reference voice without its LoRA. No graph depends on it."""
        if self.voice and not self.stage_1_loras:
            raise FieldError(VOICE_WITHOUT_LORA)

    def check_shape(self) -> None:
        """Raise UserError for settings without a possible graph. The prompt does not matter."""
        self.check_types()
        check_fields(self.size)
        if self.sound_only != (self.size.sides == NO_PICTURE):
            raise UserError(
                f"{self.size} with sound_only={self.sound_only}: sound alone has height and width 0"
            )
        validated(dict(self.spec))
        if self.extension:
            self.extension.check()
        self.size.check()
        if self.auto_duration:
            self.auto_duration.check()
        if self.upscale and self.size.two_stage:
            raise FieldError(
                "{upscale} is for one-stage runs; {two_stage} upsamples between its stages already"
            )
        of_ic_lora = self.recipe == "distilled" and not self.voice
        asked = {
            "{two_stage}": self.size.two_stage,
            f"{{recipe}} {self.recipe}": True,
            "{upscale}": self.upscale is not None,
            "{auto_duration}": self.auto_duration is not None,
            # HQ's distilled LoRA (dev recipe) applies to stage 1 as well.
            "{ic_lora}": bool(self.stage_1_loras and (self.references or of_ic_lora)),
            "{detailing_lora}": bool(self.detailing_loras),
            "{negative_prompt}": self.negative_prompt is not None and self.nag_scale is None,
            "{guidance}": self.guidance is not None,
            f"{{dfr}} {{recipe}} {self.recipe}": self.dfr,
        }
        if self.references and self.loras and not self.stage_1_loras:
            files = {f"file_{n}": f"{x.path} {x.strength:g}" for n, x in enumerate(self.loras)}
            named = " ".join(f"{{ic_lora}} {{{name}}}" for name in files)
            raise FieldError(
                "{video_conditioning} needs an {ic_lora}, and got {lora} alone, for every stage and"
                f" without references; type {named} in its place, or leave out"
                " {video_conditioning}",
                **files,
            )
        check_together(self.given | asked)
        if self.voice and self.recipe == "distilled" and self.voice.identity_scale is not None:
            raise FieldError(
                "{identity_guidance_scale} is of the dev recipe, as the other scales are; leave it"
                " out, or type {recipe} dev"
            )
        if self.recipe == "dev" and not (self.references or self.voice):
            check_guided_stage_1(self.stage_1_loras, self.stage_2_loras)
        self.check_inputs()

    def _check_unguided(self) -> None:
        if self.guidance or (self.negative_prompt is not None and self.nag_scale is None):
            check_guidable([] if self.guidance else ["negative_prompt"], self.recipe)
        if self.num_inference_steps not in (None, DISTILLED_MAX_STEPS):
            raise FieldError(
                f"{{num_inference_steps}} {self.num_inference_steps}: the distilled recipe has one"
                f" sigma table, of {DISTILLED_MAX_STEPS} steps (and 3 for stage 2); other counts"
                " need {recipe} dev"
            )

    @property
    def spec(self) -> JobSpec:
        """The job's settings as a JobSpec."""
        loras = (getattr(self, field) for field in LORA_FIELDS)
        return spec_of(self, SPEC_FIELDS, dict(zip(LORAS, loras, strict=True)))

    def describe(self) -> dict:
        """The job as JSON, for the sidecar and the report."""
        described = dataclasses.asdict(self)
        described = described.pop("size") | described
        if described.pop("ancestral"):
            described["sampler"] = self.stages[0].sampler
        for name in (*LATER_FIELDS, "spatial_scale"):
            if described[name] == getattr(Job, name, 2.0):  # the identity of earlier versions
                del described[name]
        described["num_frames"] -= self.tail_frames or 0  # as typed
        if self.auto_duration is None:
            del described["auto_duration"]
        if self.sound_only:
            del described["height"], described["width"]
        for name in (each for each in LORA_FIELDS if each in described):
            described[name] = [[str(lora.path), lora.strength] for lora in getattr(self, name)]
        return json.loads(json.dumps(described, default=os.fspath))

    @property
    def identity(self) -> dict:
        """Everything on which the latents depend. LoRAs count by content, not by path."""
        described = {k: v for k, v in self.describe().items() if k not in LORA_FIELDS}
        return described | {"loras": {s.name: identity_of(s.loras) for s in self.stages}}


# Fields that Job shares with JobSpec; of reference_audio, JobSpec has only the path.
SPEC_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(Job)
    if field.name in JobSpec.model_fields and field.name != "reference_audio"
)
