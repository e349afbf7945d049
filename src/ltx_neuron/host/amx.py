"""Float32 products with weights stored in bf16 by the matrix unit of Intel's CPUs (AMX), at least
as exact as a product in float32.

AMX multiplies tiles of bf16 and adds the products up in float32. A float32 number has 24 bits, so
cut after the 8th and the 16th it is a sum of three bf16 numbers, exactly: x w is
x1 w + x2 w + x3 w. That is three times the multiplications, at ten times the rate. No library does
it: torch gives a product of bf16 in bf16, and oneDNN's mode for float32 inputs holds for the whole
process and converts both sides of every product.

A tile is 1 KB. Those of a product, by the names of Intel's manual:

    A  16 outputs x 32 inputs of the weight, as they are stored
    B  32 inputs x 16 rows of a part of the activations; two inputs lie together
    C  16 outputs x 16 rows of the result, float32

Importing this module imports numba and compiles, or loads what was compiled before: only where
`products.has_amx`. Otherwise LLVM ends the process.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from ltx_neuron.host.openmp import bits, kernel, next_piece, number, pointer, run

TILE, STEP, PARTS = 16, 32, 3  # rows and outputs of a tile, its inputs, bf16 parts of a float32
TILE_BYTES = 1024
# Outputs that are added up side by side, a strip: four tiles C, with three B and an A they are all
# eight that there are.
OUTPUTS = 64
# Strips and tiles of inputs that a core takes at a time: as much of the weight as its cache holds
# beside the rest.
STRIPS, STEPS = 4, 8
MOST_ROWS = 1024  # of activations that are taken at once: their parts take memory
_STRIP_BYTES = STRIPS * STEPS * OUTPUTS * STEP * 2
_SUM_BYTES = STRIPS * OUTPUTS * TILE * 4  # of sixteen rows


def _instruction(name: str, kinds: str):
    """An intrinsic of AMX by LLVM's name: t is a tile's number, p an address, n a number."""
    llvm = {"t": ir.IntType(8), "p": ir.IntType(8).as_pointer(), "n": ir.IntType(64)}
    signature = ir.FunctionType(ir.VoidType(), [llvm[kind] for kind in kinds])

    def typed(*arguments):
        def emit(context, builder, signature_, values):
            function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.{name}")
            operands = []
            for kind, value, type_ in zip(kinds, values, signature_.args, strict=True):
                if kind == "t":
                    value = ir.Constant(llvm["t"], type_.literal_value)
                elif kind == "p":
                    value = builder.inttoptr(value, llvm["p"])
                operands.append(value)
            builder.call(function, operands)
            return context.get_dummy_value()

        wanted = (
            a if kind == "t" else types.int64 for kind, a in zip(kinds, arguments, strict=True)
        )
        return types.void(*wanted), emit

    return typed


@intrinsic
def configure(typing_context, address):
    return _instruction("ldtilecfg", "p")(address)


@intrinsic
def store_configuration(typing_context, address):
    return _instruction("sttilecfg", "p")(address)


@intrinsic(prefer_literal=True)
def zero(typing_context, tile):
    return _instruction("tilezero", "t")(tile)


@intrinsic(prefer_literal=True)
def load(typing_context, tile, address, stride):
    return _instruction("tileloadd64", "tpn")(tile, address, stride)


@intrinsic(prefer_literal=True)
def store(typing_context, tile, address, stride):
    return _instruction("tilestored64", "tpn")(tile, address, stride)


@intrinsic(prefer_literal=True)
def multiply(typing_context, c, a, b):
    return _instruction("tdpbf16ps", "ttt")(c, a, b)


@njit
def leading(number):
    """The 8 leading bits of a float32 number, as bits."""
    return np.uint32(bits(number) & np.uint32(0xFFFF0000))


@intrinsic
def _copy(typing_context, target, source):
    """Copy 64 bytes from address to address."""

    def emit(context, builder, signature, values):
        vector = ir.VectorType(ir.IntType(32), TILE).as_pointer()
        target, source = (builder.inttoptr(value, vector) for value in values)
        builder.store(builder.load(source, align=1), target, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@njit
def _cut(x, tile, parts):
    """Sixteen rows of x (M, K) from 16 * tile on -> parts (K / 32, 3, 16, 16): steps, parts, pairs
    of inputs, rows. Zeros where x has no more rows or inputs."""
    rows, inputs = min(TILE, x.shape[0] - TILE * tile), x.shape[1]
    block = np.zeros((TILE, STEP), np.float32)
    for step in range(len(parts)):
        width = min(STEP, inputs - STEP * step)
        if width < STEP:
            block[:] = 0
        for row in range(rows):
            for i in range(width):
                block[row, i] = x[TILE * tile + row, STEP * step + i]
        for pair in range(TILE):
            for row in range(TILE):  # of consecutive places
                first, second = block[row, 2 * pair], block[row, 2 * pair + 1]
                for part in range(PARTS):
                    low, high = leading(first), leading(second)
                    parts[step, part, pair, row] = (low >> np.uint32(16)) | high
                    first, second = first - number(low), second - number(high)


@njit
def _lay_tiles(weight, output, first, steps, strips):
    """Tiles of inputs of weight (N, K), from output and input on -> strips
    (STRIPS, STEPS, 64, 32).
    Zeros where it has no more."""
    outputs, inputs = weight.shape
    row_bytes = 2 * inputs
    whole = min(steps, (inputs - first) // STEP)
    for n in range(STRIPS * OUTPUTS):
        strip, place = n // OUTPUTS, n % OUTPUTS
        if output + n >= outputs:
            strips[strip, :, place] = 0
            continue
        source = weight.ctypes.data + (output + n) * row_bytes + 2 * first
        target = strips.ctypes.data + strip * (STEPS * 4 * TILE_BYTES) + place * 64
        for step in range(whole):
            _copy(target + step * (4 * TILE_BYTES), source + step * 64)
        for step in range(whole, steps):
            for i in range(STEP):
                k = first + STEP * step + i
                strips[strip, step, place, i] = weight[output + n, k] if k < inputs else 0


@njit
def _add_products(sums, strip, parts, steps, products):
    """Add a strip's products with sixteen rows to sums (1024), by way of `products` (1024).
    Strip and parts are addresses."""
    # From zero, and then to the sums: one long chain of additions would round three times as much.
    zero(0)
    zero(1)
    zero(2)
    zero(3)
    for step in range(steps):
        b, a = parts + step * 3072, strip + step * 4096
        load(4, b, 64)
        load(5, b + 1024, 64)
        load(6, b + 2048, 64)
        load(7, a, 64)
        multiply(0, 7, 6)
        multiply(0, 7, 5)
        multiply(0, 7, 4)
        load(7, a + 1024, 64)
        multiply(1, 7, 6)
        multiply(1, 7, 5)
        multiply(1, 7, 4)
        load(7, a + 2048, 64)
        multiply(2, 7, 6)
        multiply(2, 7, 5)
        multiply(2, 7, 4)
        load(7, a + 3072, 64)
        multiply(3, 7, 6)
        multiply(3, 7, 5)
        multiply(3, 7, 4)
    place = products.ctypes.data
    store(0, place, 64)
    store(1, place + 1024, 64)
    store(2, place + 2048, 64)
    store(3, place + 3072, 64)
    for i in range(OUTPUTS * TILE):
        sums[i] += products[i]


@njit
def _write(sums, output, out):
    """Sums (tiles of rows, STRIPS, 64, 16) of outputs from `output` on -> columns of out (M, N)."""
    rows, outputs = out.shape
    for row in range(rows):
        for n in range(min(STRIPS * OUTPUTS, outputs - output)):
            out[row, output + n] = sums[row // TILE, n // OUTPUTS, n % OUTPUTS, row % TILE]


@njit
def _multiply_strips(weight, output, parts, strips, sums, out):
    """Strips of the weight (N, K) from `output` on, times all rows -> columns of out (M, N)."""
    steps, products = parts.shape[1], np.empty(OUTPUTS * TILE, np.float32)
    sums[:] = 0
    for first in range(0, steps, STEPS):
        now = min(STEPS, steps - first)
        _lay_tiles(weight, output, first * STEP, now, strips)
        for tile in range(len(sums)):
            b = parts[tile, first].ctypes.data
            for strip in range(STRIPS):
                if output + strip * OUTPUTS < weight.shape[0]:
                    a = strips[strip].ctypes.data
                    _add_products(sums[tile, strip].reshape(-1), a, b, now, products)
    _write(sums, output, out)


def configuration() -> Tensor:
    """What `configure` takes: eight tiles of 16 rows of 64 bytes."""
    memory = torch.zeros(64, dtype=torch.uint8)
    memory[0] = 1  # the palette of eight tiles
    memory[16:32:2] = 64  # bytes of a tile's row
    memory[48:56] = TILE  # rows
    return memory


# Numbers of a job, by their places: what the threads count, addresses and sizes.
PIECE, THREAD, X, ROWS, INPUTS, WEIGHT, OUT, N, PARTS_AT, SCRATCH, CONFIGURATION = range(11)


@njit
def _parts_of(job):
    tiles, steps = -(-job[ROWS] // TILE), -(-job[INPUTS] // STEP)
    return carray(pointer(job[PARTS_AT]), (tiles, steps, PARTS, TILE, TILE), np.uint32)


@kernel
def _cut_all(address):
    """One thread's share of cutting the activations."""
    job = carray(address, 11, np.int64)
    parts = _parts_of(job)
    x = carray(pointer(job[X]), (job[ROWS], job[INPUTS]), np.float32)
    while True:
        tile = next_piece(job[PIECE:].ctypes.data)
        if tile >= len(parts):
            return
        _cut(x, tile, parts[tile])


