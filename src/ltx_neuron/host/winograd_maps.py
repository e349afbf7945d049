"""Convolutions of the mel decoder's maps by fused multiply-adds: those of 3 x 3 taps by Winograd's
F(2, 3) along both axes, with the names of the paper that host/winograd.py follows.

A tile of 4 x 4 inputs gives 2 x 2 outputs: 16 products of a channel pair where a direct
convolution takes 36. Maps are (time, bins, C). What a convolution reads is laid out by all cores:
after the norm and SiLU before it, or twice along both axes where the map is enlarged; two lines of
zeros come first, as convolutions are causal, and a row of zeros before and after each line.

Importing this module compiles it, or loads what was compiled before.
"""

from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor, nn

from ltx_neuron.host import fma, fma_convolution
from ltx_neuron.host.activation import activate
from ltx_neuron.host.fourier import flat, fresh, panel_count
from ltx_neuron.host.lanes import ARRAY, INDEX, LANES, Memory, gather, kernel
from ltx_neuron.host.transforms import plane_size
from ltx_neuron.host.winograd import Workers

ABOVE = 2  # lines of zeros
POINTS = 16
TILES = 256  # that a core computes at a time, about
# Inputs, in steps of LANES, whose filters a core transforms at a time.
STEPS = 24


def input_points(x: Sequence) -> list:
    """B^T d along one axis."""
    return [x[0] - x[2], x[1] + x[2], x[2] - x[1], x[1] - x[3]]


def filter_points(x: Sequence) -> list:
    """G g along one axis."""
    ends, middle = (x[0] + x[2]) * 0.5, x[1] * 0.5
    return [x[0], ends + middle, ends - middle, x[2]]


def outputs(x: Sequence) -> list:
    """A^T M along one axis."""
    return [x[0] + x[1] + x[2], x[1] - x[2] - x[3]]


def both_axes(transform, numbers: Sequence, size: int) -> list:
    """A transform of size x size numbers, line by line, along both axes."""
    lines = [transform(numbers[i : i + size]) for i in range(0, size * size, size)]
    columns = [transform(column) for column in zip(*lines, strict=True)]
    return [number for line in zip(*columns, strict=True) for number in line]


@intrinsic
def _tile_points(typing, x, at, line, row, count, points, to, plane):
    """Write the points, in planes, of the `count` first channels of a tile of x, and zeros."""

    def write(context, builder, signature, args):
        source = Memory(context, builder, signature.args[0], args[0], args[1])
        target = Memory(context, builder, signature.args[5], args[5], args[6])
        numbers = []
        for _ in range(4):
            numbers += [source.load(i, args[3]).first(args[4]) for i in range(4)]
            source = source.after(args[2])
        for i, point in enumerate(both_axes(input_points, numbers, 4)):
            target.store(point, i, args[7])
        return context.get_dummy_value()

    return types.void(ARRAY, *[INDEX] * 4, ARRAY, INDEX, INDEX), write


@intrinsic
def _tile_filters(typing, weight, at, step, last, points, to, plane):
    """Write the points, in planes, of filters that are `step` apart; lanes after the last one
    repeat it."""

    def write(context, builder, signature, args):
        taps = gather(context, builder, signature.args[0], *args[:4], 9)
        target = Memory(context, builder, signature.args[4], args[4], args[5])
        for i, point in enumerate(both_axes(filter_points, taps, 3)):
            target.store(point, i, args[6])
        return context.get_dummy_value()

    return types.void(ARRAY, *[INDEX] * 3, ARRAY, INDEX, INDEX), write


