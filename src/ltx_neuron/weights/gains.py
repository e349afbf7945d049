"""Checks whether the weights suit attention=nki_const_max, whose kernel loses rows with a bound
too far above their largest score.

The weights determine the average length of a head's queries and keys, but not the length for one
token. The check therefore rejects certain failures and proves nothing about other weights
(benchmarks/attention_bound.md). AWS calls the bound safe for a norm over all heads, as in Wan 2.2
and here; a port of Wan 2.2 5B measured gaps of up to 260 nats with this kernel, and rows of zeros.
"""

import re

import torch
from torch import Tensor

from ltx_neuron.config.transformer import CONST_MAX_HEAD_DIM
from ltx_neuron.errors import UserError
from ltx_neuron.weights.checkpoint import Source

# The largest gap, in nats, at which the kernel's sum is exact; the kernel clamps larger sums.
LARGEST_GAP = 80.0
UNEVEN = 2.0  # assumed ratio of the longest query's and key's length to the average
_QUERY = re.compile(r"(transformer_blocks\.\d+\.attn[12])\.q_norm\.weight")


def largest_bound(query: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> float:
    """The largest bound of any head, in nats. Each side: the gains of the norm over all heads, and
    the channels' energies before it, both (H * 128,). RoPE changes no length."""
    lengths = []
    for gains, energy in (query, key):
        share = energy / energy.mean()
        lengths.append((gains**2 * share).unflatten(0, (-1, CONST_MAX_HEAD_DIM)).sum(1).sqrt())
    return UNEVEN**2 * CONST_MAX_HEAD_DIM**-0.5 * (lengths[0] * lengths[1]).max().item()


def largest_bounds(source: Source) -> dict[str, float]:
    """Name -> largest bound of each attention of the video stream. A channel's energy is that of
    its projection of a normalised input."""
    bounds = {}
    for name in source.names:
        if match := _QUERY.fullmatch(name):
            sides = []
            for of in "qk":
                weight = source.tensor(f"{match[1]}.to_{of}.weight").float()
                bias = source.tensor(f"{match[1]}.to_{of}.bias").float()
                gains = source.tensor(f"{match[1]}.{of}_norm.weight").float()
                sides.append((gains, weight.square().sum(1) + bias.square()))
            bounds[match[1]] = largest_bound(*sides)
    return bounds


def check_const_max(source: Source, head_dim: int, dtype: torch.dtype) -> None:
    """Raise UserError if attention=nki_const_max would lose rows with these weights, or if its
    kernel does not support `dtype`. head_dim: of the video's attention."""
    advice = "Type --profile-set attention=nki"
    if dtype != torch.bfloat16:
        raise UserError(
            f"attention=nki_const_max computes in bfloat16, got --dtype {str(dtype).split('.')[1]}."
            f"\n{advice}"
        )
    if head_dim != CONST_MAX_HEAD_DIM:
        return  # the model does not use the kernel
    lost = {name: b for name, b in largest_bounds(source).items() if not b <= LARGEST_GAP}  # or NaN
    if lost:
        worst = max(lost, key=lost.__getitem__)
        raise UserError(
            f"attention=nki_const_max loses rows with these weights: by the norms of {worst} its"
            f" bound is up to {lost[worst]:.0f} nats above a score, and {LARGEST_GAP:.0f} at most"
            f" are exact.\n{advice}"
        )
