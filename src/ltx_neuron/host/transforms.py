"""The real Fourier transform of short blocks, of inputs, filters and outputs of a convolution.

The formulas are Python functions of anything that can be added and multiplied (`spectrum`,
`samples`); called with `Lanes` they write the instructions of a kernel. Importing this module
compiles it, or loads what was compiled before.
"""

import math
from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ltx_neuron.host import fma
from ltx_neuron.host.lanes import ARRAY, INDEX, LANES, ZERO, Lanes, Memory, gather, kernel

# The inputs of a block that take the least time, for these numbers of taps. Twice as many save few
# products, and cost longer transforms and more filters.
BLOCKS = {3: 16, 7: 32, 11: 32}
# Inputs, in steps of LANES, whose filters a core transforms at a time.
STEPS = 24


def spectrum(x: Sequence) -> tuple[list, list]:
    """The sums of N numbers times cos(2 pi k n / N), for k = 0 to N / 2, and times the sine, where
    the first and the last one, 0, are None. N is a power of two."""
    if len(x) == 2:
        return [x[0] + x[1], x[0] - x[1]], [None, None]
    (even_cos, even_sin), (odd_cos, odd_sin) = spectrum(x[0::2]), spectrum(x[1::2])
    last, middle = len(x) // 2, len(x) // 4
    cos, sin = [None] * (last + 1), [None] * (last + 1)
    cos[0], cos[last] = even_cos[0] + odd_cos[0], even_cos[0] - odd_cos[0]
    cos[middle], sin[middle] = even_cos[middle], odd_cos[middle]
    for k in range(1, middle):
        c, s = math.cos(2 * math.pi * k / len(x)), math.sin(2 * math.pi * k / len(x))
        turned_cos = odd_cos[k] * c - odd_sin[k] * s
        turned_sin = odd_sin[k] * c + odd_cos[k] * s
        cos[k], cos[last - k] = even_cos[k] + turned_cos, even_cos[k] - turned_cos
        sin[k], sin[last - k] = turned_sin + even_sin[k], turned_sin - even_sin[k]
    return cos, sin


def samples(cos: Sequence, sin: Sequence) -> list:
    """The N sums over k of cos[k] cos(2 pi k n / N) + sin[k] sin(2 pi k n / N)."""
    last = len(cos) - 1
    if last == 1:
        return [cos[0] + cos[1], cos[0] - cos[1]]
    middle = last // 2
    even_cos, even_sin = [cos[0] + cos[last]], [None]
    odd_cos, odd_sin = [cos[0] - cos[last]], [None]
    for k in range(1, middle):
        c, s = math.cos(math.pi * k / last), math.sin(math.pi * k / last)
        even_cos.append(cos[k] + cos[last - k])
        even_sin.append(sin[k] - sin[last - k])
        a, b = cos[k] - cos[last - k], sin[k] + sin[last - k]
        odd_cos.append(a * c + b * s)
        odd_sin.append(b * c - a * s)
    even = samples([*even_cos, cos[middle]], [*even_sin, None])
    odd = samples([*odd_cos, sin[middle]], [*odd_sin, None])
    return [sample for pair in zip(even, odd, strict=True) for sample in pair]


def point_count(taps: int) -> int:
    return BLOCKS[taps] // 2 * 3 - 1


def output_count(taps: int) -> int:
    return BLOCKS[taps] - taps + 1


def input_points(x: Sequence) -> list:
    """The points of a block of inputs: a sum that is real has one, a pair of a cosine's and a
    sine's sum three, of which the products with a filter's need no fourth."""
    cos, sin = spectrum(x)
    pairs = zip(cos[1:-1], sin[1:-1], strict=True)
    return [cos[0], cos[-1], *(point for c, s in pairs for point in (c + s, s, c))]


def filter_points(taps: Sequence, zero) -> list:
    """The points of a filter, in the same order. A convolution of torch does not turn the taps
    round: with the inputs' sums C and S and the filter's c and s the outputs' are, in the end,
    c (C + S) + S (s - c) and c (C + S) - C (c + s)."""
    block = BLOCKS[len(taps)]
    cos, sin = spectrum([*(tap * (2 / block) for tap in taps), *[zero] * (block - len(taps))])
    pairs = zip(cos[1:-1], sin[1:-1], strict=True)
    rest = (point for c, s in pairs for point in (c, s - c, c + s))
    return [cos[0] * 0.5, cos[-1] * 0.5, *rest]


