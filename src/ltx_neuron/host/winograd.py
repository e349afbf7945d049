"""3x3x3 convolution with an eighth of the multiplications: Winograd's F(4, 3) along three axes.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (arXiv:1509.09308), in three
dimensions instead of two. A tile of 6 x 6 x 6 inputs gives 4 x 4 x 4 outputs. With that paper's
names, along each axis:

    U = G g      the filter transform: 3 taps to 6 points           `_transform_filters`
    V = B^T d    the input transform: 6 inputs to 6 points          `_transform_input`
    M = U V      products, summed over input channels: one matrix product per point
    Y = A^T M    the output transform: 6 points to 4 outputs        `_transform_output`

That is 6^3 = 216 products for 64 outputs of a channel pair, 3.375 per output; a direct convolution
needs 27. The implementation uses torch: sums of strided views around matrix products.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, add, sub

from ltx_neuron.host.arithmetic import FLOAT32, ONEDNN, Arithmetic, multiply
from ltx_neuron.host.background import Workers

TILE = 4  # outputs of a tile along an axis: the paper's m
POINTS = 6**3  # products of a tile: the paper's (m + r - 1)^3 with r = 3 taps
FILTER_TRANSFORM = [  # the paper's G for F(4, 3)
    [1 / 4, 0, 0],
    [-1 / 6, -1 / 6, -1 / 6],
    [-1 / 6, 1 / 6, -1 / 6],
    [1 / 24, 1 / 12, 1 / 6],
    [1 / 24, -1 / 12, 1 / 6],
    [0, 0, 1],
]
# Tiles that one core computes at a time: enough for efficient matrix products, and few enough for
# the sums around them to stay in cache.
TILES_AT_ONCE = 128
# Maximum channel pairs of a convolution: 216 numbers for each are 226 MB.
LARGEST_FILTERS = 512 * 512

# Of a direct convolution in bfloat16: result numbers that are computed at once, and that are summed
# and passed on at once, so that the next operations find them in cache.
NUMBERS_AT_ONCE, NUMBERS_IN_CACHE = 2**22, 2**18

# Takes frames and rows of a result, and their content (frames, rows, W, C), which is overwritten
# after the call.
WritePiece = Callable[[slice, slice, Tensor], None]


class FeatureMap:
    """A feature map (F, H, W, C) with the border that a 3x3x3 convolution reads.

    inner   the map itself, (F, H, W, C): a view of `padded`
    padded  the map with its first and last frame repeated (ltx-core's padding in time); if causal,
            with its first frame repeated twice. In float32 also with zeros around every frame, up
            to whole tiles; in bfloat16 without, because oneDNN's convolutions are then faster
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, causal: bool = False):
        frames, height, width, channels = self.shape = tuple(shape)
        self.bordered = dtype == torch.float32
        self.before = 2 if causal else 1  # frames of the border before the map
        inside = slice(self.before, self.before + frames)
        if self.bordered:
            padded_size = [count * TILE + 2 for count in tile_counts(self.shape)]
            self.padded = torch.zeros(*padded_size, channels)
            self.inner = self.padded[inside, 1 : 1 + height, 1 : 1 + width]
        else:
            self.padded = torch.empty(frames + 2, height, width, channels, dtype=dtype)
            self.inner = self.padded[inside]

    def window(self, frames: slice, rows: slice, workers: Workers) -> Tensor:
        """Frames and rows of the map with its border and room for whole tiles, float32."""
        if self.bordered:
            return self.padded[frames, rows]
        _, height, width, channels = self.shape
        size = frames.stop - frames.start, rows.stop - rows.start
        across = tile_counts(self.shape)[2] * TILE + 2
        window = workers.scratch("window", *size, across, channels).zero_()
        # Row r of the map is row r + 1 of the map with its border.
        start, stop = max(rows.start - 1, 0), min(rows.stop - 1, height)
        content = self.padded[frames, start:stop]
        above = start + 1 - rows.start
        window[: len(content), above : above + stop - start, 1 : 1 + width] = content
        return window

    def repeat_end_frames(self) -> None:
        """Copy the first and last frame into the border. Call it after writing to `inner`."""
        stop = self.before + self.shape[0]
        self.padded[: self.before] = self.padded[self.before]
        self.padded[stop : self.shape[0] + 2] = self.padded[stop - 1]


def convolve(
    source: FeatureMap,
    weight: Tensor,
    bias: Tensor,
    write: WritePiece,
    workers: Workers,
    arithmetic: Arithmetic = FLOAT32,
) -> None:
    """Convolve a map (F, H, W, Cin) with weight (Cout, Cin, 3, 3, 3) and bias (Cout). Passes the
    result (F, H, W, Cout) to `write` in pieces, in any order, while they are in cache. Chooses the
    fastest of the methods below."""
    one_frame = source.shape[0] == 1 and source.bordered
    if not one_frame and winograd_is_faster(source.shape, len(weight), arithmetic.speed):
        convolve_winograd(source, weight, bias, write, workers, arithmetic.libraries.tile)
    else:
        method = convolve_direct if source.bordered else convolve_bfloat16
        method(source, weight, bias, write, workers)


