"""Attention: one kernel signature, the gated multi-head attention of the DiT and the connectors, and grouped calls of it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ltx_neuron.config import AttentionSize
from ltx_neuron.parallel import ColumnLinear, Comm, RowLinear, ShardedRMSNorm
from ltx_neuron.rope import Rope, rotate


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """softmax(query key^T scale + mask) value, heads first: (B, H, T, D) x (B, H, S, D) -> (B, H, T, D)."""
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


class Attention(nn.Module):
    """Gated attention with q/k RMSNorm over all heads and split RoPE; heads are split over the ranks.

    Source: ltx-core model/transformer/attention.py. The forward pass is in `attend`, which runs several attentions of the
    same stage side by side, so that their sums travel together.
    """

    def __init__(self, size: AttentionSize, query_dim: int, context_dim: int, tp: int, eps: float = 1e-6):
        super().__init__()
        self.heads, self.head_dim = size.heads // tp, size.head_dim
        self.to_q = ColumnLinear(query_dim, size.inner, tp)
        self.to_k = ColumnLinear(context_dim, size.inner, tp)
        self.to_v = ColumnLinear(context_dim, size.inner, tp)
        self.q_norm = ShardedRMSNorm(size.inner, tp, eps)
        self.k_norm = ShardedRMSNorm(size.inner, tp, eps)
        self.to_gate_logits = ColumnLinear(query_dim, size.heads, tp)
        self.to_out = nn.ModuleList([RowLinear(size.inner, query_dim, tp)])

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, H*D) -> (B, H, T, D)"""
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def partial(self, call: "Call", query: Tensor, key: Tensor, value: Tensor, sums: tuple[Tensor, Tensor]) -> Tensor:
        """From projections and summed statistics to this rank's summand of the output projection (B, T, query_dim)."""
        query = self.split_heads(self.q_norm(query, sums[0]))
        key = self.split_heads(self.k_norm(key, sums[1]))
        if call.rope is not None:
            query, key = rotate(query, call.rope), rotate(key, call.key_rope or call.rope)
        value = self.split_heads(value)
        out = attention(query, key, value, self.head_dim**-0.5)
        if call.keep is not None:
            out = out * call.keep + value * (1 - call.keep)
        out = out.transpose(1, 2)
        gate = 2 * torch.sigmoid(self.to_gate_logits(call.x))  # zero logits pass the head through unchanged
        return self.to_out[0].partial((out * gate.unsqueeze(-1)).flatten(-2))


class Call(NamedTuple):
    """One attention to run: queries from x (B, T, dim), keys and values from context (B, S, context_dim)."""

    module: Attention
    x: Tensor
    context: Tensor
    rope: Rope | None = None
    key_rope: Rope | None = None
    keep: Tensor | None = None  # guided graphs: 1 attends, 0 passes the values through (spatio-temporal guidance)


def attend(comm: Comm, *calls: Call) -> list[Tensor]:
    """Run attentions that do not depend on each other with two grouped sums: all statistics, then all outputs."""
    projections = [(c.module.to_q(c.x), c.module.to_k(c.context), c.module.to_v(c.context)) for c in calls]
    statistics = comm.sum(*(ShardedRMSNorm.statistic(x) for query, key, _ in projections for x in (query, key)))
    partials = [
        call.module.partial(call, *projected, statistics[2 * i : 2 * i + 2])
        for i, (call, projected) in enumerate(zip(calls, projections, strict=True))
    ]
    return [c.module.to_out[0].finish(out) for c, out in zip(calls, comm.sum(*partials), strict=True)]
