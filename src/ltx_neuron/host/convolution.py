"""3x3x3 convolution of the video VAE's feature maps on the host, with torch's conv2d.

Frames are images, and each of the three taps in time is a 2D convolution. With channels last and
AMX, oneDNN is 1.1 to 4 times as fast in conv2d as in conv3d. Figures: benchmarks/vae_decode.md.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ltx_neuron.host.background import Workers

# Result numbers that are computed at once, and that are summed and passed on at once, so that the
# next operations find them in cache.
NUMBERS_AT_ONCE, NUMBERS_IN_CACHE = 2**22, 2**18

# Takes frames and rows of a result, and their content (frames, rows, W, C), which is overwritten
# after the call.
WritePiece = Callable[[slice, slice, Tensor], None]


class FeatureMap:
    """A feature map (F, H, W, C) with the frames that a 3x3x3 convolution reads around it.

    inner   the map itself, (F, H, W, C): a view of `padded`
    padded  (F + 2, H, W, C): the map with its first and last frame repeated (ltx-core's padding in
            time); if causal, with its first frame repeated twice
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, causal: bool = False):
        frames, *sizes = self.shape = tuple(shape)
        self.before = 2 if causal else 1  # repeated frames before the map
        self.padded = torch.empty(frames + 2, *sizes, dtype=dtype)
        self.inner = self.padded[self.before : self.before + frames]

    def repeat_end_frames(self) -> None:
        """Write the repeated frames. Call it after writing to `inner`."""
        stop = self.before + self.shape[0]
        self.padded[: self.before] = self.padded[self.before]
        self.padded[stop:] = self.padded[stop - 1]


def convolve(
    source: FeatureMap, weight: Tensor, bias: Tensor, write: WritePiece, workers: Workers
) -> None:
    """Convolve a map (F, H, W, Cin) with weight (Cout, Cin, 3, 3, 3) and bias (Cout), in the map's
    dtype. The taps' results are summed in float32. Passes the result (F, H, W, Cout) to `write` in
    pieces, in any order, while they are in cache."""
    frames, height, width, _ = source.shape
    images = source.padded.permute(0, 3, 1, 2)  # (F + 2, Cin, H, W)
    taps = weight.to(images.dtype).unbind(2)
    taps = [tap.contiguous(memory_format=torch.channels_last) for tap in taps]
    biases = bias.to(images.dtype), None, None
    frames_at_once = max(1, NUMBERS_AT_ONCE // (height * width * len(weight)))
    for start in range(0, frames, frames_at_once):
        stop = min(frames, start + frames_at_once)
        results = [
            F.conv2d(images[start + i : stop + i], tap, bias, padding=1).permute(0, 2, 3, 1)
            for i, (tap, bias) in enumerate(zip(taps, biases, strict=True))
        ]
        _write_sum(results, start, write, workers)
        del results  # freed before the next ones are computed


def _write_sum(results: list[Tensor], start: int, write: WritePiece, workers: Workers) -> None:
    """Pass on the sum of results (frames, H, W, C), from the map's frame `start` on, in pieces that
    fit a core's cache."""
    frames, height, width, outputs = results[0].shape
    rows_at_once = max(1, NUMBERS_IN_CACHE // (width * outputs))

    def write_rows(corner: tuple[int, int]) -> None:
        frame, row = corner
        rows = slice(row, min(height, row + rows_at_once))
        piece = workers.scratch("piece", 1, rows.stop - row, width, outputs)
        piece.copy_(results[0][frame, rows])
        for result in results[1:]:
            piece.add_(result[frame, rows])
        write(slice(start + frame, start + frame + 1), rows, piece)

    workers.map(write_rows, itertools.product(range(frames), range(0, height, rows_at_once)))
