"""The configuration of the text model that encodes prompts: Gemma 3's or Gemma 4's."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from ltx_neuron.config import common
from ltx_neuron.config.transformer import TransformerConfig
from ltx_neuron.errors import UserError, os_reason, to_user_error
from ltx_neuron.files import check_regular, other_format
from ltx_neuron.hub import nearest


class GemmaAttention(NamedTuple):
    """Sizes of the attention of sliding or of full layers."""

    head_dim: int
    key_value_heads: int
    # The layers have no v_proj; their values are the keys before norm and RoPE
    keys_are_values: bool


@dataclass(frozen=True)
class GemmaConfig(common.ModelConfig):
    """Gemma's text model: text_config of gemma_root/config.json, with the names of transformers 4
    or 5, or of the `gemma_config` in a text encoder's file. The defaults are those of
    google/gemma-3-12b-it, whose published file omits most values. Gemma 4 added these fields; their
    defaults are Gemma 3's."""

    hidden_size: int = 3840
    intermediate_size: int = 15360
    num_hidden_layers: int = 48
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 256
    query_pre_attn_scalar: float = 256
    vocab_size: int = 262208
    rms_norm_eps: float = 1e-6
    sliding_window: int = 1024
    # Every 6th; the others are sliding and use the local RoPE base.
    full_attention_layers: tuple[int, ...] = tuple(range(5, 48, 6))
    rope_theta: float = 1e6
    rope_factor: float = 8.0
    rope_local_base_freq: float = 1e4
    global_head_dim: int | None = None  # of full layers; None: head_dim
    # Of full layers that use their keys as values; None: they have a v_proj
    num_global_key_value_heads: int | None = None
    partial_rotary_factor: float = 1.0  # share of the RoPE frequencies that full layers use
    norms_add_one: bool = True  # whether norms multiply by 1 + weight, otherwise by weight
    value_norm: bool = False  # whether the values of each head are normed, without a weight
    layer_scalar: bool = False  # whether a weight multiplies the output of a layer
    # Token ids of images, sounds and videos, each with the id that the encoder embeds instead
    replaced_tokens: tuple[tuple[int, int], ...] = ()

    added: ClassVar[dict[str, object]] = {
        "global_head_dim": None,
        "num_global_key_value_heads": None,
        "partial_rotary_factor": 1.0,
        "norms_add_one": True,
        "value_norm": False,
        "layer_scalar": False,
        "replaced_tokens": (),
    }

    def attention(self, full: bool) -> GemmaAttention:
        """The sizes of full layers' attention, or of sliding layers'."""
        shared = self.num_global_key_value_heads if full else None
        return GemmaAttention(
            full and self.global_head_dim or self.head_dim,
            shared or self.num_key_value_heads,
            shared is not None,
        )

    @property
    def heads(self) -> dict[str, int]:
        """Counts that a tensor-parallel degree must divide, or be a multiple of (key-value)."""
        heads = {
            "Gemma num_attention_heads": self.num_attention_heads,
            common.KEY_VALUE_HEADS: self.num_key_value_heads,
        }
        if self.num_global_key_value_heads:
            heads[common.GLOBAL_KEY_VALUE_HEADS] = self.num_global_key_value_heads
        return heads


GEMMA_3_12B = GemmaConfig()
GEMMA_4_12B = GemmaConfig(
    query_pre_attn_scalar=1,
    vocab_size=262144,
    rope_factor=1.0,
    global_head_dim=512,
    num_global_key_value_heads=1,
    partial_rotary_factor=0.25,
    norms_add_one=False,
    value_norm=True,
    layer_scalar=True,
    replaced_tokens=((258880, 0), (258881, 0), (258884, 0)),
)
# By the model_type in a config.
_KINDS = {"gemma3": GEMMA_3_12B, "gemma4_unified": GEMMA_4_12B}
_NOT_IMPLEMENTED = (
    "attn_logit_softcapping",
    "attention_bias",
    "enable_moe_block",
    "num_kv_shared_layers",
    "hidden_size_per_layer_input",
    "use_double_wide_mlp",
)


