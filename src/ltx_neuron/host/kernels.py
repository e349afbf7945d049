"""What torch has no fused operation for, compiled by numba for the processor that runs it: the
activations of a vocoder and the real Fourier transform of short blocks.

A signal is a flat array of rows of channels. LANES neighbouring numbers are computed at once, as
vectors of LLVM: on every processor, in as many registers as they take there. The formulas are
Python functions of anything that can be added and multiplied (`spectrum`, `samples`); called with
`Lanes` they write the instructions of a kernel, without a loop or a branch.

Importing this module compiles it, or loads what was compiled before.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LANES = 16
# The inputs of a block of the Fourier transform that take the least time, for these numbers of
# taps. Twice as many save few products, and cost longer transforms and more filters.
BLOCKS = {3: 16, 7: 32, 11: 32}
FILTER = 12  # taps of the low-pass filters around an activation
PI = 3.140625, 9.67502593994140625e-4, 1.509957990978376e-7  # with few digits: products are exact
SINE = -0.16666657096, 0.0083330172885, -0.00019806614879, 2.6000538513e-06
ROUND = 1.5 * 2**23  # added to a float32 and subtracted again, it leaves a whole number
_FIRST_LANE = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
# A product and a sum may be rounded once, and what is zero may be left out.
FLAGS = "contract", "nsz"
_VECTOR, _INDEX_BITS = ir.VectorType(ir.FloatType(), LANES), ir.IntType(64)


class Lanes:
    """LANES numbers of a kernel. Arithmetic with them writes instructions; a product and the sum
    that follows may become one."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value):
        self.builder, self.value = builder, value

    def _apply(self, operation: Callable, other: "Lanes | float") -> "Lanes":
        if not isinstance(other, Lanes):
            other = Lanes(self.builder, ir.Constant(_VECTOR, [float(other)] * LANES))
        return Lanes(self.builder, operation(self.value, other.value, flags=FLAGS))

    def __add__(self, other: "Lanes | float") -> "Lanes":
        return self._apply(self.builder.fadd, other)

    def __sub__(self, other: "Lanes | float") -> "Lanes":
        return self._apply(self.builder.fsub, other)

    def __mul__(self, other: "Lanes | float") -> "Lanes":
        return self._apply(self.builder.fmul, other)

    def __truediv__(self, other: "Lanes | float") -> "Lanes":
        return self._apply(self.builder.fdiv, other)

    def at_most(self, limit: float) -> "Lanes":
        bound = ir.Constant(_VECTOR, [limit] * LANES)
        less = self.builder.fcmp_ordered("<", self.value, bound)
        return Lanes(self.builder, self.builder.select(less, self.value, bound))

    def first(self, count: ir.Value, rest: "Lanes | None" = None) -> "Lanes":
        """The first `count` numbers, and of the others the rest's, or zeros."""
        kind = ir.VectorType(count.type, LANES)
        places = ir.Constant(kind, [*range(LANES)])
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), count, ir.IntType(32)(0))
        counts = self.builder.shuffle_vector(one, one, _FIRST_LANE)
        other = ir.Constant(_VECTOR, [0.0] * LANES) if rest is None else rest.value
        there = self.builder.icmp_signed("<", places, counts)
        return Lanes(self.builder, self.builder.select(there, self.value, other))

    def at_least(self, limit: float) -> "Lanes":
        return (self * -1).at_most(-limit) * -1

    def power(self) -> "Lanes":
        """Two to the power of n, of a sum n + ROUND."""
        whole = ir.VectorType(ir.IntType(32), LANES)
        # In the sum's bits n is the last ones; an exponent is what begins at the 23rd.
        n = self.builder.shl(
            self.builder.bitcast(self.value, whole), ir.Constant(whole, [23] * LANES)
        )
        bits = self.builder.add(n, ir.Constant(whole, [127 << 23] * LANES))
        return Lanes(self.builder, self.builder.bitcast(bits, _VECTOR))


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


