"""Which vocoders host/sound.py runs: those that are built as the released one."""

import torch
from ltx_core.model.audio_vae import vocoder as ltx
from torch import nn

FILTER = 12  # taps of the low-pass filters around an activation
# Weights of a vocoder that ltx-core runs fast enough.
SMALL = 2**22
# The modules of the released vocoder, with the settings that FastVocoder computes.
_RELEASED_MODULES = {
    ltx.VocoderWithBWE: lambda m: True,
    ltx.Vocoder: lambda m: m.is_amp and not (m.apply_final_activation and m.use_tanh_at_final),
    nn.Conv1d: lambda m: (
        (m.stride, m.groups, m.padding_mode) == ((1,), 1, "zeros")
        and m.kernel_size[0] in (3, 7, 11)
        and m.dilation[0] <= 5
        and 2 * m.padding[0] == (m.kernel_size[0] - 1) * m.dilation[0]
    ),
    nn.ConvTranspose1d: lambda m: (
        (m.dilation, m.groups, m.output_padding) == ((1,), 1, (0,))
        and 2 * m.padding[0] == m.kernel_size[0] - m.stride[0]
    ),
    nn.ModuleList: lambda m: True,
    ltx.AMPBlock1: lambda m: True,
    ltx.Activation1d: lambda m: (
        type(m.act) is ltx.SnakeBeta
        and (m.upsample.ratio, m.upsample.kernel_size) == (2, FILTER)
        and (m.downsample.ratio, m.downsample.kernel_size) == (2, FILTER)
    ),
    ltx.SnakeBeta: lambda m: m.alpha_logscale,
    ltx.UpSample1d: lambda m: True,
    ltx.DownSample1d: lambda m: True,
    ltx.LowPassFilter1d: lambda m: m.padding and m.padding_mode == "replicate",
    ltx.MelSTFT: lambda m: True,
    ltx._STFTFn: lambda m: True,
}


def unknown_modules(vocoder: nn.Module) -> list[str]:
    """Name and type of every module that `FastVocoder` cannot run: those that the released vocoder
    does not have, or that are not in float32. Empty for the released vocoder."""
    return [
        f"{name or 'vocoder'}: {type(module).__name__}({module.extra_repr()})"
        for name, module in vocoder.named_modules()
        if type(module) not in _RELEASED_MODULES
        or not _RELEASED_MODULES[type(module)](module)
        or any(weight.dtype != torch.float32 for weight in module.parameters(recurse=False))
    ]


def pays(vocoder: nn.Module) -> bool:
    """Whether `FastVocoder` can run the vocoder and saves time worth having. A small one keeps
    ltx-core's own forward, and its bits: it takes a second or less for 5 s of sound."""
    return not is_small(vocoder) and not unknown_modules(vocoder)


def is_small(model: nn.Module) -> bool:
    """Whether ltx-core runs a vocoder or a mel decoder fast enough."""
    return sum(weight.numel() for weight in model.parameters()) < SMALL
