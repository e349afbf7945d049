"""AdaLN on the host: one table of modulation rows per schedule, for each distinct timestep of each
step.

AdaLN depends on the timestep alone, so its 0.87 GB of weights never reach a device: the table is
0.2 MB per timestep in bf16. Sources: ltx-core
model/transformer/{adaln,timestep_embedding,transformer_args}.py.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ltx_neuron.config import TransformerConfig

# Rows of the table (steps, timesteps, MODULATION_ROWS, D) of each stream, in the order of
# ltx-core's AdaLN tables.
SELF_ATTENTION, FEED_FORWARD, TEXT_ATTENTION = 0, 3, 6  # each (shift, scale, gate)
A2V, V2A, AV_GATE = 9, 11, 13  # (scale, shift), (scale, shift), gate
PROMPT, EMBEDDED_TIMESTEP = 14, 16  # (shift, scale); added to the output's own (shift, scale)
MODULATION_ROWS = 17
_SINUSOID = 256  # channels of the timestep embedding, fixed upstream (timestep_embedding.py)


def modulation_table(
    weights: dict[str, Tensor],
    config: TransformerConfig,
    stream: str,
    sigmas: Tensor,
    masks: Tensor,
    cross_sigma: bool = False,
) -> Tensor:
    """Modulation rows of one stream, (steps, U, 17, D) fp32.

    weights      the host tensors of the sharded DiT (adaln_single.* and so on)
    stream       "video" or "audio"
    sigmas       (steps,) fp32, the sigma each step starts from
    masks        (U,) fp32 denoise masks: a token's timestep is mask * sigma; masks[0] must be 1
    cross_sigma  ltx-core 1.0.0: audio-video scale and shift follow the other stream's sigma, not
                 the token's own timestep
    """
    prefix, gate = {"video": ("", "a2v"), "audio": ("audio_", "v2a")}[stream]
    scale = config.timestep_scale_multiplier
    sigma = (sigmas * scale)[:, None].expand(-1, len(masks))  # (steps, U)
    own = sigmas[:, None] * masks * scale
    gate_factor = config.av_ca_timestep_scale_multiplier / scale

    rows, embedded = _adaln(weights, f"{prefix}adaln_single", own)
    av_rows, _ = _adaln(
        weights, f"av_ca_{stream}_scale_shift_adaln_single", sigma if cross_sigma else own
    )
    gate_row, _ = _adaln(weights, f"av_ca_{gate}_gate_adaln_single", sigma * gate_factor)
    if config.use_prompt_adaln_single:
        prompt_rows, _ = _adaln(weights, f"{prefix}prompt_adaln_single", sigma)
    else:
        prompt_rows = torch.zeros_like(av_rows[:, :, :2])
    return torch.cat([rows, av_rows, gate_row, prompt_rows, embedded.unsqueeze(2)], dim=2)


def _adaln(weights: dict[str, Tensor], name: str, timesteps: Tensor) -> tuple[Tensor, Tensor]:
    """AdaLayerNormSingle of timesteps (steps, U): its rows (steps, U, n, D) and the embedded
    timestep (steps, U, D)."""

    def layer(x: Tensor, part: str) -> Tensor:
        return linear(
            x, weights[f"{name}.{part}.weight"].float(), weights[f"{name}.{part}.bias"].float()
        )

    embedded = layer(sinusoid(timesteps), "emb.timestep_embedder.linear_1")
    embedded = layer(silu(embedded), "emb.timestep_embedder.linear_2")
    rows = layer(silu(embedded), "linear")
    return rows.unflatten(-1, (-1, embedded.shape[-1])), embedded


def host_weights(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that modulation_table reads."""
    found = {}
    for stream, prefix, gate, width in (
        ("video", "", "a2v", config.video.inner),
        ("audio", "audio_", "v2a", config.audio.inner),
    ):
        rows = {
            f"{prefix}adaln_single": A2V,
            f"av_ca_{stream}_scale_shift_adaln_single": AV_GATE - A2V,
            f"av_ca_{gate}_gate_adaln_single": PROMPT - AV_GATE,
        }
        if config.use_prompt_adaln_single:
            rows[f"{prefix}prompt_adaln_single"] = EMBEDDED_TIMESTEP - PROMPT
        for name, count in rows.items():
            parts = {
                "emb.timestep_embedder.linear_1": (width, _SINUSOID),
                "emb.timestep_embedder.linear_2": (width, width),
                "linear": (count * width, width),
            }
            for part, shape in parts.items():
                found |= {f"{name}.{part}.weight": shape, f"{name}.{part}.bias": shape[:1]}
    return found


def sinusoid(timesteps: Tensor) -> Tensor:
    """Sinusoidal embedding (..., 256) fp32, cosines first."""
    half = _SINUSOID // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
    phases = timesteps.float().unsqueeze(-1) * frequencies
    return torch.cat([phases.cos(), phases.sin()], dim=-1)
