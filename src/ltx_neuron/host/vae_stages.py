"""What the forwards of the released video decoder and encoder have in common: ltx-core's modules
and weights, and the feature maps between two changes of resolution.

Feature maps have their channels last and lie inside the border that convolutions read. A
convolution hands over its result piece by piece, and what follows it (residual sum, PixelNorm,
SiLU, depth to space) is done while the piece is in cache.
"""

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from ltx_core.model.common.normalization import PixelNorm
from ltx_core.model.video_vae.convolution import CausalConv3d
from ltx_core.model.video_vae.ops import PerChannelStatistics
from ltx_core.model.video_vae.resnet import ResnetBlock3D, UNetMidBlock3D
from torch import Tensor, nn

from ltx_neuron.host.arithmetic import FLOAT32, Arithmetic
from ltx_neuron.host.background import Workers
from ltx_neuron.host.winograd import FeatureMap, WritePiece, convolve

EPS = 1e-8  # of PixelNorm
# Latents that are computed before freed memory is given back once more, with every stage of a tile.
# What is given back is taken again, in 0.1 s; so many latents take 10 s on two cores with AMX.
GIVE_BACK = 1024
# A type of module -> whether one of that type has the settings that a forward computes.
Known = dict[type[nn.Module], Callable[[nn.Module], bool]]
# Those of the released decoder and encoder, with the settings that the forwards below compute.
KNOWN: Known = {
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
}


class TakenOver(nn.Module):
    """A loaded model of ltx-core with another forward, which differs in rounding only.

    Computes in `arithmetic` whatever the dtype of its weights; norms in float32.

    name      "encoder" or "decoder"
    released  the modules that the forward computes
    """

    name: str
    released: Known

    def __init__(self, model: nn.Module, arithmetic: Arithmetic = FLOAT32):
        """Take over the model's modules. Raises ValueError unless `unknown_modules` is empty."""
        if unknown := self.unknown_modules(model):
            raise ValueError(f"not the released video {self.name}:\n  " + "\n  ".join(unknown))
        nn.Module.__init__(self)
        # Shared and not copied; ltx-core's tiling reads the attributes too.
        self.__dict__.update(model.__dict__)
        self.arithmetic = arithmetic
        self._since = GIVE_BACK  # latents since freed memory was given back
        if arithmetic.dtype != torch.float32:
            _lay_channels_last(model, arithmetic.dtype)

    @classmethod
    def unknown_modules(cls, model: nn.Module) -> list[str]:
        """Name and type of every module that the released model does not have."""
        return [
            f"{path or cls.name}: {type(module).__name__}({module.extra_repr()})"
            for path, module in model.named_modules()
            if type(module) not in cls.released or not cls.released[type(module)](module)
        ]

    def give_back(self, latents: int) -> None:
        """Before so many latents: give freed memory back to the system, where it is time to."""
        self._gives_back = self._since >= GIVE_BACK
        if self._gives_back:
            self._since = 0
            _give_back()
        self._since += latents

    def give_back_between_stages(self) -> None:
        """The same between two stages of these latents: what the first one freed fits nothing that
        the second one takes."""
        if self._gives_back:
            _give_back()


def _give_back() -> None:
    """Give freed memory back to the system.

    Of blocks below 32 MB glibc keeps what it can, for every thread, in pieces between others: with
    every tile of a long clip more, 0.6 GB after twelve, and still 0.2 GB of one tile's if this is
    done once a tile. To have all of them given back at once (M_MMAP_THRESHOLD) costs a sixth to a
    half more CPU time.
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
            FeatureMap(*shape, arithmetic.dtype, self.causal) for _ in range(3)
        )
        self.workers, self.arithmetic = workers, arithmetic

    @classmethod
    def first(
        cls, given: Tensor, conv: nn.Conv3d, workers: Workers, arithmetic: Arithmetic
    ) -> "Stage":
        """The first stage: its features are the convolution of what the model is given, (C, F, H,
        W)."""
        channels, *size = given.shape
        source = FeatureMap(*size, channels, arithmetic.dtype, cls.causal)
        source.inner.copy_(given.permute(1, 2, 3, 0))
        source.repeat_end_frames()
        stage = cls(*size, conv.out_channels, workers, arithmetic)

        def write(frames: slice, rows: slice, piece: Tensor) -> None:
            stage.features.inner[frames, rows] = piece
            activate(piece, stage.active.inner[frames, rows])

        stage.convolve(source, conv.weight, conv.bias, write)
        stage.repeat_end_frames()
        return stage

    def add_residuals(self, block: UNetMidBlock3D) -> None:
        for residual in block.res_blocks:
            self._add_residual(residual)

    def _add_residual(self, block: ResnetBlock3D) -> None:
        """features += conv2(silu(norm(conv1(silu(norm(features))))))"""

        def write_middle(frames: slice, rows: slice, piece: Tensor) -> None:
            activate(piece, self.middle.inner[frames, rows])

        def write(frames: slice, rows: slice, piece: Tensor) -> None:
            features = self.features.inner[frames, rows]
            features.copy_(piece.add_(features))
            activate(piece, self.active.inner[frames, rows])

        first, second = block.conv1.conv, block.conv2.conv
        self.convolve(self.active, first.weight, first.bias, write_middle)
        self.middle.repeat_end_frames()
        self.convolve(self.middle, second.weight, second.bias, write)
        self.repeat_end_frames()

    def convolved(self, source: FeatureMap, weight: Tensor, bias: Tensor) -> Tensor:
        """The convolution of a map, whole, float32 (F, H, W, Cout)."""
        result = torch.empty(*source.shape[:3], len(weight))

        def write(frames: slice, rows: slice, piece: Tensor) -> None:
            result[frames, rows] = piece

        self.convolve(source, weight, bias, write)
        return result

    def convolve(self, source: FeatureMap, weight: Tensor, bias: Tensor, write: WritePiece) -> None:
        _, speed, libraries = self.arithmetic
        convolve(source, weight, bias, write, self.workers, speed, libraries.tile)

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
    """Lay the convolutions' weights in memory, in place, as `convolve_bfloat16` reads them: tap by
    tap in time, channels last."""
    for module in model.modules():
        if isinstance(module, nn.Conv3d):
            taps_first = module.weight.data.to(dtype).permute(2, 0, 3, 4, 1).contiguous()
            module.weight.data = taps_first.permute(1, 4, 0, 2, 3)
