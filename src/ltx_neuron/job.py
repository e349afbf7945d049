"""Job: what one generation is asked to make, checked before anything loads, and the stages it runs in."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ltx_neuron.conditioning import ImageCondition, distinct_masks, token_count
from ltx_neuron.config import Bucket
from ltx_neuron.errors import UserError
from ltx_neuron.latents import SPACE_SCALE, TIME_SCALE, audio_latent_frames, video_latent_shape
from ltx_neuron.sampling import DISTILLED_MAX_STEPS, DISTILLED_SIGMAS, STAGE_2_SIGMAS

RECIPES = ("distilled", "dev")


class Stage(NamedTuple):
    """One denoising run: its pixel size and schedule."""

    name: str  # "stage_1" or "stage_2"
    height: int
    width: int
    sigmas: tuple[float, ...]


@dataclass(frozen=True)
class Size:
    """Height, width (pixels), frames and frames per second of the video that comes out, and in how many stages."""

    height: int = 512
    width: int = 768
    num_frames: int = 121
    frame_rate: float = 24.0
    two_stage: bool = False

    def check(self) -> None:
        unit = SPACE_SCALE * (2 if self.two_stage else 1)
        for name in ("height", "width"):
            value = getattr(self, name)
            if value <= 0 or value % unit:
                below = max(unit, value // unit * unit)
                nearest = [below] if below >= value else [below, below + unit]
                raise UserError(
                    f"--{name} {value} is not a multiple of {unit}{' (two stages)' if self.two_stage else ''}; "
                    f"nearest legal: {' or '.join(map(str, nearest))}"
                )
        if self.num_frames < 1 or self.num_frames % TIME_SCALE != 1:
            below = max(1, (self.num_frames - 1) // TIME_SCALE * TIME_SCALE + 1)
            raise UserError(
                f"--num-frames {self.num_frames} is not of the form 8k+1; nearest legal: {below} or {below + TIME_SCALE}"
            )
        if not 0 < self.frame_rate < float("inf"):
            raise UserError(f"--frame-rate {self.frame_rate:g} is not above 0; type for example --frame-rate 24")
        if audio_latent_frames(self.num_frames, self.frame_rate) < 1:
            raise UserError(f"{self.num_frames} frames at --frame-rate {self.frame_rate:g} last too short for any sound; "
                            "lower the frame rate or raise --num-frames")  # fmt: skip

    def stages(self) -> tuple[Stage, ...]:
        """Distilled: 8 steps, or 8 at half the size and 3 at the full one."""
        if not self.two_stage:
            return (Stage("stage_1", self.height, self.width, DISTILLED_SIGMAS),)
        half = Stage("stage_1", self.height // 2, self.width // 2, DISTILLED_SIGMAS)
        return (half, Stage("stage_2", self.height, self.width, STAGE_2_SIGMAS))

    def bucket(self, stage: Stage, images: tuple[ImageCondition, ...], timesteps: int | None = None) -> Bucket:
        """The compiled shape a stage needs."""
        shape = video_latent_shape(stage.height, stage.width, self.num_frames)
        return Bucket(
            video_tokens=token_count(shape, images), audio_tokens=audio_latent_frames(self.num_frames, self.frame_rate),
            timesteps=timesteps or len(distinct_masks(images)), max_steps=DISTILLED_MAX_STEPS,
        )  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One generation. `check` raises UserError for whatever can be known to be wrong before a model loads."""

    prompt: str
    size: Size = Size()
    seed: int = 10
    images: tuple[ImageCondition, ...] = ()
    num_inference_steps: int | None = None
    negative_prompt: str | None = None
    recipe: str = "distilled"

    def check(self) -> None:
        if not self.prompt.strip():
            raise UserError("--prompt is empty; type for example --prompt 'a golden retriever runs across a meadow'")
        self.size.check()
        for image in self.images:
            self._check_image(image)
        if self.recipe != "distilled":
            raise UserError(f"--recipe {self.recipe} is not implemented yet; type --recipe distilled")
        if self.negative_prompt is not None:
            raise UserError("--negative-prompt has no effect under the distilled recipe, which runs without guidance.\n"
                            "For the full checkpoint type --recipe dev")  # fmt: skip
        if self.num_inference_steps not in (None, DISTILLED_MAX_STEPS):
            raise UserError(
                f"--num-inference-steps {self.num_inference_steps}: the distilled recipe has one sigma table, of "
                f"{DISTILLED_MAX_STEPS} steps (and 3 for stage 2); other counts need --recipe dev"
            )

    def _check_image(self, image: ImageCondition) -> None:
        if not Path(image.path).is_file():
            raise UserError(f"--image {image.path}: no such file")
        if not 0 <= image.strength <= 1:
            raise UserError(f"--image {image.path}: strength {image.strength:g} is outside 0..1")
        if not 0 <= image.frame_index < self.size.num_frames:
            raise UserError(
                f"--image {image.path}: frame {image.frame_index} is outside the clip's 0..{self.size.num_frames - 1}"
            )
        if not 0 <= image.crf <= 51:
            raise UserError(f"--image {image.path}: crf {image.crf} is outside 0..51 (0: no H.264 round trip, default 33)")

    def describe(self) -> dict:
        """The job as JSON: what the sidecar and the report record."""
        return {**dataclasses.asdict(self.size), **{k: v for k, v in dataclasses.asdict(self).items() if k != "size"}}
