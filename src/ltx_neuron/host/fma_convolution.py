"""Convolutions of float32 signals by fused multiply-adds, a product for every tap: what
host/amx_convolution.py has for processors with AMX, for all.

What is read of a signal lies in panels (panels, rows, LANES), zeros included; a tap reads the same
rows from another one on.

Importing this module compiles it, or loads what was compiled before.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numba import njit, types
from numpy import ndarray
from torch import Tensor, nn

from ltx_neuron.host import fma
from ltx_neuron.host.fourier import flat, panel_count
from ltx_neuron.host.lanes import ARRAY, INDEX, LANES, kernel
from ltx_neuron.host.winograd import Workers

ROWS = 96  # whose products are computed at a time: their sums stay in a core's cache

_PARTS, _FILTERS = types.float32[:, :, ::1], types.float32[:, :, :, :, ::1]
_NOTHING = np.empty(0, np.float32)


@kernel(ARRAY, *[INDEX] * 3, _PARTS, INDEX)
def cut(x, at, rows, channels, parts, row):
    """Write x[at:], rows of channels, to panels from `row` on. Zeros where x has no more
    channels."""
    for panel in range(len(parts)):
        c = panel * LANES
        count = min(LANES, channels - c)
        for r in range(rows):
            begin = at + r * channels + c
            if count == LANES:
                for i in range(LANES):
                    parts[panel, row + r, i] = x[begin + i]
            else:
                for i in range(LANES):
                    parts[panel, row + r, i] = x[begin + i] if i < count else 0


@njit(nogil=True)
def _finish(sums, panel, panels, plane, first, last, bias, x, more, out, step):
    """Write the sums of rows `first` to `last` to their places of out, with bias and with x where
    there is one, or add them to what is there."""
    outputs = len(bias)
    for row in range(first, last):
        for p in range(panels):
            c, at = (panel + p) * LANES, p * plane + (row - first) * LANES
            for i in range(min(LANES, outputs - c)):
                total = sums[at + i] + bias[c + i]
                if len(x):
                    total += x[row * outputs + c + i]
                if more:
                    total += out[row * step + c + i]
                out[row * step + c + i] = total


@kernel(
    *[_PARTS, _FILTERS, types.int64[::1], INDEX],
    *[ARRAY, ARRAY, types.boolean, ARRAY, INDEX, ARRAY],
)
def convolve(parts, filters, offsets, rows, bias, x, more, out, step, sums):
    """Write rows to `out`, where they begin `step` numbers apart. The first one reads the rows
    `offsets` of parts. With bias, and with rows of x where there are some; `more`: added to what is
    there."""
    taps, steps, panels = len(offsets), len(parts), len(filters)
    places = np.empty(steps * taps, np.int64)
    for k in range(steps):  # the taps of the same inputs one after another: they are in cache
        for tap in range(taps):
            places[k * taps + tap] = (k * parts.shape[1] + offsets[tap]) * LANES
    plane, size = ROWS * LANES, LANES * LANES
    left, right, count = parts.reshape(-1), filters.reshape(-1), steps * taps
    for start in range(0, rows, ROWS):
        now = min(ROWS, rows - start)
        for panel in range(0, panels, fma.PANELS):
            together = min(fma.PANELS, panels - panel)
            for k in range(0, count, fma.CHAIN):
                fma.multiply_part(
                    *(left, start * LANES, places, k, min(fma.CHAIN, count - k), 0),
                    *(right, (panel * count + k) * size, count * size),
                    *(sums, 0, plane, now, together, k > 0),
                )
            _finish(sums, panel, together, plane, start, start + now, bias, x, more, out, step)


def row_offsets(rows: Iterable[int]) -> ndarray:
    """What `Filters.convolve` takes for these rows of parts, one for each tap."""
    return np.array([*rows], np.int64)


def takes(conv: nn.Module) -> bool:
    """Whether a convolution's weights can be laid out: all can."""
    return True


class Filters:
    """The weights of a convolution in panels of outputs, and its bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        """weight: (outputs, inputs, taps)"""
        outputs, inputs, taps = weight.shape
        panels, steps = panel_count(outputs), panel_count(inputs)
        whole = torch.zeros(panels * LANES, steps * LANES, taps)
        whole[:outputs, :inputs] = weight
        self.panels = (
            whole.view(panels, LANES, steps, LANES, taps)
            .permute(0, 2, 4, 3, 1)
            .contiguous()
            .numpy()
        )
        self.bias = (torch.zeros(outputs) if bias is None else bias.detach().float()).numpy()

    def convolve(
        self,
        parts: ndarray,
        offsets: ndarray,
        out: Tensor,
        workers: Workers,
        width: int,
        step: int | None = None,
        x: Tensor | None = None,
        more: bool = False,
    ) -> None:
        """Write a signal's convolution to the memory that begins with `out`, and x added to it.

        offsets  row_offsets of the taps
        width    rows of the result
        step     numbers from a row of the result to the next; without it they follow each other
        x        of the result's shape
        more     add to what is there
        """
        sums = workers.scratch("sums", fma.PANELS * ROWS * LANES).numpy()
        convolve(
            *(parts, self.panels, offsets, width, self.bias),
            *(_NOTHING if x is None else flat(x), more, flat(out)),
            *(step or len(self.bias), sums),
        )


def parts_memory(workers: Workers, channels: int, rows: int) -> ndarray:
    """Scratch memory of the calling thread for the panels of rows."""
    return workers.scratch("parts", panel_count(channels), rows, LANES).numpy()
