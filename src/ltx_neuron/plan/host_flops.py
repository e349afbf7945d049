"""FLOPs of the host's models, counted by torch on the meta device from ltx-core's own modules: a
convolution counts as a direct one, however it is computed."""

from collections.abc import Callable

import torch
from ltx_core.model.upsampler import LatentUpsamplerConfigurator
from ltx_core.model.video_vae import VideoDecoderConfigurator
from torch.utils.flop_counter import FlopCounterMode

Shape = tuple[int, int, int]  # latent frames, rows, columns


def video_decoder_flops(config: dict, tile: Shape) -> int:
    """Of decoding a tile of latents. config: the checkpoint's."""
    return _counted(VideoDecoderConfigurator.from_config, config, tile)


def upsampler_flops(latent: Shape, kind: str) -> int:
    """Of the released "spatial" or "temporal" upsampler; its file need not be there."""
    config = {f"{name}_upsample": name == kind for name in ("spatial", "temporal")}
    return _counted(LatentUpsamplerConfigurator.from_config, config, latent)


def _counted(from_config: Callable[[dict], torch.nn.Module], config: dict, latent: Shape) -> int:
    with torch.device("meta"):
        module = from_config(config)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(torch.empty(1, 128, *latent))
    return counter.get_total_flops()
