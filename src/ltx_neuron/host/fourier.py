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

import torch
from torch import Tensor, nn

from ltx_neuron.host import kernels
from ltx_neuron.host.winograd import Workers

# Input channels whose filters a core transforms at a time.
INPUTS_AT_ONCE = 64


def block_size(taps: int) -> int:
    """The inputs of a block that take the least time. Twice as many save few products, and cost
    longer transforms and more filters; half as many save few transforms."""
    return 16 if taps <= 3 else 32


class Convolution:
    """A convolution in time that keeps the length, ready to be computed in parts.

    before  samples before the first one that the first output depends on
    """

    def __init__(self, conv: nn.Conv1d, workers: Workers, name: str):
        """The transformed filters are put into scratch memory of that name."""
        (self.dilation,), (self.taps,) = conv.dilation, conv.kernel_size
        self.before = (self.taps - 1) * self.dilation // 2
        self.block = block_size(self.taps)
        self.size = self.block - self.taps + 1  # outputs of a block
        self.outputs, self.inputs = conv.weight.shape[:2]
        self.bias = padded(conv.bias.repeat(self.dilation))
        count, numbers = self.block // 2 * 3 - 1, self.inputs * self.outputs
        plane = numbers + kernels.LANES
        memory = workers.scratch(name, count * plane)
        self.points = memory.as_strided(
            (count, self.inputs, self.outputs), (plane, self.outputs, 1)
        )
        weight, points = flat(conv.weight), flat(memory)

        def transform(first: int) -> None:
            last = min(self.inputs, first + INPUTS_AT_ONCE)
            kernels.to_filters(
                weight, self.taps, self.block, self.inputs, self.outputs, first, last, points, plane
            )

        workers.run(transform, range(0, self.inputs, INPUTS_AT_ONCE))

    def convolve(self, signal: Tensor, length: int, out: Tensor, workers: Workers) -> None:
        """Write `length` outputs or more to a contiguous `out` (samples, Cout). The first one is of
        the first samples of the signal (samples, Cin)."""
        # Samples that are `dilation` apart are one series; each is cut into blocks of its own. As
        # many neighbouring samples are of different series: one row of numbers for the kernels.
        blocks, count = -(-length // (self.dilation * self.size)), len(self.points)
        rows = blocks * self.dilation
        values = _planes(workers, "values", count, rows, self.inputs)
        products = _planes(workers, "products", count, rows, self.outputs)
        width = self.dilation * self.inputs
        kernels.to_points(
            flat(signal),
            self.block,
            self.size * width,
            blocks,
            width,
            flat(values),
            values.stride(0),
        )
        torch.bmm(values, self.points, out=products)
        kernels.to_samples(
            flat(products),
            products.stride(0),
            self.block,
            self.taps,
            blocks,
            self.dilation * self.outputs,
            self.bias,
            flat(out),
        )


def padded(x: Tensor):
    return torch.nn.functional.pad(x, (0, kernels.LANES)).numpy()


def flat(x: Tensor):
    """The memory from x on to the end, as kernels take it."""
    rest = x.untyped_storage().nbytes() // 4 - x.storage_offset()
    return x.as_strided((rest,), (1,)).numpy()


def _planes(workers: Workers, name: str, count: int, rows: int, channels: int) -> Tensor:
    """Scratch memory (count, rows, channels) of the calling worker, with as much room after it as
    the kernels may overwrite."""
    numbers = count * rows * channels
    memory = workers.scratch(name, numbers + kernels.LANES)
    return memory[:numbers].view(count, rows, channels)
