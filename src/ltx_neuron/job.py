"""Job: what one generation is asked to make, checked before anything loads, and the stages it runs
in."""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

from ltx_neuron.config import Bucket
from ltx_neuron.errors import UserError
from ltx_neuron.files import check_readable
from ltx_neuron.sampling.conditioning import (
    AttentionMask,
    ImageCondition,
    ReferenceVideo,
    Retake,
    SoundCondition,
    distinct_masks,
    token_count,
)
from ltx_neuron.sampling.fields import check_fields
from ltx_neuron.sampling.guidance import NEGATIVE_PROMPT, Guidance, default_guidance, default_steps
from ltx_neuron.sampling.latents import (
    SPACE_SCALE,
    TIME_SCALE,
    audio_latent_frames,
    video_latent_shape,
)
from ltx_neuron.sampling.res_2s import SAMPLERS, steps_of_evaluations
from ltx_neuron.sampling.schedules import (
    DISTILLED_MAX_STEPS,
    DISTILLED_SIGMAS,
    GUIDED_MAX_STEPS,
    SCHEDULE_TOKENS,
    STAGE_2_SIGMAS,
    ltx2_schedule,
)
from ltx_neuron.sampling.upscaling import UPSCALES, check_upscale
from ltx_neuron.weights.lora import Lora

RECIPES = ("distilled", "dev")
FRAME_RATES = 1, 1000  # frames per second: what MP4 holds and the sound's latents can follow


class Stage(NamedTuple):
    """One denoising run over a noise schedule at one pixel size.

    sigmas     the noise levels from the first step's to 0: one more than there are steps
    guided     each step runs several passes and combines their predictions (stage 1 of dev)
    upsampled  starts from the spatially upsampled latents of the stage before, not from noise alone
    refines    runs on the weights with --distilled-lora merged in (stage 2 of dev)
    sampler    "euler", or "res_2s", whose steps are of two evaluations of the model
    """

    name: str  # "stage_1" or "stage_2"
    height: int
    width: int
    sigmas: tuple[float, ...]
    guided: bool = False
    upsampled: bool = False
    refines: bool = False
    sampler: str = "euler"

    @property
    def key(self) -> str:
        """What the names of its tensors begin with in --save-tensors: "s1" or "s2"."""
        return self.name.replace("stage_", "s")

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def evaluations(self) -> tuple[int, ...]:
        """The stage's evaluations of the model, in order: each the number of the step that guidance
        takes it for. They are the rows of the compiled graph's schedule tables that are used."""
        if self.sampler == "res_2s":
            return steps_of_evaluations(self.steps)
        return tuple(range(self.steps))

    @property
    def max_steps(self) -> int:
        """Rows of the compiled graph's schedule tables."""
        return GUIDED_MAX_STEPS if self.guided else DISTILLED_MAX_STEPS


