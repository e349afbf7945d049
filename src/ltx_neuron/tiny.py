"""Tiny random assets in the released LTX-2.3 file format: python -m ltx_neuron.tiny DIR

Everything the pipeline loads, with the released names, layout and metadata but small enough to make and run on a laptop
in seconds. The weights are random, scaled so that activations stay finite and lively; the output is noise.
The same sizes and seed give the same bytes.
"""

import argparse
import json
import math
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ltx_neuron.errors import UserError, run

if TYPE_CHECKING:
    from torch import Generator, Tensor

DIFFUSION = "model.diffusion_model."
LORA_RANK = 4
IMAGE_SIZE = (260, 150)

# The released spatial x2 upsampler has 512 mid_channels and 4 blocks; its GroupNorm needs a multiple of 32 channels.
SPATIAL_UPSAMPLER = {
    "_class_name": "LatentUpsampler", "in_channels": 128, "mid_channels": 32, "num_blocks_per_stage": 1, "dims": 3,
    "spatial_upsample": True, "temporal_upsample": False, "spatial_scale": 2.0, "rational_resampler": False,
}  # fmt: skip
TEMPORAL_UPSAMPLER = SPATIAL_UPSAMPLER | {
    "spatial_upsample": False, "temporal_upsample": True, "rational_resampler": True,
}  # fmt: skip

SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SMALLEST_VOCABULARY = 320  # special and byte tokens, the corpus' letters, a few merges
CORPUS = (
    "a golden retriever puppy runs across a sunny green meadow while the woman turns and smiles warmly at the camera . "
    "soft music plays , waves crash on the shore and birds sing in the distance ; a man says hello to the world . "
)


