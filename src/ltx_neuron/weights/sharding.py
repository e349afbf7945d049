"""The sharding tables: the dimension along which each tensor is split over the ranks.

Every tensor of a model must match exactly one row (fullmatch). There is no catch-all row: an
unknown tensor is an error instead of being copied to every rank.
"""

import re
from collections.abc import Container
from typing import NamedTuple

from ltx_neuron.config.common import GLOBAL_KEY_VALUE_HEADS, KEY_VALUE_HEADS
from ltx_neuron.config.parts import TEXT_PROJECTION
from ltx_neuron.errors import UserError

# How a tensor is split. COL and ROW are the dimension of an nn.Linear weight (out, in).
COL, ROW = 0, 1  # column-parallel: by out-features; row-parallel: by in-features
ALL = None  # every rank keeps a copy
KV = "kv"  # COL by key-value heads; if ranks outnumber heads, neighbouring ranks copy one head
HOST = "host"  # stays on the host: goes to host.safetensors, never to a device

BLOCK = r"transformer_blocks\.\d+\."
ATTENTION = BLOCK + r"(?:attn[12]|audio_attn[12]|audio_to_video_attn|video_to_audio_attn)\."
FEED_FORWARD = BLOCK + r"(?:ff|audio_ff)\.net\."
CONNECTOR_BLOCK = r"(?:video|audio)_connector\.transformer_1d_blocks\.\d+\."


def _attention(prefix: str) -> dict:
    return {
        prefix + r"to_(?:q|k|v|gate_logits)\.(?:weight|bias)": COL,
        prefix + r"[qk]_norm\.weight": COL,  # RMS over all heads: squares are summed over ranks
        prefix + r"to_out\.0\.weight": ROW,
        prefix + r"to_out\.0\.bias": ALL,  # added once, after the sum
    }


def _feed_forward(prefix: str) -> dict:
    return {
        prefix + r"0\.proj\.(?:weight|bias)": COL,
        prefix + r"2\.weight": ROW,
        prefix + r"2\.bias": ALL,
    }


DIT = {
    **_attention(ATTENTION),
    **_feed_forward(FEED_FORWARD),
    BLOCK + r"(?:audio_)?(?:prompt_)?scale_shift_table": ALL,
    BLOCK + r"scale_shift_table_a2v_ca_(?:audio|video)": ALL,
    r"(?:audio_)?(?:patchify_proj|proj_out)\.(?:weight|bias)|(?:audio_)?scale_shift_table": ALL,
    r"keyframes_abs_pos_embedding": ALL,
    # Computed on the host, once per schedule.
    r"(?:audio_)?(?:prompt_)?adaln_single\..+|av_ca_\w+_adaln_single\..+": HOST,
}
# The weights on the ranks that the DiT's graphs of sound alone, and of a video alone, use.
ALONE = re.compile(rf"(?:{BLOCK})?audio_(?!to_video).+"), re.compile("(?!.*(?:audio|a2v_ca)).+")
GEMMA3 = {
    r"embed_tokens\.weight": HOST,  # rows are looked up on the host
    r"layers\.\d+\.self_attn\.q_proj\.weight": COL,
    r"layers\.\d+\.self_attn\.[kv]_proj\.weight": KV,
    r"layers\.\d+\.self_attn\.o_proj\.weight": ROW,
    r"layers\.\d+\.self_attn\.[qk]_norm\.weight": ALL,  # per head
    r"layers\.\d+\.mlp\.(?:gate|up)_proj\.weight": COL,
    r"layers\.\d+\.mlp\.down_proj\.weight": ROW,
    r"(?:layers\.\d+\.\w+_layernorm|norm)\.weight|layers\.\d+\.layer_scalar": ALL,
    r"(?:video|audio)_aggregate_embed\.(?:weight|bias)": COL,
    **_attention(CONNECTOR_BLOCK + r"attn1\."),
    **_feed_forward(CONNECTOR_BLOCK + r"ff\.net\."),
    # The host appends them to the prompt's tokens.
    r"(?:video|audio)_connector\.learnable_registers": HOST,
}

