"""The host's functions for the vocoder's modules, with the ranks' weights.

A signal (1, C, 1, T) has its channels last in memory, so it is also T rows of C. oneDNN's
convolutions need 0.8 to 0.9 of the time in this layout. A filter is a product with overlapping
windows of the rows, without a copy; a convolution before upsampling is one product.
"""

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltx_neuron.models.vocoder import EPS, Activation, Convolution, MelSpectrogram, Snake, Upsample


@torch.no_grad()
def compute_on_host(graph: nn.Module) -> None:
    """Reorder the weights of a vocoder's graph for the host, and replace its functions."""
    for module in [*graph.modules()]:
        if isinstance(module, Convolution):
            module.weight.data = module.weight.transpose(1, 2).contiguous().transpose(1, 2)
        elif isinstance(module, Upsample):
            by_sample = module.weight.squeeze(2).unflatten(0, (-1, module.stride))
            module.weight.data = by_sample.permute(1, 0, 3, 2).flatten(2).flatten(0, 1)
            module.forward = partial(upsampled, module)
        elif isinstance(module, MelSpectrogram):
            module.least_power = 0.0  # a CPU's square root is valid everywhere
        elif isinstance(module, Activation):
            down = module.downsample["lowpass"]
            module.forward = partial(
                activated, RowFilter.of(module.upsample), module.act, RowFilter.of(down)
            )


def rows_of(x: Tensor) -> Tensor:
    """A signal (1, C, 1, T) as rows (T, C), contiguous."""
    return x[0, :, 0].T.contiguous()


def upsampled(module: Upsample, x: Tensor) -> Tensor:
    """The output of an Upsample, whose weight is a matrix (stride Cout, taps C)."""
    rows, (matrix, stride) = rows_of(x), (module.weight, module.stride)
    length, channels = rows.shape
    around = matrix.shape[1] // channels - 1
    padded = F.pad(rows, (0, 0, around, around))
    windows = padded.as_strided((length + around, matrix.shape[1]), (channels, 1))
    y = F.linear(windows, matrix, module.bias.repeat(stride)).view(-1, len(module.bias))
    return y[module.cropped : module.cropped + length * stride].T[None, :, None]


class RowFilter(NamedTuple):
    """A Filter of rows: the product of a matrix with windows of `size` rows, plus `before` rows
    before and `after` rows after them."""

    matrix: Tensor
    size: int
    before: int
    after: int

    @classmethod
    def of(cls, module: Any) -> "RowFilter":
        matrix, size = module.filter.squeeze(2).transpose(1, 2).flatten(1), module.filter.shape[1]
        read = matrix.any(dim=0).nonzero().flatten()
        first, last = min(int(read[0]), size), max(int(read[-1]) + 1, 2 * size)
        return cls(matrix[:, first:last].contiguous(), size, size - first, last - 2 * size)

    def __call__(self, rows: Tensor) -> Tensor:
        """Filter rows (T, C) with repeated ends. Returns the rows of whole blocks."""
        (length, channels), size = rows.shape, self.size
        count, strides = -(-length // size), (size * channels, channels, 1)
        y = rows.new_empty(count, len(self.matrix), channels)
        # Only the first and last blocks read beyond the ends and need copies.
        for first, last in pairwise((0, 1, max(1, (length - self.after) // size), count)):
            if first < last:
                read = self._read(rows, first * size - self.before, last * size + self.after)
                shape = last - first, self.matrix.shape[1], channels
                windows = read.as_strided(shape, strides)
                torch.bmm(self.matrix.expand(last - first, -1, -1), windows, out=y[first:last])
        return y.flatten(0, 1)

    def _read(self, rows: Tensor, start: int, stop: int) -> Tensor:
        before, after = max(0, -start), max(0, stop - len(rows))
        read = rows[max(0, start) : stop]
        if before or after:
            read = torch.cat([rows[:1].expand(before, -1), read, rows[-1:].expand(after, -1)])
        return read


def activated(up: RowFilter, snake: Snake, down: RowFilter, x: Tensor) -> Tensor:
    """The output of an Activation for a signal (1, C, 1, T)."""
    rows = rows_of(x)
    y = up(rows)[: 2 * len(rows)]
    inverse = 1 / (snake.beta.exp() + EPS)
    y.addcmul_((y * snake.alpha.exp()).sin_().square_(), inverse)
    return down(y)[: len(rows)].T[None, :, None]
