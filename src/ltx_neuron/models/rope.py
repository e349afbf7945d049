"""Rotary position embeddings: tables made on the host, applied in fp32 in the graph.

The tables follow ltx-core's rounding (frequencies float64 -> fp32, phases fp32: rope.py there) bit
for bit, because at the highest frequencies one ulp of a phase changes a cosine by 1e-3. Positions
stay fp32 (upstream since 1.1.3).

Shapes: B batch, T tokens, H heads, D head size, F frequencies per axis of the positions.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ltx_neuron.config.transformer import TransformerConfig


class Rope(NamedTuple):
    """Cosines and sines, (B, H, T, D / 2) fp32: each head has its own frequencies."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, fields: Mapping[str, Tensor], name: str) -> "Rope":
        """The fields `{name}_cos` and `{name}_sin` of a graph."""
        return cls(fields[f"{name}_cos"], fields[f"{name}_sin"])

    def fields(self, name: str) -> dict[str, Tensor]:
        return {f"{name}_cos": self.cos, f"{name}_sin": self.sin}


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Split rotation of (B, H, T, D): the halves of each head form the pairs. Computed in fp32,
    returned in x's dtype."""
    # The checkpoint pairs halves, not neighbours (rope_type "split"). In fp32, because bf16 cosines
    # have errors of 4e-3.
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat(
        [first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin], dim=-1
    ).to(x.dtype)


def split_rope(
    positions: Tensor, max_pos: tuple[int, ...], inner_dim: int, heads: int, theta: float
) -> Rope:
    """Tables (B, H, T, D / 2) for positions (B, axes, T) in the units of max_pos. Heads take
    consecutive bands, so ranks slice by head. Layout within the inner dimension: frequency-major,
    axis-minor. Remaining entries come first and have phase 0."""
    axes = positions.shape[1]
    # float64 here and fp32 below, as ltx-core rounds: see the module's docstring.
    exponents = np.linspace(0.0, 1.0, inner_dim // (2 * axes), dtype=np.float64)
    # (F,).
    frequencies = torch.tensor(np.power(theta, exponents) * math.pi / 2, dtype=torch.float32)
    fractions = [positions[:, axis] / max_pos[axis] for axis in range(axes)]
    fractions = torch.stack(fractions, dim=-1)  # (B, T, axes), 0 to 1
    phases = frequencies * (fractions.unsqueeze(-1) * 2 - 1)  # (B, T, axes, F)
    phases = phases.transpose(-1, -2).flatten(2)  # (B, T, F axes)
    # inner_dim / 2 need not be a multiple of the axes: the rest has phase 0.
    padding = inner_dim // 2 - phases.shape[-1]
    cos = torch.nn.functional.pad(phases.cos(), (padding, 0), value=1.0)
    sin = torch.nn.functional.pad(phases.sin(), (padding, 0), value=0.0)
    # (B, T, inner_dim / 2) -> (B, H, T, D / 2)
    return Rope(*(t.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous() for t in (cos, sin)))


def half_rope(
    positions: Tensor, head_dim: int, theta: float, factor: float, turning: float = 1.0
) -> Rope:
    """Gemma's tables (1, 1, T, head_dim / 2) for integer positions (T,): every head alike, linear
    scaling by `factor`. Only the first frequencies turn, a share `turning` of those of the whole
    head; the phases of the others are 0. fp32 throughout, as transformers computes them
    (modeling_gemma3.py, Gemma3RotaryEmbedding; modeling_rope_utils.py,
    _compute_proportional_rope_parameters)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents / factor
    frequencies[int(turning * head_dim // 2) :] = 0
    phases = positions.float()[:, None] * frequencies[None]
    return Rope(phases.cos()[None, None], phases.sin()[None, None])


def rope_tables(
    config: TransformerConfig, video_positions: Tensor, audio_positions: Tensor
) -> dict[str, Tensor]:
    """Cosines and sines of the DiT's self attentions and audio-video attentions, by field.
    video_positions: (1, 3, Tv): seconds, pixel row, pixel column. Audio-video attention uses time
    only, with the audio's head size. audio_positions: (1, 1, Ta): seconds."""
    video_max = config.positional_embedding_max_pos
    audio_max = config.audio_positional_embedding_max_pos
    cross_max = (max(video_max[0], audio_max[0]),)
    heads, theta = config.video.heads, config.positional_embedding_theta
    video_width, audio_width = config.video.inner, config.audio.inner
    video_times = video_positions[:, :1]
    return {
        **split_rope(video_positions, video_max, video_width, heads, theta).fields("video"),
        **split_rope(audio_positions, audio_max, audio_width, heads, theta).fields("audio"),
        **split_rope(video_times, cross_max, audio_width, heads, theta).fields("video_cross"),
        **split_rope(audio_positions, cross_max, audio_width, heads, theta).fields("audio_cross"),
    }
