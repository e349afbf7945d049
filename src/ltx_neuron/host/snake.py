"""The activation of a vocoder as one kernel: upsampling, x + b sin(a x)^2, downsampling.

A signal is a flat array of rows of channels. Importing this module compiles it, or loads what was
compiled before.
"""

import math

from numba import types
from numba.extending import intrinsic

from ltx_neuron.host.lanes import ARRAY, INDEX, LANES, ROUND, Lanes, Memory, kernel, splat

FILTER = 12  # taps of the low-pass filters around an activation
PI = 3.140625, 9.67502593994140625e-4, 1.509957990978376e-7  # with few digits: products are exact
SINE = -0.16666657096, 0.0083330172885, -0.00019806614879, 2.6000538513e-06
_FILTER = types.UniTuple(types.float32, FILTER)


def snake(x: Lanes, a: Lanes, b: Lanes) -> Lanes:
    """x + b sin(a x)^2. The square's period is pi, and a sine's sign does not matter."""
    angle = x * a
    turns = angle * (1 / math.pi) + ROUND - ROUND
    for part in PI:
        angle = angle - turns * part
    # A number of more digits than these leaves the period, but no sine exceeds 1.
    square = (angle * angle).at_most(math.pi**2 / 4)
    sine = square * SINE[3] + SINE[2]
    for coefficient in (SINE[1], SINE[0], 1.0):
        sine = sine * square + coefficient
    return x + (sine * sine * square) * b


@intrinsic
def _upsample(typing, x, at, row, taps, a, b, param, high, to, plane):
    """Write a sample's two, activated, of samples -3 to 3 around it."""

    def write(context, builder, signature, args):
        kinds = signature.args
        source = Memory(context, builder, kinds[0], args[0], args[1])
        target = Memory(context, builder, kinds[7], args[7], args[8])
        step, plane = args[2], args[9]
        a, b = (Memory(context, builder, kinds[i], args[i], args[6]).load() for i in (4, 5))
        taps = [splat(builder, builder.extract_value(args[3], i)) for i in range(FILTER)]
        rows = [source.load(i, step) for i in range(-3, 4)]
        for phase in range(2):
            value = rows[phase] * taps[phase]
            for i in range(1, FILTER // 2):
                value = value + rows[phase + i] * taps[phase + 2 * i]
            target.store(snake(value, a, b), phase, plane)
        return context.get_dummy_value()

    signature = types.void(ARRAY, INDEX, INDEX, _FILTER, ARRAY, ARRAY, INDEX, ARRAY, INDEX, INDEX)
    return signature, write


@intrinsic
def _downsample(typing, high, at, row, plane, taps, out, to):
    """Write the sample of its two, and of five before and five after."""

    def write(context, builder, signature, args):
        kinds = signature.args
        first = Memory(context, builder, kinds[0], args[0], args[1])
        second = Memory(context, builder, kinds[0], args[0], builder.add(args[1], args[3]))
        step = args[2]
        taps = [splat(builder, builder.extract_value(args[4], i)) for i in range(FILTER)]
        # 2n - 5 is the second of sample n - 3.
        odd = second.load(-3, step) * taps[0]
        even = first.load(-2, step) * taps[1]
        for i in range(1, FILTER // 2):
            odd = odd + second.load(i - 3, step) * taps[2 * i]
            even = even + first.load(i - 2, step) * taps[2 * i + 1]
        target = Memory(context, builder, kinds[5], args[5], args[6])
        target.store(odd + even, 0, step)
        return context.get_dummy_value()

    signature = types.void(ARRAY, INDEX, INDEX, INDEX, _FILTER, ARRAY, INDEX)
    return signature, write


@kernel(ARRAY, *[INDEX] * 3, *[_FILTER] * 2, *[ARRAY] * 4, INDEX)
def activate(x, at, row, rows, up, down, a, b, high, out, to):
    """Write the activation of `rows` rows of `row` numbers, x[at:], to out[to:].

    x     three rows before these and after are read, too: at a signal's ends its first and last
          row again
    a, b  repeated for whole rows
    high  scratch memory
    """
    group, end, start, plane = len(a), rows * row, 3 * row, len(high) // 2
    done = 0
    for first in range(0, end, group):
        for i in range(0, group, LANES):
            _upsample(x, at + first + i, row, up, a, b, i, high, start + first + i, plane)
        # The second filter, too, reads the ends again and again.
        if first == 0:
            for i in range(start):
                high[i] = high[plane + i] = high[start + i % row]
        ready = first + group - start
        if first + group >= end:
            ready = end + LANES - 1
            for i in range(start):
                last = high[plane + end + i % row + start - row]
                high[start + end + i] = high[plane + start + end + i] = last
        while done + LANES <= ready:
            _downsample(high, start + done, row, plane, down, out, to + done)
            done += LANES
