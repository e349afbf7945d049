"""AdaLN on the host: one modulation table per schedule, with a row for each distinct timestep of
each step.

AdaLN depends only on the timestep. Its 0.87 GB of weights therefore never reach a device; the table
has 0.2 MB per timestep in bf16. Sources: ltx-core
model/transformer/{adaln,timestep_embedding,transformer_args}.py.

Shapes: U distinct timesteps of a step's tokens, D width of the stream, n rows of one AdaLN module.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ltx_neuron.config.transformer import TransformerConfig


class AdaLNRows(NamedTuple):
    """Consecutive rows of a modulation table and the learned entries that are added to them."""

    row: int  # first row of the modulation table (steps, U, MODULATION_ROWS, D)
    entry: int  # first entry of the learned table, a parameter of the block or of the output
    count: int  # how many rows, and as many entries

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.count)

    @property
    def entries(self) -> slice:
        return slice(self.entry, self.entry + self.count)


# The order is that of ltx-core's modules, whose outputs are concatenated: adaln_single (9 rows),
# av_ca_*_scale_shift_adaln_single (4), av_ca_*_gate_adaln_single (1), prompt_adaln_single (2), and
# the embedded timestep of adaln_single.
# With scale_shift_table (9, D), each (shift, scale, gate):
SELF_ATTENTION = AdaLNRows(row=0, entry=0, count=3)
FEED_FORWARD = AdaLNRows(row=3, entry=3, count=3)
TEXT_ATTENTION = AdaLNRows(row=6, entry=6, count=3)
# With scale_shift_table_a2v_ca_* (5, D): (scale, shift), in this order alone here, and the gate.
A2V = AdaLNRows(row=9, entry=0, count=2)
V2A = AdaLNRows(row=11, entry=2, count=2)
AV_GATE = AdaLNRows(row=13, entry=4, count=1)
# With prompt_scale_shift_table (2, D): (shift, scale) of the text context.
PROMPT = AdaLNRows(row=14, entry=0, count=2)
# The output layer's scale_shift_table (2, D) has a shift and a scale; both are added to this row.
EMBEDDED_TIMESTEP = AdaLNRows(row=16, entry=0, count=1)
MODULATION_ROWS = 17
# Channels of the timestep embedding, fixed upstream (timestep_embedding.py).
_SINUSOID = 256


def modulation_table(
    weights: dict[str, Tensor],  # the host tensors of the sharded DiT (adaln_single.* and so on)
    config: TransformerConfig,
    stream: str,  # "video" or "audio"
    sigmas: Tensor,  # (steps,) fp32, the sigma each step starts from
    # (U,) fp32 denoise masks: a token's timestep is mask * sigma; masks[0] must be 1
    masks: Tensor,
    # ltx-core 1.0.0: audio-video scale and shift follow the other stream's sigma, not the token's
    # own timestep
    cross_sigma: bool = False,
    # The other stream's, if they differ from `sigmas`: those of a frozen stream are 0
    other_sigmas: Tensor | None = None,
) -> Tensor:
    """Modulation rows of one stream, (steps, U, 17, D) fp32."""
    prefix, gate = {"video": ("", "a2v"), "audio": ("audio_", "v2a")}[stream]
    scale = config.timestep_scale_multiplier
    # The step's timestep and the tokens' own ones, both (steps, U). The products have
    # upstream's order (sigma, mask, scale), because another order rounds differently.
    step_timesteps = (sigmas * scale)[:, None].expand(-1, len(masks))
    token_timesteps = sigmas[:, None] * masks * scale
    other_sigmas = sigmas if other_sigmas is None else other_sigmas
    other_timesteps = (other_sigmas * scale)[:, None].expand(-1, len(masks))
    gate_factor = config.av_ca_timestep_scale_multiplier / scale

    rows, embedded = _adaln(weights, f"{prefix}adaln_single", token_timesteps)
    # Since 1.1.4 the audio-video scale and shift follow a token's own timestep.
    av_timesteps = other_timesteps if cross_sigma else token_timesteps
    av_rows, _ = _adaln(weights, f"av_ca_{stream}_scale_shift_adaln_single", av_timesteps)
    # The gate and the prompt are those of the whole stream, not of a token's timestep. The gate
    # follows the sigma of the other stream.
    gate_row, _ = _adaln(weights, f"av_ca_{gate}_gate_adaln_single", other_timesteps * gate_factor)
    if config.use_prompt_adaln_single:
        prompt_rows, _ = _adaln(weights, f"{prefix}prompt_adaln_single", step_timesteps)
    else:
        # The unused rows stay in the table, so that it has one shape for every checkpoint.
        prompt_rows = torch.zeros_like(av_rows[:, :, : PROMPT.count])
    return torch.cat([rows, av_rows, gate_row, prompt_rows, embedded.unsqueeze(2)], dim=2)


def _adaln(weights: dict[str, Tensor], name: str, timesteps: Tensor) -> tuple[Tensor, Tensor]:
    """AdaLayerNormSingle of timesteps (steps, U): its rows (steps, U, n, D) and the embedded
    timestep (steps, U, D), fp32."""

    def layer(x: Tensor, part: str) -> Tensor:
        # The weights are cast up instead of x down: near 1000, bf16 has only every fourth timestep.
        return linear(
            x, weights[f"{name}.{part}.weight"].float(), weights[f"{name}.{part}.bias"].float()
        )

    embedded = layer(sinusoid(timesteps), "emb.timestep_embedder.linear_1")
    embedded = layer(silu(embedded), "emb.timestep_embedder.linear_2")
    rows = layer(silu(embedded), "linear")
    return rows.unflatten(-1, (-1, embedded.shape[-1])), embedded


def host_weights(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that modulation_table reads."""
    shapes = {}
    for stream, prefix, gate, width in (
        ("video", "", "a2v", config.video.inner),
        ("audio", "audio_", "v2a", config.audio.inner),
    ):
        rows = {
            f"{prefix}adaln_single": (
                SELF_ATTENTION.count + FEED_FORWARD.count + TEXT_ATTENTION.count
            ),
            f"av_ca_{stream}_scale_shift_adaln_single": A2V.count + V2A.count,
            f"av_ca_{gate}_gate_adaln_single": AV_GATE.count,
        }
        if config.use_prompt_adaln_single:
            rows[f"{prefix}prompt_adaln_single"] = PROMPT.count
        for name, count in rows.items():
            parts = {
                "emb.timestep_embedder.linear_1": (width, _SINUSOID),
                "emb.timestep_embedder.linear_2": (width, width),
                "linear": (count * width, width),
            }
            for part, shape in parts.items():
                shapes |= {f"{name}.{part}.weight": shape, f"{name}.{part}.bias": shape[:1]}
    return shapes