def _size(default: int, meaning: str):
    """A field of TinySizes; the meaning is also the help of its command-line flag."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class TinySizes:
    """What may differ from one tiny checkpoint to the next. All else is fixed by the format or as small as it gets."""

    layers: int = _size(2, "transformer blocks of the DiT (48 in the release)")
    heads: int = _size(4, "attention heads of the DiT and of the connectors, video and audio alike (32)")
    head_dim: int = _size(8, "channels per video head, even (128)")
    audio_head_dim: int = _size(4, "channels per audio head, even (64)")
    connector_layers: int = _size(2, "transformer blocks of each embeddings connector (8)")
    gemma_layers: int = _size(4, "layers of Gemma3 (48)")
    gemma_heads: int = _size(8, "query heads of Gemma3 (16)")
    gemma_kv_heads: int = _size(4, "key and value heads of Gemma3 (8)")
    gemma_head_dim: int = _size(8, "channels per head of Gemma3, even (256)")
    gemma_hidden: int = _size(32, "hidden channels of Gemma3 (3840)")
    gemma_intermediate: int = _size(64, "feed-forward channels of Gemma3 (15360)")
    gemma_vocab: int = _size(512, f"rows of Gemma3's embedding table, {SMALLEST_VOCABULARY} or more (262208)")
    gemma_sliding_window_pattern: int = _size(2, "every so many-th layer of Gemma3 attends to all tokens (6)")
    seed: int = _size(1234, "seed of all weights")

    @property
    def video_inner(self) -> int:
        """Channels of the video stream."""
        return self.heads * self.head_dim

    @property
    def audio_inner(self) -> int:
        """Channels of the audio stream."""
        return self.heads * self.audio_head_dim


class TinyAssets(NamedTuple):
    """Where the assets of one directory are. gemma_root is a directory, the others are files."""

    checkpoint: Path
    gemma_root: Path
    spatial_upsampler: Path
    temporal_upsampler: Path
    lora: Path
    image: Path


def assets_in(directory: Path) -> TinyAssets:
    """The paths make_tiny writes to."""
    names = (
        "ltx-2.3-tiny.safetensors", "gemma", "upsampler.safetensors", "temporal_upsampler.safetensors",
        "lora.safetensors", "image.png",
    )  # fmt: skip
    return TinyAssets(*(Path(directory) / name for name in names))


def make_tiny(
    directory: Path,
    sizes: TinySizes = TinySizes(),
    config_overrides: dict | None = None,
    model_version: str = "2.3.0",
) -> TinyAssets:
    """Write one set of tiny assets, replacing an earlier one.

    config_overrides is merged into the checkpoint's config, section by section; the weights follow the merged config.
    Everything is made in a hidden directory next to its destination and renamed when complete.
    """
    _check(sizes)
    directory = Path(directory)
    final = assets_in(directory)
    _refuse_foreign_files(final)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as making:
        made = assets_in(Path(making))
        _write_assets(made, sizes, merge(tiny_config(sizes), config_overrides or {}), model_version)
        if final.gemma_root.exists():
            final.gemma_root.rename(Path(making) / "replaced-gemma")
        for source, destination in zip(made, final, strict=True):
            source.replace(destination)
    return final


def _check(sizes: TinySizes) -> None:
    """Stop on sizes that the models cannot have."""
    numbers = {name: number for name, number in asdict(sizes).items() if name != "seed"}
    wanted = {f"{name} >= 1": number >= 1 for name, number in numbers.items()}
    wanted |= {f"an even {name}": number % 2 == 0 for name, number in numbers.items() if name.endswith("head_dim")}
    wanted[f"gemma_vocab >= {SMALLEST_VOCABULARY}"] = sizes.gemma_vocab >= SMALLEST_VOCABULARY
    if failed := [rule for rule, holds in wanted.items() if not holds]:
        raise UserError(f"tiny sizes need {', '.join(failed)}; got {sizes}")
    for whole, part in (("gemma_hidden", "gemma_heads"), ("gemma_heads", "gemma_kv_heads")):
        if numbers[whole] % numbers[part]:
            raise UserError(f"tiny sizes need {whole} divisible by {part}; got {numbers[whole]} and {numbers[part]}")


def _refuse_foreign_files(assets: TinyAssets) -> None:
    """Names like "gemma" are also those of real downloads: replace them only next to an earlier tiny checkpoint."""
    taken = [path.name for path in assets if path.exists()]
    if taken and not assets.checkpoint.exists():
        raise UserError(
            f"{assets.checkpoint.parent} holds {', '.join(taken)} but no {assets.checkpoint.name}, "
            "so they are not tiny assets to replace; give another directory"
        )


def _write_assets(assets: TinyAssets, sizes: TinySizes, config: dict, model_version: str) -> None:
    checkpoint = checkpoint_weights(config, sizes)
    save(assets.checkpoint, checkpoint, {"config": json.dumps(config), "model_version": model_version})
    write_gemma_root(assets.gemma_root, sizes)
    for path, upsampler, offset in (
        (assets.spatial_upsampler, SPATIAL_UPSAMPLER, 2),
        (assets.temporal_upsampler, TEMPORAL_UPSAMPLER, 4),
    ):
        save(path, upsampler_weights(upsampler, sizes.seed + offset), {"config": json.dumps(upsampler)})
    save(assets.lora, lora_weights(checkpoint, sizes.seed + 3))
    picture().save(assets.image)


def save(path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. The library writes metadata in random order; here the bytes are always the same."""
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
        file.write(memoryview(serialized)[start:])  # a slice of bytes would copy them


# --- config --------------------------------------------------------------------------------------------------------
def released_config() -> dict:
    """The config in the metadata of the released LTX-2.3 checkpoints."""
    return json.loads(Path(__file__).with_name("ltx23-config.json").read_text())


def merge(config: dict, overrides: dict) -> dict:
    """config with the leaves of overrides in place of its own."""
    merged = dict(config)
    for name, value in overrides.items():
        both = isinstance(value, dict) and isinstance(config.get(name), dict)
        merged[name] = merge(config[name], value) if both else value
    return merged


