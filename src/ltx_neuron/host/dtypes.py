"""The dtype in which the host computes the video VAE and the upsamplers.

bfloat16 is used where the CPU multiplies it: its convolutions have 1 to 2 times the rate of
float32's with AVX-512, 6 to 10 times with AMX, and a third of it without such instructions
(benchmarks/vae_decode.md).
"""

import torch

from ltx_neuron import machine

_BFLOAT16 = {"avx512_bf16", "amx_bf16"}


def of_video(setting: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the video decoder's feature maps and convolutions.

    setting  "float32", "bfloat16", or "auto": bfloat16 if the run and the CPU use it
    dtype    of the run
    """
    if setting != "auto":
        return getattr(torch, setting)
    fast = dtype == torch.bfloat16 and not _BFLOAT16.isdisjoint(machine.instructions())
    return torch.bfloat16 if fast else torch.float32


def of_latents(video: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the encoder and the upsamplers. A float32 run makes latents in float32, also if
    frames are decoded in bfloat16. video, dtype: as in `of_video`"""
    return video if dtype == torch.bfloat16 else torch.float32
