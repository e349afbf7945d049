"""The text model of Gemma 3 and Gemma 4 as an encoder: token embeddings to the sum of every layer's
text features. Their config says in what they differ.

Source: transformers models/gemma3/modeling_gemma3.py and
models/gemma4_unified/modeling_gemma4_unified.py; features: ltx-core
text_encoders/gemma/feature_extractor.py (V2). The reference stacks all 49 hidden states and
projects them at once. Here each layer adds its share to the two projections, so the hidden states
need not leave the device. Sliding layers have their own RoPE base, unscaled. No sequence is longer
than the sliding window, so no mask is needed for it.

Shapes (the batch is always 1): B tokens of the bucket, W hidden width (3840), H query heads of a
rank, K key-value heads of a rank, D head size (256, in Gemma 4's full layers 512), L layers (48), O
width of a DiT stream.
Parameters have transformers' names.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ltx_neuron.config.gemma import GemmaAttention, GemmaConfig
from ltx_neuron.config.transformer import TransformerConfig
from ltx_neuron.models.attention import matmul
from ltx_neuron.models.parallel import ColumnLinear, Comm, RowLinear, rms_norm
from ltx_neuron.models.rope import Rope, rotate


class GemmaRMSNorm(nn.Module):
    """RMSNorm in fp32 whose factor is weight, in Gemma 3 1 + weight."""

    def __init__(self, features: int, config: GemmaConfig):
        super().__init__()
        self.eps, self.offset = config.rms_norm_eps, int(config.norms_add_one)
        self.weight = nn.Parameter(torch.empty(features))

    def forward(self, x: Tensor) -> Tensor:
        # 1 + weight in fp32: bf16 would lose the weight's last bits.
        return (rms_norm(x.float(), self.eps) * (self.offset + self.weight.float())).to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention with a norm per head. Heads and key-value heads are split over the
    ranks. With more ranks than key-value heads, each rank has one head, and neighbouring ranks
    share it."""

    def __init__(self, config: GemmaConfig, size: GemmaAttention, tp: int):
        super().__init__()
        self.head_dim, self.scale = size.head_dim, config.query_pre_attn_scalar**-0.5
        # A key-value head is never cut: with more ranks than heads, several ranks hold it.
        kv_parts = min(tp, size.key_value_heads)
        heads = config.num_attention_heads // tp
        kv_heads = size.key_value_heads // kv_parts
        self.repeats = heads // kv_heads
        width, queries = config.hidden_size, config.num_attention_heads * size.head_dim
        keys = size.key_value_heads * size.head_dim
        self.q_proj = ColumnLinear(width, queries, tp, bias=False)
        self.k_proj = ColumnLinear(width, keys, kv_parts, bias=False)
        self.v_proj = (
            None if size.keys_are_values else ColumnLinear(width, keys, kv_parts, bias=False)
        )
        self.o_proj = RowLinear(queries, width, tp, bias=False)
        # Norms per head, unlike the DiT's, need no sum over the ranks.
        self.q_norm = GemmaRMSNorm(size.head_dim, config)
        self.k_norm = GemmaRMSNorm(size.head_dim, config)
        self.value_eps = config.rms_norm_eps if config.value_norm else None

    def partial(self, x: Tensor, rope: Rope, mask: Tensor) -> Tensor:
        """(1, B, W) and a mask (1, 1, B, B) -> this rank's summand of the output (1, B, W)."""

        def heads(proj: ColumnLinear) -> Tensor:
            return proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query, key = heads(self.q_proj), heads(self.k_proj)  # (1, H, B, D) and (1, K, B, D)
        value = key if self.v_proj is None else heads(self.v_proj)
        query, key = rotate(self.q_norm(query), rope), rotate(self.k_norm(key), rope)
        if self.value_eps is not None:
            value = rms_norm(value, self.value_eps)
        # Repeated to (1, H, B, D): every compiler supports plain batched products.
        key, value = (t.repeat_interleave(self.repeats, dim=1) for t in (key, value))
        # Always `matmul`: the flash kernels support neither heads of 256 and 512 nor masks.
        attended = matmul(query, key, value, self.scale, mask)
        return self.o_proj.partial(attended.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Gated feed-forward, W -> intermediate -> W, column then row parallel, no gather between."""

    def __init__(self, config: GemmaConfig, tp: int):
        super().__init__()
        self.gate_proj = ColumnLinear(config.hidden_size, config.intermediate_size, tp, bias=False)
        self.up_proj = ColumnLinear(config.hidden_size, config.intermediate_size, tp, bias=False)
        self.down_proj = RowLinear(config.intermediate_size, config.hidden_size, tp, bias=False)

    def partial(self, x: Tensor) -> Tensor:
        """(1, B, W) -> this rank's summand of the output (1, B, W)."""
        return self.down_proj.partial(
            nn.functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)
        )


