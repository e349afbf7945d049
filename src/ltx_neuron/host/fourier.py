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
from torch import Tensor, nn

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

    points  (P, Cout, Cin), in scratch memory of the calling thread by the name given
    """

    def __init__(
        self, conv: nn.Conv1d, scale: Tensor, new_scale: Tensor, workers: Workers, name: str
    ):
        """For inputs that are multiplied by `scale` (Cin), and outputs by `new_scale` (Cout)."""
        outputs, inputs, taps = conv.weight.shape
        (self.dilation,), self.bias = conv.dilation, conv.bias * new_scale
        self.before = (taps - 1) * self.dilation // 2
        self.matrices = transforms(block_size(taps), taps)
        points, inverse = len(self.matrices.inputs), 1 / scale[:, None]
        self.points = workers.scratch(name, points, outputs, inputs)
        flat = self.points.view(points, -1)

        def transform(first: int) -> None:
            rows = slice(first, first + FILTERS_AT_ONCE)
            some = conv.weight[rows] * inverse
            some.mul_(new_scale[rows, None, None])
            columns = slice(first * inputs, (first + len(some)) * inputs)
            torch.mm(self.matrices.filters, some.view(-1, taps).T, out=flat[:, columns])

        workers.run(transform, range(0, outputs, FILTERS_AT_ONCE))

    def blocks(self, length: int) -> int:
        """Blocks of each series that make `length` outputs or more. Samples that are `dilation`
        apart are one series, which is cut into blocks of its own."""
        return -(-length // (self.dilation * len(self.matrices.outputs)))

    def to_points(self, signal: Tensor, length: int, workers: Workers) -> Tensor:
        """(dilation * blocks, P, Cin) of a signal (samples, Cin) that has zeros, or what else lies
        there, around the `length` samples of which outputs are made; from before them on."""
        (points, block), size = self.matrices.inputs.shape, len(self.matrices.outputs)
        inputs, blocks = signal.shape[1], self.blocks(length)
        values = workers.scratch("values", self.dilation * blocks, points, inputs)
        matrix = self.matrices.inputs.expand(blocks, -1, -1)
        row = signal.stride(0)
        strides = (self.dilation * size * row, self.dilation * row, 1)
        for series in range(self.dilation):
            views = signal[series:].as_strided((blocks, block, inputs), strides)
            torch.bmm(matrix, views, out=values[series * blocks : (series + 1) * blocks])
        return values

    def to_samples(self, products: Tensor, out: Tensor, workers: Workers) -> None:
        """Write the outputs of products (P, dilation * blocks, Cout) to a contiguous signal `out`
        (samples, Cout): all that the blocks have."""
        (size, points), channels = self.matrices.outputs.shape, products.shape[2]
        blocks = products.shape[1] // self.dilation
        matrix = self.matrices.outputs.expand(blocks, -1, -1)
        rows = products.transpose(0, 1)
        if self.dilation == 1:
            torch.bmm(matrix, rows, out=out[: blocks * size].view(blocks, size, channels))
            return
        whole = out[: blocks * size * self.dilation].view(blocks, size, self.dilation, channels)
        part = workers.scratch("values", blocks, size, channels)
        for series in range(self.dilation):
            torch.bmm(matrix, rows[series * blocks : (series + 1) * blocks], out=part)
            whole[:, :, series] = part

    def multiply(self, values: Tensor, workers: Workers) -> Tensor:
        """The products (P, rows, Cout) of values (rows, P, Cin), by one core."""
        points, outputs, _ = self.points.shape
        products = workers.scratch("products", points, len(values), outputs)
        torch.bmm(values.transpose(0, 1), self.points.transpose(1, 2), out=products)
        # The mean, of which an output gets 1 / block.
        products[0].add_(self.bias, alpha=self.matrices.inputs.shape[1])
        return products
