"""Random weights under the released names: checkpoint, upsamplers and LoRA."""

# The annotation of ltx-core's from_config returns the wrong class.
# pyright: reportAttributeAccessIssue=false

import json
import math
from pathlib import Path

import torch
from torch import Generator, Tensor

from tiny.config import TinySizes

DIFFUSION = "model.diffusion_model."
LORA_RANK = 4
QUIET = 1e-4  # scale of the vocoder's last convolutions, to avoid clipping


def random_weight(name: str, like: Tensor, generator: Generator) -> Tensor:
    """A random fp32 tensor of like's shape. Its scale depends on the kind of weight, by its name,
    so that activations keep their scale from layer to layer."""
    noise = torch.randn(like.shape, generator=generator)
    if name.endswith("std-of-means"):
        return 1.0 + 0.3 * torch.rand(like.shape, generator=generator)
    if name.endswith("mean-of-means"):
        return 0.1 * noise
    if "scale_shift_table" in name:
        return 0.2 * noise
    if like.ndim == 1:
        return 0.1 * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    if name.endswith("learnable_registers"):
        return noise
    return noise / math.sqrt(math.prod(like.shape[1:]))


def random_weights(shapes: dict[str, Tensor], generator: Generator) -> dict[str, Tensor]:
    """Random fp32 weights for a state dict. The vocoder's low-pass filters are constants and keep
    their values."""
    return {
        name: like.clone() if name.endswith(".filter") else random_weight(name, like, generator)
        for name, like in shapes.items()
    }


def checkpoint_weights(config: dict, sizes: TinySizes) -> dict[str, Tensor]:
    """All tensors of the single-file checkpoint under their published names: bf16, and fp32 for
    the scale-shift tables."""
    from ltx_neuron.host.models import import_ltx_core

    import_ltx_core()
    generator = torch.Generator().manual_seed(sizes.seed)
    weights: dict[str, Tensor] = {}
    for prefix, shapes in _shapes_by_prefix(config, sizes).items():
        for name, weight in random_weights(shapes, generator).items():
            # Encoder and decoder share one set of statistics.
            shared = name.startswith("per_channel_statistics.")
            owner = prefix.partition(".")[0] + "." if shared else prefix
            weights.setdefault(owner + name, weight)
    weights |= vocoder_weights(config, generator)
    return {
        name: weight.to(torch.float32 if "scale_shift_table" in name else torch.bfloat16)
        for name, weight in weights.items()
    }


def _shapes(configurator, config: dict) -> dict[str, Tensor]:
    """The state dict of one of ltx-core's models on the meta device: names and shapes."""
    with torch.device("meta"):
        return configurator.from_config(config).state_dict()


def _shapes_by_prefix(config: dict, sizes: TinySizes) -> dict[str, dict[str, Tensor]]:
    """Published prefix and state dict of each model, in the order of drawing their weights."""
    from ltx_core.model import audio_vae, video_vae
    from ltx_core.model.transformer import LTXModelConfigurator
    from ltx_core.text_encoders.gemma.embeddings_connector import (
        AudioEmbeddings1DConnectorConfigurator,
        Embeddings1DConnectorConfigurator,
    )

    configurators = {
        f"{DIFFUSION}video_embeddings_connector.": Embeddings1DConnectorConfigurator,
        f"{DIFFUSION}audio_embeddings_connector.": AudioEmbeddings1DConnectorConfigurator,
        "vae.encoder.": video_vae.VideoEncoderConfigurator,
        "vae.decoder.": video_vae.VideoDecoderConfigurator,
        "audio_vae.encoder.": audio_vae.AudioEncoderConfigurator,
        "audio_vae.decoder.": audio_vae.AudioDecoderConfigurator,
    }
    return {
        DIFFUSION: _shapes(LTXModelConfigurator, config),
        "text_embedding_projection.": _text_projection_shapes(config["transformer"], sizes),
        **{prefix: _shapes(one, config) for prefix, one in configurators.items()},
    }


def _text_projection_shapes(transformer: dict, sizes: TinySizes) -> dict[str, Tensor]:
    """The two projections from Gemma's concatenated hidden states, including the embedding, to a
    stream's channels.

    weight (stream channels, gemma_hidden * (gemma_layers + 1)), bias (stream channels,)
    """
    features = sizes.gemma_hidden * (sizes.gemma_layers + 1)
    shapes = {}
    for stream, prefix in (("video", ""), ("audio", "audio_")):
        heads, head_dim = "num_attention_heads", "attention_head_dim"
        channels = transformer[prefix + heads] * transformer[prefix + head_dim]
        shapes[f"{stream}_aggregate_embed.weight"] = torch.empty(channels, features, device="meta")
        shapes[f"{stream}_aggregate_embed.bias"] = torch.empty(channels, device="meta")
    return shapes


