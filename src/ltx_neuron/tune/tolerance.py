"""Whether two runs of the same model agree, by their distances from a float32 reference."""

from torch import Tensor

# A variant may be this much further from float32 than the baseline, because the two round at
# different operations. The floor is for tensors that are computed in few operations.
FACTOR, FLOOR = 2, 0.005
_MOST = 0.1  # largest tolerance in bfloat16, for any baseline: rounding alone gives 0.004
_FLOAT32 = 1e-5


def rel_l2(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, summed in fp64; infinite where there is NaN."""
    error = ((got.double() - expected.double()).norm() / expected.double().norm()).item()
    return error if error == error else float("inf")


def worst_violation(
    errors: dict[str, float], baseline: dict[str, float] | None, dtype: str
) -> tuple[str, float, float] | None:
    """(tensor, its relative L2 error, its tolerance) of the tensor that exceeds its tolerance by
    the largest factor; None if all tensors are within theirs.

    errors    relative L2 of each tensor from the float32 reference
    baseline  the same for the profile's own settings, if they ran: in bfloat16, the rounding error
    """
    tolerances = {
        name: _FLOAT32
        if dtype == "float32"
        else min(_MOST, FACTOR * baseline[name] + FLOOR)
        if baseline
        else _MOST
        for name in errors
    }
    worst = max(errors, key=lambda name: errors[name] / tolerances[name])
    if errors[worst] <= tolerances[worst]:
        return None
    return worst, errors[worst], tolerances[worst]
