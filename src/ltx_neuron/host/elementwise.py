"""Operations on single bf16 numbers that torch computes in several passes over the memory, or
number by number though there are only 65,536 of them. The bits are torch's.

Importing this module imports numba and compiles, or loads what was compiled before.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from ltx_neuron.host.openmp import bits, kernel, next_piece, number, pointer, run

_PIECE = 2**16  # numbers that a thread takes at a time
_TOKENS = 8  # that a thread rotates at a time
_NAN = np.uint16(0x7FC0)  # torch's, when it rounds


@kernel
def _look_up(address):
    """out[i] = table[x[i]]. The job: how many, x, table and out."""
    job = carray(address, 5, np.int64)
    count = job[1]
    x, out = carray(pointer(job[2]), count, np.uint16), carray(pointer(job[4]), count, np.uint16)
    table = carray(pointer(job[3]), 2**16, np.uint16)
    while True:
        first = next_piece(job.ctypes.data) * _PIECE
        if first >= count:
            return
        for i in range(first, min(first + _PIECE, count)):
            out[i] = table[x[i]]


@njit
def _rounded(value):
    """The nearest bf16 number, of two the even one."""
    word = bits(value)
    nearest = np.uint16((word + np.uint32(0x7FFF) + ((word >> 16) & np.uint32(1))) >> 16)
    return nearest if value == value else _NAN


@njit
def _float(half):
    return number(np.uint32(half) << np.uint32(16))


@njit
def _rotate_head(x, cos, sin, out):
    """The heads of D numbers of one token, and their D / 2 angles."""
    half = len(cos)
    for i in range(half):
        first, second = _float(x[i]), _float(x[half + i])
        out[i] = _rounded(first * cos[i] - second * sin[i])
        out[half + i] = _rounded(second * cos[i] + first * sin[i])


@kernel
def _rotate(address):
    """The job: B, T, H, D of x (B, T, H, D) and out, which are contiguous; heads of cos and sin
    (1, 1 or H, T, D / 2); x, cos, sin and out."""
    job = carray(address, 10, np.int64)
    batch, tokens, heads, size, tables = job[1], job[2], job[3], job[4], job[5]
    shape = batch, tokens, heads, size
    x, out = carray(pointer(job[6]), shape, np.uint16), carray(pointer(job[9]), shape, np.uint16)
    cos = carray(pointer(job[7]), (tables, tokens, size // 2), np.float32)
    sin = carray(pointer(job[8]), (tables, tokens, size // 2), np.float32)
    pieces = -(-tokens // _TOKENS)
    while True:
        piece = next_piece(job.ctypes.data)
        if piece >= batch * pieces:
            return
        row, first = piece // pieces, piece % pieces * _TOKENS
        for token in range(first, min(first + _TOKENS, tokens)):
            for head in range(heads):
                table = head if tables > 1 else 0
                angles = cos[table, token], sin[table, token]
                _rotate_head(x[row, token, head], *angles, out[row, token, head])


@cache
def _gelu_table() -> Tensor:
    """tanh-GELU of every bf16 number, in the order of their bits."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.nn.functional.gelu(numbers, approximate="tanh")


def gelu(x: Tensor) -> Tensor:
    """tanh-GELU of contiguous bf16 numbers."""
    out = torch.empty_like(x)
    run(_look_up, x.numel(), x.data_ptr(), _gelu_table().data_ptr(), out.data_ptr())
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """models.rope.rotate of bf16 (B, H, T, D), whose (B, T, H, D) is contiguous, and contiguous
    cos and sin (1, 1 or H, T, D / 2)."""
    source = x.transpose(1, 2)
    out = torch.empty_like(source)
    places = (tensor.data_ptr() for tensor in (source, cos, sin, out))
    run(_rotate, *source.shape, cos.shape[1], *places)
    return out.transpose(1, 2)
