"""The activation of the mel decoder: a norm over the channels of a row, and SiLU. For kernels that
lay out what a convolution reads (host/amx_maps.py, host/winograd_maps.py)."""

import math

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from ltx_neuron.host.lanes import ARRAY, INDEX, LANES, ROUND, Lanes, Memory, splat

_EPSILON = np.float32(1e-6)
# exp(r) for r up to half a logarithm of 2, and that logarithm.
EXP = [1 / math.factorial(n) for n in range(7, -1, -1)]
LOG = 0.693359375, -2.12194440e-4  # with few digits and the rest: products are exact


@njit(nogil=True, fastmath={"reassoc"})  # for vectors
def _mean_square(x, at, count):
    total = np.float32(0)
    for i in range(count):
        total += x[at + i] * x[at + i]
    return total / np.float32(count)


def exp(x: Lanes) -> Lanes:
    """e^x, as of 80 where x is larger, and of -80 where it is smaller."""
    x = x.at_most(80).at_least(-80)
    shifted = x * (1 / math.log(2)) + ROUND
    whole = shifted - ROUND
    rest = x - whole * LOG[0] - whole * LOG[1]
    result = rest * EXP[0] + EXP[1]
    for coefficient in EXP[2:]:
        result = result * rest + coefficient
    return result * shifted.power()


@intrinsic
def _silu(typing, x, at, norm, out, to):
    """Write SiLU of LANES numbers of x[at:], divided by the norm, to out[to:]."""

    def write(context, builder, signature, values):
        kinds = signature.args
        x = Memory(context, builder, kinds[0], *values[:2]).load()
        x = x / splat(builder, values[2])
        Memory(context, builder, kinds[3], *values[3:]).store(x / (exp(x * -1) + 1))
        return context.get_dummy_value()

    return types.void(ARRAY, INDEX, types.float32, ARRAY, INDEX), write


@njit(nogil=True)
def activate(x, at, count, out, to):
    """The norm over a row's channels, and SiLU."""
    norm = np.float32(math.sqrt(_mean_square(x, at, count) + _EPSILON))
    for i in range(0, count, LANES):
        _silu(x, at + i, norm, out, to + i)
