"""Stage: one denoising run of a job, over its own noise schedule."""

from typing import NamedTuple

from ltx_neuron.sampling import dfr
from ltx_neuron.sampling.extension import Window
from ltx_neuron.sampling.samplers import STAGE_SEED, steps_of_evaluations
from ltx_neuron.sampling.schedules import DISTILLED_MAX_STEPS, GUIDED_MAX_STEPS
from ltx_neuron.weights.lora import WeightSet


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
    # "euler", "ancestral", which adds noise in each step, "res_2s" with two evaluations of the
    # model per step, or "gradient_estimation"
    sampler: str = "euler"
    window: Window | None = None  # of an extended video: each has its own stage 1
    temporal: dfr.TemporalWindow | None = None  # of DFR: each window of a round is a stage

    @property
    def key(self) -> str:
        """The prefix of its tensors in --save-tensors: "s1", "s2", "window_1"."""
        window = self.window or self.temporal
        return window.key if window else self.name.replace("stage_", "s")

    @property
    def title(self) -> str:
        """Its name for users: "stage_1", "window 2 of 3"."""
        window = self.window or self.temporal
        return window.title if window else self.name

    @property
    def noise(self) -> tuple[int, float]:
        """Of the ancestral sampler: what is added to the seed, and eta."""
        if self.temporal:
            return self.temporal.seed, dfr.ETA
        return STAGE_SEED * (1 + self.upsampled), 1.0

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def evaluations(self) -> tuple[int, ...]:
        """The stage's evaluations of the model in order, each with the step number that guidance
        uses. Their number is that of the used rows of the graph's schedule tables."""
        if self.sampler == "res_2s":
            return steps_of_evaluations(self.steps)
        return tuple(range(self.steps))

    @property
    def max_steps(self) -> int:
        """Rows of the compiled graph's schedule tables."""
        return GUIDED_MAX_STEPS if self.guided else DISTILLED_MAX_STEPS