def gemma_config(root: Path) -> GemmaConfig:
    """Read gemma_root/config.json."""
    path = Path(root) / "config.json"
    try:
        check_regular(path)
        content = json.loads(path.read_text())
    except PermissionError as error:
        raise to_user_error(error, "--gemma-root") from None
    except OSError as error:
        what = f"{path}: {os_reason(error)}"
        if not os.path.isdir(root):
            what = f"--gemma-root {root} is {other_format(Path(root)) or 'not a folder'}"
            what += "" if os.path.exists(root) else nearest(root)
        raise UserError(
            f"{what}; wanted Gemma3-12B's folder.\nDownload it: {common.gemma_download(root)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    return read_config(content, path)


def read_config(content: object, path: Path) -> GemmaConfig:
    """The text model of a config of Gemma 3 or Gemma 4. path: for errors."""
    content = content if isinstance(content, dict) else {}
    kind, text = content.get("model_type"), content.get("text_config")
    known = _KINDS.get(str(kind))
    if known is None or not isinstance(text, dict):
        raise UserError(
            f"{path}: model_type is {kind!r}, wanted {' or '.join(map(repr, _KINDS))} with a"
            " text_config (LTX-2.3 uses Gemma3-12B, LTX-2.5 Gemma 4)"
        )
    # "vision" makes only images bidirectional.
    bidirectional = text.get("use_bidirectional_attention") not in (None, False, "vision")
    for name in (*_NOT_IMPLEMENTED, *["use_bidirectional_attention"] * bidirectional):
        if text.get(name):
            raise UserError(
                f"{path}: text_config.{name} is {text[name]!r}, which is not implemented"
            )
    sizes = {name: text.get(name, default) for name, default in dataclasses.asdict(known).items()}
    pattern = text.get("sliding_window_pattern", 6)
    types = text.get("layer_types") or [
        "sliding" if (i + 1) % pattern else "full_attention"
        for i in range(sizes["num_hidden_layers"])
    ]
    rope = text.get("rope_parameters") or {}
    full, local = rope.get("full_attention", {}), rope.get("sliding_attention", {})
    scaling = text.get("rope_scaling") or full or {"factor": 8.0, "rope_type": "linear"}
    kinds = "linear", "default", "proportional"
    if (rope_type := scaling.get("rope_type", "linear")) not in kinds:
        raise UserError(
            f"{path}: rope_type {rope_type!r} is not implemented, only 'linear' and 'proportional'"
        )
    share = scaling.get("partial_rotary_factor", 1.0) if rope_type == "proportional" else 1.0
    shared = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    names = "image_token_id", "audio_token_id", "video_token_id"
    sizes |= {
        "full_attention_layers": tuple(i for i, t in enumerate(types) if t == "full_attention"),
        "rope_theta": full.get("rope_theta", sizes["rope_theta"]),
        "rope_factor": scaling.get("factor", 1.0),
        "rope_local_base_freq": local.get("rope_theta", sizes["rope_local_base_freq"]),
        "num_global_key_value_heads": shared,
        "partial_rotary_factor": share,
        "replaced_tokens": tuple(
            (content.get(name, token), text.get("pad_token_id", pad))
            for name, (token, pad) in zip(names, known.replaced_tokens, strict=False)
        ),
    }
    config = GemmaConfig(**sizes)
    common.check_numbers(config, f"{path}: text_config.")
    if config.sliding_window < common.TEXT_TOKENS:
        raise UserError(
            f"{path}: sliding_window {config.sliding_window} is below the"
            f" {common.TEXT_TOKENS} tokens LTX encodes"
        )
    return config


def check_gemma_fits(
    gemma: GemmaConfig,
    transformer: TransformerConfig,
    gemma_root: Path,
    features: int | None = None,
    download: str = "",
) -> None:
    """Raise UserError unless the text encoder's hidden states fit the checkpoint's projections.
    features: input width of a projection: the concatenated hidden states of the embedding and all
    layers. download: the command that fetches the published text encoder, if it is a file."""
    if gemma.hidden_size != transformer.caption_channels:
        got = f"hidden_size {gemma.hidden_size}"
        needs = f"{transformer.caption_channels} (caption_channels)"
    elif features in (None, gemma.hidden_size * (gemma.num_hidden_layers + 1)):
        return
    else:
        got = f"num_hidden_layers {gemma.num_hidden_layers}"
        needs = f"{features // gemma.hidden_size - 1} layers"
    needed = f"LTX-2.3 needs Gemma3-12B: {common.gemma_download(gemma_root, beside=True)}"
    raise UserError(
        f"--gemma-root {gemma_root} has {got}, but the checkpoint's text projections take"
        f" {needs}.\n{f'Download the published one: {download}' if download else needed}"
    )
