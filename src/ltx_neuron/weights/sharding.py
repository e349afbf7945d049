"""The sharding tables: which dimension of which tensor is split over the ranks. The only place that
says so.

Every checkpoint tensor of a model must match exactly one row (fullmatch). There is no catch-all: a
tensor nobody knows stops the sharder instead of being copied.
"""

import re
from typing import NamedTuple

from ltx_neuron.config import KEY_VALUE_HEADS
from ltx_neuron.errors import UserError

COL, ROW, ALL = 0, 1, None  # split out-features | split in-features | every rank keeps a copy
# as COL by key-value heads: where ranks outnumber them, neighbouring ranks keep the same head
KV = "kv"
HOST = "host"  # stays on the host: goes to host.safetensors, never to a device

BLOCK = r"transformer_blocks\.\d+\."
ATTENTION = BLOCK + r"(?:attn[12]|audio_attn[12]|audio_to_video_attn|video_to_audio_attn)\."
FEED_FORWARD = BLOCK + r"(?:ff|audio_ff)\.net\."
CONNECTOR_BLOCK = r"(?:video|audio)_connector\.transformer_1d_blocks\.\d+\."


def _attention(prefix: str) -> dict:
    return {
        prefix + r"to_(?:q|k|v|gate_logits)\.(?:weight|bias)": COL,
        prefix + r"[qk]_norm\.weight": (
            COL
        ),  # RMS over all heads: the norm sums its squares over the ranks
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
    r"(?:audio_)?(?:prompt_)?adaln_single\..+|av_ca_\w+_adaln_single\..+": (
        HOST  # once per schedule, on the host
    ),
}
GEMMA3 = {
    r"embed_tokens\.weight": HOST,  # rows are looked up on the host
    r"layers\.\d+\.self_attn\.q_proj\.weight": COL,
    r"layers\.\d+\.self_attn\.[kv]_proj\.weight": KV,
    r"layers\.\d+\.self_attn\.o_proj\.weight": ROW,
    r"layers\.\d+\.self_attn\.[qk]_norm\.weight": ALL,  # per head
    r"layers\.\d+\.mlp\.(?:gate|up)_proj\.weight": COL,
    r"layers\.\d+\.mlp\.down_proj\.weight": ROW,
    r"(?:layers\.\d+\.\w+_layernorm|norm)\.weight": ALL,
    r"(?:video|audio)_aggregate_embed\.(?:weight|bias)": COL,
    **_attention(CONNECTOR_BLOCK + r"attn1\."),
    **_feed_forward(CONNECTOR_BLOCK + r"ff\.net\."),
    r"(?:video|audio)_connector\.learnable_registers": (
        HOST  # put behind the prompt's tokens on the host
    ),
}


class Model(NamedTuple):
    """A model's table and how its tensors are named: `prefixes` maps a prefix in the files to one
    of our modules.

    `elsewhere` lists the prefixes of the same files that belong to other components.
    """

    name: str
    table: dict
    prefixes: dict[str, str]
    elsewhere: tuple[str, ...]


DIFFUSION, CONNECTORS = "model.diffusion_model.", ("video", "audio")
_CONNECTOR_PREFIXES = {
    f"{DIFFUSION}{m}_embeddings_connector.": f"{m}_connector." for m in CONNECTORS
}
MODELS = {
    "dit": Model(
        "dit",
        DIT,
        {DIFFUSION: ""},
        (*_CONNECTOR_PREFIXES, "text_embedding_projection.", "vae.", "audio_vae.", "vocoder."),
    ),
    "gemma3": Model(
        "gemma3",
        GEMMA3,
        {**_CONNECTOR_PREFIXES, "text_embedding_projection.": "", "language_model.model.": ""},
        (
            DIFFUSION,
            "vae.",
            "audio_vae.",
            "vocoder.",
            "vision_tower.",
            "multi_modal_projector.",
            "language_model.lm_head.",
        ),
    ),
}


def rename(model: Model, key: str) -> str | None:
    """Our name for a tensor of the files; None where it belongs to another component."""
    prefixes = [p for p in (*model.prefixes, *model.elsewhere) if key.startswith(p)]
    if not prefixes:
        raise UserError(
            f"tensor {key!r} belongs to no known component of {model.name}; is this another model's"
            " file?"
        )
    longest = max(prefixes, key=len)
    return (
        model.prefixes[longest] + key.removeprefix(longest) if longest in model.prefixes else None
    )


def rule(model: Model, name: str) -> int | str | None:
    """The one row that matches a tensor's name: COL, ROW, ALL, KV or HOST."""
    rows = [split for pattern, split in model.table.items() if re.fullmatch(pattern, name)]
    if len(rows) != 1:
        raise UserError(
            f"tensor {name!r} matches {len(rows)} rows of the {model.name} sharding table, wanted"
            " exactly one"
        )
    return rows[0]


def copies(kind: int | str | None, tp: int, heads: dict[str, int]) -> int:
    """How many neighbouring ranks keep the same part of a tensor of that row: with 8 key-value
    heads, 2 of 16 do."""
    return max(1, tp // heads.get(KEY_VALUE_HEADS, tp)) if kind == KV else 1


def local_shape(
    shape: tuple[int, ...], split: int | str | None, tp: int, name: str
) -> tuple[int, ...]:
    """A rank's part of a tensor."""
    if split in (ALL, HOST):
        return tuple(shape)
    if split >= len(shape) or shape[split] % tp:
        raise UserError(
            f"tensor {name!r} of shape {list(shape)} cannot be split over {tp} ranks along"
            f" dimension {split}"
        )
    return tuple(size // tp if dim == split else size for dim, size in enumerate(shape))