def winograd_is_faster(shape: Sequence[int], outputs: int, speed: int = 1) -> bool:
    """Whether `convolve_winograd` is faster than `convolve_direct` for a map (F, H, W, Cin) and
    `outputs` channels. speed: of the direct convolution, relative to float32. Compares the
    products, filter transforms and map transforms with a direct convolution. The factors were
    measured on one core, in units of a direct convolution's multiplication. The factor of the
    products, 5, was 3 to 5, less for fewer channels."""
    *sizes, inputs = shape
    pairs = inputs * outputs
    tiled = math.prod(count * TILE for count in tile_counts(shape))
    narrow, large = min(inputs, outputs) < 32, pairs > LARGEST_FILTERS
    cost = pairs * (5 * tiled + 16000) + tiled * (180 * inputs + 110 * outputs)
    return not narrow and not large and speed * cost < 27 * pairs * math.prod(sizes)


def convolve_direct(
    source: FeatureMap, weight: Tensor, bias: Tensor, write: WritePiece, workers: Workers
) -> None:
    """`convolve` with torch's convolutions, for a map in float32."""
    frames, height, width, _ = source.shape
    if frames == 1:
        # The border repeats the frame, so the sum of the three taps in time is one filter. In
        # bfloat16 summing takes longer than it saves.
        image = source.inner.permute(0, 3, 1, 2).contiguous()
        taps = weight.sum(2, dtype=torch.float32)
        result = F.conv2d(image, taps, bias.float(), padding=1).permute(0, 2, 3, 1)
        _write_sum([result], 0, write, workers)
        return
    # Channels first and without the zeros: few positions with many channels are 3 times slower
    # otherwise.
    inputs = source.padded[: frames + 2, 1 : 1 + height, 1 : 1 + width]
    inputs = inputs.permute(3, 0, 1, 2).contiguous()  # (Cin, F + 2, H, W)
    result = F.conv3d(inputs[None], weight.float(), bias.float(), padding=(0, 1, 1))[0]
    result = result.permute(1, 2, 3, 0)

    def write_frame(index: int) -> None:
        frame = slice(index, index + 1)
        # Not copied to channels last, because sums over channels would have other bits.
        write(frame, slice(0, height), result[frame])

    workers.map(write_frame, range(frames))


def convolve_bfloat16(
    source: FeatureMap, weight: Tensor, bias: Tensor, write: WritePiece, workers: Workers
) -> None:
    """`convolve` with torch's conv2d, for a map in bfloat16: frames are images, and each of the
    three taps in time is a convolution. The workers sum their results in float32. With channels
    last and AMX, oneDNN is 1.1 to 4 times as fast as in conv3d."""
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


def convolve_winograd(
    source: FeatureMap,
    weight: Tensor,
    bias: Tensor,
    write: WritePiece,
    workers: Workers,
    library: str = ONEDNN,
) -> None:
    """`convolve` with Winograd's F(4, 3) in float32; workers compute tiles of the result."""
    outputs, inputs = weight.shape[:2]
    filters = _transform_filters(weight.float(), workers)
    frames, height, width, _ = source.shape
    tiles_f, tiles_h, tiles_w = tile_counts(source.shape)
    piece_f, piece_h = piece_size(source.shape, workers.count)

    def compute_piece(corner: tuple[int, int]) -> None:
        # The last piece along an axis may be smaller.
        n_f, n_h = min(piece_f, tiles_f - corner[0]), min(piece_h, tiles_h - corner[1])
        frame, row = TILE * corner[0], TILE * corner[1]
        reads = slice(frame, frame + TILE * n_f + 2), slice(row, row + TILE * n_h + 2)
        points = _transform_input(source.window(*reads, workers), workers)
        products = workers.scratch("products", POINTS, n_f * n_h * tiles_w, outputs)
        for point, values in enumerate(points.view(POINTS, -1, inputs)):
            multiply(values, filters[point], products[point], library)
        products = products.view(6, 6, 6, n_f, n_h, tiles_w, outputs)
        piece = _transform_output(products, bias, workers)
        piece = piece[: frames - frame, : height - row, :width]  # without the padding of tiles
        write(slice(frame, frame + len(piece)), slice(row, row + piece.shape[1]), piece)

    corners = itertools.product(range(0, tiles_f, piece_f), range(0, tiles_h, piece_h))
    workers.map(compute_piece, corners)


