"""Convolution in time with a fraction of the multiplications: blocks of samples by the discrete
Fourier transform.

A block of N inputs gives N - k + 1 outputs of a convolution with k taps. Along time, with the
names of the paper that host/winograd.py follows:

    U = G g      the filter transform: k taps to P points       kernels.to_filters
    V = B^T d    the input transform: N inputs to P points      kernels.to_points
    M = U V      products, summed over input channels: one matrix product per point
    Y = A^T M    the output transform: P points to N - k + 1    kernels.to_samples

A point is a real number: a real and a complex frequency's product takes 1 and 3 of them. N = 32
has 47 points, which are 2.1 products an output where 11 taps take 11. Unlike Winograd's transforms
for as many taps, these lose no digits. Signals are rows of channels, (time, C).
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor, nn

from ltx_neuron.host import kernels
from ltx_neuron.host.winograd import Workers

# Input channels whose filters a core transforms at a time.
INPUTS_AT_ONCE = 16


class Convolution:
    """A convolution in time that keeps the length, ready to be computed in parts.

    before  samples before the first one that the first output depends on
    """

    def __init__(self, conv: nn.Conv1d, workers: Workers, name: str):
        """The transformed filters are put into scratch memory of that name."""
        (self.dilation,), (self.taps,) = conv.dilation, conv.kernel_size
        self.before = (self.taps - 1) * self.dilation // 2
        self.size = kernels.output_count(self.taps)  # of a block
        self.bias = flat(F.pad(conv.bias.repeat(self.dilation), (0, kernels.LANES)))
        outputs, inputs, _ = conv.weight.shape
        row = -(-outputs // kernels.LANES) * kernels.LANES
        memory = workers.scratch(name, kernels.point_count(self.taps), inputs, row)
        self.points = memory[:, :, :outputs]
        weight, points = flat(conv.weight.contiguous()), flat(memory)

        def transform(first: int) -> None:
            part = first, min(inputs, first + INPUTS_AT_ONCE)
            plane = memory.stride(0)
            kernels.to_filters(weight, self.taps, inputs, outputs, *part, points, row, plane)

        workers.run(transform, range(0, inputs, INPUTS_AT_ONCE))

    def reach(self, length: int) -> int:
        """Samples of a signal that are read for `length` outputs."""
        return (self._blocks(length) * self.size + self.taps - 1) * self.dilation

    def convolve(self, signal: Tensor, length: int, out: Tensor, workers: Workers) -> None:
        """Write `length` outputs or more to `out` (samples, Cout). The first one is of the first
        samples of the signal (samples, Cin). Both are contiguous."""
        kernels.to_samples(*self._multiply(signal, length, workers), flat(out))

    def add(
        self, signal: Tensor, length: int, x: Tensor, out: Tensor, more: bool, workers: Workers
    ) -> None:
        """Write `length` outputs and x added up to `out`, or add both to what is there."""
        outputs = self.points.shape[2]
        one = workers.scratch("values", self.size * self.dilation * outputs + kernels.LANES)
        given = self._multiply(signal, length, workers)
        kernels.add_samples(*given, flat(x), flat(out), length * outputs, more, flat(one))

    def _blocks(self, length: int) -> int:
        return -(-length // (self.dilation * self.size))

    def _multiply(self, signal: Tensor, length: int, workers: Workers) -> tuple:
        """The products, as the kernels take them."""
        # Samples that are `dilation` apart are one series; each is cut into blocks of its own.
        # Neighbouring samples are of different series, and one row of numbers for the kernels.
        count, inputs, outputs = self.points.shape
        blocks = self._blocks(length)
        rows = blocks * self.dilation
        # The kernel may write a little more than a plane.
        memory = workers.scratch("values", count, rows * inputs + kernels.LANES)
        values = memory[:, : rows * inputs].unflatten(1, (rows, inputs))
        numbers = count * rows * outputs
        products = workers.scratch("products", numbers + kernels.LANES)
        row, plane = self.dilation * inputs, values.stride(0)
        kernels.to_points(
            flat(signal), self.taps, self.size * row, blocks, row, flat(memory), plane
        )
        # torch multiplies all points at once only where the result has no gaps.
        torch.bmm(values, self.points, out=products[:numbers].view(count, rows, outputs))
        row = self.dilation * outputs
        return flat(products), self.taps, self.size * row, blocks, row, self.bias


def flat(x: Tensor) -> ndarray:
    """The memory of x and all that follows it, as kernels take it."""
    rest = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    return x.detach().as_strided((rest,), (1,)).numpy()


def fresh(*shape: int) -> Tensor:
    """Memory for float32 numbers, in large pages: numpy asks Linux for them. Fresh small ones cost
    more than what is written to them."""
    return torch.from_numpy(np.empty(shape, np.float32))
