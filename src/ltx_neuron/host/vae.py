"""The released video decoder, run faster on a CPU: ltx-core's modules and weights, and a forward of
our own.

Feature maps lie with their channels last, inside the border that convolutions read. A convolution
hands over its result piece by piece, and what follows it (sum, norm, activation, depth to space) is
done while the piece is in cache.
"""

import torch
import torch.nn.functional as F
from ltx_core.model.common.normalization import PixelNorm
from ltx_core.model.video_vae import VideoDecoder
from ltx_core.model.video_vae.convolution import CausalConv3d
from ltx_core.model.video_vae.ops import PerChannelStatistics, unpatchify
from ltx_core.model.video_vae.resnet import ResnetBlock3D, UNetMidBlock3D
from ltx_core.model.video_vae.sampling import DepthToSpaceUpsample
from torch import Tensor, nn

from ltx_neuron.host.winograd import LARGEST_FILTERS, Map, Workers, convolve

EPS = 1e-8
# What the released decoder is made of. A module of another type, or with other settings, is not
# ours to run.
_KNOWN = {
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


def unknown_parts(decoder: nn.Module) -> list[str]:
    """Name and type of every module of a decoder that the released one does not have; none if
    `FastVideoDecoder` can run it."""
    return [
        f"{name or 'decoder'}: {type(module).__name__}({module.extra_repr()})"
        for name, module in decoder.named_modules()
        if type(module) not in _KNOWN or not _KNOWN[type(module)](module)
    ]


class FastVideoDecoder(VideoDecoder):
    """A loaded ltx-core video decoder with another forward. Computes in float32 whatever the dtype
    of its weights."""

    def __init__(self, decoder: VideoDecoder):
        """Takes over the decoder's modules. Raises ValueError where it is not built as the released
        one."""
        if unknown := unknown_parts(decoder):
            raise ValueError("not the released video decoder:\n  " + "\n  ".join(unknown))
        nn.Module.__init__(self)
        self.__dict__.update(decoder.__dict__)

    @torch.no_grad()
    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Frames (B, 3, 8F-7, 32h, 32w), float32 in about [-1, 1], of normalised latents (B, 128,
        F, h, w).

        The released decoder uses neither timestep nor noise.
        """
        with Workers() as workers:
            latents = self.per_channel_statistics.un_normalize(sample.float())
            return torch.stack([self._decoded(latent, workers) for latent in latents])

    def _decoded(self, latent: Tensor, workers: Workers) -> Tensor:
        channels, *size = latent.shape
        source = Map(*size, channels)
        source.inner.copy_(latent.permute(1, 2, 3, 0))
        source.repeat_ends()
        stage = _Stage(*size, self.conv_in.conv.out_channels, workers)
        stage.enter(source, self.conv_in.conv)
        for block in self.up_blocks:
            if isinstance(block, UNetMidBlock3D):
                for residual in block.res_blocks:
                    stage.residual(residual)
            else:
                stage = stage.upsampled(block)
        return unpatchify(
            stage.left(self.conv_out.conv).permute(3, 0, 1, 2)[None], self.patch_size
        )[0]


class _Stage:
    """What lies between two upsamplings: the features, and their activation, which is what the next
    convolution reads."""

    def __init__(self, frames: int, height: int, width: int, channels: int, workers: Workers):
        self.features, self.active, self.middle = (
            Map(frames, height, width, channels) for _ in range(3)
        )
        self.workers = workers

    def enter(self, source: Map, conv: nn.Conv3d) -> None:
        """Begin with the convolution of a map."""

        def write(f: slice, r: slice, piece: Tensor) -> None:
            self.features.inner[f, r] = piece
            _activate(piece, self.active.inner[f, r])

        convolve(source, conv.weight, conv.bias, write, self.workers)
        self._repeat_ends()

    def residual(self, block: ResnetBlock3D) -> None:
        """Add a residual block's result to the features."""

        def write_middle(f: slice, r: slice, piece: Tensor) -> None:
            _activate(piece, self.middle.inner[f, r])

        def write(f: slice, r: slice, piece: Tensor) -> None:
            _activate(self.features.inner[f, r].add_(piece), self.active.inner[f, r])

        first, second = block.conv1.conv, block.conv2.conv
        convolve(self.active, first.weight, first.bias, write_middle, self.workers)
        self.middle.repeat_ends()
        convolve(self.middle, second.weight, second.bias, write, self.workers)
        self._repeat_ends()

    def upsampled(self, block: DepthToSpaceUpsample) -> "_Stage":
        """The next stage. Output channel (c, p1, p2, p3) of the convolution is channel c at one of
        a position's p1 x p2 x p3.

        With a stride of 2 in time the first frame goes. This stage's activation is dropped, to make
        room.
        """
        del self.active, self.middle
        frames, height, width, inputs = self.features.shape
        time, down, across = block.stride
        parts = time * down * across
        weight, bias = (
            t.unflatten(0, (-1, parts)).transpose(0, 1)
            for t in (block.conv.conv.weight, block.conv.conv.bias)
        )
        channels = weight.shape[1]
        stage = _Stage(
            frames * time - (time - 1), height * down, width * across, channels, self.workers
        )
        together = max(1, LARGEST_FILTERS // (inputs * channels))
        for first in range(0, parts, together):

            def write(f: slice, r: slice, piece: Tensor, first: int = first) -> None:
                for part, content in enumerate(piece.split(channels, dim=-1), first):
                    t, y, x = part // (down * across), part // across % down, part % across
                    start, stop = (frame * time + t - (time - 1) for frame in (f.start, f.stop))
                    if start < 0:
                        start, content = start + time, content[1:]
                    at = (
                        slice(start, stop, time),
                        slice(r.start * down + y, r.stop * down, down),
                        slice(x, None, across),
                    )
                    stage.features.inner[at] = content
                    _activate(content, stage.active.inner[at])

            some = slice(first, first + together)
            convolve(
                self.features, weight[some].flatten(0, 1), bias[some].flatten(), write, self.workers
            )
        stage._repeat_ends()
        return stage

    def left(self, conv: nn.Conv3d) -> Tensor:
        """The convolution (F, H, W, Cout) of the active features."""
        found = torch.empty(*self.active.shape[:3], conv.out_channels)

        def write(f: slice, r: slice, piece: Tensor) -> None:
            found[f, r] = piece

        convolve(self.active, conv.weight, conv.bias, write, self.workers)
        return found

    def _repeat_ends(self) -> None:
        self.features.repeat_ends()
        self.active.repeat_ends()


def _activate(piece: Tensor, out: Tensor) -> None:
    """PixelNorm and SiLU of (..., C)."""
    torch.ops.aten.silu.out(F.rms_norm(piece, piece.shape[-1:], eps=EPS), out=out)