def tiny_config(sizes: TinySizes) -> dict:
    """The released config with the sizes of the DiT, both VAEs and the vocoder shrunk."""
    released = released_config()
    vocoder = {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]}
    return merge(released, {
        "transformer": _tiny_transformer(sizes),
        "vae": _tiny_video_vae(released["vae"]),
        "audio_vae": {"model": {"params": {"ddconfig": {"ch_mult": [1, 1, 1], "num_res_blocks": 1}}}},
        # Each upsampling stage halves the channels: 2 ** 6 and 2 ** 5 are the least for six and five stages.
        "vocoder": {
            "vocoder": vocoder | {"upsample_initial_channel": 64},
            "bwe": vocoder | {"upsample_initial_channel": 32},
        },
    })  # fmt: skip


def _tiny_transformer(sizes: TinySizes) -> dict:
    return {
        "num_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "attention_head_dim": sizes.head_dim,
        "cross_attention_dim": sizes.video_inner,
        "audio_num_attention_heads": sizes.heads,
        "audio_attention_head_dim": sizes.audio_head_dim,
        "audio_cross_attention_dim": sizes.audio_inner,
        "caption_channels": sizes.gemma_hidden,
        "connector_num_layers": sizes.connector_layers,
        "connector_num_attention_heads": sizes.heads,
        "connector_attention_head_dim": sizes.head_dim,
        "audio_connector_num_attention_heads": sizes.heads,
        "audio_connector_attention_head_dim": sizes.audio_head_dim,
    }


def _tiny_video_vae(released: dict) -> dict:
    """Fewer residual blocks and channels; time / 8 and space / 32 as released."""
    residual = ["res_x", {"num_layers": 1}]
    compress = [[f"compress_{axes}_res", {"multiplier": 1}] for axes in ("space", "time", "all", "all")]
    return {
        "encoder_blocks": [residual, compress[0], residual, *compress[1:], residual],
        "decoder_blocks": [residual if block[0] == "res_x" else block for block in released["decoder_blocks"]],
        "decoder_base_channels": 4,
        "encoder_base_channels": 128,  # the last width must not be below the 128 latent channels
    }


# --- checkpoint, upsamplers, LoRA ----------------------------------------------------------------------------------
def random_weight(name: str, like: "Tensor", generator: "Generator") -> "Tensor":
    """A random fp32 tensor of like's shape whose scale suits what the name says it is."""
    import torch

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


def random_weights(shapes: "dict[str, Tensor]", generator: "Generator") -> "dict[str, Tensor]":
    """Random weights for a state dict. Low-pass filters (the vocoder's) are not learned: they keep their values."""
    return {
        name: like.clone() if name.endswith(".filter") else random_weight(name, like, generator)
        for name, like in shapes.items()
    }


def checkpoint_weights(config: dict, sizes: TinySizes) -> "dict[str, Tensor]":
    """All tensors of the single-file checkpoint under their published names: bf16, scale-shift tables fp32."""
    import torch

    from ltx_neuron.decode import import_ltx_core

    import_ltx_core()
    generator = torch.Generator().manual_seed(sizes.seed)
    weights: dict[str, Tensor] = {}
    for prefix, shapes in (*_transformer_parts(config, sizes), *_vae_parts(config)):
        for name, weight in random_weights(shapes, generator).items():
            # Encoder and decoder share one set of statistics, stored beside them.
            owner = prefix.partition(".")[0] + "." if name.startswith("per_channel_statistics.") else prefix
            weights.setdefault(owner + name, weight)
    weights |= _vocoder_weights(config, generator)
    return {
        name: weight.to(torch.float32 if "scale_shift_table" in name else torch.bfloat16).contiguous()
        for name, weight in weights.items()
    }


def _shapes(configurator, config: dict) -> "dict[str, Tensor]":
    """The state dict of one of ltx-core's models, without memory."""
    import torch

    with torch.device("meta"):
        return configurator.from_config(config).state_dict()


def _transformer_parts(config: dict, sizes: TinySizes) -> "list[tuple[str, dict[str, Tensor]]]":
    """Published prefix and state dict of the DiT, the text projections and the two connectors."""
    from ltx_core.model.transformer import LTXModelConfigurator
    from ltx_core.text_encoders.gemma.embeddings_connector import (
        AudioEmbeddings1DConnectorConfigurator,
        Embeddings1DConnectorConfigurator,
    )

    return [
        (DIFFUSION, _shapes(LTXModelConfigurator, config)),
        ("text_embedding_projection.", _text_projection_shapes(config["transformer"], sizes)),
        (DIFFUSION + "video_embeddings_connector.", _shapes(Embeddings1DConnectorConfigurator, config)),
        (DIFFUSION + "audio_embeddings_connector.", _shapes(AudioEmbeddings1DConnectorConfigurator, config)),
    ]