def tile_counts(shape: Sequence[int]) -> tuple[int, int, int]:
    """Tiles along time, height and width of a map (F, H, W, C); the last ones may be partly
    empty."""
    frames, height, width = (-(-size // TILE) for size in shape[:3])
    return frames, height, width


def piece_size(shape: Sequence[int], workers: int) -> tuple[int, int]:
    """Tiles in time and in height that a worker computes at a time, for the whole width."""
    tiles_f, tiles_h, tiles_w = tile_counts(shape)
    # At least two pieces per worker, so that none waits long for the last one.
    at_once = min(TILES_AT_ONCE, -(-tiles_f * tiles_h * tiles_w // (2 * workers)))
    frames = _equal_parts(tiles_f, at_once // (tiles_w * tiles_h))
    return frames, _equal_parts(tiles_h, at_once // tiles_w)


def _equal_parts(size: int, longest: int) -> int:
    """The length of equal parts of a size, at most `longest` but at least 1."""
    return -(-size // -(-size // max(1, longest)))


def _transform_filters(weight: Tensor, workers: Workers) -> Tensor:
    """U (216, Cout, Cin) of weight (Cout, Cin, 3, 3, 3); points in the order width, height,
    time."""
    outputs, inputs = weight.shape[:2]
    axis = torch.tensor(FILTER_TRANSFORM)
    # The three transforms as one matrix (216, 27).
    matrix = torch.einsum("wc,hb,ta->whtabc", axis, axis, axis).reshape(POINTS, 27)
    taps = weight.reshape(-1, 27)
    filters = workers.scratch("filters", POINTS, outputs * inputs)
    return torch.mm(matrix, taps.T, out=filters).view(POINTS, outputs, inputs)


def _transform_input(part: Tensor, workers: Workers) -> Tensor:
    """V (6, 6, 6, n, t, w, C), points in the order width, height, time, of a part
    (4n + 2, 4t + 2, 4w + 2, C) of a padded map: n x t x w tiles, which overlap by 2."""
    n, t, w = (size // TILE for size in part.shape[:3])
    channels = part.shape[3]
    # View i of each axis has the i-th input of every tile. Each step moves the axis of its points
    # to the front.
    in_time = workers.scratch("one", 6, n, TILE * t + 2, TILE * w + 2, channels)
    _transform_input_axis([part[i : i + TILE * n - 3 : TILE] for i in range(6)], in_time)
    in_height = workers.scratch("two", 6, 6, n, t, TILE * w + 2, channels)
    _transform_input_axis([in_time[:, :, i : i + TILE * t - 3 : TILE] for i in range(6)], in_height)
    points = workers.scratch("points", 6, 6, 6, n, t, w, channels)
    _transform_input_axis(
        [in_height[..., i : i + TILE * w - 3 : TILE, :] for i in range(6)], points
    )
    return points


def _transform_output(products: Tensor, bias: Tensor, workers: Workers) -> Tensor:
    """The result (4n, 4t, 4w, C), bias included, of M (6, 6, 6, n, t, w, C). Overwrites `products`.
    Scratch memory is shared with `_transform_input`, which has ended."""
    *_, n, t, w, channels = products.shape
    in_time = workers.scratch("points", 4, 6, 6, n, t, w, channels)
    _transform_output_axis(products.unbind(2), in_time)
    in_height = workers.scratch("one", 4, 4, 6, n, t, w, channels)
    _transform_output_axis(in_time.unbind(2), in_height)
    in_width = workers.scratch("two", 4, 4, 4, n, t, w, channels)
    _transform_output_axis(in_height.unbind(2), in_width)
    piece = workers.scratch("products", n, TILE, t, TILE, w, TILE, channels)
    # (width, height, time, n, t, w, C) to (n, time, t, height, w, width, C)
    add(in_width.permute(3, 2, 4, 1, 5, 0, 6), bias.float(), out=piece)
    return piece.view(TILE * n, TILE * t, TILE * w, channels)


def _transform_input_axis(x: Sequence[Tensor], out: Tensor) -> None:
    """The paper's B^T for F(4, 3) along one axis: six inputs to six points. Rows 1 and 2, and rows
    3 and 4, differ only in signs, so each pair shares its two sums."""
    add(x[4], x[2], alpha=-5, out=out[0]).add_(x[0], alpha=4)
    add(x[4], x[2], alpha=-4, out=out[1])
    add(x[3], x[1], alpha=-4, out=out[2])
    out[1].add_(out[2])
    add(out[1], out[2], alpha=-2, out=out[2])
    sub(x[4], x[2], out=out[3])
    sub(x[3], x[1], out=out[4])
    out[3].add_(out[4], alpha=2)
    add(out[3], out[4], alpha=-4, out=out[4])
    add(x[5], x[3], alpha=-5, out=out[5]).add_(x[1], alpha=4)


def _transform_output_axis(x: Sequence[Tensor], out: Tensor) -> None:
    """The paper's A^T for F(4, 3) along one axis: six points to four outputs, with shared sums."""
    add(x[1], x[2], out=out[0])
    add(x[3], x[4], out=out[2])
    out[0].add_(out[2])
    add(out[0], out[2], alpha=3, out=out[2])
    out[0].add_(x[0])
    sub(x[1], x[2], out=out[1])
    sub(x[3], x[4], out=out[3])
    out[1].add_(out[3], alpha=2)
    add(out[1], out[3], alpha=6, out=out[3]).add_(x[5])
