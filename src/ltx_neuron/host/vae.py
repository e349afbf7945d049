"""The released video decoder and encoder, faster on a CPU: ltx-core's modules and weights with our
forward.

Feature maps have their channels last and include the border that convolutions read. A convolution
returns its result in pieces, and the following operations (residual sum, PixelNorm, SiLU, depth to
space) run while a piece is in cache.
"""

# To type checkers a module's parts are Tensor | Module, not the types that are built here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAssignmentType=false

import ctypes
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from ltx_core.model.common.normalization import PixelNorm
from ltx_core.model.video_vae import VideoDecoder, VideoEncoder
from ltx_core.model.video_vae.convolution import CausalConv3d
from ltx_core.model.video_vae.enums import LogVarianceType
from ltx_core.model.video_vae.ops import PerChannelStatistics, patchify, unpatchify
from ltx_core.model.video_vae.resnet import ResnetBlock3D, UNetMidBlock3D
from ltx_core.model.video_vae.sampling import DepthToSpaceUpsample, SpaceToDepthDownsample
from torch import Tensor, nn

from ltx_neuron.host.arithmetic import FLOAT32, Arithmetic
from ltx_neuron.host.background import Workers
from ltx_neuron.host.tiles import EagerDecoder
from ltx_neuron.host.winograd import (
    LARGEST_FILTERS,
    NUMBERS_IN_CACHE,
    FeatureMap,
    WritePiece,
    convolve,
)
from ltx_neuron.sampling.latents import SPACE_SCALE, TIME_SCALE

EPS = 1e-8  # of PixelNorm
# Module type -> whether a module has the settings that the forwards below support.
KNOWN: dict[type[nn.Module], Callable[[nn.Module], bool]] = {
    PerChannelStatistics: lambda m: True,
    CausalConv3d: lambda m: m.time_kernel_size == 3,
    nn.Conv3d: lambda m: (
        (m.kernel_size, m.stride, m.padding, m.dilation)
        == ((3, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1))
        and (m.groups, m.padding_mode, m.bias is None) == (1, "zeros", False)
    ),
    nn.ModuleList: lambda m: True,
    UNetMidBlock3D: lambda m: not m.timestep_conditioning,
    ResnetBlock3D: lambda m: not m.inject_noise and not m.timestep_conditioning,
    PixelNorm: lambda m: (m.dim, m.eps) == (1, EPS),
    nn.SiLU: lambda m: True,
    nn.Dropout: lambda m: m.p == 0,
    nn.Identity: lambda m: True,
    VideoDecoder: lambda m: not m.causal and not m.timestep_conditioning,
    DepthToSpaceUpsample: lambda m: not m.residual,
    # The last channel, the variance of all latents, is not used.
    VideoEncoder: lambda m: m.latent_log_var in (LogVarianceType.UNIFORM, LogVarianceType.CONSTANT),
    SpaceToDepthDownsample: lambda m: math.prod(m.stride) % m.group_size == 0,
}


class TakenOver(nn.Module):
    """A loaded model of ltx-core with our forward, which differs only in rounding.

    Computes in `arithmetic`, independent of its weights' dtype; norms in float32.
    """

    name: str  # "encoder" or "decoder"

    def __init__(self, model: nn.Module, arithmetic: Arithmetic = FLOAT32):
        """Take over the model's modules. Raises ValueError unless `unknown_modules` is empty."""
        if unknown := self.unknown_modules(model):
            raise ValueError(f"not the released video {self.name}:\n  " + "\n  ".join(unknown))
        nn.Module.__init__(self)
        # Shared, not copied; ltx-core's tiling reads the attributes too.
        self.__dict__.update(model.__dict__)
        self.arithmetic = arithmetic
        if arithmetic.dtype != torch.float32:
            _lay_channels_last(model, arithmetic.dtype)

    @classmethod
    def unknown_modules(cls, model: nn.Module) -> list[str]:
        """Name and type of every module that the released model does not have."""
        return [
            f"{path or cls.name}: {type(module).__name__}({module.extra_repr()})"
            for path, module in model.named_modules()
            if type(module) not in KNOWN or not KNOWN[type(module)](module)
        ]


