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
for as many taps, these lose no digits. Every transform is a matrix product too.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.host.winograd import Workers

BLOCKS = 16, 32  # inputs of a block: the lengths to choose from
# A point of a channel pair costs a multiplication for each block, and about as much time as this
# many for its filter, which goes to memory and back.
FILTER_COST = 60
# Output channels whose filters a core transforms at a time.
FILTERS_AT_ONCE = 64


class Transforms(NamedTuple):
    """The matrices of one number of taps: `filters` (P, k), `inputs` (P, N), `outputs`
    (N - k + 1, P)."""

    filters: Tensor
    inputs: Tensor
    outputs: Tensor


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


def fastest_block(weight_shape: Sequence[int], length: int) -> int:
    """The inputs of a block for a weight (Cout, Cin, k) and a signal of that length, from rates
    measured on one core."""
    outputs, inputs, taps = weight_shape

    def cost(block: int) -> float:
        points, blocks = 3 * block // 2 - 1, length / (block - taps + 1)
        products = inputs * outputs * (blocks + FILTER_COST)
        return points * (products + blocks * (inputs * block + outputs * (block - taps + 1)))

    return min(BLOCKS, key=cost)


class Filters:
    """One convolution's weight (Cout, Cin, k), transformed, and bias (Cout).

    length  of the whole signal
    """

    def __init__(self, weight: Tensor, bias: Tensor, dilation: int, length: int, workers: Workers):
        outputs, inputs, taps = weight.shape
        self.dilation, self.bias = dilation, bias
        self.matrices = transforms(fastest_block(weight.shape, length), taps)
        points = len(self.matrices.inputs)
        self.points = workers.scratch("filters", points, outputs, inputs)
        flat = self.points.view(points, -1)

        def transform(first: int) -> None:
            some = weight[first : first + FILTERS_AT_ONCE].reshape(-1, taps)
            columns = slice(first * inputs, first * inputs + len(some))
            torch.mm(self.matrices.filters, some.T, out=flat[:, columns])

        workers.run(transform, range(0, outputs, FILTERS_AT_ONCE))

    def room(self, length: int) -> int:
        """Samples that `convolve` reads for `length` outputs: whole blocks."""
        size = len(self.matrices.outputs)
        blocks = self._blocks(length)
        return (blocks * size + self.matrices.inputs.shape[1] - size) * self.dilation

    def _blocks(self, length: int) -> int:
        return -(-length // (self.dilation * len(self.matrices.outputs)))

    def convolve(self, signal: Tensor, length: int, workers: Workers) -> Tensor:
        """The first `length` outputs (Cout, length) for a contiguous signal (Cin, room(length) or
        more), in scratch memory of the calling worker."""
        matrices, dilation = self.matrices, self.dilation
        size, block = len(matrices.outputs), matrices.inputs.shape[1]
        points, outputs, inputs = self.points.shape
        blocks = self._blocks(length)
        count = dilation * blocks
        # Samples that are `dilation` apart are one series; each is cut into blocks of its own.
        strides = (signal.stride(0), 1, size * dilation, dilation)
        views = signal.as_strided((inputs, dilation, blocks, block), strides)
        cut = workers.scratch("blocks", *views.shape).copy_(views).view(-1, block)
        values = workers.scratch("values", points, inputs * count)
        torch.mm(matrices.inputs, cut.T, out=values)
        products = workers.scratch("products", points, outputs, count)
        torch.bmm(self.points, values.view(points, inputs, count), out=products)
        products[0] += self.bias[:, None] * block  # the mean, of which an output gets 1 / block
        result = workers.scratch("blocks", outputs * count, size)
        torch.mm(products.view(points, -1).T, matrices.outputs.T, out=result)
        if dilation > 1:
            series = result.view(outputs, dilation, blocks * size)
            result = workers.scratch("values", outputs, blocks * size, dilation)
            result.copy_(series.transpose(1, 2))
        return result.view(outputs, -1)[:, :length]