class Memory:
    """An array of float32 of a kernel, from an index on."""

    def __init__(self, context, builder: ir.IRBuilder, kind: types.Array, array, index):
        self.builder = builder
        self.place = builder.gep(context.make_array(kind)(context, builder, array).data, [index])

    def after(self, distance: ir.Value) -> "Memory":
        """The array from so many numbers later on."""
        memory = copy(self)
        memory.place = self.builder.gep(self.place, [distance])
        return memory

    def _number(self, count: int, step: ir.Value | None) -> ir.Value:
        """To the number that lies `count` steps after the index. A step is one number, or more."""
        distance = ir.Constant(_INDEX_BITS, count)
        if step is not None:
            distance = self.builder.mul(step, distance)
        return self.builder.gep(self.place, [distance])

    def _pointer(self, count: int, step: ir.Value | None) -> ir.Value:
        return self.builder.bitcast(self._number(count, step), _VECTOR.as_pointer())

    def load(self, count: int = 0, step: ir.Value | None = None) -> Lanes:
        return Lanes(self.builder, self.builder.load(self._pointer(count, step), align=4))

    def load_one(self, count: int) -> ir.Value:
        return self.builder.load(self._number(count, None))

    def store(self, value: Lanes, count: int = 0, step: ir.Value | None = None) -> None:
        self.builder.store(value.value, self._pointer(count, step), align=4)

    def store_past_caches(self, value: Lanes, count: int, step: ir.Value) -> None:
        """Write to an aligned place, whose old numbers are not read into the caches first."""
        store = self.builder.store(value.value, self._pointer(count, step), align=4 * LANES)
        hint = self.builder.module.add_metadata([ir.IntType(32)(1)])
        store.set_metadata("nontemporal", hint)


_ARRAY, _INDEX, _FILTER = types.float32[::1], types.intp, types.UniTuple(types.float32, FILTER)


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> Lanes:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.IntType(32)(0))
    return Lanes(builder, builder.shuffle_vector(one, one, _FIRST_LANE))


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

    signature = types.void(
        _ARRAY, _INDEX, _INDEX, _FILTER, _ARRAY, _ARRAY, _INDEX, _ARRAY, _INDEX, _INDEX
    )
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

    signature = types.void(_ARRAY, _INDEX, _INDEX, _INDEX, _FILTER, _ARRAY, _INDEX)
    return signature, write


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

        return types.void(_ARRAY, *[_INDEX] * 3, _ARRAY, _INDEX, _INDEX), write

    return block_points


def _samples_of(taps: int):
    @intrinsic
    def block_samples(typing, products, at, plane, bias, first, out, to, step, count):
        """Write the `count` first outputs of products, which are in planes, to rows that are `step`
        apart. What follows in a row is read and written again."""

        def write(context, builder, signature, args):
            kinds = signature.args
            source = Memory(context, builder, kinds[0], args[0], args[1])
            bias = Memory(context, builder, kinds[3], args[3], args[4])
            target = Memory(context, builder, kinds[5], args[5], args[6])
            products = [source.load(i, args[2]) for i in range(point_count(taps))]
            # The mean, which is a part of every sample.
            products[0] = products[0] + bias.load()
            for i, sample in enumerate(output_samples(products)[: output_count(taps)]):
                target.store(sample.first(args[8], target.load(i, args[7])), i, args[7])
            return context.get_dummy_value()

        places = [_ARRAY, _INDEX, _INDEX]
        return types.void(*places, _ARRAY, _INDEX, *places, _INDEX), write

    return block_samples


def _filters_of(taps: int):
    @intrinsic
    def block_filters(typing, weight, at, step, last, points, to, plane):
        """Write the points, in planes, of filters that are `step` apart; lanes after the last one
        repeat it."""

        def write(context, builder, signature, args):
            kinds, (_, at, step, last, _, _, plane) = signature.args, args
            data = context.make_array(kinds[0])(context, builder, args[0]).data
            vectors = [ir.Constant(_VECTOR, ir.Undefined)] * taps
            for lane in range(LANES):
                index = ir.Constant(step.type, lane)
                index = builder.select(builder.icmp_signed("<", index, last), index, last)
                index = builder.add(at, builder.mul(index, step))
                for tap in range(taps):
                    place = builder.add(index, ir.Constant(step.type, tap))
                    number = builder.load(builder.gep(data, [place]))
                    vectors[tap] = builder.insert_element(
                        vectors[tap], number, ir.IntType(32)(lane)
                    )
            zero = Lanes(builder, ir.Constant(_VECTOR, [0.0] * LANES))
            target = Memory(context, builder, kinds[4], args[4], args[5])
            numbers = [Lanes(builder, vector) for vector in vectors]
            for i, point in enumerate(filter_points(numbers, zero)):
                target.store_past_caches(point, i, plane)
            return context.get_dummy_value()

        return types.void(_ARRAY, _INDEX, _INDEX, _INDEX, _ARRAY, _INDEX, _INDEX), write

    return block_filters


