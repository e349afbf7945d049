"""Gemma3's text model as an encoder: from token embeddings to the text features of every layer,
summed.

Source: transformers models/gemma3/modeling_gemma3.py; features: ltx-core
text_encoders/gemma/feature_extractor.py (V2). The reference stacks all 49 hidden states and
projects them at once; here each layer adds its share to the two projections, so 49 x tokens x width
need not leave the device. Sliding layers have their own RoPE base, unscaled; no sequence here is
longer than the sliding window, so the window itself cuts nothing.
"""

import math

import torch
from torch import Tensor, nn

from ltx_neuron.config import GemmaConfig, TransformerConfig
from ltx_neuron.models.attention import matmul
from ltx_neuron.models.parallel import ColumnLinear, Comm, RowLinear, rms_norm
from ltx_neuron.models.rope import Rope, rotate
from ltx_neuron.models.signatures import Gemma3Inputs, Gemma3Outputs, Gemma3OutputsWithStates


class GemmaRMSNorm(nn.Module):
    """RMSNorm whose weight is stored as w for a factor of 1 + w, all in fp32."""

    def __init__(self, features: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(features))

    def forward(self, x: Tensor) -> Tensor:
        return (rms_norm(x.float(), self.eps) * (1 + self.weight.float())).to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention with a norm per head. Heads and key-value heads are split over the
    ranks.

    With more ranks than key-value heads, each rank has one of them, which neighbouring ranks have
    as well.
    """

    def __init__(self, config: GemmaConfig, tp: int):
        super().__init__()
        self.head_dim, self.scale = config.head_dim, config.query_pre_attn_scalar**-0.5
        parts = min(tp, config.num_key_value_heads)
        self.repeats = (config.num_attention_heads // tp) // (config.num_key_value_heads // parts)
        width, queries = config.hidden_size, config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = ColumnLinear(width, queries, tp, bias=False)
        self.k_proj = ColumnLinear(width, keys, parts, bias=False)
        self.v_proj = ColumnLinear(width, keys, parts, bias=False)
        self.o_proj = RowLinear(queries, width, tp, bias=False)
        self.q_norm = GemmaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(config.head_dim, config.rms_norm_eps)

    def partial(self, x: Tensor, rope: Rope, mask: Tensor) -> Tensor:
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(self.q_norm(query), rope), rotate(self.k_norm(key), rope)
        key, value = (t.repeat_interleave(self.repeats, dim=1) for t in (key, value))
        return self.o_proj.partial(
            matmul(query, key, value, self.scale, mask).transpose(1, 2).flatten(-2)
        )


class MLP(nn.Module):
    def __init__(self, config: GemmaConfig, tp: int):
        super().__init__()
        self.gate_proj = ColumnLinear(config.hidden_size, config.intermediate_size, tp, bias=False)
        self.up_proj = ColumnLinear(config.hidden_size, config.intermediate_size, tp, bias=False)
        self.down_proj = RowLinear(config.intermediate_size, config.hidden_size, tp, bias=False)

    def partial(self, x: Tensor) -> Tensor:
        return self.down_proj.partial(
            nn.functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)
        )


class Layer(nn.Module):
    """One decoder layer: norms before and after both attention and MLP, two sums over the ranks."""

    def __init__(self, config: GemmaConfig, tp: int):
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(config, tp), MLP(config, tp)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(
                self, f"{name}_layernorm", GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
            )

    def forward(self, comm: Comm, x: Tensor, rope: Rope, mask: Tensor) -> Tensor:
        (summed,) = comm.sum(self.self_attn.partial(self.input_layernorm(x), rope, mask))
        x = x + self.post_attention_layernorm(summed)
        (summed,) = comm.sum(self.mlp.partial(self.pre_feedforward_layernorm(x)))
        return x + self.post_feedforward_layernorm(summed)


class AggregateEmbed(nn.Module):
    """Projection of all hidden states, layer by layer. Out-features are split over the ranks.

    weight (layers + 1, out / tp, width): the released matrix (out, width * (layers + 1)) with index
    d * (layers + 1) + l, laid out by layer when it is sharded. The reference scales its input by
    sqrt(out / width); we scale the sum.
    """

    def __init__(self, gemma: GemmaConfig, out_features: int, tp: int):
        super().__init__()
        self.scale = math.sqrt(out_features / gemma.hidden_size)
        self.weight = nn.Parameter(
            torch.empty(gemma.num_hidden_layers + 1, out_features // tp, gemma.hidden_size)
        )
        self.bias = nn.Parameter(torch.empty(out_features // tp))

    def finish(self, summed: Tensor) -> Tensor:
        return (summed * self.scale).to(self.bias.dtype) + self.bias


def layers_first(weight: Tensor, width: int) -> Tensor:
    """(out, width * layers) with index d * layers + l -> (layers, out, width)."""
    return weight.unflatten(-1, (width, -1)).permute(2, 0, 1)


class Gemma3Encoder(nn.Module):
    """Token embeddings (1, B, width) -> video and audio features (1, B, out / tp); optionally all
    hidden states."""

    def __init__(
        self,
        gemma: GemmaConfig,
        config: TransformerConfig,
        tp: int,
        comm: Comm,
        return_states: bool,
    ):
        super().__init__()
        self.comm, self.return_states, self.full_attention = (
            comm,
            return_states,
            set(gemma.full_attention_layers),
        )
        self.layers = nn.ModuleList(Layer(gemma, tp) for _ in range(gemma.num_hidden_layers))
        self.norm = GemmaRMSNorm(gemma.hidden_size, gemma.rms_norm_eps)
        self.video_aggregate_embed = AggregateEmbed(gemma, config.video.inner, tp)
        self.audio_aggregate_embed = AggregateEmbed(gemma, config.audio.inner, tp)

    def forward(self, inputs: Gemma3Inputs) -> Gemma3Outputs | Gemma3OutputsWithStates:
        states, sums = [], None
        for state in self.hidden_states(inputs):
            normed = rms_norm(state)  # per token and layer, before the projections
            index = len(states)
            shares = [
                nn.functional.linear(normed, projection.weight[index]).float()
                for projection in (self.video_aggregate_embed, self.audio_aggregate_embed)
            ]
            sums = (
                shares
                if sums is None
                else [total + share for total, share in zip(sums, shares, strict=True)]
            )
            states.append(state)
        features = (
            self.video_aggregate_embed.finish(sums[0]),
            self.audio_aggregate_embed.finish(sums[1]),
        )
        return (
            Gemma3OutputsWithStates(*features, torch.stack(states, -1))
            if self.return_states
            else Gemma3Outputs(*features)
        )

    def hidden_states(self, inputs: Gemma3Inputs):
        """The embeddings, every layer's output but the last, and the normed last: num_hidden_layers
        + 1 states."""
        local, full = (
            Rope(inputs.local_cos, inputs.local_sin),
            Rope(inputs.global_cos, inputs.global_sin),
        )
        x = inputs.embeddings
        for index, layer in enumerate(self.layers):
            yield x
            x = layer(
                self.comm, x, full if index in self.full_attention else local, inputs.attention_mask
            )
        yield self.norm(x)