@kernel
def _multiply_all(address):
    """One thread's share of the product."""
    job = carray(address, 11, np.int64)
    parts = _parts_of(job)
    weight = carray(pointer(job[WEIGHT]), (job[N], job[INPUTS]), np.int16)
    out = carray(pointer(job[OUT]), (job[ROWS], job[N]), np.float32)
    place = job[SCRATCH] + next_piece(job[THREAD:].ctypes.data) * (
        _STRIP_BYTES + len(parts) * _SUM_BYTES
    )
    strips = carray(pointer(place), (STRIPS, STEPS, OUTPUTS, STEP), np.int16)
    sums = carray(pointer(place + _STRIP_BYTES), (len(parts), STRIPS, OUTPUTS, TILE), np.float32)
    before = np.zeros(64, np.uint8)
    store_configuration(before.ctypes.data)
    configure(job[CONFIGURATION])
    while True:
        piece = next_piece(job[PIECE:].ctypes.data)
        if piece * STRIPS * OUTPUTS >= job[N]:
            break
        _multiply_strips(weight, piece * STRIPS * OUTPUTS, parts, strips, sums, out)
    configure(before.ctypes.data)


class Products:
    """Products of float32 activations with bf16 weights, one at a time. Its memory is used again
    and again: fresh pages cost more than what is written to them."""

    def __init__(self):
        self._memory: dict[str, Tensor] = {}
        self._configuration = configuration()

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write x (M, K) times the transpose of weight (N, K), bf16, to `out` (M, N). All are
        contiguous."""
        threads = torch.get_num_threads()
        for rows, result in zip(x.split(MOST_ROWS), out.split(MOST_ROWS), strict=True):
            tiles, steps = -(-len(rows) // TILE), -(-x.shape[1] // STEP)
            parts = self._scratch("parts", tiles * steps * PARTS * TILE_BYTES)
            scratch = self._scratch("sums", threads * (_STRIP_BYTES + tiles * _SUM_BYTES))
            places = rows.data_ptr(), *rows.shape, weight.data_ptr(), result.data_ptr(), len(weight)
            for function in (_cut_all, _multiply_all):
                run(function, 0, *places, parts, scratch, self._configuration.data_ptr())

    def _scratch(self, name: str, size: int) -> int:
        """The address of memory that is kept for this purpose."""
        if name not in self._memory or self._memory[name].numel() < size:
            self._memory.pop(name, None)  # freed first, so that both never exist
            self._memory[name] = torch.empty(size, dtype=torch.uint8)
        return self._memory[name].data_ptr()