@dataclass(frozen=True)
class Size:
    """Height, width (pixels), frames and frames per second of the video that comes out, and in how
    many stages."""

    height: int = 512
    width: int = 768
    num_frames: int = 121
    frame_rate: float = 24.0
    two_stage: bool = False

    def check(self) -> None:
        """Raise UserError for a size the model cannot have, naming the nearest one it can."""
        check_fields(self)
        unit = SPACE_SCALE * (2 if self.two_stage else 1)
        for name in ("height", "width"):
            value = getattr(self, name)
            if value <= 0 or value % unit:
                below = max(unit, value // unit * unit)
                nearest = [below] if below >= value else [below, below + unit]
                raise UserError(
                    f"--{name} {value} is not a multiple of"
                    f" {unit}{' (two stages)' if self.two_stage else ''}; nearest legal:"
                    f" {' or '.join(map(str, nearest))}"
                )
        if self.num_frames < 1 or self.num_frames % TIME_SCALE != 1:
            below = max(1, (self.num_frames - 1) // TIME_SCALE * TIME_SCALE + 1)
            raise UserError(
                f"--num-frames {self.num_frames} is not of the form 8k+1; nearest legal: {below} or"
                f" {below + TIME_SCALE}"
            )
        if not FRAME_RATES[0] <= self.frame_rate <= FRAME_RATES[1]:  # NaN is refused as well
            raise UserError(
                f"--frame-rate {self.frame_rate:g} is not a number from {FRAME_RATES[0]} to"
                f" {FRAME_RATES[1]}; type for example --frame-rate 24"
            )
        if audio_latent_frames(self.num_frames, self.frame_rate) < 1:
            raise UserError(
                f"{self.num_frames} frames at --frame-rate {self.frame_rate:g} last too short for"
                " any sound; lower the frame rate or raise --num-frames"
            )

    def check_images(self, images: tuple[ImageCondition, ...]) -> None:
        """Raise UserError for an image that is not there or cannot be held where it is asked to
        be."""
        for index, image in enumerate(images):
            check_fields(image, f"images[{index}].")
            flag = f"--image {image.path}"
            advice = "; pass an image as --image FILE [FRAME_IDX [STRENGTH [CRF]]]"
            check_readable(image.path, "--image", advice)
            if not 0 <= image.frame_index < self.num_frames:
                raise UserError(
                    f"{flag}: frame {image.frame_index} is outside the clip's"
                    f" 0..{self.num_frames - 1}"
                )
            if not 0 <= image.strength <= 1:
                raise UserError(
                    f"{flag}: strength {image.strength:g} is outside 0..1 (1 keeps the image, 0"
                    " ignores it)"
                )
            if not 0 <= image.crf <= 51:
                raise UserError(
                    f"{flag}: crf {image.crf} is outside 0..51 (0: no H.264 round trip, default 33)"
                )

    def stages(
        self, recipe: str = "distilled", steps: int = 1, sampler: str = "euler"
    ) -> tuple[Stage, ...]:
        """One stage at the full size, or one at half of it and a distilled one at the full size.

        Distilled: 8 steps (and 3). Dev: a guided first stage of `steps` steps.
        """
        guided, halves = recipe == "dev", 2 if self.two_stage else 1
        first = self.height // halves, self.width // halves
        tokens = SCHEDULE_TOKENS
        if sampler == "res_2s":  # HQ alone counts them
            tokens = math.prod(video_latent_shape(*first, self.num_frames))
        sigmas = ltx2_schedule(steps, tokens) if guided else DISTILLED_SIGMAS
        stages = [Stage("stage_1", *first, sigmas, guided, sampler=sampler)]
        if self.two_stage:
            full = Stage("stage_2", self.height, self.width, STAGE_2_SIGMAS, sampler=sampler)
            stages.append(full._replace(upsampled=True, refines=guided))
        return tuple(stages)

    def buckets(self, images: tuple[ImageCondition, ...], recipe: str) -> list[Bucket]:
        """The compiled shapes of all stages."""
        return [self.bucket(stage, images) for stage in self.stages(recipe)]

    def bucket(
        self, stage: Stage, images: tuple[ImageCondition, ...], timesteps: int | None = None
    ) -> Bucket:
        """The compiled shape a stage needs."""
        shape = video_latent_shape(stage.height, stage.width, self.num_frames)
        return Bucket(
            video_tokens=token_count(shape, images),
            audio_tokens=audio_latent_frames(self.num_frames, self.frame_rate),
            timesteps=timesteps or len(distinct_masks(images)),
            max_steps=stage.max_steps,
            guided=stage.guided,
        )


def check_guidable(what: str, recipe: str) -> None:
    """Raise UserError where something that steers guidance is asked of the recipe that has none."""
    if recipe == "distilled":
        raise UserError(
            f"the distilled recipe takes no {what}: a distilled checkpoint runs without guidance,"
            " and guided like the full one it gives noise.\nFor the full checkpoint type"
            " --recipe dev"
        )


@dataclass(frozen=True)
class Job:
    """What one generation is asked to make."""

    prompt: str
    size: Size = Size()
    seed: int = 10
    images: tuple[ImageCondition, ...] = ()
    num_inference_steps: int | None = None
    negative_prompt: str | None = None
    recipe: str = "distilled"
    guidance: Guidance | None = None  # dev recipe: the model version's own where None
    upscale: str | None = None  # after a one-stage run: "spatial", "temporal" or "both"
    sound: SoundCondition | None = None
    retake: Retake | None = None
    references: tuple[ReferenceVideo, ...] = ()
    attention_mask: AttentionMask | None = None
    skip_stage_2: bool = False  # of a two-stage run: the half-size result is decoded
    images_as_guides: bool = False  # an image at frame 0 is a keyframe as the others are
    sampler: str = "euler"  # or "res_2s", which HQ uses
    loras: tuple[Lora, ...] = ()  # in all stages
    stage_1_loras: tuple[Lora, ...] = ()  # besides, an IC-LoRA or HQ's distilled one
    stage_2_loras: tuple[Lora, ...] = ()  # besides, the distilled one

    @property
    def steps(self) -> int:
        """Steps of stage 1."""
        if self.recipe == "distilled":
            return DISTILLED_MAX_STEPS
        if self.num_inference_steps is not None:
            return self.num_inference_steps
        return default_steps(self.sampler)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.size.stages(self.recipe, self.steps, self.sampler)

    @property
    def heard(self) -> str:
        """The name of the latents whose sound is the video's: the last stage's or, of HQ, whose
        second stage is for the picture alone, the first's."""
        stage = self.stages[0 if self.sampler == "res_2s" else -1]
        return f"{stage.key}_audio"

    @property
    def refines(self) -> bool:
        """Whether a stage needs the weights with the distilled LoRA."""
        return any(stage.refines for stage in self.stages)

    @property
    def resolved_guidance(self) -> Guidance:
        return self.guidance or default_guidance(self.sampler)

    @property
    def upsamplers(self) -> dict[str, str]:
        """The latent upsamplers this job needs, each with the flag that needs it."""
        kinds = {"spatial": "--two-stage"} if self.size.two_stage else {}
        return kinds | dict.fromkeys(UPSCALES.get(self.upscale, ()), f"--upscale {self.upscale}")

    @property
    def output_frame_rate(self) -> float:
        """Frames per second of the file: twice as many frames in the same time after the temporal
        upsampler."""
        return self.size.frame_rate * (2 if self.upscale in ("temporal", "both") else 1)

    @property
    def prompts(self) -> tuple[str, ...]:
        """What is encoded: the prompt, and the negative one where a pass uses it."""
        if self.recipe == "dev" and "uncond" in self.resolved_guidance.passes():
            return self.prompt, (
                NEGATIVE_PROMPT if self.negative_prompt is None else self.negative_prompt
            )
        return (self.prompt,)

    def check(self) -> None:
        """Raise UserError for whatever can be known to be wrong before a model loads."""
        check_fields(self)
        if not self.prompt.strip():
            raise UserError(
                "--prompt is empty; type for example --prompt 'a golden retriever runs across a"
                " meadow'"
            )
        try:
            f"{self.prompt}{self.negative_prompt}".encode()
        except UnicodeEncodeError:
            raise UserError(
                "--prompt is not UTF-8 text; type it again in a terminal or a file that is UTF-8"
            ) from None
        if not -(2**63) <= self.seed < 2**64:
            raise UserError(f"--seed {self.seed} has more than 64 bits; type a smaller number")
        self.size.check()
        self.size.check_images(self.images)
        check_upscale(self.upscale, self.size.two_stage)
        if self.recipe not in RECIPES:
            raise UserError(f"recipe {self.recipe!r} is not known; known: {', '.join(RECIPES)}")
        self._check_sampler()
        # A graph's rows are evaluations: res_2s has two a step, and one more.
        most = (GUIDED_MAX_STEPS - 1) // 2 if self.sampler == "res_2s" else GUIDED_MAX_STEPS
        if self.recipe == "distilled":
            self._check_unguided()
        elif not 1 <= self.steps <= most:
            raise UserError(f"--num-inference-steps {self.steps}: type a number from 1 to {most}")

    def _check_sampler(self) -> None:
        if self.sampler not in SAMPLERS:
            raise UserError(f"sampler {self.sampler!r} is not known; known: {', '.join(SAMPLERS)}")
        if self.sampler == "res_2s" and not (self.size.two_stage and self.recipe == "dev"):
            raise UserError(
                "--sampler res_2s is of the dev recipe in two stages; type --two-stage --recipe"
                " dev, or leave it out"
            )
        if self.sampler == "res_2s" and (self.sound or self.retake or self.references):
            raise UserError(
                "--sampler res_2s makes picture and sound from a prompt and images alone; leave it"
                " out where a sound, a video or a reference is given"
            )

    def _check_unguided(self) -> None:
        if self.negative_prompt is not None or self.guidance is not None:
            check_guidable(
                "--negative-prompt" if self.negative_prompt is not None else "guidance", self.recipe
            )
        if self.num_inference_steps not in (None, DISTILLED_MAX_STEPS):
            raise UserError(
                f"--num-inference-steps {self.num_inference_steps}: the distilled recipe has one"
                f" sigma table, of {DISTILLED_MAX_STEPS} steps (and 3 for stage 2); other counts"
                " need --recipe dev"
            )

    def describe(self) -> dict:
        """The job as JSON: what the sidecar and the report record."""
        return {
            **dataclasses.asdict(self.size),
            **{k: v for k, v in dataclasses.asdict(self).items() if k != "size"},
        }