def _give_back() -> None:
    """Return freed memory to the system.

    glibc keeps freed blocks below 32 MB for every thread: 0.6 GB after twelve tiles of a long clip,
    and 0.2 GB if this is called once per tile. Returning every block at once (M_MMAP_THRESHOLD)
    costs a sixth to a half more CPU time.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


class Stage:
    """Feature maps between two changes of resolution, all (F, H, W, C).

    features  the sum of the residual blocks so far
    active    their PixelNorm and SiLU, which the next convolution reads
    middle    the same between the two convolutions of a residual block

    causal    whether convolutions read the two frames before one, not one before and one after it
    """

    causal = False

    def __init__(self, shape: tuple[int, ...], workers: Workers, arithmetic: Arithmetic):
        self.features, self.active, self.middle = (
            FeatureMap(shape, arithmetic.dtype, self.causal) for _ in range(3)
        )
        self.workers, self.arithmetic = workers, arithmetic

    @classmethod
    def first(
        cls, given: Tensor, conv: nn.Conv3d, workers: Workers, arithmetic: Arithmetic
    ) -> "Stage":
        """The first stage, whose features are a convolution of the model's input (C, F, H, W)."""
        channels, *size = given.shape
        source = FeatureMap((*size, channels), arithmetic.dtype, cls.causal)
        source.inner.copy_(given.permute(1, 2, 3, 0))
        source.repeat_end_frames()
        stage = cls((*size, conv.out_channels), workers, arithmetic)

        def write(frames: slice, rows: slice, piece: Tensor) -> None:
            stage.features.inner[frames, rows] = piece
            activate(piece, stage.active.inner[frames, rows])

        stage.convolve(source, conv.weight, conv.bias, write)
        stage.repeat_end_frames()
        return stage

    def add_residuals(self, block: UNetMidBlock3D) -> None:
        """features += conv2(silu(norm(conv1(silu(norm(features)))))), for every residual block"""

        def write_middle(frames: slice, rows: slice, piece: Tensor) -> None:
            activate(piece, self.middle.inner[frames, rows])

        def write(frames: slice, rows: slice, piece: Tensor) -> None:
            features = self.features.inner[frames, rows]
            features.copy_(piece.add_(features))
            activate(piece, self.active.inner[frames, rows])

        for residual in block.res_blocks:
            first, second = residual.conv1.conv, residual.conv2.conv
            self.convolve(self.active, first.weight, first.bias, write_middle)
            self.middle.repeat_end_frames()
            self.convolve(self.middle, second.weight, second.bias, write)
            self.repeat_end_frames()

    def convolved(self, source: FeatureMap, weight: Tensor, bias: Tensor) -> Tensor:
        """The whole convolution of a map, float32 (F, H, W, Cout)."""
        result = torch.empty(*source.shape[:3], len(weight))

        def write(frames: slice, rows: slice, piece: Tensor) -> None:
            result[frames, rows] = piece

        self.convolve(source, weight, bias, write)
        return result

    def convolve(self, source: FeatureMap, weight: Tensor, bias: Tensor, write: WritePiece) -> None:
        convolve(source, weight, bias, write, self.workers, self.arithmetic)

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


