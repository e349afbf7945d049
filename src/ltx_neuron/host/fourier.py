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
        """Write `length` outputs or more to `out` (samples, Cout). The first one is of the first
        samples of the signal (samples, Cin). Both are contiguous."""
        transforms.to_samples(*self._multiply(signal, length, workers), flat(out))

    def add(
        self, signal: Tensor, length: int, x: Tensor, out: Tensor, more: bool, workers: Workers
    ) -> None:
        """Write `length` outputs and x added up to `out`, or add both to what is there."""
        one = workers.scratch("one", self.size * self.dilation * self.outputs + LANES)
        given = self._multiply(signal, length, workers)
        transforms.add_samples(*given, flat(x), flat(out), length * self.outputs, more, flat(one))

    def _blocks(self, length: int) -> int:
        return -(-length // (self.dilation * self.size))

    def _multiply(self, signal: Tensor, length: int, workers: Workers) -> tuple:
        """The products, as the kernels take them."""
        # Samples that are `dilation` apart are one series; each is cut into blocks of its own.
        blocks, count = self._blocks(length), transforms.point_count(self.taps)
        inputs, outputs = panel_count(self.inputs), panel_count(self.outputs)
        rows = blocks * self.dilation
        shapes = {
            "values": (inputs, rows),
            "products": (outputs, rows),
            "filters": (fma.PANELS, transforms.STEPS * LANES),
        }
        values, products, filters = (
            workers.scratch(name, count * transforms.plane_size(*shape)).numpy()
            for name, shape in shapes.items()
        )
        shape = self.taps, self.size, self.dilation, blocks
        transforms.to_points(flat(signal), *shape, self.inputs, values)
        given = self.taps, self.inputs, self.outputs, rows
        transforms.multiply(values, self.weight, products, *given, filters)
        return products, *shape, self.outputs, self.bias


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