def _text_projection_shapes(transformer: dict, sizes: TinySizes) -> "dict[str, Tensor]":
    """Two linear layers from all hidden states of Gemma side by side, the embedding's included, to a stream's channels.

    weight: (stream channels, gemma_hidden * (gemma_layers + 1)), bias: (stream channels,)
    """
    import torch

    features = sizes.gemma_hidden * (sizes.gemma_layers + 1)
    shapes = {}
    for stream, prefix in (("video", ""), ("audio", "audio_")):
        channels = transformer[f"{prefix}num_attention_heads"] * transformer[f"{prefix}attention_head_dim"]
        shapes[f"{stream}_aggregate_embed.weight"] = torch.empty(channels, features, device="meta")
        shapes[f"{stream}_aggregate_embed.bias"] = torch.empty(channels, device="meta")
    return shapes


def _vae_parts(config: dict) -> "list[tuple[str, dict[str, Tensor]]]":
    """Published prefix and state dict of the video and audio encoders and decoders."""
    from ltx_core.model.audio_vae import AudioDecoderConfigurator, AudioEncoderConfigurator
    from ltx_core.model.video_vae import VideoDecoderConfigurator, VideoEncoderConfigurator

    return [
        ("vae.encoder.", _shapes(VideoEncoderConfigurator, config)),
        ("vae.decoder.", _shapes(VideoDecoderConfigurator, config)),
        ("audio_vae.encoder.", _shapes(AudioEncoderConfigurator, config)),
        ("audio_vae.decoder.", _shapes(AudioDecoderConfigurator, config)),
    ]


def _vocoder_weights(config: dict, generator: "Generator") -> "dict[str, Tensor]":
    from ltx_core.model.audio_vae import VocoderConfigurator

    # Not on meta: its state dict holds the values of the low-pass filters.
    weights = random_weights(VocoderConfigurator.from_config(config).state_dict(), generator)
    weights |= {f"mel_stft.{name}": basis for name, basis in _mel_stft(config["vocoder"]["bwe"]).items()}
    return {f"vocoder.{name}": weight for name, weight in weights.items()}


