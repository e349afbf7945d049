"""Convolution in time with a fraction of the multiplications: blocks of samples by the discrete
Fourier transform.

A block of N inputs gives N - k + 1 outputs of a convolution with k taps. Along time, with the
names of the paper that host/winograd.py follows:

    U = G g      the filter transform: k taps to P points
    V = B^T d    the input transform: N inputs to P points
    M = U V      products, summed over input channels: one matrix product per point
    Y = A^T M    the output transform: P points to N - k + 1 outputs

A point is a real number: a real and a complex frequency's product takes 1 and 3 of them. N = 32
has 47 points, which are 2.1 products an output where 11 taps take 11. Unlike Winograd's transforms
for as many taps, these lose no digits. Every transform is a matrix product too. Signals are rows of
channels, (time, C): overlapping blocks are then views, and no sample is copied.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.host.winograd import Workers

# Output channels whose filters a core transforms at a time.
FILTERS_AT_ONCE = 64


class Transforms(NamedTuple):
    """The matrices of one number of taps: `filters` (P, k), `inputs` (P, N), `outputs`
    (N - k + 1, P)."""

    filters: Tensor
    inputs: Tensor
    outputs: Tensor


def block_size(taps: int) -> int:
    """The inputs of a block that take the least time. Twice as many save few products, and cost
    longer transforms and more filters; half as many save few transforms."""
    return 16 if taps <= 3 else 32


@cache
def transforms(block: int, taps: int) -> Transforms:
    """The transforms for blocks of `block` inputs, an even number."""
    time = torch.arange(block, dtype=torch.float64)
    filters, inputs, outputs = [], [], []
    for frequency in range(block // 2 + 1):
        cos = torch.cos(2 * math.pi * frequency * time / block)
        sin = torch.sin(2 * math.pi * frequency * time / block)
        if frequency in (0, block // 2):  # real: one product
            filters.append(cos)
            inputs.append(cos)
            outputs.append(cos / block)
            continue
        # Inputs a + ib have b = -sin; the filter c + id is conjugated, as a convolution of torch
        # does not turn the taps round. Real part c(a + b) - b(c + d), imaginary part c(a + b) +
        # a(d - c).
        filters += [cos, sin - cos, cos + sin]
        inputs += [cos - sin, cos, -sin]
        outputs += [(cos - sin) * 2 / block, -sin * 2 / block, -cos * 2 / block]
    return Transforms(
        torch.stack(filters)[:, :taps].float(),
        torch.stack(inputs).float(),
        torch.stack(outputs)[:, : block - taps + 1].T.float().contiguous(),
    )


class Filters:
    """One convolution's weight (Cout, Cin, k), transformed, and bias (Cout).

    unit  outputs of which `convolve` makes whole multiples
    """

    def __init__(self, weight: Tensor, bias: Tensor, dilation: int, workers: Workers):
        outputs, inputs, taps = weight.shape
        self.dilation, self.bias = dilation, bias
        self.matrices = transforms(block_size(taps), taps)
        self.unit = dilation * len(self.matrices.outputs)
        points = len(self.matrices.inputs)
        self.points = workers.scratch("filters", points, outputs, inputs)
        flat = self.points.view(points, -1)

        def transform(first: int) -> None:
            some = weight[first : first + FILTERS_AT_ONCE].reshape(-1, taps)
            columns = slice(first * inputs, first * inputs + len(some))
            torch.mm(self.matrices.filters, some.T, out=flat[:, columns])

        workers.run(transform, range(0, outputs, FILTERS_AT_ONCE))

    def reads(self, units: int) -> int:
        """Samples that `convolve` reads for that many units."""
        size, block = self.matrices.outputs.shape[0], self.matrices.inputs.shape[1]
        return (units * size + block - size) * self.dilation

    def convolve(self, signal: Tensor, out: Tensor, add: bool, workers: Workers) -> None:
        """Write the convolution of a contiguous signal (samples, Cin) to `out` (length, Cout), a
        contiguous part of a whole with a whole number of units, or add it to what is there."""
        matrices, dilation = self.matrices, self.dilation
        size, block = len(matrices.outputs), matrices.inputs.shape[1]
        points, outputs, inputs = self.points.shape
        blocks = len(out) // self.unit
        values = workers.scratch("values", dilation, blocks, points, inputs)
        to_points = matrices.inputs.expand(blocks, -1, -1)
        # Samples that are `dilation` apart are one series; each is cut into blocks of its own.
        strides = (self.unit * inputs, dilation * inputs, 1)
        for series in range(dilation):
            first = signal.storage_offset() + series * inputs
            views = signal.as_strided((blocks, block, inputs), strides, first)
            torch.bmm(to_points, views, out=values[series])
        products = workers.scratch("products", points, dilation * blocks, outputs)
        rows = values.flatten(0, 1).transpose(0, 1)
        torch.bmm(rows, self.points.transpose(1, 2), out=products)
        products[0] += self.bias * block  # the mean, of which an output gets 1 / block
        to_samples = matrices.outputs.expand(blocks, -1, -1)
        for series in range(dilation):
            rows = products[:, series * blocks : (series + 1) * blocks].transpose(0, 1)
            wanted = out.view(blocks, size, dilation, outputs)[:, :, series]
            if dilation == 1 and add:
                wanted.baddbmm_(to_samples, rows)
                continue
            part = workers.scratch("values", blocks, size, outputs)
            torch.bmm(to_samples, rows, out=part)
            wanted.add_(part) if add else wanted.copy_(part)