def sinusoid(timesteps: Tensor) -> Tensor:
    """Sinusoidal embedding (..., 256) fp32, cosines first."""
    # fp32 as upstream: float64 phases would change the last bits of all rows.
    half = _SINUSOID // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
    phases = timesteps.float().unsqueeze(-1) * frequencies
    return torch.cat([phases.cos(), phases.sin()], dim=-1)


class Modulation:
    """The AdaLN rows of one stream at one step. rows: (U, MODULATION_ROWS, D). timestep_mask:
    (T, U), one-hot: the timestep of each token; not read if U = 1."""

    def __init__(self, rows: Tensor, timestep_mask: Tensor | None):
        self.rows, self.timestep_mask = rows, timestep_mask

    def per_token(self, table: Tensor, group: AdaLNRows) -> tuple[Tensor, ...]:
        """The group's rows plus the entries of a learned table (entries, D), by each token's
        timestep: (D,) if all tokens have the same, otherwise (T, D)."""
        values = table[group.entries] + self.rows[:, group.rows]  # (U, count, D)
        return tuple(self._select(values[:, i]) for i in range(group.count))

    def per_step(self, table: Tensor, group: AdaLNRows) -> Tensor:
        """The group's rows plus the entries of a learned table (entries, D) for the
        step's sigma, independent of tokens' timesteps: (count, D)."""
        # The first timestep is that of mask 1 (sampling.latent_state.LatentState.masks).
        return table[group.entries] + self.rows[0, group.rows]

    def _select(self, values: Tensor) -> Tensor:
        """(U, D) -> (D,) or, for more than one timestep, (T, D)."""
        if values.shape[0] == 1:
            return values[0]
        # Compilers reject a gather of rows or make it slow. All summands but one are zero, so the
        # sum is exact.
        return sum(self.timestep_mask[:, u, None] * values[u] for u in range(values.shape[0]))
