"""The text encoder in the published formats, with random weights and a small tokenizer: Gemma3's
folder, and LTX-2.5's file."""

import json
import math
from pathlib import Path

import torch
from torch import Generator, Tensor

from tiny.config import TinySizes
from tiny.weights import save

SPECIAL_TOKENS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
]
# Gemma 4's tokens of images, sounds and videos, by the names of their ids in the gemma_config.
MEDIA_TOKENS = {
    "image_token_id": "<|image|>",
    "audio_token_id": "<|audio|>",
    "video_token_id": "<|video|>",
}
GEMMA_4_VERSION = "gemma4-12b-ltx-v1"  # as the transformer's file names it too
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


def write_gemma4_file(path: Path, sizes: TinySizes) -> None:
    """Write a text encoder's file of LTX-2.5: Gemma 4 and the text projections, with config,
    tokenizer and chat template inside. Full layers have heads of twice the size, and one key-value
    head."""
    config, generator = gemma_4_config(sizes), torch.Generator().manual_seed(sizes.seed + 5)
    tensors = {
        name: random_gemma_4_weight(name, like, generator).bfloat16().contiguous()
        for name, like in gemma_4_shapes(config, sizes).items()
    }
    tensors |= gemma_4_tokenizer(sizes)
    save(path, tensors, {"format": "pt", "gemma_config": json.dumps(config)})


def gemma_4_tokenizer(sizes: TinySizes) -> dict[str, Tensor]:
    """The tokenizer's files in a text encoder's file, as tensors of bytes."""
    tokenizer = train_tokenizer(sizes.gemma_vocab, [*SPECIAL_TOKENS[:4], *MEDIA_TOKENS.values()])
    tokenizer["post_processor"] = None  # it adds no <bos>
    names = "bos_token", "eos_token", "pad_token", "unk_token"
    settings = {name: TOKENIZER_CONFIG[name] for name in names}
    assets = {
        "tokenizer_json": json.dumps(tokenizer),
        "hf_asset__tokenizer_config.json": json.dumps(
            settings | {"tokenizer_class": "GemmaTokenizer"}
        ),
        "hf_asset__processor_config.json": json.dumps(
            {"processor_class": "Gemma4UnifiedProcessor"}
        ),
        "hf_asset__generation_config.json": json.dumps({"pad_token_id": 0}),
        "hf_asset__chat_template.jinja": TOKENIZER_CONFIG["chat_template"],
    }
    return {
        name: torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)
        for name, content in assets.items()
    }


def gemma_4_config(sizes: TinySizes) -> dict:
    """The gemma_config in the metadata of a text encoder's file, with the released names."""
    period = sizes.gemma_sliding_window_pattern
    first = len(SPECIAL_TOKENS[:4])
    return {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "gemma_version": GEMMA_4_VERSION,
        **{name: first + index for index, name in enumerate(MEDIA_TOKENS)},
        "dtype": "bfloat16",
        "eos_token_id": [SPECIAL_TOKENS.index("<eos>")],
        "initializer_range": 0.02,
        "model_type": "gemma4_unified",
        "tie_word_embeddings": True,
        "transformers_version": "5.10.1",
        **_gemma_4_media_configs(sizes.gemma_hidden),
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_k_eq_v": True,
            "bos_token_id": SPECIAL_TOKENS.index("<bos>"),
            "dtype": "bfloat16",
            "enable_moe_block": False,
            "eos_token_id": SPECIAL_TOKENS.index("<eos>"),
            "final_logit_softcapping": 30.0,
            "global_head_dim": 2 * sizes.gemma_head_dim,
            "head_dim": sizes.gemma_head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": sizes.gemma_hidden,
            "hidden_size_per_layer_input": 0,
            "initializer_range": 0.02,
            "intermediate_size": sizes.gemma_intermediate,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
            "layer_types": [
                "sliding_attention" if (index + 1) % period else "full_attention"
                for index in range(sizes.gemma_layers)
            ],
            "model_type": "gemma4_unified_text",
            "num_attention_heads": sizes.gemma_heads,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": sizes.gemma_layers,
            "num_key_value_heads": sizes.gemma_kv_heads,
            "num_kv_shared_layers": 0,
            "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
            "use_double_wide_mlp": False,
            "vocab_size": sizes.gemma_vocab,
        },
    }