@intrinsic
def _tile_outputs(typing, products, at, plane, bias, first, x, out, to, line, row):
    """Write the outputs of a tile's products, which are in planes, to out[to:], with the same
    numbers of x added where it has any."""

    def write(context, builder, signature, args):
        kinds = signature.args
        source = Memory(context, builder, kinds[0], args[0], args[1])
        bias = Memory(context, builder, kinds[3], args[3], args[4]).load()
        added = Memory(context, builder, kinds[5], args[5], args[7])
        target = Memory(context, builder, kinds[6], args[6], args[7])
        products = [source.load(i, args[2]) for i in range(POINTS)]
        results = [number + bias for number in both_axes(outputs, products, 4)]
        length = context.make_array(kinds[5])(context, builder, args[5]).nitems
        with builder.if_else(builder.icmp_signed("!=", length, length.type(0))) as branches:
            for branch, is_there in zip(branches, (True, False), strict=True):
                with branch:
                    from_line, to_line = added, target
                    for i in range(0, 4, 2):
                        for j in range(2):
                            total = results[i + j]
                            if is_there:
                                total = total + from_line.load(j, args[9])
                            to_line.store(total, j, args[9])
                        from_line, to_line = from_line.after(args[8]), to_line.after(args[8])
        return context.get_dummy_value()

    return types.void(ARRAY, INDEX, INDEX, ARRAY, INDEX, ARRAY, ARRAY, *[INDEX] * 3), write


