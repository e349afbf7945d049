"""The video decoder and encoder on a CPU: the ranks' graphs, with the host's functions for their
modules.

Features have their channels last and include the border that convolutions read. A convolution
returns its result in pieces, and the following operations (residual sum, PixelNorm, SiLU, depth to
space) run while a piece is in cache.
"""

# To type checkers a module's parts are Tensor | Module, not the types that are built here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false

import ctypes
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltx_neuron.config.video import VideoDecoderConfig, VideoEncoderConfig
from ltx_neuron.host.background import Workers
from ltx_neuron.host.convolution import NUMBERS_IN_CACHE, FeatureMap, WritePiece, convolve
from ltx_neuron.models import video_decoder, video_encoder
from ltx_neuron.models.programs import Program, encoder_program, tile_program
from ltx_neuron.models.video_decoder import EPS, DepthToSpace, Residual, VideoConvolution
from ltx_neuron.models.video_encoder import SpaceToDepth


class HostVideoModel(nn.Module):
    """The graphs of the video decoder or encoder, computed in `dtype`, independent of the
    weights' dtype; norms in float32."""

    def __init__(self, program: Program, weights: Mapping[str, Tensor], dtype: torch.dtype):
        """weights: under the names in rank files."""
        super().__init__()
        self.program, self.dtype = program, dtype
        self.weights = {name: self._laid_out(weights[name]) for name in program.weights()}
        for module in [part for graph in program.modules.values() for part in graph.modules()]:
            if isinstance(module, video_decoder.ConvIn | video_encoder.ConvIn):
                module.conv_in.forward = partial(self._first, module.conv_in)
            elif isinstance(module, video_decoder.ConvOut | video_encoder.ConvOut):
                module.conv_out.forward = partial(last, module.conv_out)
            elif function := FUNCTIONS.get(type(module)):
                module.forward = partial(function, module)

    def _laid_out(self, weight: Tensor) -> Tensor:
        """A weight; in bfloat16 as `convolve` uses it: by tap in time, with its channels last."""
        if weight.ndim < 5 or self.dtype == torch.float32:
            return weight
        taps_first = weight.to(self.dtype).permute(2, 0, 3, 4, 1).contiguous()
        return taps_first.permute(1, 4, 0, 2, 3)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Normalised latents (1, 128, f, h, w) to frames (1, 3, 8f - 7, 32h, 32w) in about [-1, 1],
        or such frames to latents; float32."""
        _trim_heap()
        with Workers() as self.workers:
            for call in self.program.runs["main"]:
                graph: Any = self.program.modules[call[0]]
                values = {graph.inputs[0]: x}
                y = self.program.call(*call, self.weights.__getitem__, values)[graph.outputs[0]]
                del values
                if y is not x:  # another stage: this one's features are freed
                    x = y
                    _trim_heap()
        return x.contiguous()

    def _first(self, module: VideoConvolution, x: Tensor) -> "Features":
        """The first stage's features: the convolution of the model's input (F, C, H, W)."""
        frames, channels, *sides = x.shape
        source = FeatureMap((frames, *sides, channels), self.dtype, module.causal)
        source.inner.copy_(x.permute(0, 2, 3, 1))
        source.repeat_end_frames()
        shape = frames, *sides, len(module.conv.weight)
        features = Features(shape, module.causal, self.workers, self.dtype)
        features.convolve(source, module.conv.weight, module.conv.bias, features.write)
        features.repeat_end_frames()
        return features


def host_decoder(
    config: VideoDecoderConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> HostVideoModel:
    """The video decoder. weights: of ltx-core's."""
    return HostVideoModel(tile_program(config, (1, 1, 1), torch.float32), weights, dtype)


