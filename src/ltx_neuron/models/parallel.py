"""Tensor parallelism of the models: the collectives (Comm), and layers with divided sizes.

The models know the number of ranks but not their own rank. Rank files are cut before loading, so
one traced graph serves every rank.

Shapes: `features` counts those of the whole model; a rank's parameters and split activations have
features / tp. Activations that are not split are equal on every rank. With sequence parallelism
(Korthikanti et al. 2022, arXiv 2205.05198) the video's residual stream is divided too: between the
layers a rank has T / tp of its tokens, (B, T / tp, D).

With context parallelism there are cp groups of tp ranks. Each group has its own part of the video's
tokens throughout, T' / cp of T' >= T, and all tokens of audio and text. Only video self-attention
needs the tokens of other groups; attention to the video merges their results (ContextParallel).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class Comm(Protocol):
    """The collectives that models use. A backend decides how it reduces a group."""

    size: int

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each tensor summed over the ranks. The tensors of a call form a group, which may be
        reduced in one collective. With one rank this is the identity."""
        ...

    # For sequence parallelism, which needs several ranks.
    def all_gather(self, tensor: Tensor) -> Tensor:
        """The ranks' tokens joined in the order of the ranks: (1, T / size, D) -> (1, T, D)."""
        ...

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, of which each rank keeps its own tokens: (1, T, D) ->
        (1, T / size, D)."""
        ...


class SingleRank:
    """Comm of an unsharded model."""

    size = 1

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors


@dataclass(frozen=True)
class ContextParallel:
    """The collectives between tensor-parallel groups that divide a clip's video tokens."""

    groups: Comm  # all of these groups
    tokens: int = 0  # of the clip, T; each group has `own` of them, and the last ones are padding
    own: int = 0  # T' / cp

    def joined(self, tensor: Tensor) -> Tensor:
        """The tokens of all groups, without padding: (1, T' / cp, D) -> (1, T, D)."""
        tokens = self.groups.all_gather(tensor)
        return tokens[:, : self.tokens] if self.padding else tokens

    @property
    def padding(self) -> int:
        """Tokens that the last groups have beyond the clip's."""
        return self.own * self.groups.size - self.tokens

    def gathered(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Keys and values (1, H, T' / cp, D) of all tokens in one collective, without padding:
        (1, H, T, D) each."""
        count, (_, number, _, size) = len(heads), heads[0].shape
        tokens = torch.stack(heads, 1).permute(0, 3, 1, 2, 4).flatten(2)  # (1, T' / cp, 2 H D)
        whole = self.joined(tokens)
        whole = whole.unflatten(2, (count, number, size))
        return whole.permute(2, 0, 3, 1, 4).unbind(0)

    def merged(self, sums: Tensor, maximum: Tensor) -> Tensor:
        """Attention to the keys of all groups, (1, H, T, D), from each group's part: its sums
        (1, H, T, D + 1) and maximum (1, H, T, 1), see attention.part_of_attention. A part of
        padding alone has no share."""
        parts = self.groups.all_gather(maximum.squeeze(-1)).unflatten(1, (self.groups.size, -1))
        share = (maximum - parts.amax(1).unsqueeze(-1)).exp()
        (summed,) = self.groups.sum(sums * share)
        return summed[..., :-1] / summed[..., -1:]


@dataclass(frozen=True)
class Mesh:
    """How the ranks divide a DiT's work."""

    tensor: Comm  # the collectives of a tensor-parallel group
    # Sequence parallelism: its ranks divide the video's tokens between the layers
    divided: bool = False
    context: ContextParallel | None = None  # context parallelism, or None

    @property
    def selects(self) -> bool:
        """Whether a rank has only a part of the video's tokens in the residual stream."""
        return self.divided or self.context is not None


def sum_partials(comm: Comm, partials: Sequence[Tensor], divided: Sequence[bool]) -> list[Tensor]:
    """Row-parallel summands (1, T, D), summed over the ranks: (1, T, D), or (1, T / tp, D) if
    the stream is divided. Streams that are not divided are summed in one group."""
    together = [partial for partial, parts in zip(partials, divided, strict=True) if not parts]
    whole = iter(comm.sum(*together)) if together else iter(())
    return [
        comm.reduce_scatter(partial) if parts else next(whole)
        for partial, parts in zip(partials, divided, strict=True)
    ]


class ColumnLinear(nn.Linear):
    """Linear whose out-features are split over the ranks (weight dim 0); its output stays split."""

    def __init__(self, in_features: int, out_features: int, tp: int, bias: bool = True):
        # The bias is split with the out-features.
        super().__init__(in_features, out_features // tp, bias=bias)


class RowLinear(nn.Linear):
    """Linear whose in-features are split over the ranks (weight dim 1). `partial` gives this rank's
    summand; the caller sums it over the ranks, alone or grouped with others, and `finish` adds the
    bias, once."""

    def __init__(self, in_features: int, out_features: int, tp: int, bias: bool = True):
        super().__init__(in_features // tp, out_features, bias=bias)

    def partial(self, x: Tensor) -> Tensor:
        """(..., in_features / tp) -> this rank's summand of (..., out_features)."""
        return nn.functional.linear(x, self.weight)

    def finish(self, summed: Tensor) -> Tensor:
        """Add the bias to the sum: once, not once per rank."""
        return summed if self.bias is None else summed + self.bias


class ShardedRMSNorm(nn.Module):
    """RMSNorm over features that are split over the ranks: its statistic is a sum over the ranks. A
    norm over a rank's own features would be wrong without an error. The caller sums `statistic`
    (..., 1) fp32."""

    def __init__(self, features: int, tp: int, eps: float):
        super().__init__()
        self.features, self.eps = features, eps
        self.weight = nn.Parameter(torch.empty(features // tp))

    @staticmethod
    def statistic(x: Tensor) -> Tensor:
        """The sum of squares of this rank's features: (..., features / tp) -> (..., 1) fp32."""
        # A sum, not a mean, so that the caller can sum it over the ranks in a group.
        return x.float().square().sum(-1, keepdim=True)

    def forward(self, x: Tensor, summed: Tensor) -> Tensor:
        """(..., features / tp) and the summed statistic (..., 1) -> (..., features / tp)."""
        normed = x.float() * torch.rsqrt(summed / self.features + self.eps)
        return normed.to(x.dtype) * self.weight


class FeedForward(nn.Module):
    """dim -> 4 dim -> dim with tanh-GELU, column then row parallel, no gather between. Source:
    ltx-core feed_forward.py."""

    def __init__(self, dim: int, tp: int, bias: bool):
        super().__init__()
        # The nesting gives the checkpoint's names, net.0.proj and net.2; net.1 has no parameters.
        project = nn.Module()
        project.proj = ColumnLinear(dim, 4 * dim, tp, bias)
        self.net = nn.ModuleList([project, nn.Identity(), RowLinear(4 * dim, dim, tp, bias)])

    def partial(self, x: Tensor) -> Tensor:
        """(B, T, dim) -> this rank's summand of the output (B, T, dim)."""
        return self.net[2].partial(nn.functional.gelu(self.net[0].proj(x), approximate="tanh"))

    def finish(self, summed: Tensor) -> Tensor:
        return self.net[2].finish(summed)


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last dimension without weight, computed in fp32. Source: ltx-core
    utils.py."""
    # fp32 explicitly: in bf16 a mean over 4096 squares has only two correct digits.
    x_fp32 = x.float()
    return (x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
