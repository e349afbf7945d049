"""The released video decoder, run faster on a CPU: ltx-core's modules and weights with another
forward.

Feature maps have their channels last and lie inside the border that convolutions read. A
convolution hands over its result piece by piece, and what follows it (residual sum, PixelNorm,
SiLU, depth to space) is done while the piece is in cache.
"""

import ctypes

import torch
import torch.nn.functional as F
from ltx_core.model.common.normalization import PixelNorm
from ltx_core.model.video_vae import VideoDecoder
from ltx_core.model.video_vae.convolution import CausalConv3d
from ltx_core.model.video_vae.ops import PerChannelStatistics, unpatchify
from ltx_core.model.video_vae.resnet import ResnetBlock3D, UNetMidBlock3D
from ltx_core.model.video_vae.sampling import DepthToSpaceUpsample
from torch import Tensor, nn

from ltx_neuron.host.arithmetic import FLOAT32, Arithmetic
from ltx_neuron.host.tiles import EagerDecoder
from ltx_neuron.host.winograd import LARGEST_FILTERS, FeatureMap, Workers, WritePiece, convolve

EPS = 1e-8  # of PixelNorm
# Latents that are decoded before freed memory is given back once more, with every upsampling of a
# tile. What is given back is taken again, in 0.1 s; so many latents take 10 s on two AMX cores.
GIVE_BACK = 1024
# The modules of the released decoder, with the settings that the forward below computes.
_RELEASED_MODULES = {
    VideoDecoder: lambda m: not m.causal and not m.timestep_conditioning,
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
    DepthToSpaceUpsample: lambda m: not m.residual,
}


def unknown_modules(decoder: nn.Module) -> list[str]:
    """Name and type of every module that `FastVideoDecoder` cannot run: those that the released
    decoder does not have. Empty for the released decoder."""
    return [
        f"{name or 'decoder'}: {type(module).__name__}({module.extra_repr()})"
        for name, module in decoder.named_modules()
        if type(module) not in _RELEASED_MODULES or not _RELEASED_MODULES[type(module)](module)
    ]


class FastVideoDecoder(EagerDecoder):
    """A loaded ltx-core video decoder with another forward, which differs in rounding only.

    Computes in `arithmetic` whatever the dtype of its weights; norms in float32.
    """

    def __init__(self, decoder: VideoDecoder, arithmetic: Arithmetic = FLOAT32):
        """Take over the decoder's modules. Raises ValueError unless `unknown_modules` is empty."""
        if unknown := unknown_modules(decoder):
            raise ValueError("not the released video decoder:\n  " + "\n  ".join(unknown))
        nn.Module.__init__(self)
        # Shared and not copied; ltx-core's tiling reads the attributes too.
        self.__dict__.update(decoder.__dict__)
        self.arithmetic = arithmetic
        self._since = GIVE_BACK  # latents since freed memory was given back
        if arithmetic.dtype != torch.float32:
            _lay_channels_last(decoder, arithmetic.dtype)

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
        give_back = self._since >= GIVE_BACK
        if give_back:
            self._since = 0
            _give_back()
        self._since += sample[:, 0].numel()
        with Workers() as workers:
            latents = self.per_channel_statistics.un_normalize(sample.float())
            return torch.stack([self._decode(latent, workers, give_back) for latent in latents])

    def _decode(self, latent: Tensor, workers: Workers, give_back: bool) -> Tensor:
        """Decode one latent (128, F, h, w), un-normalised, to frames (3, 8F-7, 32h, 32w)."""
        channels, *size = latent.shape
        source = FeatureMap(*size, channels, self.arithmetic.dtype)
        source.inner.copy_(latent.permute(1, 2, 3, 0))
        source.repeat_end_frames()
        stage = _Stage(*size, self.conv_in.conv.out_channels, workers, self.arithmetic)
        stage.conv_in(source, self.conv_in.conv)
        for block in self.up_blocks:
            if isinstance(block, UNetMidBlock3D):
                for residual in block.res_blocks:
                    stage.add_residual(residual)
            else:
                stage = stage.upsample(block)
                if give_back:  # the blocks of the stage before, which fit none of the next one's
                    _give_back()
        pixels = stage.conv_out(self.conv_out.conv).permute(3, 0, 1, 2)
        return unpatchify(pixels[None], self.patch_size)[0]