def host_encoder(
    config: VideoEncoderConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> HostVideoModel:
    """The video encoder. weights: of ltx-core's. The variance, which is not used, is left out."""
    means = slice(config.latent_channels)
    named = {
        f"encoder.{name}": weight[means] if name.startswith("conv_out.") else weight
        for name, weight in weights.items()
    }
    return HostVideoModel(encoder_program(config, (1, 32, 32), torch.float32), named, dtype)


def _trim_heap() -> None:
    """Return freed memory to the system. glibc keeps freed blocks below 32 MB for every thread:
    0.6 GB after twelve tiles of a long clip, and 0.2 GB if this is called once per tile. Returning
    every block at once (M_MMAP_THRESHOLD) costs a sixth to a half more CPU time."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


class Features:
    """The features of a stage of the graphs, all (F, H, W, C). causal: whether convolutions read
    the two frames before one, not one before and one after it."""

    dtype = torch.float32  # of the graphs' outputs

    def __init__(
        self, shape: tuple[int, ...], causal: bool, workers: Workers, map_dtype: torch.dtype
    ):
        # The sum of the residual blocks so far, their PixelNorm and SiLU, which the next
        # convolution reads, and the same between the two convolutions of a residual block.
        self.features, self.active, self.middle = (
            FeatureMap(shape, map_dtype, causal) for _ in range(3)
        )
        self.shared = causal, workers, map_dtype

    def to(self, dtype: torch.dtype) -> Self:
        """Itself; the modules round their features to the run's dtype."""
        return self

    def free(self) -> None:
        """Free all but `features`, which the next stage is made of."""
        del self.active, self.middle

    def convolve(self, source: FeatureMap, weight: Tensor, bias: Tensor, write: WritePiece) -> None:
        convolve(source, weight, bias, write, self.shared[1])

    def convolved(self, source: FeatureMap, module: VideoConvolution) -> Tensor:
        """The whole convolution of a map, float32 (F, H, W, Cout)."""
        weight, bias = module.conv.weight, module.conv.bias
        result = torch.empty(*source.shape[:3], len(weight))

        def write(frames: slice, rows: slice, piece: Tensor) -> None:
            result[frames, rows] = piece

        self.convolve(source, weight, bias, write)
        return result

    def write(self, frames: slice, rows: slice, piece: Tensor) -> None:
        self.features.inner[frames, rows] = piece
        activate(piece, self.active.inner[frames, rows])

    def repeat_end_frames(self) -> None:
        self.features.repeat_end_frames()
        self.active.repeat_end_frames()


def activate(piece: Tensor, out: Tensor) -> None:
    """Write PixelNorm and SiLU of (..., C) to `out`; computed in float32."""
    normed = F.rms_norm(piece.float(), piece.shape[-1:], eps=EPS)
    if out.dtype == torch.float32:
        torch.ops.aten.silu.out(normed, out=out)
    else:
        out.copy_(F.silu(normed, inplace=True))


def last(module: VideoConvolution, x: Features) -> Tensor:
    """The last convolution, (F, Cout, H, W)."""
    return x.convolved(x.active, module).permute(0, 3, 1, 2)


def add_residual(module: Residual, x: Features) -> Features:
    def write_middle(frames: slice, rows: slice, piece: Tensor) -> None:
        activate(piece, x.middle.inner[frames, rows])

    def write(frames: slice, rows: slice, piece: Tensor) -> None:
        features = x.features.inner[frames, rows]
        features.copy_(piece.add_(features))
        activate(piece, x.active.inner[frames, rows])

    first, second = module.conv1.conv, module.conv2.conv
    x.convolve(x.active, first.weight, first.bias, write_middle)
    x.middle.repeat_end_frames()
    x.convolve(x.middle, second.weight, second.bias, write)
    x.repeat_end_frames()
    return x


def upsampled(module: DepthToSpace, x: Features) -> Features:
    """The next stage's features: output channel (c, i1, i2, i3) of the convolution is channel c at
    one of the positions that take the place of one."""
    frames, height, width, _ = x.features.shape
    time, down, across = module.stride
    positions = [*itertools.product(*map(range, module.stride))]
    weight, bias = module.conv.conv.weight, module.conv.conv.bias
    channels = len(weight) // len(positions)
    # With twice the frames, the first one is dropped.
    shape = frames * time - (time - 1), height * down, width * across, channels
    x.free()
    larger = Features(shape, *x.shared)

    def write(frames: slice, rows: slice, piece: Tensor) -> None:
        for number, (t, row, column) in enumerate(positions):
            content = piece[..., number :: len(positions)]
            start, stop = (frame * time + t - (time - 1) for frame in (frames.start, frames.stop))
            if start < 0:
                start, content = start + time, content[1:]
            rows_written = slice(rows.start * down + row, rows.stop * down, down)
            place = slice(start, stop, time), rows_written, slice(column, None, across)
            larger.features.inner[place] = content
            activate(content, larger.active.inner[place])

    x.convolve(x.features, weight, bias, write)
    larger.repeat_end_frames()
    return larger


def downsampled(module: SpaceToDepth, x: Features) -> Features:
    """The next stage's features: channel c at one of the positions that become one is channel
    (c, i1, i2, i3) of it."""
    x.free()
    result = x.convolved(x.features, module.conv)
    *sizes, inputs = x.features.shape
    steps, channels = module.stride, module.channels
    smaller = [-(-size // step) for size, step in zip(sizes, steps, strict=True)]
    following = Features((*smaller, channels), *x.shared)
    parts = [*itertools.product(*map(range, steps))]
    group = inputs * len(parts) // channels
    rows_at_once = max(1, NUMBERS_IN_CACHE // (smaller[2] * channels))
    workers = x.shared[1]

    def write(corner: tuple[int, int]) -> None:
        frame, start = corner
        stop = min(smaller[1], start + rows_at_once)
        piece = workers.scratch("piece", stop - start, smaller[2], channels)
        taken = [_positions(frame, start, stop, part, steps) for part in parts]
        for number, positions in enumerate(taken):
            piece[..., number :: len(parts)] = result[positions]
        for number, positions in enumerate(taken):
            group_channels = piece[..., number // group :: len(parts) // group]
            group_channels.add_(x.features.inner[positions], alpha=1 / group)
        following.write(slice(frame, frame + 1), slice(start, stop), piece[None])

    rows = range(0, smaller[1], rows_at_once)
    workers.map(write, itertools.product(range(smaller[0]), rows))
    following.repeat_end_frames()
    return following


def _positions(
    frame: int, start: int, stop: int, part: tuple[int, ...], steps: tuple[int, int, int]
) -> tuple[int, slice, slice]:
    """The input positions of one part of a frame's rows `start` to `stop`."""
    (time, down, across), (t, y, x) = steps, part
    # With a stride of 2 in time the first frame counts twice.
    before = max(0, (frame - 1) * time + 1 + t)
    return before, slice(start * down + y, stop * down, down), slice(x, None, across)


FUNCTIONS = {Residual: add_residual, DepthToSpace: upsampled, SpaceToDepth: downsampled}