@kernel(ARRAY, *[INDEX] * 6, types.boolean, ARRAY)
def lay_lines(x, first, last, width, channels, scale, pitch, active, out):
    """Write lines `first` to `last` of x, which has `width` rows of channels in a line, to their
    places between zeros: lines of `pitch` rows. Lines and their rows come `scale` times;
    `active`: their norm's SiLU."""
    for line in range(first, last):
        to, end = (ABOVE + line) * pitch * channels, (ABOVE + line + 1) * pitch * channels
        out[to : to + channels] = 0
        to += channels
        for i in range(width):
            at = (line // scale * width + i) * channels
            if active:
                activate(x, at, channels, out, to)
            else:
                out[to : to + channels] = x[at : at + channels]
            for _ in range(1, scale):
                to += channels
                out[to : to + channels] = out[to - channels : to]
            to += channels
        out[to:end] = 0


@njit(nogil=True)
def _write_panel(products, at, plane, pair, shape, bias, c, x, out, one):
    """Write a panel of outputs, from the output c on, of the tiles of a pair of lines."""
    width, lines, count = shape[0], shape[1], min(LANES, shape[3] - c)
    for tile in range(-(-width // 2)):
        to = (2 * pair * width + 2 * tile) * shape[3] + c
        source = at + tile * LANES
        if count == LANES and 2 * tile + 1 < width and 2 * pair + 1 < lines:
            _tile_outputs(products, source, plane, bias, c, x, out, to, width * shape[3], shape[3])
            continue
        # What follows these numbers is not to be written.
        _tile_outputs(products, source, plane, bias, c, x[:0], one, 0, 2 * LANES, LANES)
        for line in range(min(2, lines - 2 * pair)):
            for row in range(min(2, width - 2 * tile)):
                for lane in range(count):
                    place = to + (line * width + row) * shape[3] + lane
                    number = one[(2 * line + row) * LANES + lane]
                    out[place] = number + x[place] if len(x) else number


@kernel(*[ARRAY] * 2, types.UniTuple(INDEX, 4), *[INDEX] * 2, *[ARRAY] * 6)
def convolve(laid, weight, shape, first, last, bias, x, out, values, filters, products):
    """Write pairs of lines `first` to `last` of a convolution with weight (outputs, inputs, 9), of
    what `lay_lines` laid out, to a map; with bias, and with x added where it has numbers.

    shape  width and lines of the map, inputs, outputs
    bias   has room for LANES more
    values, filters, products  scratch memory
    """
    width, _, inputs, outputs = shape
    across, pitch = -(-width // 2), (-(-width // 2) + 1) * 2
    rows, steps, panels = (last - first) * across, -(-inputs // LANES), -(-outputs // LANES)
    panel_size, chain, offsets = rows * LANES, STEPS * LANES, np.arange(steps) * rows * LANES
    plane, out_plane = plane_size(steps, rows), plane_size(fma.PANELS, rows)
    filter_plane, one = plane_size(fma.PANELS, chain), np.empty(4 * LANES, np.float32)
    for row in range(rows):
        at = ((first + row // across) * pitch + row % across) * 2 * inputs
        for step in range(steps):
            c, to = step * LANES, (step * rows + row) * LANES
            _tile_points(laid, at + c, pitch * inputs, inputs, inputs - c, values, to, plane)
    for panel in range(0, panels, fma.PANELS):
        now = min(fma.PANELS, panels - panel)
        for k in range(0, steps, STEPS):
            together = min(STEPS, steps - k)
            for p in range(now):
                c = (panel + p) * LANES
                for i in range(together * LANES):
                    # Inputs that there are not have values of zero.
                    source = (c * inputs + min(k * LANES + i, inputs - 1)) * 9
                    to = (p * chain + i) * LANES
                    _tile_filters(
                        weight, source, inputs * 9, outputs - 1 - c, filters, to, filter_plane
                    )
            for point in range(POINTS):
                fma.multiply_part(
                    *(values, point * plane, offsets, k, together, plane),
                    *(filters, point * filter_plane, chain * LANES),
                    *(products, point * out_plane, panel_size, rows, now, k > 0),
                )
        for p in range(now):
            c = (panel + p) * LANES
            for pair in range(first, last):
                at = p * panel_size + (pair - first) * across * LANES
                _write_panel(products, at, out_plane, pair, shape, bias, c, x, out, one)


class Convolution:
    """A causal convolution of a map, of 3 x 3 taps or of one."""

    def __init__(self, conv: nn.Conv2d):
        self.outputs, self.inputs = conv.weight.shape[:2]
        self.weight, self.bias = flat(conv.weight.contiguous()), flat(F.pad(conv.bias, (0, LANES)))
        self.one = None
        if conv.kernel_size == (1, 1):
            self.one = fma_convolution.Filters(conv.weight.flatten(2), conv.bias)

    def convolve(
        self,
        source: Tensor,
        workers: Workers,
        active: bool = False,
        scale: int = 1,
        x: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """A convolution of a map (T, bins, Cin), written to `out` where it is given.

        active  of the map's norm and its SiLU
        scale   how often each line and each of its rows comes
        x       is added
        """
        lines, width, channels = source.shape
        lines, wide = scale * lines, scale * width
        if out is None:
            out = fresh(lines, wide, self.outputs)
        if self.one:
            self._multiply(source, out, workers)
            return out
        pairs, across = -(-lines // 2), -(-wide // 2)
        pitch = (across + 1) * 2
        laid = workers.scratch("laid", (ABOVE + 2 * pairs) * pitch + 1, channels)
        laid[: ABOVE * pitch] = 0
        laid[(ABOVE + lines) * pitch :] = 0

        def lay(part: tuple[int, int]) -> None:
            first, last = 2 * part[0], min(lines, 2 * part[1])
            lay_lines(flat(source), first, last, width, channels, scale, pitch, active, flat(laid))

        def compute(part: tuple[int, int]) -> None:
            rows = (part[1] - part[0]) * across
            shapes = (
                (panel_count(channels), rows),
                (fma.PANELS, STEPS * LANES),
                (fma.PANELS, rows),
            )
            memory = [
                workers.scratch(name, POINTS * plane_size(*shape)).numpy()
                for name, shape in zip(("values", "filters", "products"), shapes, strict=True)
            ]
            shape, added = (wide, lines, channels, self.outputs), np.empty(0, np.float32)
            if x is not None:
                added = flat(x)
            convolve(*(flat(laid), self.weight, shape, *part, self.bias, added, flat(out)), *memory)

        parts = parts_of(pairs, across)
        workers.run(lay, parts)
        workers.run(compute, parts)
        return out

    def _multiply(self, source: Tensor, out: Tensor, workers: Workers) -> None:
        """The convolution of one tap."""

        def compute(part: tuple[int, int]) -> None:
            rows = source[part[0] : part[1]].flatten(0, 1)
            parts = fma_convolution.parts_memory(workers, *rows.shape[::-1])
            fma_convolution.cut(flat(rows), 0, *rows.shape, parts, 0)
            offsets = fma_convolution.row_offsets([0])
            self.one.convolve(parts, offsets, out[part[0] :], workers, len(rows))

        workers.run(compute, parts_of(*source.shape[:2]))


def parts_of(lines: int, tiles: int) -> list[tuple[int, int]]:
    """Lines in an even number of parts, of TILES tiles or fewer; of one line at least."""
    count = -(-lines * tiles // TILES)
    count = min(lines, count + count % 2)
    return [(lines * i // count, lines * (i + 1) // count) for i in range(count)]
