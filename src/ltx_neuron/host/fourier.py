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

# Inputs of an output up to which a convolution is computed directly.
DIRECT = 176
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


class Convolution:
    """A convolution in time that keeps the length, ready to be computed in parts.

    before  samples before the first one that the first output depends on
    """

    def __init__(self, conv: nn.Conv1d, scale: Tensor, new_scale: Tensor):
        """For inputs that are multiplied by `scale` (Cin), and outputs by `new_scale` (Cout)."""
        (self.dilation,), (self.taps,) = conv.dilation, conv.kernel_size
        self.before = (self.taps - 1) * self.dilation // 2
        self.weight, self.bias = conv.weight, conv.bias * new_scale
        self._inverse, self._new_scale = 1 / scale[:, None], new_scale[:, None, None]

    def _scaled(self, rows: slice) -> Tensor:
        """The weight (Cout, Cin, k) of these outputs."""
        return (self.weight[rows] * self._inverse).mul_(self._new_scale[rows])


class Direct(Convolution):
    """By one matrix product for every tap."""

    def __init__(self, conv: nn.Conv1d, scale: Tensor, new_scale: Tensor):
        super().__init__(conv, scale, new_scale)
        self.matrices = self._scaled(slice(None)).permute(2, 1, 0).contiguous()

    def convolve(self, signal: Tensor, length: int, out: Tensor, workers: Workers) -> None:
        """Write `length` outputs or more to a contiguous `out` (samples, Cout). The first one is of
        the first samples of the signal (samples, Cin)."""
        out = out[:length]
        torch.addmm(self.bias, signal[:length], self.matrices[0], out=out)
        for tap in range(1, self.taps):
            first = tap * self.dilation
            out.addmm_(signal[first : first + length], self.matrices[tap])


class Fourier(Convolution):
    """By blocks of the Fourier transform."""

    def __init__(
        self, conv: nn.Conv1d, scale: Tensor, new_scale: Tensor, workers: Workers, name: str
    ):
        """The transformed filters are put into scratch memory of that name."""
        super().__init__(conv, scale, new_scale)
        self.matrices = transforms(block_size(self.taps), self.taps)
        outputs, inputs, _ = self.weight.shape
        self.points = workers.scratch(name, len(self.matrices.inputs), outputs, inputs)
        flat = self.points.view(len(self.points), -1)

        def transform(first: int) -> None:
            some = self._scaled(slice(first, first + FILTERS_AT_ONCE))
            columns = slice(first * inputs, (first + len(some)) * inputs)
            torch.mm(self.matrices.filters, some.view(-1, self.taps).T, out=flat[:, columns])

        workers.run(transform, range(0, outputs, FILTERS_AT_ONCE))

    def convolve(self, signal: Tensor, length: int, out: Tensor, workers: Workers) -> None:
        """See Direct.convolve."""
        # Samples that are `dilation` apart are one series; each is cut into blocks of its own.
        blocks = -(-length // (self.dilation * len(self.matrices.outputs)))
        values = self._values(signal, blocks, workers)
        points, outputs, _ = self.points.shape
        products = workers.scratch("products", points, len(values), outputs)
        torch.bmm(values.transpose(0, 1), self.points.transpose(1, 2), out=products)
        # The mean, of which an output gets 1 / block.
        products[0].add_(self.bias, alpha=self.matrices.inputs.shape[1])
        self._write(products.transpose(0, 1), blocks, out, workers)

    def _values(self, signal: Tensor, blocks: int, workers: Workers) -> Tensor:
        """The inputs' points (dilation * blocks, P, Cin)."""
        (points, block), (row, _) = self.matrices.inputs.shape, signal.stride()
        values = workers.scratch("values", self.dilation * blocks, points, row)
        matrix = self.matrices.inputs.expand(blocks, -1, -1)
        strides = (self.dilation * len(self.matrices.outputs) * row, self.dilation * row, 1)
        for series in range(self.dilation):
            views = signal[series:].as_strided((blocks, block, row), strides)
            torch.bmm(matrix, views, out=values[series * blocks : (series + 1) * blocks])
        return values

    def _write(self, products: Tensor, blocks: int, out: Tensor, workers: Workers) -> None:
        """Write all blocks' outputs, of products (dilation * blocks, P, Cout)."""
        size, channels = len(self.matrices.outputs), products.shape[2]
        matrix = self.matrices.outputs.expand(blocks, -1, -1)
        whole = out[: blocks * size * self.dilation].view(blocks, size, self.dilation, channels)
        if self.dilation == 1:
            torch.bmm(matrix, products, out=whole[:, :, 0])
            return
        part = workers.scratch("values", blocks, size, channels)
        for series in range(self.dilation):
            torch.bmm(matrix, products[series * blocks : (series + 1) * blocks], out=part)
            whole[:, :, series] = part


def prepare(
    conv: nn.Conv1d, scale: Tensor, new_scale: Tensor, workers: Workers, name: str
) -> Direct | Fourier:
    """The convolution by the method that takes less time: transforms are not worth their time for
    few channels and taps."""
    if conv.in_channels * conv.kernel_size[0] <= DIRECT:
        return Direct(conv, scale, new_scale)
    return Fourier(conv, scale, new_scale, workers, name)