def _mel_stft(bwe: dict) -> "dict[str, Tensor]":
    """The constants of the bandwidth extension's mel spectrogram.

    Fourier bases (2 * frequencies, 1, n_fft): windowed cosines, then sines, of n_fft // 2 + 1 frequencies.
    Mel basis (num_mels, frequencies): triangular filters.
    """
    import torch

    n_fft, rate = bwe["n_fft"], bwe["input_sampling_rate"]
    sample = torch.arange(n_fft, dtype=torch.float64)
    frequency = torch.arange(n_fft // 2 + 1, dtype=torch.float64)
    angle = 2 * math.pi * frequency[:, None] * sample[None] / n_fft
    window = torch.hann_window(n_fft, periodic=True, dtype=torch.float64)
    fourier = (torch.cat([torch.cos(angle), -torch.sin(angle)]) * window)[:, None]
    top = 2595 * math.log10(1 + rate / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, top, bwe["num_mels"] + 2, dtype=torch.float64) / 2595) - 1)
    hertz = (frequency * rate / n_fft)[None]
    rising = (hertz - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
    falling = (corners[2:, None] - hertz) / (corners[2:] - corners[1:-1])[:, None]
    mel = torch.minimum(rising, falling).clamp(min=0)
    return {"mel_basis": mel, "stft_fn.forward_basis": fourier, "stft_fn.inverse_basis": fourier.clone()}


def upsampler_weights(config: dict, seed: int) -> "dict[str, Tensor]":
    """The bf16 weights of a latent upsampler."""
    import torch
    from ltx_core.model.upsampler import LatentUpsamplerConfigurator

    weights = random_weights(_shapes(LatentUpsamplerConfigurator, config), torch.Generator().manual_seed(seed))
    return {name: weight.bfloat16() for name, weight in weights.items()}


def lora_weights(checkpoint: "dict[str, Tensor]", seed: int) -> "dict[str, Tensor]":
    """A bf16 LoRA on every linear layer of the DiT: lora_A (LORA_RANK, inputs) and lora_B (outputs, LORA_RANK)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    lora = {}
    for key, weight in sorted(checkpoint.items()):
        linear = key.startswith(DIFFUSION) and key.endswith(".weight") and weight.ndim == 2
        if not linear or "embeddings_connector" in key:
            continue
        name = key.removeprefix("model.").removesuffix(".weight")
        down = torch.randn(LORA_RANK, weight.shape[1], generator=generator) / math.sqrt(weight.shape[1])
        up = 0.25 * torch.randn(weight.shape[0], LORA_RANK, generator=generator)
        lora |= {f"{name}.lora_A.weight": down.bfloat16(), f"{name}.lora_B.weight": up.bfloat16()}
    return lora


# --- Gemma ---------------------------------------------------------------------------------------------------------
def write_gemma_root(root: Path, sizes: TinySizes) -> None:
    """A directory like the published Gemma3: config, weights, tokenizer and image processor settings."""
    root.mkdir()
    config = gemma_config(sizes)
    image_tokens, image_size = config["mm_tokens_per_image"], config["vision_config"]["image_size"]
    save(root / "model.safetensors", gemma_weights(config, sizes.seed + 1), {"format": "pt"})
    for name, content in {
        "config.json": config,
        "tokenizer.json": tokenizer(sizes.gemma_vocab),
        "tokenizer_config.json": tokenizer_config(),
        "preprocessor_config.json": preprocessor_config(image_tokens, image_size),
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": image_tokens},
    }.items():
        (root / name).write_text(json.dumps(content, indent=2) + "\n")


def gemma_config(sizes: TinySizes) -> dict:
    """config.json as published, that is in the words of transformers 4; transformers 5 translates them on loading."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": SPECIAL_TOKENS.index("<start_of_image>"),
        "eoi_token_index": SPECIAL_TOKENS.index("<end_of_image>"),
        "eos_token_id": [SPECIAL_TOKENS.index("<eos>")],
        "image_token_index": SPECIAL_TOKENS.index("<image_soft_token>"),
        "initializer_range": 0.02,
        "mm_tokens_per_image": 4,
        "model_type": "gemma3",
        "text_config": _gemma_text_config(sizes),
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "vision_config": {
            "hidden_size": 16,
            "image_size": 28,
            "intermediate_size": 32,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


def _gemma_text_config(sizes: TinySizes) -> dict:
    return {
        "attention_bias": False,
        "head_dim": sizes.gemma_head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": sizes.gemma_hidden,
        "intermediate_size": sizes.gemma_intermediate,
        "max_position_embeddings": 131072,
        "model_type": "gemma3_text",
        "num_attention_heads": sizes.gemma_heads,
        "num_hidden_layers": sizes.gemma_layers,
        "num_key_value_heads": sizes.gemma_kv_heads,
        "query_pre_attn_scalar": sizes.gemma_head_dim,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "sliding_window": 1024,
        "sliding_window_pattern": sizes.gemma_sliding_window_pattern,
        "vocab_size": sizes.gemma_vocab,
    }


def gemma_weights(config: dict, seed: int) -> "dict[str, Tensor]":
    """The bf16 weights of Gemma3 and its image tower under their published names."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    with torch.device("meta"):
        shapes = Gemma3ForConditionalGeneration(Gemma3Config.from_dict(config)).state_dict()
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, like in shapes.items():
        if name.startswith("lm_head"):  # tied to the embedding table, and not stored
            continue
        noise = torch.randn(like.shape, generator=generator)
        if like.ndim == 1:  # Gemma's norms multiply by 1 + weight, so theirs may scatter around zero too
            weight = noise * (0.2 if "norm" in name else 0.1)
        else:
            weight = noise / math.sqrt(math.prod(like.shape[1:]))
        weights[_published_gemma_name(name)] = weight.bfloat16().contiguous()
    return weights


def _published_gemma_name(name: str) -> str:
    """The name on disk of a parameter of transformers 5, or of the last versions of transformers 4."""
    name = name.removeprefix("model.")
    renamed = {"language_model.": "language_model.model.", "vision_tower.": "vision_tower.vision_model."}
    for ours, published in renamed.items():
        if name.startswith(ours) and not name.startswith(published):
            return published + name.removeprefix(ours)
    return name


def tokenizer(vocabulary: int) -> dict:
    """tokenizer.json: a byte-pair tokenizer of Gemma's kind, with byte fallback, trained here on two sentences."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    pairs = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    pairs.normalizer = normalizers.Replace(" ", "\u2581")
    pairs.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL_TOKENS + BYTE_TOKENS, show_progress=False, max_token_length=8
    )
    # Pairs count only if seen often: repeat the text.
    pairs.train_from_iterator([CORPUS * 20], trainer)
    pairs.post_processor = processors.TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A <bos> $B",
        special_tokens=[("<bos>", SPECIAL_TOKENS.index("<bos>"))],
    )
    content = json.loads(pairs.to_str())
    # Only the trainer had to see bytes as special: they must count as text, or decoding would skip them.
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in SPECIAL_TOKENS]
    return content


