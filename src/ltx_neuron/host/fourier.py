"""Convolution in time with a fraction of the multiplications: blocks of samples by the discrete
Fourier transform.

A block of N inputs gives N - k + 1 outputs of a convolution with k taps. Along time, with the
names of the paper that host/winograd.py follows:

    U = G g      the filter transform: k taps to P points       transforms.to_filters
    V = B^T d    the input transform: N inputs to P points      transforms.to_points
    M = U V      products, summed over input channels: one matrix product per point
    Y = A^T M    the output transform: P points to N - k + 1    transforms.to_samples

A point is a real number: a real and a complex frequency's product takes 1 and 3 of them. N = 32
has 47 points, which are 2.1 products an output where 11 taps take 11. Unlike Winograd's transforms
for as many taps, these lose no digits. Signals are rows of channels, (time, C).
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor, nn

from ltx_neuron.host import fma, transforms
from ltx_neuron.host.lanes import LANES
from ltx_neuron.host.winograd import Workers


class Convolution:
    """A convolution in time that keeps the length, to be computed in parts.

    before  samples before the first one that the first output depends on
    """

    def __init__(self, conv: nn.Conv1d):
        (self.dilation,), (self.taps,) = conv.dilation, conv.kernel_size
        self.before = (self.taps - 1) * self.dilation // 2
        self.size = transforms.output_count(self.taps)  # of a block
        self.outputs, self.inputs, _ = conv.weight.shape
        self.weight = flat(conv.weight.contiguous())
        self.bias = flat(F.pad(conv.bias, (0, LANES)))

    def reach(self, length: int) -> int:
        """Samples of a signal that are read for `length` outputs."""
        return (self._blocks(length) * self.size + self.taps - 1) * self.dilation

    def convolve(self, signal: Tensor, length: int, out: Tensor, workers: Workers) -> None:
        """Write `length` outputs to `out` (samples, Cout). The first one is of the first samples of
        the signal (samples, Cin). Both are contiguous."""
        self._convolve(signal, length, np.empty(0, np.float32), out, False, workers)

    def add(
        self, signal: Tensor, length: int, x: Tensor, out: Tensor, more: bool, workers: Workers
    ) -> None:
        """Write `length` outputs and x added up to `out`, or add both to what is there."""
        self._convolve(signal, length, flat(x), out, more, workers)

    def _convolve(
        self, signal: Tensor, length: int, x: ndarray, out: Tensor, more: bool, workers: Workers
    ) -> None:
        # Samples that are `dilation` apart are one series; each is cut into blocks of its own.
        blocks, count = self._blocks(length), transforms.point_count(self.taps)
        rows = blocks * self.dilation
        shapes = {
            "values": (panel_count(self.inputs), rows),
            "filters": (fma.PANELS, transforms.STEPS * LANES),
            "products": (fma.PANELS, rows),
        }
        values, *rest = (
            workers.scratch(name, count * transforms.plane_size(*shape)).numpy()
            for name, shape in shapes.items()
        )
        shape = self.taps, self.size, self.dilation, blocks, self.inputs
        transforms.to_points(flat(signal), *shape, values)
        given = values, self.weight, (*shape, self.outputs), self.bias
        transforms.convolve(*given, x, flat(out), length, more, *rest)

    def _blocks(self, length: int) -> int:
        return -(-length // (self.dilation * self.size))


def panel_count(channels: int) -> int:
    return -(-channels // LANES)


def flat(x: Tensor) -> ndarray:
    """The memory of x and all that follows it, as kernels take it."""
    rest = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    return x.detach().as_strided((rest,), (1,)).numpy()


def fresh(*shape: int) -> Tensor:
    """Memory for float32 numbers, in large pages: numpy asks Linux for them. Fresh small ones cost
    more than what is written to them."""
    return torch.from_numpy(np.empty(shape, np.float32))
