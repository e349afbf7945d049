"""Vectors of float32 for the kernels that decode sound, compiled by numba for the processor that
runs them.

LANES neighbouring numbers are computed at once, as vectors of LLVM: on every processor, in as many
registers as they take there. What is written as a Python function of anything that can be added and
multiplied, called with `Lanes`, writes the instructions of a kernel, without a loop or a branch.
"""

from collections.abc import Callable
from copy import copy
from functools import partial

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from ltx_neuron.host.compiled import compile_or_load

LANES = 16
ARRAY, INDEX = types.float32[::1], types.intp
VECTOR, _INDEX_BITS = ir.VectorType(ir.FloatType(), LANES), ir.IntType(64)
_FIRST_LANE = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
ROUND = 1.5 * 2**23  # added to a float32 and subtracted again, it leaves a whole number
# A product and a sum may be rounded once, and what is zero may be left out.
FLAGS = "contract", "nsz"


class Lanes:
    """LANES numbers of a kernel. Arithmetic with them writes instructions; a product and the sum
    that follows may become one."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value):
        self.builder, self.value = builder, value

    def _apply(self, operation: Callable, other: "Lanes | float") -> "Lanes":
        if not isinstance(other, Lanes):
            other = Lanes(self.builder, ir.Constant(VECTOR, [float(other)] * LANES))
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
        bound = ir.Constant(VECTOR, [limit] * LANES)
        less = self.builder.fcmp_ordered("<", self.value, bound)
        return Lanes(self.builder, self.builder.select(less, self.value, bound))

    def first(self, count: ir.Value, rest: "Lanes | None" = None) -> "Lanes":
        """The first `count` numbers, and of the others the rest's, or zeros."""
        kind = ir.VectorType(count.type, LANES)
        places = ir.Constant(kind, [*range(LANES)])
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), count, ir.IntType(32)(0))
        counts = self.builder.shuffle_vector(one, one, _FIRST_LANE)
        other = ZERO if rest is None else rest.value
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
        return Lanes(self.builder, self.builder.bitcast(bits, VECTOR))


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
        return self.builder.bitcast(self._number(count, step), VECTOR.as_pointer())

    def load(self, count: int = 0, step: ir.Value | None = None) -> Lanes:
        return Lanes(self.builder, self.builder.load(self._pointer(count, step), align=4))

    def load_one(self, count: int) -> ir.Value:
        return self.builder.load(self._number(count, None))

    def prefetch(self, count: int) -> None:
        """Bring a number, and those around it, into the second cache."""
        place = self.builder.bitcast(self._number(count, None), ir.IntType(8).as_pointer())
        kinds = [place.type, *[ir.IntType(32)] * 3]
        kind = ir.FunctionType(ir.VoidType(), kinds)
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        read, second, data = (ir.IntType(32)(number) for number in (0, 2, 1))
        self.builder.call(function, [place, read, second, data])

    def store(self, value: Lanes, count: int = 0, step: ir.Value | None = None) -> None:
        self.builder.store(value.value, self._pointer(count, step), align=4)

    def store_past_caches(self, value: Lanes, count: int, step: ir.Value) -> None:
        """Write to an aligned place, whose old numbers are not read into the caches first."""
        store = self.builder.store(value.value, self._pointer(count, step), align=4 * LANES)
        hint = self.builder.module.add_metadata([ir.IntType(32)(1)])
        store.set_metadata("nontemporal", hint)


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> Lanes:
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, ir.IntType(32)(0))
    return Lanes(builder, builder.shuffle_vector(one, one, _FIRST_LANE))


def gather(context, builder, kind, array, at, step, last, count: int) -> list[Lanes]:
    """Of `count` neighbouring numbers from each of LANES places on, which are `step` apart, the
    first ones, the second ones and so on. Places after the one of index `last` are that one."""
    data = context.make_array(kind)(context, builder, array).data
    vectors = [ir.Constant(VECTOR, ir.Undefined)] * count
    for lane in range(LANES):
        index = ir.Constant(step.type, lane)
        index = builder.select(builder.icmp_signed("<", index, last), index, last)
        place = builder.add(at, builder.mul(index, step))
        for i in range(count):
            number = builder.load(
                builder.gep(data, [builder.add(place, ir.Constant(step.type, i))])
            )
            vectors[i] = builder.insert_element(vectors[i], number, ir.IntType(32)(lane))
    return [Lanes(builder, vector) for vector in vectors]


def kernel(*signature) -> Callable:
    """Compile a function at once, for these types alone."""

    compiler = partial(njit, types.void(*signature), nogil=True)
    return partial(compile_or_load, compiler)
