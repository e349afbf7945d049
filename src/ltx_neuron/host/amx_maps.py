"""Convolutions of the mel decoder's maps by AMX, as host/amx_convolution.py does them.

Maps are (time, bins, C). What a convolution reads of a map is cut into parts, as lines of bins, by
all cores: after the norm and SiLU before it, or twice along both axes where the map is enlarged.
Convolutions are causal: two lines of zeros come first. A line begins with one row of zeros, which
is also what follows the line before it.

Importing this module compiles it: only where `products.has_amx`, as host/amx.py says.
"""

import itertools

import numpy as np
from numba import types
from torch import Tensor, nn

from ltx_neuron.host.activation import activate
from ltx_neuron.host.amx_convolution import Filters, cut, parts_memory, row_offsets
from ltx_neuron.host.fourier import flat, fresh
from ltx_neuron.host.lanes import ARRAY, INDEX, kernel
from ltx_neuron.host.winograd import Workers

ABOVE = 2  # lines of zeros
ROWS = 512  # of a result that a core computes at a time, about

_PARTS = types.uint16[:, :, :, ::1]


@kernel(ARRAY, *[INDEX] * 5, types.boolean, _PARTS)
def cut_lines(x, first, last, width, channels, scale, active, parts):
    """Write the parts of lines `first` to `last` of x, `width` rows of channels each, to their
    places between zeros: lines and their rows `scale` times; `active`: of their norm's SiLU."""
    pitch, row = width * scale + 1, np.zeros(channels, np.float32)
    if first == 0:
        for zero in range(ABOVE * pitch + 1):
            cut(row, 0, 1, channels, parts, zero)
    for line in range(first, last):
        to = (ABOVE + line) * pitch + 1
        for i in range(width):
            at = (line // scale * width + i) * channels
            if active:
                activate(x, at, channels, row, 0)
            for again in range(scale):
                if active:
                    cut(row, 0, 1, channels, parts, to + i * scale + again)
                else:
                    cut(x, at, 1, channels, parts, to + i * scale + again)
        row[:] = 0
        cut(row, 0, 1, channels, parts, to + width * scale)


class Convolution:
    """A causal convolution of a map, of 3 x 3 taps or of one."""

    def __init__(self, conv: nn.Conv2d):
        self.filters = Filters(conv.weight.flatten(2), conv.bias)
        self.taps = [(ABOVE, 1)]
        if conv.kernel_size == (3, 3):
            self.taps = [*itertools.product(range(3), range(3))]

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
        pitch = wide + 1
        parts = parts_memory(workers, channels, (ABOVE + lines) * pitch + 1)
        pieces = pieces_of(lines, wide)

        def cut_piece(piece: tuple[int, int]) -> None:
            cut_lines(flat(source), *piece, width, channels, scale, active, parts)

        workers.run(cut_piece, pieces)
        offsets = row_offsets(line * pitch + row for line, row in self.taps)
        if out is None:
            out = fresh(lines, wide, len(self.filters.bias))

        def convolve_piece(piece: tuple[int, int]) -> None:
            start, stop = piece
            added = None if x is None else x[start:stop]
            place = {"lines": stop - start, "first": start * pitch, "pitch": pitch}
            self.filters.convolve(parts, offsets, out[start:stop], workers, wide, **place, x=added)

        workers.run(convolve_piece, pieces)
        return out


def pieces_of(lines: int, width: int) -> list[tuple[int, int]]:
    """Lines in pieces of about as many rows."""
    step = max(1, ROWS // width)
    return [(start, min(lines, start + step)) for start in range(0, lines, step)]