def _gemma_4_media_configs(width: int) -> dict:
    """The configs for sounds and images, which this toolkit does not read."""
    shared = {"dtype": "bfloat16", "initializer_range": 0.02, "rms_norm_eps": 1e-06}
    vision = {"mm_embed_dim": width, "mm_posemb_size": 4, "model_type": "gemma4_unified_vision"}
    vision |= {"num_soft_tokens": 4, "output_proj_dims": width}
    vision |= {"patch_size": 2, "pooling_kernel_size": 1}
    return {
        "audio_config": {"audio_embed_dim": 8, "model_type": "gemma4_unified_audio"} | shared,
        "vision_config": vision | shared,
    }


def gemma_4_shapes(config: dict, sizes: TinySizes) -> dict[str, Tensor]:
    """The weights of a text encoder's file on the meta device, under their published names, with
    those for images and sounds."""
    text, shapes = config["text_config"], {}
    width, heads = text["hidden_size"], text["num_attention_heads"]
    for index, kind in enumerate(text["layer_types"]):
        full, layer = kind == "full_attention", f"model.layers.{index}."
        head = text["global_head_dim" if full else "head_dim"]
        keys = head * text["num_global_key_value_heads" if full else "num_key_value_heads"]
        attention = {"q_proj": (heads * head, width), "k_proj": (keys, width)}
        attention |= {} if full else {"v_proj": (keys, width)}
        attention |= {"o_proj": (width, heads * head), "q_norm": (head,), "k_norm": (head,)}
        inner = text["intermediate_size"]
        linear = {"gate_proj": (inner, width), "up_proj": (inner, width)}
        linear |= {"down_proj": (width, inner)}
        shapes |= {f"{layer}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{layer}mlp.{name}.weight": shape for name, shape in linear.items()}
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}{name}_layernorm.weight"] = (width,)
        shapes[f"{layer}layer_scalar"] = (1,)
    shapes |= {"model.embed_tokens.weight": (text["vocab_size"], width)}
    shapes |= {"model.norm.weight": (width,), **_gemma_4_towers(width)}
    for stream, channels in (("video", sizes.video_inner), ("audio", sizes.audio_inner)):
        projection = f"text_embedding_projection.{stream}_aggregate_embed."
        shapes[f"{projection}weight"] = (channels, width * (len(text["layer_types"]) + 1))
        shapes[f"{projection}bias"] = (channels,)
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def _gemma_4_towers(width: int) -> dict[str, tuple[int, ...]]:
    """The tensors for images and sounds, which this toolkit does not read."""
    sizes = {"patch_ln1": 12, "patch_ln2": width, "pos_norm": width}
    shapes = {f"{name}.{kind}": (n,) for name, n in sizes.items() for kind in ("weight", "bias")}
    shapes |= {"patch_dense.weight": (width, 12), "patch_dense.bias": (width,)}
    shapes |= {"pos_embedding": (4, 2, width)}
    towers = {f"vision_model.{name}": shape for name, shape in shapes.items()}
    projectors = {"multi_modal_projector": width, "audio_projector": 8}
    return towers | {
        f"{name}.embedding_projection.weight": (width, n) for name, n in projectors.items()
    }


def random_gemma_4_weight(name: str, like: Tensor, generator: Generator) -> Tensor:
    """As random_gemma_weight. Norms multiply by their weight, and layers by their scalar."""
    centre = 1.0 if "norm" in name else 0.8 if name.endswith("layer_scalar") else 0.0
    return centre + random_gemma_weight(name, like, generator)


def train_tokenizer(vocabulary: int, special: list[str] = SPECIAL_TOKENS) -> dict:
    """tokenizer.json: a byte-pair tokenizer with byte fallback, as Gemma's, trained on two
    sentences. special: its first tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    pairs = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    pairs.normalizer = normalizers.Replace(" ", "\u2581")
    pairs.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special + BYTE_TOKENS,
        show_progress=False,
        max_token_length=8,
    )
    # The trainer ignores rare pairs: repeat the text.
    pairs.train_from_iterator([CORPUS * 20], trainer)
    pairs.post_processor = processors.TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A <bos> $B",
        special_tokens=[("<bos>", special.index("<bos>"))],
    )
    content = json.loads(pairs.to_str())
    # Byte tokens are special for the trainer only: decoding skips special tokens.
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] in special
    ]
    return content
