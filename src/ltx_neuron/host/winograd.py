"""3x3x3 convolution with an eighth of the multiplications: Winograd's F(4,3) in time, height and
width.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (arXiv:1509.09308), in three
dimensions: 6 x 6 x 6 = 216 products give 4 x 4 x 4 = 64 outputs of a channel pair, 3.375 an output
where a direct convolution takes 27. All of it is torch: sums of strided views around one batched
matrix product.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, add, sub

from ltx_neuron.host.background import check_cancelled
from ltx_neuron.host.products import product

TILE, POINTS = 4, 6**3  # outputs of a tile along an axis; products of a tile
TAPS = [  # F(4,3)'s filter transform: three taps along an axis to six points
    [1 / 4, 0, 0],
    [-1 / 6, -1 / 6, -1 / 6],
    [-1 / 6, 1 / 6, -1 / 6],
    [1 / 24, 1 / 12, 1 / 6],
    [1 / 24, -1 / 12, 1 / 6],
    [0, 0, 1],
]
# Tiles that one core takes at a time: enough for efficient matrix products, few enough that the
# sums around them stay in cache.
TILES_AT_ONCE = 128
LARGEST_FILTERS = (
    512 * 512
)  # channel pairs; 216 numbers for each are 226 MB, the most that is worth holding

# Takes (frames, rows) of a result and its content there, (f, r, W, C), which is overwritten when
# the call returns.
Write = Callable[[slice, slice, Tensor], None]


class Map:
    """A feature map (F, H, W, C), float32, inside the border that a convolution reads.

    The border: zeros around every frame, the first and the last frame once more. `padded` also has
    room for whole tiles.
    """

    def __init__(self, frames: int, height: int, width: int, channels: int):
        self.shape = (frames, height, width, channels)
        whole = [-(-size // TILE) * TILE + 2 for size in (frames, height, width)]
        self.padded = torch.zeros(*whole, channels)
        self.inner = self.padded[1 : 1 + frames, 1 : 1 + height, 1 : 1 + width]

    def repeat_ends(self) -> None:
        """Renew the border after writing to `inner`."""
        frames = self.shape[0]
        self.padded[0] = self.padded[1]
        self.padded[frames + 1] = self.padded[frames]


class Workers:
    """A thread for each core, with memory of its own that is used again: fresh pages cost more than
    the sums written to them.

    Each computes pieces of a result on one core, from cache. The same calls shared out operation by
    operation between the cores of a busy machine take several times as long, as each operation
    waits for the slowest core.
    """

    def __init__(self):
        self.count = torch.get_num_threads()
        self._memory = threading.local()
        self._threads = ThreadPoolExecutor(self.count)
        all_there = threading.Barrier(self.count)

        def start() -> None:
            # the first call in a thread sets the default, and would undo the next line later
            torch.get_num_threads()
            torch.set_num_threads(1)
            all_there.wait()

        try:
            for started in [self._threads.submit(start) for _ in range(self.count)]:
                started.result()
        except BaseException:  # stopped half-way
            all_there.abort()
            self._threads.shutdown()
            raise
        finally:
            torch.set_num_threads(
                self.count
            )  # what a worker sets is also the default of threads that start later

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        self._threads.shutdown(cancel_futures=True)

    def run(self, function: Callable, items: Iterable) -> None:
        """Call the function with every item."""
        for _ in self._threads.map(torch.no_grad()(function), items):
            check_cancelled()

    def memory(self, name: str, *shape: int) -> Tensor:
        """A float32 tensor of that shape and any content, over what the same name gave this thread
        before."""
        held, size = vars(self._memory), math.prod(shape)
        if name not in held or held[name].numel() < size:
            held.pop(name, None)
            held[name] = torch.empty(size)
        return held[name][:size].view(shape)


def convolve(source: Map, weight: Tensor, bias: Tensor, write: Write, workers: Workers) -> None:
    """Write the convolution of a map with (Cout, Cin, 3, 3, 3) and (Cout), piece by piece and in
    any order."""
    method = by_tiles if pays(source.shape, weight.shape[0]) else directly
    method(source, weight.float(), bias.float(), write, workers)


def pays(shape: Sequence[int], outputs: int) -> bool:
    """Whether tiles cost less than a direct convolution of a map of that shape: products, filter
    and map transforms.

    The factors are times measured on one core, in units of a direct convolution's multiplication;
    that of the products, 5, is 3 to 5 the fewer the channels.
    """
    *sizes, inputs = shape
    pairs, tiled = inputs * outputs, math.prod(-(-size // TILE) * TILE for size in sizes)
    narrow, large = min(inputs, outputs) < 32, pairs > LARGEST_FILTERS
    cost = pairs * (5 * tiled + 16000) + tiled * (180 * inputs + 110 * outputs)
    return not narrow and not large and cost < 27 * pairs * math.prod(sizes)


def directly(source: Map, weight: Tensor, bias: Tensor, write: Write, workers: Workers) -> None:
    """The convolution by torch; then its frames are shared out."""
    frames, height, width, _ = source.shape
    # Channels first and without the zeros: few positions under many channels are 3 times slower the
    # other way.
    planes = (
        source.padded[: frames + 2, 1 : 1 + height, 1 : 1 + width].permute(3, 0, 1, 2).contiguous()
    )
    found = F.conv3d(planes[None], weight, bias, padding=(0, 1, 1))[0].permute(1, 2, 3, 0)
    workers.run(
        lambda at: write(slice(at, at + 1), slice(0, height), found[at : at + 1]), range(frames)
    )


def by_tiles(source: Map, weight: Tensor, bias: Tensor, write: Write, workers: Workers) -> None:
    """The convolution in the Winograd domain, some tiles at a time."""
    outputs, inputs = weight.shape[:2]
    filters = _transformed(weight, workers)
    frames, height, width, _ = source.shape
    long, tall, wide = tiles_of(source.shape)
    groups, rows = piece_of(source.shape, workers.count)

    def piece(corner: tuple[int, int]) -> None:
        first, top = (TILE * at for at in corner)
        n, t = min(groups, long - corner[0]), min(rows, tall - corner[1])
        part = source.padded[first : first + TILE * n + 2, top : top + TILE * t + 2]
        values = _enter(part, workers)
        products = workers.memory("products", POINTS, n * t * wide, outputs)
        for point, tiles in enumerate(values.view(POINTS, -1, inputs)):
            products[point] = product(tiles, filters[point])
        found = _leave(products.view(6, 6, 6, n, t, wide, outputs), bias, workers)[
            : frames - first, : height - top, :width
        ]
        write(slice(first, first + len(found)), slice(top, top + found.shape[1]), found)

    workers.run(piece, itertools.product(range(0, long, groups), range(0, tall, rows)))


def tiles_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Tiles along the three axes of a map (F, H, W, C)."""
    return tuple(-(-size // TILE) for size in shape[:3])


def piece_of(shape: Sequence[int], workers: int) -> tuple[int, int]:
    """Tiles in time and in height that a worker takes at a time; in width it takes all."""
    long, tall, wide = tiles_of(shape)
    at_once = min(TILES_AT_ONCE, -(-long * tall * wide // (2 * workers)))
    return _even(long, at_once // (wide * tall)), _even(tall, at_once // wide)


def _even(size: int, most: int) -> int:
    """The length of equal parts of a size, each at most so long, or one."""
    return -(-size // -(-size // max(1, most)))


def _transformed(weight: Tensor, workers: Workers) -> Tensor:
    """(Cout, Cin, 3, 3, 3) as (216, Cout, Cin): points in the order width, height, time."""
    outputs, inputs = weight.shape[:2]
    axis = torch.tensor(TAPS)
    matrix = torch.einsum("wc,hb,ta->whtabc", axis, axis, axis).reshape(POINTS, 27)
    taps = weight.reshape(-1, 27)
    return torch.mm(matrix, taps.T, out=workers.memory("filters", POINTS, outputs * inputs)).view(
        POINTS, outputs, inputs
    )


def _enter(part: Tensor, workers: Workers) -> Tensor:
    """What multiplies the filters, (6, 6, 6, n, t, w, C), of a part (4n + 2, 4t + 2, 4w + 2, C) of
    a padded map."""
    n, t, w = (size // TILE for size in part.shape[:3])
    channels = part.shape[3]
    in_time = workers.memory("one", 6, n, TILE * t + 2, TILE * w + 2, channels)
    _enter_axis([part[i : i + TILE * n - 3 : TILE] for i in range(6)], in_time)
    in_height = workers.memory("two", 6, 6, n, t, TILE * w + 2, channels)
    _enter_axis([in_time[:, :, i : i + TILE * t - 3 : TILE] for i in range(6)], in_height)
    values = workers.memory("values", 6, 6, 6, n, t, w, channels)
    _enter_axis([in_height[..., i : i + TILE * w - 3 : TILE, :] for i in range(6)], values)
    return values


def _leave(products: Tensor, bias: Tensor, workers: Workers) -> Tensor:
    """The part (4n, 4t, 4w, C) of the result, of products (6, 6, 6, n, t, w, C)."""
    *_, n, t, w, channels = products.shape
    in_time = workers.memory("values", 4, 6, 6, n, t, w, channels)
    _leave_axis(products.unbind(2), in_time)
    in_height = workers.memory("one", 4, 4, 6, n, t, w, channels)
    _leave_axis(in_time.unbind(2), in_height)
    in_width = workers.memory("two", 4, 4, 4, n, t, w, channels)
    _leave_axis(in_height.unbind(2), in_width)
    piece = workers.memory("products", n, TILE, t, TILE, w, TILE, channels)
    add(in_width.permute(3, 2, 4, 1, 5, 0, 6), bias, out=piece)
    return piece.view(TILE * n, TILE * t, TILE * w, channels)


def _enter_axis(x: Sequence[Tensor], out: Tensor) -> None:
    """F(4,3)'s input transform: six pixels along an axis to six points, with few sums."""
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


def _leave_axis(x: Sequence[Tensor], out: Tensor) -> None:
    """F(4,3)'s output transform: six points to four pixels along an axis, with few sums."""
    add(x[1], x[2], out=out[0])
    add(x[3], x[4], out=out[2])
    out[0].add_(out[2])
    add(out[0], out[2], alpha=3, out=out[2])
    out[0].add_(x[0])
    sub(x[1], x[2], out=out[1])
    sub(x[3], x[4], out=out[3])
    out[1].add_(out[3], alpha=2)
    add(out[1], out[3], alpha=6, out=out[3]).add_(x[5])