def _lay_channels_last(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the convolutions' weights, in place, in the layout of `convolve_bfloat16`: by tap in
    time, channels last."""
    for module in model.modules():
        if isinstance(module, nn.Conv3d):
            taps_first = module.weight.data.to(dtype).permute(2, 0, 3, 4, 1).contiguous()
            module.weight.data = taps_first.permute(1, 4, 0, 2, 3)


# --- the decoder ----------------------------------------------------------------------------------


class FastVideoDecoder(TakenOver, EagerDecoder):
    """A loaded ltx-core video decoder with our forward, see TakenOver."""

    name = "decoder"

    @torch.no_grad()
    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Decode normalised latents (B, 128, F, h, w) to frames (B, 3, 8F-7, 32h, 32w), float32 in
        about [-1, 1].

        `timestep` and `generator` are in ltx-core's signature; the released decoder uses neither.
        """
        _give_back()
        with Workers() as workers:
            latents = self.per_channel_statistics.un_normalize(sample.float())
            return torch.stack([self._decode(latent, workers) for latent in latents])

    def _decode(self, latent: Tensor, workers: Workers) -> Tensor:
        """Decode one latent (128, F, h, w), un-normalised, to frames (3, 8F-7, 32h, 32w)."""
        stage = _DecoderStage.first(latent, self.conv_in.conv, workers, self.arithmetic)
        for block in self.up_blocks:
            if isinstance(block, UNetMidBlock3D):
                stage.add_residuals(block)
            else:
                stage = stage.upsample(block)
                _give_back()
        conv = self.conv_out.conv
        pixels = stage.convolved(stage.active, conv.weight, conv.bias).permute(3, 0, 1, 2)
        return unpatchify(pixels[None], self.patch_size)[0]


class _DecoderStage(Stage):
    def upsample(self, block: DepthToSpaceUpsample) -> "_DecoderStage":
        """The next stage: a convolution whose output channels become positions.

        With a stride of (p1, p2, p3), output channel (c, i1, i2, i3) of the convolution is channel
        c at one of the p1 x p2 x p3 positions that take the place of one. A stride of 2 in time
        gives 2F frames, of which the first is dropped.
        """
        del self.active, self.middle  # for the next stage, up to 8 times as large
        frames, height, width, inputs = self.features.shape
        time, down, across = block.stride
        parts = time * down * across
        # Channels are ordered (c, part); as (part, c) some parts can be convolved alone.
        weight = block.conv.conv.weight.unflatten(0, (-1, parts)).transpose(0, 1)
        bias = block.conv.conv.bias.unflatten(0, (-1, parts)).transpose(0, 1)
        channels = weight.shape[1]
        larger = frames * time - (time - 1), height * down, width * across, channels
        stage = _DecoderStage(larger, self.workers, self.arithmetic)
        parts_at_once = max(1, LARGEST_FILTERS // (inputs * channels))
        for first in range(0, parts, parts_at_once):

            def write(f: slice, r: slice, piece: Tensor, first: int = first) -> None:
                for part, content in enumerate(piece.split(channels, dim=-1), first):
                    t, y, x = part // (down * across), part // across % down, part % across
                    start, stop = (frame * time + t - (time - 1) for frame in (f.start, f.stop))
                    if start < 0:  # the first frame, which is dropped
                        start, content = start + time, content[1:]
                    positions = (
                        slice(start, stop, time),
                        slice(r.start * down + y, r.stop * down, down),
                        slice(x, None, across),
                    )
                    stage.features.inner[positions] = content
                    activate(content, stage.active.inner[positions])

            some = slice(first, first + parts_at_once)
            self.convolve(self.features, weight[some].flatten(0, 1), bias[some].flatten(), write)
        stage.repeat_end_frames()
        return stage


# --- the encoder ----------------------------------------------------------------------------------


class FastVideoEncoder(TakenOver, VideoEncoder):
    """A loaded ltx-core video encoder with our forward, see TakenOver."""

    name = "encoder"

    @torch.no_grad()
    def forward(self, sample: Tensor) -> Tensor:
        """Encode frames (B, 3, 8F-7, 32h, 32w) in [-1, 1] as normalised latents (B, 128, F, h, w),
        float32. As in ltx-core, further frames are omitted. Raises ValueError for other sides."""
        _, _, frames, height, width = sample.shape
        if height % SPACE_SCALE or width % SPACE_SCALE:
            raise ValueError(f"wanted multiples of {SPACE_SCALE} pixels, got {height}x{width}")
        frames -= (frames - 1) % TIME_SCALE
        _give_back()
        with Workers() as workers:
            means = [self._encode(video[:, :frames], workers) for video in sample]
        return self.per_channel_statistics.normalize(torch.stack(means))

    def _encode(self, video: Tensor, workers: Workers) -> Tensor:
        """Encode one video (3, 8F-7, 32h, 32w) as latents (128, F, h, w) before they are
        normalised."""
        stage = _EncoderStage.first(
            patchify(video[None], self.patch_size)[0], self.conv_in.conv, workers, self.arithmetic
        )
        for block in self.down_blocks:
            if isinstance(block, UNetMidBlock3D):
                stage.add_residuals(block)
            else:
                stage = stage.downsample(block)
                _give_back()
        conv, means = self.conv_out.conv, slice(self.latent_channels)  # before their variance
        latents = stage.convolved(stage.active, conv.weight[means], conv.bias[means])
        return latents.permute(3, 0, 1, 2)


class _EncoderStage(Stage):
    causal = True

    def downsample(self, block: SpaceToDepthDownsample) -> "_EncoderStage":
        """The next stage: the sum of a convolution whose positions become channels, and of the
        features, whose positions become channels averaged in groups.

        With a stride of (p1, p2, p3), channel c at one of p1 x p2 x p3 positions is channel
        (c, i1, i2, i3) of the one that takes their place. A stride of 2 in time takes the first
        frame twice: of the features and of the convolution, which reads that frame alone for both.
        """
        del self.active, self.middle  # frees memory for the next stage
        conv, steps, group = block.conv.conv, block.stride, block.group_size
        result = self.convolved(self.features, conv.weight, conv.bias)
        *sizes, _ = self.features.shape
        smaller = [-(-size // step) for size, step in zip(sizes, steps, strict=True)]
        parts = [*itertools.product(*map(range, steps))]
        channels = conv.out_channels * len(parts)
        stage = _EncoderStage((*smaller, channels), self.workers, self.arithmetic)
        rows_at_once = max(1, NUMBERS_IN_CACHE // (smaller[2] * channels))

        def write(corner: tuple[int, int]) -> None:
            frame, start = corner
            stop = min(smaller[1], start + rows_at_once)
            piece = self.workers.scratch("piece", stop - start, smaller[2], channels)
            taken = [_positions(frame, start, stop, part, steps) for part in parts]
            for number, positions in enumerate(taken):
                piece[..., number :: len(parts)] = result[positions]
            for number, positions in enumerate(taken):
                own = piece[..., number // group :: len(parts) // group]
                own.add_(self.features.inner[positions], alpha=1 / group)
            place = frame, slice(start, stop)
            stage.features.inner[place] = piece
            activate(piece, stage.active.inner[place])

        self.workers.map(
            write, itertools.product(range(smaller[0]), range(0, smaller[1], rows_at_once))
        )
        stage.repeat_end_frames()
        return stage


def _positions(
    frame: int, start: int, stop: int, part: tuple[int, int, int], steps: tuple[int, int, int]
) -> tuple[int, slice, slice]:
    """The input positions of one part of a frame's rows `start` to `stop`."""
    (time, down, across), (t, y, x) = steps, part
    # With a stride of 2 in time the first frame counts twice.
    before = max(0, (frame - 1) * time + 1 + t)
    return before, slice(start * down + y, stop * down, down), slice(x, None, across)