def output_samples(products: Sequence) -> list:
    """The samples of products with a filter's points."""
    first, last, *rest = products
    cos, sin = [first], [None]
    for both, with_sin, with_cos in zip(rest[0::3], rest[1::3], rest[2::3], strict=True):
        cos.append(both + with_sin)
        sin.append(both - with_cos)
    return samples([*cos, last], [*sin, None])


def _points_of(block: int):
    @intrinsic
    def block_points(typing, x, at, step, count, points, to, plane):
        """Write the points, in planes, of rows that are `step` apart: of their `count` first
        numbers, and zeros."""

        def write(context, builder, signature, args):
            source = Memory(context, builder, signature.args[0], args[0], args[1])
            target = Memory(context, builder, signature.args[4], args[4], args[5])
            inputs = [source.load(i, args[2]).first(args[3]) for i in range(block)]
            for i, point in enumerate(input_points(inputs)):
                target.store(point, i, args[6])
            return context.get_dummy_value()

        return types.void(ARRAY, *[INDEX] * 3, ARRAY, INDEX, INDEX), write

    return block_points


def _samples_of(taps: int):
    @intrinsic
    def block_samples(typing, products, at, plane, bias, first, x, out, to, step):
        """Write the outputs of products, which are in planes, to rows of out[to:] that are `step`
        apart, with the same numbers of x added where it has any."""

        def write(context, builder, signature, args):
            kinds = signature.args
            source = Memory(context, builder, kinds[0], args[0], args[1])
            bias = Memory(context, builder, kinds[3], args[3], args[4])
            added = Memory(context, builder, kinds[5], args[5], args[7])
            target = Memory(context, builder, kinds[6], args[6], args[7])
            products = [source.load(i, args[2]) for i in range(point_count(taps))]
            # The mean, which is a part of every sample.
            products[0] = products[0] + bias.load()
            outputs = output_samples(products)[: output_count(taps)]
            length = context.make_array(kinds[5])(context, builder, args[5]).nitems
            some = builder.icmp_signed("!=", length, ir.Constant(length.type, 0))
            with builder.if_else(some) as (there, none):
                with there:
                    for i, sample in enumerate(outputs):
                        target.store(sample + added.load(i, args[8]), i, args[8])
                with none:
                    for i, sample in enumerate(outputs):
                        target.store(sample, i, args[8])
            return context.get_dummy_value()

        places = [ARRAY, INDEX, INDEX]
        return types.void(*places, ARRAY, INDEX, ARRAY, *places), write

    return block_samples


def _filters_of(taps: int):
    @intrinsic
    def block_filters(typing, weight, at, step, last, points, to, plane):
        """Write the points, in planes, of filters that are `step` apart; lanes after the last one
        repeat it."""

        def write(context, builder, signature, args):
            kinds, (_, at, step, last, _, _, plane) = signature.args, args
            rows = gather(context, builder, kinds[0], args[0], at, step, last, taps)
            zero = Lanes(builder, ZERO)
            target = Memory(context, builder, kinds[4], args[4], args[5])
            for i, point in enumerate(filter_points(rows, zero)):
                target.store(point, i, plane)
            return context.get_dummy_value()

        return types.void(ARRAY, INDEX, INDEX, INDEX, ARRAY, INDEX, INDEX), write

    return block_filters


# One for each number of taps: a kernel finds them by name.
_points16, _points32 = _points_of(16), _points_of(32)
_filters3, _filters7, _filters11 = _filters_of(3), _filters_of(7), _filters_of(11)
_samples3, _samples7, _samples11 = _samples_of(3), _samples_of(7), _samples_of(11)


@njit
def plane_size(panels, rows):
    """Numbers from a plane of panels (rows, LANES) to the next one. A kernel reads or writes the
    same place of all planes: an odd number of cache lines, as others would share their sets."""
    return (panels * rows | 1) * LANES


