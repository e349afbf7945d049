"""Attention kernels with one signature, and the gated multi-head attention of the DiT and the
connectors.

Shapes: B batch, T queries, S keys and values, D head size, H heads of one rank (all heads / tp).
The kernels take (B, H, T, D) and (B, H, S, D); Attention takes tokens (B, T, dim).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from ltx_neuron.config.common import AttentionSize
from ltx_neuron.models.parallel import (
    ColumnLinear,
    Comm,
    ContextParallel,
    RowLinear,
    ShardedRMSNorm,
    sum_partials,
)
from ltx_neuron.models.rope import Rope, rotate


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """PyTorch's own kernel, (B, H, T, D) and (B, H, S, D) twice -> (B, H, T, D). On CPU and CUDA
    it never materializes the T x S scores."""
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale
    )


def matmul(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Two batched products around a softmax, with scores in fp32. Every compiler supports these
    operations, for any head size. mask is added to the scores, broadcast to (B, H, T, S). The
    scores of all heads are materialized."""
    return _attended(*_batched(query, key, value), scale, mask, query.shape[:-2]).view(query.shape)


def _batched(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B H, T, D) and keys (B H, D, S) in fp32, and values (B H, S, D): heads are
    batch entries of a bmm, which needs no broadcasting."""
    keys = key.flatten(0, -3).float().transpose(1, 2)
    return query.flatten(0, -3).float(), keys, value.flatten(0, -3)


def _attended(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mask: Tensor | None,
    batch_and_heads: torch.Size,
) -> Tensor:
    """The attention of some queries, (B H, T, D). Materializes their scores twice, in fp32."""
    scores = torch.bmm(queries, keys) * scale  # (B H, T, S)
    if mask is not None:
        scores = (scores.unflatten(0, batch_and_heads) + mask.float()).flatten(0, -3)
    # fp32 up to here: bf16 rounds a score of 40 to 0.1, and its weight to a tenth.
    return torch.bmm(scores.softmax(-1).to(values.dtype), values)


def part_of_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention to a part of the keys, without its division: the weighted sum of the values and,
    behind it, the sum of the weights, (B, H, T, D + 1), both over exp(maximum); and the maximum of
    each query's scores, (B, H, T, 1). All in fp32, without a kernel, so for few queries. mask: as
    in `matmul`. ContextParallel.merged combines the parts."""
    queries, keys, values = _batched(query, key, value)
    scores = (torch.bmm(queries, keys) * scale).unflatten(0, query.shape[:-2])
    if mask is not None:
        scores = scores + mask.float()
    maximum = scores.amax(-1, keepdim=True)
    weights = (scores - maximum).exp()
    # A channel of ones: the same product sums the weights. A column that is concatenated to four
    # dimensions was zero on trn2 in another model (vllm-neuron, 2026).
    values = nn.functional.pad(values.float(), (0, 1), value=1.0)
    return torch.bmm(weights.flatten(0, -3), values).unflatten(0, query.shape[:-2]), maximum