class _Stage:
    """Feature maps between two upsamplings, all (F, H, W, C).

    features  the sum of the residual blocks so far
    active    their PixelNorm and SiLU, which the next convolution reads
    middle    the same between the two convolutions of a residual block
    """

    def __init__(
        self,
        frames: int,
        height: int,
        width: int,
        channels: int,
        workers: Workers,
        arithmetic: Arithmetic,
    ):
        shape = frames, height, width, channels
        self.features, self.active, self.middle = (
            FeatureMap(*shape, arithmetic.dtype) for _ in range(3)
        )
        self.workers, self.arithmetic = workers, arithmetic

    def conv_in(self, source: FeatureMap, conv: nn.Conv3d) -> None:
        """Fill the first stage's features with the convolution of the latent, `source`."""

        def write(frames: slice, rows: slice, piece: Tensor) -> None:
            self.features.inner[frames, rows] = piece
            _activate(piece, self.active.inner[frames, rows])

        self._convolve(source, conv.weight, conv.bias, write)
        self._repeat_end_frames()

    def add_residual(self, block: ResnetBlock3D) -> None:
        """features += conv2(silu(norm(conv1(silu(norm(features))))))"""

        def write_middle(frames: slice, rows: slice, piece: Tensor) -> None:
            _activate(piece, self.middle.inner[frames, rows])

        def write(frames: slice, rows: slice, piece: Tensor) -> None:
            features = self.features.inner[frames, rows]
            features.copy_(piece.add_(features))
            _activate(piece, self.active.inner[frames, rows])

        first, second = block.conv1.conv, block.conv2.conv
        self._convolve(self.active, first.weight, first.bias, write_middle)
        self.middle.repeat_end_frames()
        self._convolve(self.middle, second.weight, second.bias, write)
        self._repeat_end_frames()

    def upsample(self, block: DepthToSpaceUpsample) -> "_Stage":
        """The next stage: a convolution, whose output channels become positions.

        With a stride of (p1, p2, p3), output channel (c, i1, i2, i3) of the convolution is channel
        c at one of the p1 x p2 x p3 positions that take the place of one. A stride of 2 in time
        gives 2F frames, of which the first is dropped.
        """
        del self.active, self.middle  # room for the next stage, which is up to 8 times as large
        frames, height, width, inputs = self.features.shape
        time, down, across = block.stride
        parts = time * down * across
        # Channels are ordered (c, part); as (part, c) some parts can be convolved alone.
        weight = block.conv.conv.weight.unflatten(0, (-1, parts)).transpose(0, 1)
        bias = block.conv.conv.bias.unflatten(0, (-1, parts)).transpose(0, 1)
        channels = weight.shape[1]
        larger = frames * time - (time - 1), height * down, width * across
        stage = _Stage(*larger, channels, self.workers, self.arithmetic)
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
                    _activate(content, stage.active.inner[positions])

            some = slice(first, first + parts_at_once)
            self._convolve(self.features, weight[some].flatten(0, 1), bias[some].flatten(), write)
        stage._repeat_end_frames()
        return stage

    def conv_out(self, conv: nn.Conv3d) -> Tensor:
        """The convolution (F, H, W, Cout) of the last stage's active features."""
        pixels = torch.empty(*self.active.shape[:3], conv.out_channels)

        def write(frames: slice, rows: slice, piece: Tensor) -> None:
            pixels[frames, rows] = piece

        self._convolve(self.active, conv.weight, conv.bias, write)
        return pixels

    def _convolve(
        self, source: FeatureMap, weight: Tensor, bias: Tensor, write: WritePiece
    ) -> None:
        _, speed, libraries = self.arithmetic
        convolve(source, weight, bias, write, self.workers, speed, libraries.tile)

    def _repeat_end_frames(self) -> None:
        self.features.repeat_end_frames()
        self.active.repeat_end_frames()


def _give_back() -> None:
    """Give freed memory back to the system.

    Of blocks below 32 MB glibc keeps what it can, for every thread, in pieces between others: with
    every tile of a long clip more, 0.6 GB after twelve, and still 0.2 GB of one tile's if this is
    done once a tile. To have all of them given back at once (M_MMAP_THRESHOLD) costs a sixth to a
    half more CPU time.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _activate(piece: Tensor, out: Tensor) -> None:
    """Write PixelNorm and SiLU of (..., C) to `out`; computed in float32."""
    normed = F.rms_norm(piece.float(), piece.shape[-1:], eps=EPS)
    if out.dtype == torch.float32:
        torch.ops.aten.silu.out(normed, out=out)
    else:
        out.copy_(F.silu(normed, inplace=True))


def _lay_channels_last(decoder: VideoDecoder, dtype: torch.dtype) -> None:
    """Lay the convolutions' weights in memory, in place, as `convolve_bfloat16` reads them: tap by
    tap in time, channels last."""
    for module in decoder.modules():
        if isinstance(module, nn.Conv3d):
            taps_first = module.weight.data.to(dtype).permute(2, 0, 3, 4, 1).contiguous()
            module.weight.data = taps_first.permute(1, 4, 0, 2, 3)