class Layer(nn.Module):
    """One decoder layer: norms before and after both attention and MLP, two sums over the ranks."""

    def __init__(self, config: GemmaConfig, size: GemmaAttention, tp: int):
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(config, size, tp), MLP(config, tp)
        # Every rank has their whole inputs, so they need no sum over the ranks.
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{name}_layernorm", GemmaRMSNorm(config.hidden_size, config))
        self.layer_scalar = nn.Parameter(torch.empty(1)) if config.layer_scalar else None

    def forward(self, comm: Comm, x: Tensor, rope: Rope, mask: Tensor) -> Tensor:
        """(1, B, W) -> (1, B, W)"""
        # Norms are not linear, so each sum over the ranks comes before its norm.
        (summed,) = comm.sum(self.self_attn.partial(self.input_layernorm(x), rope, mask))
        x = x + self.post_attention_layernorm(summed)
        (summed,) = comm.sum(self.mlp.partial(self.pre_feedforward_layernorm(x)))
        x = x + self.post_feedforward_layernorm(summed)
        return x if self.layer_scalar is None else x * self.layer_scalar


class AggregateEmbed(nn.Module):
    """Projection of all hidden states, layer by layer. Out-features are split over the ranks.
    weight (L + 1, O / tp, W): the released matrix (O, W * (L + 1)) with index d * (L + 1) + l.
    Sharding reorders it by layer (layers_first). The reference scales the input by sqrt(O / W); we
    scale the sum."""

    def __init__(self, gemma: GemmaConfig, out_features: int, tp: int):
        super().__init__()
        self.scale = math.sqrt(out_features / gemma.hidden_size)
        self.weight = nn.Parameter(
            torch.empty(gemma.num_hidden_layers + 1, out_features // tp, gemma.hidden_size)
        )
        self.bias = nn.Parameter(torch.empty(out_features // tp))

    def finish(self, summed: Tensor) -> Tensor:
        """From the sum over the layers (1, B, O / tp) fp32 to the features, in the run's dtype."""
        return (summed * self.scale).to(self.bias.dtype) + self.bias


def layers_first(weight: Tensor, width: int) -> Tensor:
    """(out, width * layers) with index d * layers + l -> (layers, out, width)."""
    return weight.unflatten(-1, (width, -1)).permute(2, 0, 1)


class Gemma3Encoder(nn.Module):
    """Token embeddings (1, B, W) -> video and audio features (1, B, O / tp); optionally all hidden
    states (1, B, W, L + 1)."""

    def __init__(
        self, gemma: GemmaConfig, config: TransformerConfig, tp: int, comm: Comm, states: bool
    ):
        super().__init__()
        self.comm, self.return_states = comm, states
        self.full_attention = set(gemma.full_attention_layers)
        self.layers = nn.ModuleList(
            Layer(gemma, gemma.attention(index in self.full_attention), tp)
            for index in range(gemma.num_hidden_layers)
        )
        self.norm = GemmaRMSNorm(gemma.hidden_size, gemma)
        self.video_aggregate_embed = AggregateEmbed(gemma, config.video.inner, tp)
        self.audio_aggregate_embed = AggregateEmbed(gemma, config.audio.inner, tp)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        embeds = self.video_aggregate_embed, self.audio_aggregate_embed
        states, sums = [], None
        for index, state in enumerate(self.hidden_states(inputs)):
            normed = rms_norm(state)  # per token and layer, before the projections
            # In fp32: 49 additions in bf16 would lose the smaller shares.
            shares = [nn.functional.linear(normed, embed.weight[index]).float() for embed in embeds]
            if sums is None:
                sums = shares
            else:
                sums = [total + share for total, share in zip(sums, shares, strict=True)]
            states.append(state)
        video, audio = (embed.finish(total) for embed, total in zip(embeds, sums, strict=True))
        features = {"video_features": video, "audio_features": audio}
        if self.return_states:
            features["hidden_states"] = torch.stack(states, -1)
        return features

    def hidden_states(self, inputs: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yield L + 1 states (1, B, W): the embeddings, every layer's output but the last, and the
        last one's after the final norm."""
        local, full = Rope.of(inputs, "local"), Rope.of(inputs, "global")
        x = inputs["embeddings"]
        for index, layer in enumerate(self.layers):
            yield x
            rope = full if index in self.full_attention else local
            x = layer(self.comm, x, rope, inputs["attention_mask"])
        yield self.norm(x)