@njit(nogil=True)
def _to_filters(weight, taps, inputs, outputs, first, i, points, to, plane):
    """Write the points of LANES filters of an input, those of the outputs from `first` on, to
    points[to:]. Zeros for an input that there is not."""
    step, last = inputs * taps, outputs - 1 - first
    at = first * step + i * taps
    if i >= inputs:
        for point in range(len(points) // plane):
            points[point * plane + to : point * plane + to + LANES] = 0
    elif taps == 3:
        _filters3(weight, at, step, last, points, to, plane)
    elif taps == 7:
        _filters7(weight, at, step, last, points, to, plane)
    else:
        _filters11(weight, at, step, last, points, to, plane)


@kernel(ARRAY, *[INDEX] * 5, ARRAY)
def to_points(x, taps, size, dilation, blocks, channels, points):
    """Write the points of a signal of rows of channels: planes of panels (rows, LANES), with zeros
    after the last channel. Of each block of `size * dilation` samples `dilation` rows are made. x
    needs room for LANES more."""
    step, rows = dilation * channels, blocks * dilation
    panels = -(-channels // LANES)
    plane = plane_size(panels, rows)
    for b in range(blocks):
        for d in range(dilation):
            at, row = (b * size * dilation + d) * channels, b * dilation + d
            for panel in range(panels):
                c = panel * LANES
                count, to = channels - c, (panel * rows + row) * LANES
                if taps == 3:
                    _points16(x, at + c, step, count, points, to, plane)
                else:
                    _points32(x, at + c, step, count, points, to, plane)


@njit(nogil=True)
def _to_samples(products, at, plane, taps, bias, c, x, out, to, step):
    if taps == 3:
        _samples3(products, at, plane, bias, c, x, out, to, step)
    elif taps == 7:
        _samples7(products, at, plane, bias, c, x, out, to, step)
    else:
        _samples11(products, at, plane, bias, c, x, out, to, step)


@njit(nogil=True)
def _write_panel(products, at, plane, shape, bias, c, x, out, length, more, one):
    """Write a panel of outputs, from the output c on, of `length` samples, with x added where it
    has numbers; `more`: added to what is there."""
    taps, size, dilation, blocks, _, outputs = shape
    count, step = min(LANES, outputs - c), dilation * outputs
    for b in range(blocks):
        for d in range(dilation):
            source, first = at + (b * dilation + d) * LANES, b * size * dilation + d
            to = first * outputs + c
            if count == LANES and first + (size - 1) * dilation < length and not more:
                _to_samples(products, source, plane, taps, bias, c, x, out, to, step)
                continue
            # What follows these numbers is not to be written.
            _to_samples(products, source, plane, taps, bias, c, x[:0], one, 0, LANES)
            for i in range(min(size, -(-(length - first) // dilation))):
                for lane in range(count):
                    place, total = to + i * step + lane, one[i * LANES + lane]
                    if len(x):
                        total += x[place]
                    out[place] = out[place] + total if more else total


@kernel(*[ARRAY] * 2, types.UniTuple(INDEX, 6), *[ARRAY] * 3, INDEX, types.boolean, *[ARRAY] * 2)
def convolve(values, weight, shape, bias, x, out, length, more, filters, products):
    """Write `length` samples of a convolution with weight (outputs, inputs, taps) to rows of out,
    with bias, and with x added where it has numbers; `more`: added to what is there.

    A core's caches hold what is made for as many outputs as the products take at a time: the points
    of filters, of some inputs, and the products of all.

    values             a signal's points, as `to_points` writes them
    shape              taps, outputs of a block, dilation, blocks, inputs, outputs
    bias               has room for LANES more
    filters, products  scratch memory: planes of PANELS panels
    """
    taps, size, dilation, blocks, inputs, outputs = shape
    rows, steps, panels = blocks * dilation, -(-inputs // LANES), -(-outputs // LANES)
    panel_size, chain, offsets = rows * LANES, STEPS * LANES, np.arange(steps) * rows * LANES
    plane, out_plane = plane_size(steps, rows), plane_size(fma.PANELS, rows)
    filter_plane = plane_size(fma.PANELS, chain)
    one = np.empty(size * LANES, np.float32)
    for panel in range(0, panels, fma.PANELS):
        now = min(fma.PANELS, panels - panel)
        for first in range(0, steps, STEPS):
            together = min(STEPS, steps - first)
            for p in range(now):
                for i in range(together * LANES):
                    _to_filters(
                        *(weight, taps, inputs, outputs, (panel + p) * LANES, first * LANES + i),
                        *(filters, (p * chain + i) * LANES, filter_plane),
                    )
            for point in range(len(filters) // filter_plane):
                fma.multiply_part(
                    *(values, point * plane, offsets, first, together, plane),
                    *(filters, point * filter_plane, chain * LANES),
                    *(products, point * out_plane, panel_size, rows, now, first > 0),
                )
        for p in range(now):
            c = (panel + p) * LANES
            _write_panel(
                products, p * panel_size, out_plane, shape, bias, c, x, out, length, more, one
            )
