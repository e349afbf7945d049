"""Whether two runs of the same model agree: the three-way rule."""

from torch import Tensor

# A variant may be this much further from float32 than the profile's own setting, since the two
# round in other places; the floor is for tensors that few operations separate from exact ones.
FACTOR, FLOOR = 2, 0.005
_MOST = 0.1  # of bfloat16, whatever the profile's own setting does: rounding gives 0.004
_FLOAT32 = 1e-5


def distance(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|, summed in fp64; infinite where there is NaN."""
    far = ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
    return far if far == far else float("inf")


def distances(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    return {name: distance(got[name], wanted[name]) for name in wanted}


def disagreement(
    far: dict[str, float], own: dict[str, float] | None, dtype: str
) -> tuple[str, float, float] | None:
    """The tensor of a variant that is further from the reference than the rule allows, with its
    distance and what is allowed: the worst one; None where all agree.

    own  the distances of the profile's own setting, if it ran: in bfloat16 they say how far
         rounding leads
    """
    wrong = []
    for name, value in far.items():
        allowed = _FLOAT32
        if dtype != "float32":
            allowed = min(_MOST, FACTOR * own[name] + FLOOR) if own else _MOST
        if not value <= allowed:
            wrong.append((name, value, allowed))
    return max(wrong, key=lambda each: each[1] / each[2], default=None)
