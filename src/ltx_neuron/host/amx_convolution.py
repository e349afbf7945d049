"""Convolutions of float32 signals with weights stored in bf16, by the matrix unit that host/amx.py
describes: exact products, at four times the rate of the best float32 product.

A signal is cut once into the three bf16 parts of its numbers. What a tap reads are the same rows of
parts from another one on: nothing is copied for it. Here the tiles are

    A  16 rows x 32 inputs of a part of the signal
    B  32 inputs x 16 outputs of a tap; two inputs lie together
    C  16 rows x 16 outputs of the result, float32

Four tiles C at a time, of 32 rows and 32 outputs. Their sum over all taps of 32 inputs is one chain
of additions, and such sums are added up: one long chain would round more.

Rows of a signal may be those of a picture, line by line: from the end of a line to the begin of the
next one are `pitch - width` rows that the border's zeros take.

Importing this module compiles it: only where `products.has_amx`, as host/amx.py says.
"""

from collections.abc import Iterable

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy import ndarray
from torch import Tensor, nn

from ltx_neuron.host import amx
from ltx_neuron.host.amx import PARTS, STEP, TILE, TILE_BYTES
from ltx_neuron.host.fourier import flat
from ltx_neuron.host.lanes import kernel
from ltx_neuron.host.winograd import Workers

ROW_BYTES = 2 * STEP  # of parts
BLOCK = 2 * TILE  # rows and outputs of four tiles C
LEADING = 0xFFFF0000  # of a float32: the bits that a bf16 has
TILES = 32  # of rows: their sums and parts stay in a core's cache
# Taps, of one input tile or more, whose products are one chain of additions, about.
CHAIN = 8

_ARRAY, _INDEX = types.float32[::1], types.intp
_PARTS, _FILTERS = types.uint16[:, :, :, ::1], types.uint16[:, :, :, :, ::1]
_OFFSETS, _SUMS = types.int64[::1], types.float32[:, ::1]
_ROW = ir.VectorType(ir.FloatType(), STEP)
_NO_ROW = ir.Constant(_ROW, [0.0] * STEP)


class _Rows:
    """Rows of 32 numbers of a kernel, of which some are there, or fewer."""

    def __init__(self, context, builder: ir.IRBuilder, count: ir.Value):
        """count: of the numbers that are there; the others are read as zeros, and not written"""
        self.context, self.builder = context, builder
        bits, none = ir.VectorType(ir.IntType(32), STEP), ir.IntType(32)(0)
        first = ir.Constant(bits, ir.Undefined)
        first = builder.insert_element(first, builder.trunc(count, none.type), none)
        counts = builder.shuffle_vector(first, first, ir.Constant(bits, [0] * STEP))
        self.valid = builder.icmp_signed("<", ir.Constant(bits, [*range(STEP)]), counts)

    def _place(self, kind: types.Array, array: ir.Value, at: ir.Value) -> ir.Value:
        data = self.context.make_array(kind)(self.context, self.builder, array).data
        return self.builder.bitcast(self.builder.gep(data, [at]), _ROW.as_pointer())

    def load(self, kind: types.Array, array: ir.Value, at: ir.Value) -> ir.Value:
        operands = self._place(kind, array, at), ir.IntType(32)(4), self.valid, _NO_ROW
        return self._call("load", _ROW, operands)

    def store(self, row: ir.Value, kind: types.Array, array: ir.Value, at: ir.Value) -> None:
        operands = row, self._place(kind, array, at), ir.IntType(32)(4), self.valid
        self._call("store", ir.VoidType(), operands)

    def _call(self, name: str, result: ir.Type, operands: tuple) -> ir.Value:
        signature = ir.FunctionType(result, [operand.type for operand in operands])
        function = cgutils.get_or_insert_function(
            self.builder.module, signature, f"llvm.masked.{name}.v{STEP}f32.p0"
        )
        return self.builder.call(function, operands)


@intrinsic
def _cut_row(typing, x, at, count, to, plane):
    """Write the parts of x[at : at + count] to the address `to`, and `plane` bytes on and on; zeros
    for the rest of 32 numbers."""

    def write(context, builder, signature, values):
        x, at, count, to, plane = values
        bits, half = (ir.VectorType(ir.IntType(size), STEP) for size in (32, 16))
        rest = _Rows(context, builder, count).load(signature.args[0], x, at)
        for _ in range(PARTS):
            leading = builder.and_(builder.bitcast(rest, bits), ir.Constant(bits, [LEADING] * STEP))
            part = builder.trunc(builder.lshr(leading, ir.Constant(bits, [16] * STEP)), half)
            builder.store(part, builder.inttoptr(to, half.as_pointer()), align=2 * STEP)
            rest = builder.fsub(rest, builder.bitcast(leading, _ROW))
            to = builder.add(to, plane)
        return context.get_dummy_value()

    return types.void(_ARRAY, *[_INDEX] * 4), write


