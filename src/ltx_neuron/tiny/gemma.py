"""A folder in the format of the published Gemma3: config, random weights, a small tokenizer."""

import json
import math
from pathlib import Path

import torch
from torch import Generator, Tensor

from ltx_neuron.tiny.config import TinySizes
from ltx_neuron.tiny.weights import save

SPECIAL_TOKENS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = (
    "a golden retriever puppy runs across a sunny green meadow while the woman turns and smiles"
    " warmly at the camera . soft music plays , waves crash on the shore and birds sing in the"
    " distance ; a man says hello to the world . "
)
IMAGE_TOKENS, IMAGE_SIZE = 4, 28
# Special tokens, and padding on the left as in Gemma.
TOKENIZER_CONFIG = {
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
    "chat_template": (
        "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    ),
}
# Image preprocessing for Gemma's vision tower.
PREPROCESSOR_CONFIG = {
    "image_processor_type": "Gemma3ImageProcessor",
    "processor_class": "Gemma3Processor",
    "do_resize": True,
    "do_normalize": True,
    "do_rescale": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "image_seq_length": IMAGE_TOKENS,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
}


def write_gemma_root(root: Path, sizes: TinySizes) -> None:
    """Write a Gemma3 directory in the published format: config, weights, tokenizer and the settings
    of the image processor."""
    root.mkdir()
    config = write_gemma_settings(root, sizes)
    save(root / "model.safetensors", gemma_weights(config, sizes.seed + 1), {"format": "pt"})


def write_gemma_settings(root: Path, sizes: TinySizes) -> dict:
    """Write all files of that directory except the weights; returns the config."""
    config = gemma_config(sizes)
    for name, content in {
        "config.json": config,
        "tokenizer.json": train_tokenizer(sizes.gemma_vocab),
        "tokenizer_config.json": TOKENIZER_CONFIG,
        "preprocessor_config.json": PREPROCESSOR_CONFIG,
        "processor_config.json": {
            "processor_class": "Gemma3Processor",
            "image_seq_length": IMAGE_TOKENS,
        },
    }.items():
        (root / name).write_text(json.dumps(content, indent=2) + "\n")
    return config


def gemma_config(sizes: TinySizes) -> dict:
    """config.json with the published field names, those of transformers 4; transformers 5
    translates them on loading."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": SPECIAL_TOKENS.index("<start_of_image>"),
        "eoi_token_index": SPECIAL_TOKENS.index("<end_of_image>"),
        "eos_token_id": [SPECIAL_TOKENS.index("<eos>")],
        "image_token_index": SPECIAL_TOKENS.index("<image_soft_token>"),
        "initializer_range": 0.02,
        "mm_tokens_per_image": IMAGE_TOKENS,
        "model_type": "gemma3",
        "text_config": {
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
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "vision_config": {
            "hidden_size": 16,
            "image_size": IMAGE_SIZE,
            "intermediate_size": 32,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


def gemma_weights(config: dict, seed: int) -> dict[str, Tensor]:
    """The bf16 weights of Gemma3 and its vision tower under their published names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: random_gemma_weight(name, like, generator).bfloat16().contiguous()
        for name, like in gemma_shapes(config).items()
    }


def gemma_shapes(config: dict) -> dict[str, Tensor]:
    """The tensors of Gemma3 and its vision tower on the meta device, under their published names.
    The output layer is tied to the embedding table and not stored."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    with torch.device("meta"):
        shapes = Gemma3ForConditionalGeneration(Gemma3Config.from_dict(config)).state_dict()
    return {
        published_gemma_name(name): like
        for name, like in shapes.items()
        if not name.startswith("lm_head")
    }


def random_gemma_weight(name: str, like: Tensor, generator: Generator) -> Tensor:
    """A random fp32 tensor of like's shape, with a scale that preserves the activations' scale."""
    noise = torch.randn(like.shape, generator=generator)
    if like.ndim == 1:
        # Gemma's norms multiply by 1 + weight, so their weights are centred on zero too.
        return noise * (0.2 if "norm" in name else 0.1)
    return noise / math.sqrt(math.prod(like.shape[1:]))


def published_gemma_name(name: str) -> str:
    """The published name of a parameter, which transformers 5 and late versions of transformers 4
    renamed."""
    name = name.removeprefix("model.")
    renamed = {
        "language_model.": "language_model.model.",
        "vision_tower.": "vision_tower.vision_model.",
    }
    for ours, published in renamed.items():
        if name.startswith(ours) and not name.startswith(published):
            return published + name.removeprefix(ours)
    return name


def train_tokenizer(vocabulary: int) -> dict:
    """tokenizer.json: a byte-pair tokenizer with byte fallback, as Gemma's, trained on two
    sentences."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    pairs = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    pairs.normalizer = normalizers.Replace(" ", "\u2581")
    pairs.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS + BYTE_TOKENS,
        show_progress=False,
        max_token_length=8,
    )
    # The trainer ignores rare pairs: repeat the text.
    pairs.train_from_iterator([CORPUS * 20], trainer)
    pairs.post_processor = processors.TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A <bos> $B",
        special_tokens=[("<bos>", SPECIAL_TOKENS.index("<bos>"))],
    )
    content = json.loads(pairs.to_str())
    # Byte tokens are special for the trainer only: decoding skips special tokens.
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] in SPECIAL_TOKENS
    ]
    return content
