"""The configuration of Gemma3's text model, which encodes prompts."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from ltx_neuron.config.common import (
    KEY_VALUE_HEADS,
    TEXT_TOKENS,
    ModelConfig,
    check_numbers,
    gemma_download,
)
from ltx_neuron.config.transformer import TransformerConfig
from ltx_neuron.errors import UserError, reason, refusal
from ltx_neuron.files import check_regular
from ltx_neuron.hub import nearest


@dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    """Gemma3's text model (text_config of gemma_root/config.json, with the names of transformers 4
    or 5). The defaults are google/gemma-3-12b-it's, whose published file omits most values."""

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

    @property
    def heads(self) -> dict[str, int]:
        """A tensor-parallel degree divides these, or is a multiple of the second."""
        return {
            "Gemma num_attention_heads": self.num_attention_heads,
            KEY_VALUE_HEADS: self.num_key_value_heads,
        }


GEMMA_3_12B = GemmaConfig()


def gemma_config(root: Path) -> GemmaConfig:
    """Read gemma_root/config.json."""
    path = Path(root) / "config.json"
    try:
        check_regular(path)
        content = json.loads(path.read_text())
    except PermissionError as error:
        raise refusal(error, "--gemma-root") from None
    except OSError as error:
        what = f"{path}: {reason(error)}"
        if not os.path.isdir(root):
            what = f"--gemma-root {root} is not a folder{nearest(root)}"
        raise UserError(
            f"{what}; wanted Gemma3-12B's folder.\nDownload it: {gemma_download(root)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    content = content if isinstance(content, dict) else {}
    kind, text = content.get("model_type"), content.get("text_config")
    if kind != "gemma3" or not isinstance(text, dict):
        raise UserError(
            f"{path}: model_type is {kind!r}, wanted 'gemma3' with a text_config (LTX-2.3 uses"
            " Gemma3-12B)"
        )
    for name in ("attn_logit_softcapping", "attention_bias", "use_bidirectional_attention"):
        if text.get(name):
            raise UserError(
                f"{path}: text_config.{name} is {text[name]!r}, which is not implemented"
            )
    sizes = {name: text.get(name, own) for name, own in dataclasses.asdict(GEMMA_3_12B).items()}
    pattern = text.get("sliding_window_pattern", 6)
    types = text.get("layer_types") or [
        "sliding" if (i + 1) % pattern else "full_attention"
        for i in range(sizes["num_hidden_layers"])
    ]
    rope = text.get("rope_parameters") or {}
    full, local = rope.get("full_attention", {}), rope.get("sliding_attention", {})
    scaling = text.get("rope_scaling") or full or {"factor": 8.0, "rope_type": "linear"}
    if scaling.get("rope_type", "linear") not in ("linear", "default"):
        raise UserError(
            f"{path}: rope_type {scaling['rope_type']!r} is not implemented, only 'linear'"
        )
    sizes |= {
        "full_attention_layers": tuple(i for i, t in enumerate(types) if t == "full_attention"),
        "rope_theta": full.get("rope_theta", sizes["rope_theta"]),
        "rope_factor": scaling.get("factor", 1.0),
        "rope_local_base_freq": local.get("rope_theta", sizes["rope_local_base_freq"]),
    }
    config = GemmaConfig(**sizes)
    check_numbers(config, f"{path}: text_config.")
    if config.sliding_window < TEXT_TOKENS:
        raise UserError(
            f"{path}: sliding_window {config.sliding_window} is below the {TEXT_TOKENS} tokens"
            " LTX-2.3 encodes"
        )
    return config


def check_gemma_fits(
    gemma: GemmaConfig,
    transformer: TransformerConfig,
    gemma_root: Path,
    features: int | None = None,
) -> None:
    """Raise UserError unless the text encoder's hidden states fit the checkpoint's projections.

    features  input width of a projection: the concatenated hidden states of the embedding and all
              layers
    """
    if gemma.hidden_size != transformer.caption_channels:
        got = f"hidden_size {gemma.hidden_size}"
        wanted = f"{transformer.caption_channels} (caption_channels)"
    elif features in (None, gemma.hidden_size * (gemma.num_hidden_layers + 1)):
        return
    else:
        got = f"num_hidden_layers {gemma.num_hidden_layers}"
        wanted = f"{features // gemma.hidden_size - 1} layers"
    raise UserError(
        f"--gemma-root {gemma_root} has {got}, but the checkpoint's text projections take"
        f" {wanted}.\nLTX-2.3 needs Gemma3-12B: {gemma_download(gemma_root)}"
    )