def _sum_of(terms: int):
    @intrinsic
    def write_sum(typing, count, sums, i, bias, j, x, k, out, to):
        """Write so many of the terms added up, each up to `count` numbers, to out[to:]."""

        def write(context, builder, signature, values):
            rows = _Rows(context, builder, values[0])
            total, *others = (
                rows.load(signature.args[at], *values[at : at + 2]) for at in (1, 3, 5, 7)[:terms]
            )
            for term in others:
                total = builder.fadd(total, term)
            rows.store(total, signature.args[7], *values[7:])
            return context.get_dummy_value()

        return types.void(_INDEX, *[_ARRAY, _INDEX] * 4), write

    return write_sum


_sum2, _sum3, _sum4 = _sum_of(2), _sum_of(3), _sum_of(4)


@kernel(_ARRAY, *[_INDEX] * 3, _PARTS, _INDEX)
def cut(x, at, rows, channels, parts, row):
    """Write the parts of x[at:], rows of channels, to rows of parts (steps, 3, rows, 32) from `row`
    on. Zeros where x has no more channels."""
    plane = parts.shape[2] * ROW_BYTES
    for step in range(len(parts)):
        to, count = parts[step, 0, row:].ctypes.data, min(STEP, channels - step * STEP)
        for r in range(rows):
            _cut_row(x, at + r * channels + step * STEP, count, to + r * ROW_BYTES, plane)


@njit(nogil=True)
def _multiply(first, second, plane, filters, steps, offsets, to):
    """Write the products of two times 16 rows of parts with filters. All are addresses."""
    amx.zero(0)
    amx.zero(1)
    amx.zero(2)
    amx.zero(3)
    for _ in range(steps):
        for tap in range(len(offsets)):
            one, two = first + offsets[tap], second + offsets[tap]
            amx.load(4, filters, 64)
            amx.load(5, filters + TILE_BYTES, 64)
            filters += 2 * TILE_BYTES
            # The smallest part first.
            amx.load(6, one + 2 * plane, 64)
            amx.load(7, two + 2 * plane, 64)
            amx.multiply(0, 6, 4)
            amx.multiply(1, 6, 5)
            amx.multiply(2, 7, 4)
            amx.multiply(3, 7, 5)
            amx.load(6, one + plane, 64)
            amx.load(7, two + plane, 64)
            amx.multiply(0, 6, 4)
            amx.multiply(1, 6, 5)
            amx.multiply(2, 7, 4)
            amx.multiply(3, 7, 5)
            amx.load(6, one, 64)
            amx.load(7, two, 64)
            amx.multiply(0, 6, 4)
            amx.multiply(1, 6, 5)
            amx.multiply(2, 7, 4)
            amx.multiply(3, 7, 5)
        first, second = first + PARTS * plane, second + PARTS * plane
    half = TILE * BLOCK * 4
    amx.store(0, to, BLOCK * 4)
    amx.store(1, to + TILE * 4, BLOCK * 4)
    amx.store(2, to + half, BLOCK * 4)
    amx.store(3, to + half + TILE * 4, BLOCK * 4)


