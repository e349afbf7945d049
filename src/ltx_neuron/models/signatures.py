"""The signatures of the traced graphs: one NamedTuple of inputs and one of outputs each, and the
shape of every field.

A field's name means the same tensor in every graph, so running a model is: call a graph with the
named values it asks for, keep the named values it returns. Example inputs, uploads, manifests and
tests all derive from here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.config import TEXT_TOKENS, Bucket, GemmaConfig, TransformerConfig
from ltx_neuron.models.modulation import MODULATION_ROWS


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


class X0Outputs(NamedTuple):
    video_x0: Tensor
    audio_x0: Tensor


def _joined(name: str, document: str, fields: list[str]) -> type:
    kind = NamedTuple(name, [(field, Tensor) for field in dict.fromkeys(fields)])
    kind.__doc__ = document
    return kind


def _outside(head: type, blocks: type, tail: type, inside: type) -> list[str]:
    return [f for f in (*head._fields, *blocks._fields, *tail._fields) if f not in inside._fields]


StepInputs = _joined(
    "StepInputs",
    "The whole step: what head, blocks and tail take from outside.",
    _outside(HeadInputs, BlockInputs, TailInputs, HeadOutputs),
)

# The guided step runs the model several times with other contexts and switches, and combines the
# predictions.
GuidedHeadInputs = _joined(
    "GuidedHeadInputs", "Head of a guided pass.", [*HeadInputs._fields, "enabled_steps"]
)
GuidedHeadOutputs = _joined(
    "GuidedHeadOutputs", "Head of a guided pass.", [*HeadOutputs._fields, "enabled"]
)
GuidedBlockInputs = _joined(
    "GuidedBlockInputs", "Blocks of a guided pass.", [*BlockInputs._fields, "keep", "enabled"]
)
GuidedStepInputs = _joined(
    "GuidedStepInputs",
    "A whole guided pass: what head, blocks and tail take from outside.",
    _outside(GuidedHeadInputs, GuidedBlockInputs, TailInputs, GuidedHeadOutputs),
)


class GuideInputs(NamedTuple):
    step: Tensor
    step_numbers: Tensor
    sigmas: Tensor
    enabled_steps: Tensor
    guidance: Tensor
    denoise_mask: Tensor
    clean_latent: Tensor
    video_latent: Tensor
    audio_latent: Tensor
    cond_video: Tensor
    cond_audio: Tensor
    uncond_video: Tensor
    uncond_audio: Tensor
    perturbed_video: Tensor
    perturbed_audio: Tensor
    isolated_video: Tensor
    isolated_audio: Tensor
    guided_video: Tensor
    guided_audio: Tensor


class GuideOutputs(NamedTuple):
    video_latent: Tensor
    audio_latent: Tensor
    guided_video: Tensor
    guided_audio: Tensor


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


LATENTS = ("video_latent", "audio_latent")  # what a step leaves for the next one
PASSES = ("cond", "uncond", "perturbed", "isolated")


class Field(NamedTuple):
    """Shape and dtype of a graph's tensor on one rank; `split` is the dimension in which the ranks
    hold different parts.

    A field `per_block` has one row per block of the graph: each call gets the rows of its own
    blocks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    split: int | None = None
    per_block: bool = False


def dit_fields(
    config: TransformerConfig, bucket: Bucket, tp: int, dtype: torch.dtype
) -> dict[str, Field]:
    """Every tensor that goes into or comes out of a DiT graph."""
    video, audio, wide = config.video, config.audio, torch.float32
    t_video, t_audio, steps, unique = (
        bucket.video_tokens,
        bucket.audio_tokens,
        bucket.max_steps,
        bucket.timesteps,
    )
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
    ropes = {
        "video": (t_video, video),
        "audio": (t_audio, audio),
        "video_cross": (t_video, audio),
        "audio_cross": (t_audio, audio),
    }
    for name, (tokens, size) in ropes.items():
        table = Field((1, size.heads // tp, tokens, size.head_dim // 2), wide, split=1)
        fields |= {f"{name}_cos": table, f"{name}_sin": table}
    return fields


def guided_fields(
    config: TransformerConfig, bucket: Bucket, tp: int, dtype: torch.dtype, blocks: int
) -> dict[str, Field]:
    """What guidance adds to dit_fields, for graphs of `blocks` blocks."""
    streams = {
        "video": Field((1, bucket.video_tokens, config.in_channels), dtype),
        "audio": Field((1, bucket.audio_tokens, config.audio_in_channels), dtype),
    }
    predictions = {
        f"{name}_{stream}": field
        for name in (*PASSES, "guided")
        for stream, field in streams.items()
    }
    return {
        **predictions,
        **{f"{stream}_x0": field for stream, field in streams.items()},
        "keep": Field(
            (blocks, 4), dtype, per_block=True
        ),  # video and audio self-attention, a2v, v2a: 0 leaves it out
        "enabled_steps": Field(
            (bucket.max_steps, 2), torch.float32
        ),  # video, audio: 0 repeats the last prediction
        "enabled": Field((2,), torch.float32),
        "guidance": Field(
            (2, 4), torch.float32
        ),  # video, audio: cfg - 1, stg, modality - 1, rescale
    }


def gemma3_fields(
    gemma: GemmaConfig, config: TransformerConfig, tokens: int, tp: int, dtype: torch.dtype
) -> dict:
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
        table = Field(
            (1, size.heads // tp, TEXT_TOKENS, size.head_dim // 2), torch.float32, split=1
        )
        tokens = Field((1, TEXT_TOKENS, size.inner), dtype)
        fields |= {
            f"{name}_tokens": tokens,
            f"{name}_context": tokens,
            f"{name}_cos": table,
            f"{name}_sin": table,
        }
    return fields
