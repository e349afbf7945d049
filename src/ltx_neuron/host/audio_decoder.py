"""The released audio decoder, run faster on a CPU: ltx-core's module and weights, which makes mel
spectrograms of latents, with another forward.

Maps are (time, bins, C), as the convolutions of host/amx_maps.py or host/winograd_maps.py take
them.
"""

from collections.abc import Callable

import torch
from ltx_core.model.audio_vae.audio_vae import AudioDecoder
from ltx_core.model.audio_vae.causal_conv_2d import CausalConv2d
from ltx_core.model.audio_vae.causality_axis import CausalityAxis
from ltx_core.model.audio_vae.ops import PerChannelStatistics
from ltx_core.model.audio_vae.resnet import ResnetBlock
from ltx_core.model.audio_vae.upsample import Upsample
from ltx_core.model.common.normalization import PixelNorm
from torch import Tensor, nn

from ltx_neuron.host import fma
from ltx_neuron.host.lanes import LANES
from ltx_neuron.host.winograd import Workers


def pays(decoder: nn.Module, has_amx: bool) -> bool:
    """Whether `FastAudioDecoder` can run the decoder, which is built as the released one, and is
    as near to ltx-core's as ltx-core's is to itself on another processor.

    Without AVX-512 it would not be: ltx-core's spectrogram is 2.8e-6 from float64 there and not
    8.5e-7, and the vocoder answers with four times the difference (benchmarks/audio_decode.md)."""
    return (has_amx or fma.WIDE) and not unknown_modules(decoder)


def unknown_modules(decoder: AudioDecoder) -> list[str]:
    """Name and type of every module that `FastAudioDecoder` cannot run."""
    released = {
        CausalConv2d: lambda m: m.causality_axis == CausalityAxis.HEIGHT,
        nn.Conv2d: lambda m: (
            m.kernel_size in ((3, 3), (1, 1))
            and (m.stride, m.dilation, m.groups) == ((1, 1), (1, 1), 1)
            and m.weight.dtype == torch.float32
        ),
        ResnetBlock: lambda m: (
            not hasattr(m, "temb_proj")
            and m.in_channels % LANES == m.out_channels % LANES == 0
            and (m.in_channels == m.out_channels or hasattr(m, "nin_shortcut"))
        ),
        PixelNorm: lambda m: (m.dim, m.eps) == (1, 1e-6),
        Upsample: lambda m: m.with_conv and m.causality_axis == CausalityAxis.HEIGHT,
        AudioDecoder: lambda m: not (m.tanh_out or m.give_pre_end),
        **dict.fromkeys(
            (PerChannelStatistics, nn.SiLU, nn.Dropout, nn.Identity, nn.ModuleList, nn.Module),
            lambda m: not m.training,
        ),
    }
    return [
        f"{name or 'decoder'}: {type(module).__name__}({module.extra_repr()})"
        for name, module in decoder.named_modules()
        if type(module) not in released or not released[type(module)](module)
    ]


class FastAudioDecoder(AudioDecoder):
    """A loaded ltx-core audio decoder with another forward, which differs in rounding only."""

    def __init__(self, decoder: AudioDecoder, has_amx: bool = False):
        """Take over the decoder's modules. Raises ValueError unless `unknown_modules` is empty.

        has_amx  its convolutions are computed by AMX, if all have weights of bf16
        """
        if unknown := unknown_modules(decoder):
            raise ValueError("not the released audio decoder:\n  " + "\n  ".join(unknown))
        nn.Module.__init__(self)
        self.__dict__.update(decoder.__dict__)  # shared and not copied
        modules = {
            causal: causal.conv for causal in self.modules() if isinstance(causal, CausalConv2d)
        }
        kind = convolutions_by(has_amx, [*modules.values()])
        self.convolutions = {causal: kind(conv) for causal, conv in modules.items()}

    @torch.no_grad()
    def forward(self, sample: Tensor) -> Tensor:
        """Latents (B, 8, T, bins) to mel spectrograms (B, 2, time, mel bins)."""
        with Workers() as workers:
            return torch.cat([self._decode(latent[None], workers) for latent in sample])

    def _decode(self, latent: Tensor, workers: Workers) -> Tensor:
        latent, shape = self._denormalize_latents(latent)
        x = self.convolutions[self.conv_in].convolve(
            latent[0].permute(1, 2, 0).contiguous(), workers
        )
        for block in (self.mid.block_1, self.mid.block_2):
            x = self._run(block, x, workers)
        for stage in reversed(self.up):
            for block in stage.block:
                x = self._run(block, x, workers)
            if hasattr(stage, "upsample"):
                enlarge = self.convolutions[stage.upsample.conv]
                x = enlarge.convolve(x, workers, scale=2)[1:]
        x = self.convolutions[self.conv_out].convolve(x, workers, active=True)
        return self._adjust_output_shape(x.permute(2, 0, 1)[None], shape)

    def _run(self, block: ResnetBlock, x: Tensor, workers: Workers) -> Tensor:
        """What a block makes of x, which is overwritten."""
        hidden = workers.scratch("hidden", *x.shape[:2], block.out_channels)
        first, second = (self.convolutions[conv] for conv in (block.conv1, block.conv2))
        first.convolve(x, workers, active=True, out=hidden)
        if block.in_channels != block.out_channels:
            x = self.convolutions[block.nin_shortcut].convolve(x, workers)
        return second.convolve(hidden, workers, active=True, x=x, out=x)


def convolutions_by(has_amx: bool, convolutions: list[nn.Conv2d]) -> Callable:
    """What computes these convolutions: a class of them. Compiles it, or loads what was."""
    if has_amx:
        from ltx_neuron.host import amx_convolution, amx_maps

        if all(map(amx_convolution.takes, convolutions)):
            return amx_maps.Convolution
    from ltx_neuron.host import winograd_maps

    return winograd_maps.Convolution