_DIFFUSION_BLOCK = r"(?:det_stages\.\d+|diff_blocks)\.\d+\."
# Each rank decodes different tiles with the whole decoder.
VAE = {
    r"conv_(?:in|out)\.conv\.(?:weight|bias)": ALL,
    r"up_blocks\.\d+\.res_blocks\.\d+\.conv[12]\.conv\.(?:weight|bias)": ALL,
    r"up_blocks\.\d+\.conv\.conv\.(?:weight|bias)": ALL,
    r"per_channel_statistics\.(?:std|mean)-of-means": ALL,
    # The diffusion decoder's; each rank decodes other frames.
    r"(?:conv_in|conv_in_x_t|conv_out)\.(?:weight|bias)|norm_out\.weight": ALL,
    _DIFFUSION_BLOCK + r"attn\.(?:qkv|proj)\.(?:weight|bias)": ALL,
    _DIFFUSION_BLOCK + r"(?:attn\.[qk]_norm|norm[12]|mlp\.w_(?:gate|up|down))\.weight": ALL,
    r"diff_blocks\.\d+\.context_proj\.(?:weight|bias)": ALL,
    r"diff_blocks\.\d+\.(?:scale_shift_table|gate_(?:msa|mlp|ctx))": ALL,
    r"(?:upsamples\.\d+|shared_adaln)\.proj\.(?:weight|bias)": ALL,
    r"t_embedder\.mlp\.[02]\.(?:weight|bias)": ALL,
}
# Names begin with the model's, because ranks tell loaded models apart by their weights' names.
ENCODER = {
    r"encoder\.conv_(?:in|out)\.conv\.(?:weight|bias)": ALL,
    r"encoder\.down_blocks\.\d+\.res_blocks\.\d+\.conv[12]\.conv\.(?:weight|bias)": ALL,
    r"encoder\.down_blocks\.\d+\.conv\.conv\.(?:weight|bias)": ALL,
    r"encoder\.per_channel_statistics\.(?:std|mean)-of-means": ALL,
}

# Each rank also holds the whole decoders of sound.
_RESIDUAL = r"audio_decoder\.(?:mid\.block_[12]|up\.\d+\.block\.\d+)\."
_GENERATOR = r"(?:vocoder|bwe_generator)\."
_ACTIVATION = _GENERATOR + r"(?:act_post|resblocks\.\d+\.acts[12]\.\d+)\."
SOUND = {
    r"audio_decoder\.per_channel_statistics\.(?:std|mean)-of-means": ALL,
    r"audio_decoder\.(?:conv_in|conv_out|up\.\d+\.upsample\.conv)\.conv\.(?:weight|bias)": ALL,
    _RESIDUAL + r"(?:conv[12]|nin_shortcut)\.conv\.(?:weight|bias)": ALL,
    _GENERATOR + r"(?:conv_pre|conv_post|ups\.\d+)\.(?:weight|bias)": ALL,
    _GENERATOR + r"resblocks\.\d+\.convs[12]\.\d+\.(?:weight|bias)": ALL,
    _ACTIVATION + r"act\.(?:alpha|beta)": ALL,
    _ACTIVATION + r"(?:upsample|downsample\.lowpass)\.filter": ALL,
    r"bwe_generator\.mel_stft\.(?:stft_fn\.forward_basis|mel_basis)": ALL,
}


class Model(NamedTuple):
    """A model's sharding table and its tensor names in the files."""

    name: str
    table: dict  # pattern of a tensor's name -> COL, ROW, ALL, KV or HOST
    prefixes: dict[str, str]  # prefix of a name in the files -> prefix of our name
    elsewhere: tuple[str, ...] = ()  # prefixes of other components among those names


