"""The ranks of a run, whatever drives them: the interface both backends keep, its errors and
helpers."""

import math

from torch import Tensor

from ltx_neuron.errors import RunError, UserError
from ltx_neuron.models.signatures import Field


def whole_shape(field: Field, tp: int) -> tuple[int, ...]:
    return tuple(size * tp if dim == field.split else size for dim, size in enumerate(field.shape))


def part_of(field: Field, whole: Tensor, rank: int) -> Tensor:
    """A rank's part of a whole tensor: a view."""
    if field.split is None:
        return whole
    return whole.narrow(field.split, field.shape[field.split] * rank, field.shape[field.split])


def finite(tensor: Tensor) -> bool:
    """Whether every element is. Minimum and maximum pass NaN on, and take a twentieth of the time
    of looking at each."""
    return all(math.isfinite(bound) for bound in tensor.aminmax())


class RankError(RunError):
    """A rank failed; the text is that rank's own error."""


class RankRefusal(RankError, UserError):
    """A rank refused the files it was given: a mistake the user can mend."""


class NotFiniteError(RankError):
    """Latents with NaN or Inf. `names` are theirs."""

    def __init__(self, names: list[str]):
        super().__init__(f"NaN or Inf in {', '.join(names)}")
        self.names = names
