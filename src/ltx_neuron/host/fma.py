"""Products of float32 matrices by a processor's fused multiply-adds, for the convolutions of sound.

Matrices are stored in panels of LANES columns, (panels, rows, LANES): what the inner loop reads
lies together, and all its distances are known when it is compiled. The loop keeps a tile of the
result in registers, as many rows and panels as they hold, and goes through LANES columns of the
left matrix, a step, at a time. A left matrix's steps need not follow each other: those of a
convolution's taps are the same panels from another row on.

MKL, which torch takes, has half of this rate on processors that are not Intel's, and oneDNN has it
for large matrices only (benchmarks/audio_decode.md).

Importing this module compiles it, or loads what was compiled before.
"""

import os

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ltx_neuron.host.lanes import ARRAY, INDEX, LANES, ZERO, Lanes, Memory, splat

# Steps whose products are one chain of additions: one long chain would round more.
CHAIN = 4
_UNROLLED = 4  # columns of a step
_TOLD = "NUMBA_CPU_FEATURES", "NUMBA_CPU_NAME"  # for another processor than this one
# Rows and panels of a tile: 24 of 32 registers of 16 numbers, or 12 of 16 registers of 8.
WIDE = get_host_cpu_features().get("avx512f") and not any(name in os.environ for name in _TOLD)
ROWS, PANELS = (12, 2) if WIDE else (6, 1)

_OFFSETS = types.int64[::1]


class _Tile:
    """Instructions that multiply a tile of `rows` rows and `panels` panels."""

    def __init__(self, builder: ir.IRBuilder, rows: int, panels: int):
        self.builder = builder
        # LLVM keeps them in registers.
        self.sums = [
            [cgutils.alloca_once_value(builder, ZERO) for _ in range(rows)] for _ in range(panels)
        ]
        for sums in self.sums:
            for place in sums:
                builder.store(ZERO, place)

    def multiply(
        self, a: Memory, offsets: ir.Value, steps: ir.Value, filters: list[Memory], ahead: ir.Value
    ) -> None:
        """Add up the products of all steps of a, which begin `offsets` after it. The numbers that
        lie `ahead` of them are brought into the second cache."""
        builder, size = self.builder, steps.type
        with cgutils.for_range(builder, steps) as step:
            offset = builder.load(builder.gep(offsets, [step.index]))
            begin = builder.mul(step.index, ir.Constant(size, LANES * LANES))
            later = a.after(builder.add(offset, ahead))
            for row in range(len(self.sums[0])):
                later.prefetch(row * LANES)
            with cgutils.for_range(builder, ir.Constant(size, LANES // _UNROLLED)) as part:
                column = builder.mul(part.index, ir.Constant(size, _UNROLLED))
                row = builder.add(begin, builder.mul(column, ir.Constant(size, LANES)))
                left = a.after(builder.add(offset, column))
                right = [memory.after(row) for memory in filters]
                for k in range(_UNROLLED):
                    self._add(left, [memory.load(k * LANES) for memory in right], k)

    def _add(self, a: Memory, b: list[Lanes], column: int) -> None:
        """Add the products of a column of a with a row of each panel."""
        for row in range(len(self.sums[0])):
            number = splat(self.builder, a.load_one(row * LANES + column))
            for sums, vector in zip(self.sums, b, strict=True):
                total = Lanes(self.builder, self.builder.load(sums[row])) + number * vector
                self.builder.store(total.value, sums[row])

    def store(self, panels: list[Memory], more: ir.Value) -> None:
        """Write the sums to rows of panels, or add them to what is there."""
        with self.builder.if_else(more) as (added, written):
            for branch, old in ((added, True), (written, False)):
                with branch:
                    for panel, sums in zip(panels, self.sums, strict=True):
                        for row, place in enumerate(sums):
                            total = Lanes(self.builder, self.builder.load(place))
                            at = row * LANES
                            panel.store(panel.load(at) + total if old else total, at)


def _tile_of(panels: int):
    @intrinsic
    def tile(
        typing, rows, a, at, offsets, first, steps, ahead, b, b_at, b_plane, c, c_at, c_plane, more
    ):
        """Write the products of `rows` rows, at most ROWS, from a[at:] with panels of b[b_at:] to
        c[c_at:], or add them to what is there. Panels of b and c are planes apart."""

        def write(context, builder, signature, args):
            kinds = signature.args

            def memories(array: int, count: int) -> list[Memory]:
                memory = Memory(context, builder, kinds[array], args[array], args[array + 1])
                planes = [memory]
                for _ in range(count - 1):
                    planes.append(planes[-1].after(args[array + 2]))
                return planes

            offsets = context.make_array(kinds[3])(context, builder, args[3]).data
            offsets = builder.gep(offsets, [args[4]])
            done = builder.append_basic_block("done")
            switch = builder.switch(args[0], done)
            for count in range(1, ROWS + 1):
                block = builder.append_basic_block(f"rows{count}")
                switch.add_case(ir.Constant(args[0].type, count), block)
                builder.position_at_end(block)
                tile = _Tile(builder, count, panels)
                tile.multiply(memories(1, 1)[0], offsets, args[5], memories(7, panels), args[6])
                tile.store(memories(10, panels), args[13])
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        places = [ARRAY, INDEX, INDEX]
        kinds = [INDEX, ARRAY, INDEX, _OFFSETS, *[INDEX] * 3, *places, *places]
        return types.void(*kinds, types.boolean), write

    return tile


_tile, _last_tile = _tile_of(PANELS), _tile_of(1)


@njit(nogil=True)
def multiply_part(
    a, at, offsets, first, steps, ahead, b, b_at, b_plane, c, c_at, c_plane, rows, panels, more
):
    """Write the product of `rows` rows and `panels` panels, PANELS at most, to c[c_at:], or add it
    to what is there.

    a       its steps, from the one with the index `first` on, begin `offsets` after a[at]
    ahead   how far after them the numbers lie that are read next
    planes  numbers from a panel to the next
    """
    tiles, start = -(-rows // ROWS), 0
    for tile in range(tiles):
        end = (tile + 1) * rows // tiles
        left, to = at + start * LANES, c_at + start * LANES
        for k in range(0, steps, CHAIN):
            right, there = b_at + k * LANES * LANES, more or k > 0
            given = end - start, a, left, offsets, first + k, min(CHAIN, steps - k), ahead
            if panels == PANELS:
                _tile(*given, b, right, b_plane, c, to, c_plane, there)
            else:
                _last_tile(*given, b, right, b_plane, c, to, c_plane, there)
        start = end