STATISTICS = "per_channel_statistics."
_READ_STATISTICS = f"{STATISTICS}std-of-means", f"{STATISTICS}mean-of-means"
DIFFUSION = "model.diffusion_model."
CONNECTORS = {
    f"{DIFFUSION}{stream}_embeddings_connector.": f"{stream}_connector."
    for stream in ("video", "audio")
}
# Prefixes of all tensors of a checkpoint. Others are of other models, or copies (EMA).
COMPONENTS = DIFFUSION, TEXT_PROJECTION, "vae.", "audio_vae.", "vocoder."
SHARDED_MODELS = {
    model.name: model
    for model in (
        Model("dit", DIT, {DIFFUSION: ""}, (*CONNECTORS,)),
        Model(
            "gemma3",
            GEMMA3,
            {
                **CONNECTORS,
                TEXT_PROJECTION: "",
                "language_model.model.": "",
                "model.language_model.": "",
                **{f"model.{part}.": f"{part}." for part in ("embed_tokens", "layers", "norm")},
            },
        ),
        Model(
            "vae",
            VAE,
            # No model reads the checkpoint's other statistics.
            {"vae.decoder.": "", **{f"vae.{name}": name for name in _READ_STATISTICS}},
            # No model reads them: see UNREAD in config/diffusion.py.
            ("vae.decoder.coarse_", "vae.decoder.type_emb"),
        ),
        Model(
            "encoder",
            ENCODER,
            {
                "vae.encoder.": "encoder.",
                **{f"vae.{name}": f"encoder.{name}" for name in _READ_STATISTICS},
            },
        ),
        Model(
            "sound",
            SOUND,
            {
                "audio_vae.decoder.": "audio_decoder.",
                **{f"audio_vae.{name}": f"audio_decoder.{name}" for name in _READ_STATISTICS},
                "vocoder.vocoder.": "vocoder.",
                "vocoder.bwe_generator.": "bwe_generator.",
                "vocoder.mel_stft.": "bwe_generator.mel_stft.",
            },
            ("vocoder.mel_stft.stft_fn.inverse_basis",),  # no model reads it
        ),
    )
}


def rename(model: Model, key: str) -> str | None:
    """Our name for a tensor of the files; None if it belongs to another component or model."""
    prefixes = [p for p in (*model.prefixes, *model.elsewhere) if key.startswith(p)]
    longest = max(prefixes, key=len, default="")
    return (
        model.prefixes[longest] + key.removeprefix(longest) if longest in model.prefixes else None
    )


def rule(model: Model, name: str) -> int | str | None:
    """COL, ROW, ALL, KV or HOST, from the table; UserError unless exactly one row matches."""
    rows = [split for pattern, split in model.table.items() if re.fullmatch(pattern, name)]
    if len(rows) != 1:
        raise UserError(
            f"tensor {name!r} matches {len(rows)} rows of the {model.name} sharding table, wanted"
            " exactly one"
        )
    return rows[0]


def copies(model: Model, name: str, names: Container[str], tp: int, heads: dict[str, int]) -> int:
    """The number of neighbouring ranks with the same part of a tensor: 2 for 8 key-value heads and
    16 ranks. names: of all tensors; a layer without v_proj has global key-value heads."""
    if rule(model, name) != KV:
        return 1
    has_values = name.replace(".k_proj.", ".v_proj.") in names
    return max(1, tp // heads.get(KEY_VALUE_HEADS if has_values else GLOBAL_KEY_VALUE_HEADS, tp))


def local_shape(
    shape: tuple[int, ...], split: int | str | None, tp: int, name: str
) -> tuple[int, ...]:
    """The shape of a rank's part of a tensor. UserError if the split is uneven."""
    if not isinstance(split, int):  # ALL or HOST
        return tuple(shape)
    if split >= len(shape) or shape[split] % tp:
        raise UserError(
            f"tensor {name!r} of shape {list(shape)} cannot be split over {tp} ranks along"
            f" dimension {split}"
        )
    return tuple(size // tp if dim == split else size for dim, size in enumerate(shape))
