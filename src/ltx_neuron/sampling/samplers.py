"""The samplers by name. A new one is a row of this table and a step: a class of the host, or a tail
of the graphs (models/programs.py)."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ltx_neuron.sampling.gradient_estimation import Euler, GradientEstimation
from ltx_neuron.sampling.res_2s import Res2s, evaluation_pairs, steps_of_evaluations
from ltx_neuron.sampling.schedules import sigma_pairs


class Sampler(NamedTuple):
    """How a stage steps from noise to latents.

    host         steps on the host; None: the graphs step on the ranks
    pairs        sigmas and rows of the graphs' table to the sigmas (rows, 2) of each evaluation
    evaluations  number of steps to the step number that guidance uses in each evaluation
    """

    host: type[Euler | Res2s] | None = None
    pairs: Callable[[tuple[float, ...], int], Tensor] = sigma_pairs
    evaluations: Callable[[int], tuple[int, ...]] = lambda steps: tuple(range(steps))


SAMPLERS = {
    "euler": Sampler(),
    "ancestral": Sampler(),  # Euler that adds noise in each step
    "res_2s": Sampler(Res2s, evaluation_pairs, steps_of_evaluations),  # two evaluations a step
    "gradient_estimation": Sampler(GradientEstimation),
}
CHOICES = ("euler", "res_2s", "gradient_estimation")  # a release selects the ancestral one
