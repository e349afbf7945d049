"""A diffusion decoder of a few channels, with random weights from a seed."""

import json
from pathlib import Path

import torch
from helpers import generator
from safetensors.torch import load_file, save_file
from torch import Tensor

from ltx_neuron.config.diffusion import DiffusionDecoderConfig, diffusion_decoder_config
from ltx_neuron.host.diffusion import DiffusionDecoder, HostSpans

_DECODER = {"in_channels": 8, "out_channels": 3, "patch_size": 4, "head_dim": 16, "stage5_kernel": [5, 5, 7]}
_DECODER |= {"stage_channels": [32, 32, 16, 16, 16], "stage_depths": [1, 2, 1, 1, 3]}
_DECODER |= {"stage_kernels": [[3, 3, 3], [3, 3, 3], [3, 3, 3], [3, 5, 3], [5, 5, 7]]}
_DECODER |= {"upsamples": [[[1, 2, 2], 1], [[2, 1, 1], 2], [[2, 2, 2], 1], [[2, 2, 2], 1]]}
_DECODER |= {"timestep_scale_multiplier": 1000.0, "default_num_inference_steps": 1}
VAE = {"_class_name": "CausalDiffusionVAE", "model_output_type": "x0", "decoder": _DECODER}
SEED = 7  # of the golden frames' noise
GATED = ["diff_blocks.0.gate_msa"]
# By latent shape: every few frames, rows and columns that ltx-core 1.2.0's DiffusionVideoDecoder decodes from `latent`
# in float32, with NATTEN's neighbourhoods of the whole clip.
GOLDEN = load_file(Path(__file__).parent / "golden" / "diffusion_decoder.safetensors")
GOLDEN_STEPS = {"2x2x4": 4, "6x5x7": 8}


def config_of(names=GATED) -> DiffusionDecoderConfig:
    return diffusion_decoder_config({"vae": VAE}, names)


def weights(config: DiffusionDecoderConfig) -> dict[str, Tensor]:
    """The golden frames' weights by name, float32."""
    drawn, made = generator(1), {}
    for name, parameter in sorted(HostSpans(config).named_parameters()):
        weight = torch.randn(parameter.shape, generator=drawn)
        if weight.ndim == 2 and "table" not in name:
            made[name] = weight * weight.shape[1] ** -0.5
        elif any(part in name for part in ("norm", "gate", "std")):
            made[name] = 1 + 0.3 * weight
        else:
            made[name] = 0.3 * weight
    return made


def spans(dtype: torch.dtype = torch.float32) -> HostSpans:
    """The decoder on the host with the golden frames' weights."""
    config = config_of()
    decoder = HostSpans(config)
    decoder.load_state_dict(weights(config), assign=True)
    return decoder.to(dtype).requires_grad_(False)


def write(path: Path, **more: Tensor) -> Path:
    """Write the decoder's file under the names of a checkpoint. more: further tensors."""
    named = {f"vae.decoder.{name}": tensor for name, tensor in weights(config_of()).items()}
    shared = "decoder.per_channel_statistics", "per_channel_statistics"
    save_file(
        {name.replace(*shared): tensor for name, tensor in named.items()} | more,
        path,
        metadata={"config": json.dumps({"vae": VAE})},
    )
    return path


def latent(shape: tuple[int, int, int], seed: int = 2) -> Tensor:
    return torch.randn(1, 8, *shape, generator=generator(seed))


def pixels(decoder, shape: tuple[int, int, int], seed: int = SEED) -> Tensor:
    chunks = DiffusionDecoder(decoder.config, shape, decoder).pixels(latent(shape), seed)
    return torch.cat([*chunks], 2)[0].permute(1, 2, 3, 0)