def nki(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """nkilib's flash kernel, with which a backend replaces `attention_cte`: (B, H, T, D) and
    (B, H, S, D) twice -> (B, H, T, D). Head sizes up to 128. The kernel takes no mask. With a mask,
    (T, S) or (1, S), this computes `matmul` for `rows_at_once` queries at a time."""
    if mask is not None:
        queries, keys, values = _batched(query, key, value)
        rows = rows_at_once(*queries.shape[:2])
        parts = queries.split(rows, 1)
        masks = mask.split(rows, 0) if len(mask) > 1 else [mask] * len(parts)
        attended = [
            _attended(q, keys, values, scale, m, query.shape[:-2])
            for q, m in zip(parts, masks, strict=True)
        ]
        return torch.cat(attended, 1).view(query.shape)
    heads = (x.flatten(0, -3) for x in (query, key, value))  # the kernel's batch is B H
    return attention_cte(*heads, scale).view(query.shape)


def rows_at_once(heads: int, queries: int) -> int:
    """The number of queries whose masked scores `nki` materializes at once, for all heads: half as
    many scores as one head has."""
    return -(-queries // (2 * heads))


@torch.library.custom_op("ltx_neuron::attention_cte", mutates_args=())
def attention_cte(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention without mask of queries (H, T, D) to keys and values (H, S, D): one operation in
    every graph. This reference runs without NKI. Like the kernel it computes scores, scale, softmax
    and sum in fp32."""
    scores = torch.bmm(query.float(), key.float().transpose(1, 2)) * scale
    return torch.bmm(scores.softmax(-1), value.float()).to(query.dtype)


@attention_cte.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return query.new_empty(query.shape)  # contiguous, whatever the strides of the query


@register_flop_formula(torch.ops.ltx_neuron.attention_cte)
def _(query: tuple, key: tuple, value: tuple, scale: float, **_) -> int:
    heads, queries, size = query
    # Two products, of a multiplication and an addition each.
    return 4 * heads * queries * key[1] * size


# Kernels of the DiT and the connectors, query, key, value (B, H, T|S, D) -> (B, H, T, D), with a
# mask that is added to the scores, broadcast to (B, H, T, S), or None; the profile selects one for
# a program. Gemma's heads of 256 or 512 are larger than the kernels allow, so it always uses
# `matmul`.
Kernel = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
KERNELS: dict[str, Kernel] = {"sdpa": sdpa, "matmul": matmul, "nki": nki}


class Attention(nn.Module):
    """Gated attention with q/k RMSNorm over all heads and split RoPE; heads are split over the
    ranks. Source: ltx-core model/transformer/attention.py; parameters have its names. The forward
    pass is in `attend`, which runs independent attentions together, so that their sums form one
    group."""

    def __init__(
        self,
        size: AttentionSize,
        query_dim: int,
        context_dim: int,
        tp: int,
        kernel: Kernel,
        eps: float = 1e-6,
    ):
        super().__init__()
        self.heads, self.head_dim, self.kernel = size.heads // tp, size.head_dim, kernel
        self.to_q = ColumnLinear(query_dim, size.inner, tp)
        self.to_k = ColumnLinear(context_dim, size.inner, tp)
        self.to_v = ColumnLinear(context_dim, size.inner, tp)
        self.q_norm = ShardedRMSNorm(size.inner, tp, eps)
        self.k_norm = ShardedRMSNorm(size.inner, tp, eps)
        # A rank has the gates of its own heads.
        self.to_gate_logits = ColumnLinear(query_dim, size.heads, tp)
        self.to_out = nn.ModuleList([RowLinear(size.inner, query_dim, tp)])

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, H*D) -> (B, H, T, D)"""
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def attended(
        self,
        call: "AttentionCall",
        query: Tensor,
        contexts: Sequence[tuple[Tensor, Tensor]],
        statistics: Sequence[Tensor],
    ) -> list[Tensor]:
        """The attention of this rank's heads to each context, (B, T, H, D), from the projections:
        the query (B, T, H*D), and each context's key and value (B, S, H*D). statistics: the summed
        ones of the query (B, T, 1) and of each key (B, S, 1)."""
        query = self.split_heads(self.q_norm(query, statistics[0]))
        return [
            self._attended(call, query, self.split_heads(self.k_norm(key, statistic)), value)
            for (key, value), statistic in zip(contexts, statistics[1:], strict=True)
        ]

    def _attended(self, call: "AttentionCall", query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if call.rope is not None:
            query, key = rotate(query, call.rope), rotate(key, call.key_rope or call.rope)
        value = self.split_heads(value)
        out = self._over_groups(call, query, key, value)  # (B, H, T, D)
        if call.keep is not None:
            # Spatio-temporal guidance: without attention each token keeps its own value.
            out = out * call.keep + value * (1 - call.keep)
        return out.transpose(1, 2)

    def _over_groups(
        self, call: "AttentionCall", query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """The kernel's output for all keys and values, of which context parallelism divides those
        of the video."""
        context, scale = call.context_parallel, self.head_dim**-0.5
        if context is None:
            return self.kernel(query, key, value, scale, call.bias)
        if call.context is not call.x:
            # Every group has the same queries, from the audio. Their results are smaller than the
            # video's keys and values.
            part = part_of_attention(query, key, value, scale, call.bias)
            return context.merged(*part).to(value.dtype)
        key, value = context.gathered(key, value)
        return self.kernel(query, key, value, scale, call.bias)

    def partial(self, call: "AttentionCall", out: Tensor) -> Tensor:
        """This rank's summand of the output projection, (B, T, query_dim), from the attention of
        its heads (B, T, H, D)."""
        # One gate per token and head, (B, T, H): zero logits pass the head through unchanged.
        gate = 2 * torch.sigmoid(self.to_gate_logits(call.x))
        return self.to_out[0].partial((out * gate.unsqueeze(-1)).flatten(-2))


class AttentionCall(NamedTuple):
    """One attention to run."""

    module: Attention
    x: Tensor  # (B, T, query_dim), input of the queries and the gates
    context: Tensor  # (B, S, context_dim), input of the keys and values
    rope: Rope | None = None  # tables of the queries, and of the keys if key_rope is None
    key_rope: Rope | None = None  # tables of the keys, if they have other positions
    # (), guided graphs: 1 attends, 0 passes the values through (needs T = S)
    keep: Tensor | None = None
    bias: Tensor | None = None  # (T, S), or (1, S) for all queries, added to all heads' scores
    # Normalized attention guidance: the negative prompt's context, (B, S, context_dim)
    negative: Sequence[Tensor] = ()
    x_divided: bool = False  # a rank has T / tp of these tokens (sequence parallelism), ...
    context_divided: bool = False  # ... and of these
    # If tensor-parallel groups divide the tokens of the context
    context_parallel: ContextParallel | None = None

    def gathered(self, comm: Comm) -> "AttentionCall":
        """The call with all tokens, as column-parallel layers and attention need them."""
        x = comm.all_gather(self.x) if self.x_divided else self.x
        if self.context is self.x:
            return self._replace(x=x, context=x)
        context = comm.all_gather(self.context) if self.context_divided else self.context
        return self._replace(x=x, context=context)

    def projections(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The query, and each context's key and value."""
        query, contexts = self.module.to_q(self.x), (self.context, *self.negative)
        return query, [(self.module.to_k(x), self.module.to_v(x)) for x in contexts]


def attend(comm: Comm, *calls: AttentionCall, nag: Tensor | None = None) -> list[Tensor]:
    """Run independent attentions with two grouped sums over the ranks: one of all statistics, one
    of all outputs. Returns (B, T, query_dim) for each, or (B, T / tp, query_dim) if x is divided.
    nag: (3,) fp32, of calls with a negative context, see `normalized_guidance`: one sum more."""
    calls = [call.gathered(comm) for call in calls]
    projections = [call.projections() for call in calls]
    # q_norm and k_norm span the heads of all ranks, so their sums of squares are summed first. The
    # statistics of all calls form one small message.
    normed = [(query, *(key for key, _ in contexts)) for query, contexts in projections]
    summed = iter(comm.sum(*(ShardedRMSNorm.statistic(x) for tensors in normed for x in tensors)))
    # Not a list: without guidance each output is projected before the next one is computed.
    attended = (
        call.module.attended(call, *projection, [next(summed) for _ in tensors])
        for call, projection, tensors in zip(calls, projections, normed, strict=True)
    )
    if nag is None:
        outs = (out for (out,) in attended)
    else:
        outs = normalized_guidance(comm, nag, [*attended])
    partials = [call.module.partial(call, out) for call, out in zip(calls, outs, strict=True)]
    outputs = sum_partials(comm, partials, [call.x_divided for call in calls])
    return [c.module.to_out[0].finish(out) for c, out in zip(calls, outputs, strict=True)]


_SMALLEST_NORM = 1e-7  # keeps the quotient of two norms finite, as upstream


def normalized_guidance(
    comm: Comm, nag: Tensor, attended: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Normalized attention guidance (Chen et al. 2025, arXiv 2505.21179): each attention to a
    prompt is moved away from the attention to the negative prompt, with one grouped sum over the
    ranks.

    nag       (3,) fp32: scale, alpha and tau
    attended  the attentions to the prompt and to the negative prompt, (B, T, H, D) each

    Per token, of all heads together: the L1 norm grows at most to tau times that of the prompt's
    attention, and alpha mixes the result with it. Source: ComfyUI-KJNodes, LTX2_NAG.
    """
    scale, alpha, tau = nag.unbind(0)
    positives = [positive.float() for positive, _ in attended]
    # scale * positive - (scale - 1) * negative, exact for equal attentions.
    guided = [
        positive + (scale - 1) * (positive - negative.float())
        for positive, (_, negative) in zip(positives, attended, strict=True)
    ]
    # The norms span the heads of all ranks, (B, T, 1, 1).
    norms = iter(comm.sum(*(x.abs().sum((2, 3), keepdim=True) for x in (*positives, *guided))))
    most = [next(norms) * tau for _ in positives]
    results = []
    for positive, moved, limit, norm in zip(positives, guided, most, norms, strict=True):
        limited = moved * (limit / (norm + _SMALLEST_NORM)).clamp(max=1)
        results.append((positive + alpha * (limited - positive)).to(attended[0][0].dtype))
    return results