def tokenizer_config() -> dict:
    """tokenizer_config.json: which token is which, and padding on the left as Gemma has it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "padding_side": "left",
        "model_max_length": 10**9,
        "extra_special_tokens": {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        "chat_template": "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}",
    }


def preprocessor_config(image_tokens: int, image_size: int) -> dict:
    """preprocessor_config.json: how an image is prepared for Gemma's image tower."""
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "do_resize": True,
        "do_normalize": True,
        "do_rescale": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_seq_length": image_tokens,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": image_size, "width": image_size},
    }


# --- image and command line ----------------------------------------------------------------------------------------
def picture():
    """A house under an evening sky: an image for image-to-video whose fate in the video is easy to see."""
    from PIL import Image, ImageDraw

    width, height = IMAGE_SIZE
    image = Image.new("RGB", IMAGE_SIZE)
    draw = ImageDraw.Draw(image)
    for row in range(height):
        draw.line([(0, row), (width, row)], fill=(70 + row, 110 + row // 2, 220 - row // 2))
    draw.ellipse([185, 18, 225, 58], fill=(255, 220, 90))
    draw.ellipse([-80, 85, 180, 260], fill=(60, 125, 75))
    draw.ellipse([110, 100, 380, 290], fill=(85, 155, 70))
    draw.rectangle([60, 70, 115, 112], fill=(205, 95, 70))
    draw.polygon([(52, 70), (87, 42), (123, 70)], fill=(110, 55, 50))
    draw.rectangle([80, 88, 94, 112], fill=(70, 45, 40))
    return image


def parse_arguments() -> argparse.Namespace:
    """The directory and one flag for each of TinySizes."""
    parser = argparse.ArgumentParser(
        prog="python -m ltx_neuron.tiny", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; an earlier tiny set is replaced")
    for size in fields(TinySizes):
        flag = "--" + size.name.replace("_", "-")
        parser.add_argument(
            flag, type=int, default=size.default, metavar="N", help=f"{size.metadata['help']}; default %(default)s"
        )
    return parser.parse_args()


def main() -> None:
    """Make the assets and print where they are."""
    chosen = vars(parse_arguments())
    directory = chosen.pop("directory")
    sizes = TinySizes(**chosen)
    assets = make_tiny(directory, sizes)
    for name, path in assets._asdict().items():
        files = path.rglob("*") if path.is_dir() else [path]
        print(f"{name:20s} {sum(file.stat().st_size for file in files) / 1e3:8.1f} kB  {path}")
    print("sizes: " + " ".join(f"{name}={number}" for name, number in asdict(sizes).items()))


if __name__ == "__main__":
    run(main)