# One for each number of taps: a kernel finds them by name.
_points16, _points32 = _points_of(16), _points_of(32)
_filters3, _filters7, _filters11 = _filters_of(3), _filters_of(7), _filters_of(11)
_samples3, _samples7, _samples11 = _samples_of(3), _samples_of(7), _samples_of(11)


def kernel(*signature) -> Callable:
    """Compile a function at once, for these types alone."""

    def compiled(function: Callable) -> Callable:
        options = {"nogil": True}
        try:
            return njit(types.void(*signature), cache=True, **options)(function)
        except RuntimeError:  # neither this file's folder nor the user's for caches can be written
            return njit(types.void(*signature), **options)(function)

    return compiled


@kernel(_ARRAY, *[_INDEX] * 3, *[_FILTER] * 2, *[_ARRAY] * 4, _INDEX)
def activate(x, at, row, rows, up, down, a, b, high, out, to):
    """Write the activation of `rows` rows of `row` numbers, x[at:], to out[to:].

    Three rows before x and after are overwritten by its first and last one, as the first filter
    reads them. `a` and `b` are repeated for whole rows; `high` is scratch memory."""
    group, end, start, plane = len(a), rows * row, 3 * row, len(high) // 2
    for i in range(start):
        x[at - start + i] = x[at + i % row]
        x[at + end + i] = x[at + end - row + i % row]
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


@kernel(_ARRAY, *[_INDEX] * 5, _ARRAY, _INDEX, _INDEX)
def to_filters(weight, taps, inputs, outputs, first, last, points, panel, plane):
    """Write the points of weight (outputs, inputs, taps) for inputs `first` to `last`: panels of
    LANES outputs, a row of them for each input. Panels, planes and `points` begin at multiples of
    LANES numbers."""
    step = inputs * taps
    for i in range(first, last):
        for c in range(0, outputs, LANES):
            at, to, end = c * step + i * taps, c // LANES * panel + i * LANES, outputs - 1 - c
            if taps == 3:
                _filters3(weight, at, step, end, points, to, plane)
            elif taps == 7:
                _filters7(weight, at, step, end, points, to, plane)
            else:
                _filters11(weight, at, step, end, points, to, plane)


@kernel(_ARRAY, *[_INDEX] * 5, _ARRAY)
def to_points(x, taps, size, dilation, blocks, channels, points):
    """Write the points of a signal of rows of channels: planes of panels (rows, LANES), with zeros
    after the last channel. Of each block of `size * dilation` samples `dilation` rows are made. x
    needs room for LANES more."""
    step, rows = dilation * channels, blocks * dilation
    panels = -(-channels // LANES)
    plane = panels * rows * LANES
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
def _block_samples(products, rows, row, taps, dilation, channels, bias, out, to):
    """The samples of a block, whose products begin with `row`, written to out[to:]."""
    step, panels = dilation * channels, -(-channels // LANES)
    plane = panels * rows * LANES
    for d in range(dilation):
        for panel in range(panels):
            c = panel * LANES
            at, place = (panel * rows + row + d) * LANES, to + d * channels + c
            if taps == 3:
                _samples3(products, at, plane, bias, c, out, place, step, channels - c)
            elif taps == 7:
                _samples7(products, at, plane, bias, c, out, place, step, channels - c)
            else:
                _samples11(products, at, plane, bias, c, out, place, step, channels - c)


@kernel(_ARRAY, *[_INDEX] * 5, _ARRAY, _ARRAY)
def to_samples(products, taps, size, dilation, blocks, channels, bias, out):
    """Write the outputs of products, which lie as `to_points` writes points, to rows of channels.
    `out` needs room for LANES more."""
    for b in range(blocks):
        to = b * size * dilation * channels
        _block_samples(
            products, blocks * dilation, b * dilation, taps, dilation, channels, bias, out, to
        )


@kernel(_ARRAY, *[_INDEX] * 5, *[_ARRAY] * 3, _INDEX, types.boolean, _ARRAY)
def add_samples(products, taps, size, dilation, blocks, channels, bias, x, out, count, more, one):
    """Write the first `count` numbers of x and outputs added up to `out`, or add both to what is
    there. `one` is scratch memory for a block."""
    rows, step = blocks * dilation, size * dilation * channels
    for b in range(blocks):
        _block_samples(products, rows, b * dilation, taps, dilation, channels, bias, one, 0)
        begin, last = b * step, min(step, count - b * step)
        if more:
            for i in range(last):
                out[begin + i] += x[begin + i] + one[i]
        else:
            for i in range(last):
                out[begin + i] = x[begin + i] + one[i]