@njit(nogil=True)
def _finish(strip, first, last, rows, ends, sums, bias, x, more, out, step):
    """Write a strip's sums of tiles `first` to `last` to their rows of out, with bias and with x
    where there is one, or add them to what is there."""
    output, outputs = strip * BLOCK, len(bias)
    count = min(BLOCK, outputs - output)
    for tile in range(first, last):
        total, start = sums[(tile - first) // 2], rows[tile]
        for row in range(start, ends[tile]):
            at, to = ((tile - first) % 2 * TILE + row - start) * BLOCK, row * step + output
            x_at = row * outputs + output
            if not len(x):
                _sum2(count, total, at, bias, output, x, x_at, out, to)
            elif more:
                _sum4(count, total, at, bias, output, x, x_at, out, to)
            else:
                _sum3(count, total, at, bias, output, x, x_at, out, to)


@kernel(
    *[_PARTS, _FILTERS, _OFFSETS],
    *[_INDEX] * 4,
    *[_ARRAY, _ARRAY, types.boolean, _ARRAY, _INDEX],
    *[_SUMS, types.uint8[::1]],
)
def convolve(
    parts, filters, offsets, first, pitch, width, lines, bias, x, more, out, step, sums, on
):
    """Write lines of `width` rows to `out`, where rows begin `step` numbers apart. The first one
    reads `offsets` bytes after the row `first` of parts, the next line `pitch` rows later. With
    bias, and with rows of x where there are some; `more`: added to what is there."""
    per_line, plane = -(-width // TILE), parts.shape[2] * ROW_BYTES
    tiles, chain = per_line * lines, max(1, CHAIN // len(offsets))
    # Of each tile: its first byte of parts, and its rows of the result. Two at a time.
    starts = np.empty(tiles + 1, np.int64)
    rows, ends = np.empty(tiles, np.int64), np.empty(tiles, np.int64)
    for tile in range(tiles):
        line, begin = tile // per_line, tile % per_line * TILE
        starts[tile] = starts[tile + 1] = (first + line * pitch + begin) * ROW_BYTES
        rows[tile] = line * width + begin
        ends[tile] = line * width + min(width, begin + TILE)
    products, before = np.empty(BLOCK * BLOCK, np.float32), np.zeros(64, np.uint8)
    amx.store_configuration(before.ctypes.data)
    amx.configure(on.ctypes.data)
    for start in range(0, tiles, TILES):
        stop = min(start + TILES, tiles)
        for strip in range(len(filters)):
            for k in range(0, len(parts), chain):
                base, weights = parts[k].ctypes.data, filters[strip, k].ctypes.data
                steps = min(chain, len(parts) - k)
                for tile in range(start, stop, 2):
                    one, two = base + starts[tile], base + starts[tile + 1]
                    total = sums[(tile - start) // 2]
                    to = products if k else total
                    _multiply(one, two, plane, weights, steps, offsets, to.ctypes.data)
                    if k:
                        for i in range(0, BLOCK * BLOCK, BLOCK):
                            _sum2(BLOCK, products, i, total, i, total, i, total, i)
            _finish(strip, start, stop, rows, ends, sums, bias, x, more, out, step)
    amx.configure(before.ctypes.data)


def takes(conv: nn.Module) -> bool:
    """Whether a convolution's weights are those of bf16, as they were stored: products are exact
    then."""
    return torch.equal(conv.weight, conv.weight.bfloat16().to(conv.weight.dtype))


def row_offsets(rows: Iterable[int]) -> ndarray:
    """What `Filters.convolve` takes for these rows of parts, one for each tap."""
    return np.array([*rows], np.int64) * ROW_BYTES


class Filters:
    """The weights of a convolution, exact in bf16, in tiles, and its bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        """weight: (outputs, inputs, taps)"""
        outputs, inputs, taps = weight.shape
        strips, steps = -(-outputs // BLOCK), -(-inputs // STEP)
        whole = torch.zeros(strips * BLOCK, steps * STEP, taps, dtype=torch.bfloat16)
        whole[:outputs, :inputs] = weight
        tiles = whole.view(strips, 2, TILE, steps, STEP // 2, 2, taps)
        tiles = tiles.permute(0, 3, 6, 1, 4, 2, 5).contiguous()  # pairs of inputs come last
        self.tiles = tiles.view(torch.uint16).view(strips, steps, taps, 2, -1).numpy()
        self.bias = (torch.zeros(outputs) if bias is None else bias.detach().float()).numpy()

    def convolve(
        self,
        parts: ndarray,
        offsets: ndarray,
        out: Tensor,
        workers: Workers,
        width: int,
        lines: int = 1,
        first: int = 0,
        pitch: int = 0,
        step: int | None = None,
        x: Tensor | None = None,
        more: bool = False,
    ) -> None:
        """Write a signal's convolution to the memory that begins with `out`, and x added to it.

        offsets  row_offsets of the taps
        width    rows of the result, or of each of its lines
        first    row of parts that the first output's offsets begin at
        pitch    rows of parts from a line to the next
        step     numbers from a row of the result to the next; without it they follow each other
        x        of the result's shape
        more     add to what is there
        """
        sums = workers.scratch("sums", TILES // 2, BLOCK * BLOCK).numpy()
        convolve(
            *(parts, self.tiles, offsets, first, pitch, width, lines, self.bias),
            *(_NOTHING if x is None else flat(x), more, flat(out)),
            *(step or len(self.bias), sums, _CONFIGURATION),
        )


def parts_memory(workers: Workers, channels: int, rows: int) -> ndarray:
    """Scratch memory of the calling thread for the parts of rows, which are read in whole tiles."""
    steps = -(-channels // STEP)
    memory = workers.scratch("parts", steps, PARTS, rows + TILE, STEP // 2)
    return memory.view(torch.uint16).numpy()


_NOTHING, _CONFIGURATION = np.empty(0, np.float32), amx.configuration().numpy()
