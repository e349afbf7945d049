"""The signatures of the traced graphs: one NamedTuple of inputs and one of outputs each, and the shape of every field.

A field's name means the same tensor in every graph, so running a model is: call a graph with the named values it asks for,
keep the named values it returns. Example inputs, uploads, manifests and tests all derive from here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.config import TEXT_TOKENS, Bucket, GemmaConfig, TransformerConfig
from ltx_neuron.modulation import MODULATION_ROWS


class HeadInputs(NamedTuple):
    step: Tensor
    step_numbers: Tensor
    sigmas: Tensor
    video_modulation: Tensor
    audio_modulation: Tensor
    video_latent: Tensor
    audio_latent: Tensor


class HeadOutputs(NamedTuple):
    video_hidden: Tensor
    audio_hidden: Tensor
    video_rows: Tensor
    audio_rows: Tensor
    sigma_pair: Tensor


class BlockInputs(NamedTuple):
    video_hidden: Tensor
    audio_hidden: Tensor
    video_rows: Tensor
    audio_rows: Tensor
    timestep_mask: Tensor
    video_context: Tensor
    audio_context: Tensor
    video_cos: Tensor
    video_sin: Tensor
    audio_cos: Tensor
    audio_sin: Tensor
    video_cross_cos: Tensor
    video_cross_sin: Tensor
    audio_cross_cos: Tensor
    audio_cross_sin: Tensor


class BlockOutputs(NamedTuple):
    video_hidden: Tensor
    audio_hidden: Tensor


class TailInputs(NamedTuple):
    video_hidden: Tensor
    audio_hidden: Tensor
    video_rows: Tensor
    audio_rows: Tensor
    timestep_mask: Tensor
    sigma_pair: Tensor
    video_latent: Tensor
    audio_latent: Tensor
    denoise_mask: Tensor
    clean_latent: Tensor


class TailOutputs(NamedTuple):
    video_latent: Tensor
    audio_latent: Tensor


_INSIDE_STEP = {*HeadOutputs._fields}
_STEP_FIELDS = [*HeadInputs._fields, *BlockInputs._fields, *TailInputs._fields]
StepInputs = NamedTuple("StepInputs", [(name, Tensor) for name in dict.fromkeys(_STEP_FIELDS) if name not in _INSIDE_STEP])
StepInputs.__doc__ = "The whole step: what head, blocks and tail take from outside."


class Gemma3Inputs(NamedTuple):
    embeddings: Tensor
    attention_mask: Tensor
    local_cos: Tensor
    local_sin: Tensor
    global_cos: Tensor
    global_sin: Tensor


class Gemma3Outputs(NamedTuple):
    video_features: Tensor
    audio_features: Tensor


class Gemma3OutputsWithStates(NamedTuple):
    video_features: Tensor
    audio_features: Tensor
    hidden_states: Tensor


class ConnectorInputs(NamedTuple):
    video_tokens: Tensor
    audio_tokens: Tensor
    video_cos: Tensor
    video_sin: Tensor
    audio_cos: Tensor
    audio_sin: Tensor


class ConnectorOutputs(NamedTuple):
    video_context: Tensor
    audio_context: Tensor


class Field(NamedTuple):
    """Shape and dtype of a graph's tensor on one rank; `split` is the dimension in which the ranks hold different parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    split: int | None = None


def dit_fields(config: TransformerConfig, bucket: Bucket, tp: int, dtype: torch.dtype) -> dict[str, Field]:
    """Every tensor that goes into or comes out of a DiT graph."""
    video, audio, wide = config.video, config.audio, torch.float32
    t_video, t_audio, steps, unique = bucket.video_tokens, bucket.audio_tokens, bucket.max_steps, bucket.timesteps
    fields = {
        "step": Field((1,), torch.int32),
        "step_numbers": Field((steps,), torch.int32),
        "sigmas": Field((steps, 2), wide),
        "sigma_pair": Field((2,), wide),
        "video_modulation": Field((steps, unique, MODULATION_ROWS, video.inner), dtype),
        "audio_modulation": Field((steps, 1, MODULATION_ROWS, audio.inner), dtype),
        "video_rows": Field((unique, MODULATION_ROWS, video.inner), dtype),
        "audio_rows": Field((1, MODULATION_ROWS, audio.inner), dtype),
        "timestep_mask": Field((t_video, unique), dtype),
        "denoise_mask": Field((t_video, 1), wide),
        "clean_latent": Field((1, t_video, config.in_channels), dtype),
        "video_latent": Field((1, t_video, config.in_channels), dtype),
        "audio_latent": Field((1, t_audio, config.audio_in_channels), dtype),
        "video_hidden": Field((1, t_video, video.inner), dtype),
        "audio_hidden": Field((1, t_audio, audio.inner), dtype),
        "video_context": Field((1, TEXT_TOKENS, video.inner), dtype),
        "audio_context": Field((1, TEXT_TOKENS, audio.inner), dtype),
    }
    ropes = {"video": (t_video, video), "audio": (t_audio, audio),
             "video_cross": (t_video, audio), "audio_cross": (t_audio, audio)}  # fmt: skip
    for name, (tokens, size) in ropes.items():
        table = Field((1, size.heads // tp, tokens, size.head_dim // 2), wide, split=1)
        fields |= {f"{name}_cos": table, f"{name}_sin": table}
    return fields


def gemma3_fields(gemma: GemmaConfig, config: TransformerConfig, tokens: int, tp: int, dtype: torch.dtype) -> dict:
    """Every tensor of a text encoder graph for a bucket of `tokens`."""
    table = Field((1, 1, tokens, gemma.head_dim // 2), torch.float32)
    return {
        "embeddings": Field((1, tokens, gemma.hidden_size), dtype),
        "attention_mask": Field((1, 1, tokens, tokens), dtype),
        **{f"{kind}_{part}": table for kind in ("local", "global") for part in ("cos", "sin")},
        "video_features": Field((1, tokens, config.video.inner // tp), dtype, split=2),
        "audio_features": Field((1, tokens, config.audio.inner // tp), dtype, split=2),
        "hidden_states": Field((1, tokens, gemma.hidden_size, gemma.num_hidden_layers + 1), dtype),
    }


def connector_fields(config: TransformerConfig, tp: int, dtype: torch.dtype) -> dict[str, Field]:
    """Every tensor of the connectors' graph."""
    fields = {}
    for name, size in (("video", config.video_connector), ("audio", config.audio_connector)):
        table = Field((1, size.heads // tp, TEXT_TOKENS, size.head_dim // 2), torch.float32, split=1)
        tokens = Field((1, TEXT_TOKENS, size.inner), dtype)
        fields |= {f"{name}_tokens": tokens, f"{name}_context": tokens, f"{name}_cos": table, f"{name}_sin": table}
    return fields
