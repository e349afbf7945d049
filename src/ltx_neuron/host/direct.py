"""Convolutions of sound with a product for every tap, by one of two units of a processor.

A unit is a module: host/amx_convolution.py, where there is AMX, or host/fma_convolution.py, for
every processor. It cuts a signal into the parts that it multiplies (`parts_memory`, `cut`), and
multiplies them with weights that it has laid out (`Filters`, of convolutions that it `takes`).
"""

from types import ModuleType

from numpy import ndarray
from torch import Tensor, nn

from ltx_neuron.host import fma_convolution
from ltx_neuron.host.fourier import flat
from ltx_neuron.host.winograd import Workers


def units(has_amx: bool) -> list[ModuleType]:
    """Those of this processor, the faster one first. Compiles them, or loads what was compiled."""
    if not has_amx:
        return [fma_convolution]
    from ltx_neuron.host import amx_convolution

    return [amx_convolution, fma_convolution]


class Convolution:
    """A convolution in time, transposed or not, that keeps the length or multiplies it.

    before, after  samples before and after an output's that it depends on
    """

    def __init__(self, conv: nn.Conv1d | nn.ConvTranspose1d, unit: ModuleType):
        self.unit, self.outputs = unit, conv.out_channels
        (self.stride,), (padding,), (dilation,) = conv.stride, conv.padding, conv.dilation
        taps = range(conv.kernel_size[0])
        if isinstance(conv, nn.ConvTranspose1d):
            weight = conv.weight.transpose(0, 1)
            ahead = [[phase + padding - tap for tap in taps] for phase in range(self.stride)]
        else:
            weight, ahead = conv.weight, [[tap * dilation - padding for tap in taps]]
        # Each phase of the outputs has taps of its own.
        reaches = [
            {tap: rows // self.stride for tap, rows in enumerate(phase) if rows % self.stride == 0}
            for phase in ahead
        ]
        every = [rows for phase in reaches for rows in phase.values()]
        self.before, self.after = max(0, -min(every)), max(0, *every)
        self.phases = [
            (
                unit.Filters(weight[:, :, [*phase]], conv.bias),
                unit.row_offsets(self.before + r for r in phase.values()),
            )
            for phase in reaches
        ]

    def reach(self, length: int) -> int:
        """Samples of a signal that are read for `length` outputs."""
        return self.before + length + self.after

    def convolve(self, signal: Tensor, length: int, out: Tensor, workers: Workers) -> None:
        """Write `length` outputs to `out` (samples, Cout). The first one is of the first samples of
        the signal (samples, Cin). Both are contiguous."""
        parts = self._cut(signal[: self.reach(length)], 0, length, workers)
        filters, offsets = self.phases[0]
        filters.convolve(parts, offsets, out, workers, length)

    def add(
        self, signal: Tensor, length: int, x: Tensor, out: Tensor, more: bool, workers: Workers
    ) -> None:
        """Write `length` outputs and x added up to `out`, or add both to what is there."""
        parts = self._cut(signal[: self.reach(length)], 0, length, workers)
        filters, offsets = self.phases[0]
        filters.convolve(parts, offsets, out, workers, length, x=x, more=more)

    def convolve_part(
        self, x: Tensor, start: int, stop: int, out: Tensor, workers: Workers
    ) -> None:
        """Write the outputs of samples `start` to `stop` of a whole signal x (length, Cin) to their
        places in `out`."""
        first, last = max(0, start - self.before), min(len(x), stop + self.after)
        zeros = first - (start - self.before)
        parts = self._cut(x[first:last], zeros, stop - start, workers)
        for phase, (filters, offsets) in enumerate(self.phases):
            begin, step = start * self.stride + phase, self.stride * out.shape[1]
            filters.convolve(parts, offsets, out[begin:], workers, stop - start, step=step)

    def _cut(self, x: Tensor, zeros: int, length: int, workers: Workers) -> ndarray:
        """The parts of what `length` outputs read: as many rows of zeros, x, and zeros again."""
        parts = self.unit.parts_memory(workers, x.shape[1], self.reach(length))
        parts[..., :zeros, :] = 0
        self.unit.cut(flat(x), 0, *x.shape, parts, zeros)
        parts[..., zeros + len(x) : self.reach(length), :] = 0
        return parts