def vocoder_weights(config: dict, generator: Generator) -> dict[str, Tensor]:
    """The vocoder's tensors under their published names, with the constants of its STFT."""
    from ltx_core.model.audio_vae import VocoderConfigurator

    # Not on meta: its state dict contains the values of the low-pass filters.
    weights = random_weights(VocoderConfigurator.from_config(config).state_dict(), generator)
    # Quiet: in a clipped waveform, rounding errors of the input grow a thousandfold.
    for name in weights:
        if name.endswith("conv_post.weight"):
            weights[name] *= QUIET
    for name, basis in mel_stft(config["vocoder"]["bwe"]).items():
        weights[f"mel_stft.{name}"] = basis
    return {f"vocoder.{name}": weight for name, weight in weights.items()}


def mel_stft(bwe: dict) -> dict[str, Tensor]:
    """The constants of the bandwidth extension's mel spectrogram.

    Fourier bases (2 * frequencies, 1, n_fft): windowed cosines, then sines, of n_fft // 2 + 1
    frequencies. Mel basis (num_mels, frequencies): triangular filters.
    """
    n_fft, rate = bwe["n_fft"], bwe["input_sampling_rate"]
    sample = torch.arange(n_fft, dtype=torch.float64)
    frequency = torch.arange(n_fft // 2 + 1, dtype=torch.float64)
    angle = 2 * math.pi * frequency[:, None] * sample[None] / n_fft
    window = torch.hann_window(n_fft, periodic=True, dtype=torch.float64)
    fourier = (torch.cat([torch.cos(angle), -torch.sin(angle)]) * window)[:, None]
    top = 2595 * math.log10(1 + rate / 2 / 700)
    corners = 700 * (
        10 ** (torch.linspace(0, top, bwe["num_mels"] + 2, dtype=torch.float64) / 2595) - 1
    )
    hertz = (frequency * rate / n_fft)[None]
    rising = (hertz - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
    falling = (corners[2:, None] - hertz) / (corners[2:] - corners[1:-1])[:, None]
    mel = torch.minimum(rising, falling).clamp(min=0)
    return {
        "mel_basis": mel,
        "stft_fn.forward_basis": fourier,
        "stft_fn.inverse_basis": fourier.clone(),
    }


def upsampler_weights(config: dict, seed: int) -> dict[str, Tensor]:
    """The bf16 weights of a latent upsampler."""
    weights = random_weights(upsampler_shapes(config), torch.Generator().manual_seed(seed))
    return {name: weight.bfloat16() for name, weight in weights.items()}


def upsampler_shapes(config: dict) -> dict[str, Tensor]:
    """The tensors of a latent upsampler on the meta device."""
    from ltx_core.model.upsampler import LatentUpsamplerConfigurator

    return _shapes(LatentUpsamplerConfigurator, config)


def lora_weights(checkpoint: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """A bf16 LoRA on every linear layer of the DiT: lora_A (LORA_RANK, inputs) and lora_B (outputs,
    LORA_RANK)."""
    generator = torch.Generator().manual_seed(seed)
    lora = {}
    for key, weight in sorted(checkpoint.items()):
        linear = key.startswith(DIFFUSION) and key.endswith(".weight") and weight.ndim == 2
        if not linear or "embeddings_connector" in key:
            continue
        name, (outputs, inputs) = key.removeprefix("model.").removesuffix(".weight"), weight.shape
        down = torch.randn(LORA_RANK, inputs, generator=generator) / math.sqrt(inputs)
        up = 0.25 * torch.randn(outputs, LORA_RANK, generator=generator)
        lora |= {f"{name}.lora_A.weight": down.bfloat16(), f"{name}.lora_B.weight": up.bfloat16()}
    return lora


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with deterministic bytes: the library writes metadata in random
    order."""
    from safetensors.torch import save as serialize

    serialized = serialize(tensors)
    start = 8 + int.from_bytes(serialized[:8], "little")
    header = json.loads(serialized[8:start])
    if metadata:
        header = {"__metadata__": metadata} | header
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.write(memoryview(serialized)[start:])  # slicing bytes would copy them
