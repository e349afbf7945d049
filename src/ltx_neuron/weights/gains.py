"""Whether the weights suit attention=nki_const_max, which loses rows whose bound is too far above
their largest score.

Weights tell how long a head's queries and keys are on average, and not how long those of one token
are: this refuses what is sure to go wrong, and proves nothing of the rest
(benchmarks/attention_bound.md). AWS calls the bound safe where one norm reaches over all heads, as
in Wan 2.2 and here; a port of Wan 2.2 5B saw gaps of up to 260 nats with the same kernel, and rows
of zeros.
"""

import re

import torch
from torch import Tensor

from ltx_neuron.config.transformer import CONST_MAX_HEAD_DIM
from ltx_neuron.errors import UserError
from ltx_neuron.weights.checkpoint import Source

# Nats at which the kernel still sums a row exactly: it clamps the sum soon after.
LARGEST_GAP = 80.0
UNEVEN = 2.0  # how many times as long as on average a query and the longest key are assumed to be
_QUERY = re.compile(r"(transformer_blocks\.\d+\.attn[12])\.q_norm\.weight")


def largest_bound(query: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> float:
    """The bound, in nats, of the head that has the largest. Each side: the gains of the norm over
    all heads, and the channels' energies before it, both (H * 128,). RoPE changes no length."""
    lengths = []
    for gains, energy in (query, key):
        share = energy / energy.mean()
        lengths.append((gains**2 * share).unflatten(0, (-1, CONST_MAX_HEAD_DIM)).sum(1).sqrt())
    return UNEVEN**2 * CONST_MAX_HEAD_DIM**-0.5 * (lengths[0] * lengths[1]).max().item()


def largest_bounds(source: Source) -> dict[str, float]:
    """That bound of each attention of the video's stream, by name. Channels have the energy that
    their projection gives a normalised input."""
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
    """Raise UserError where attention=nki_const_max loses rows by the weights, or runs in another
    dtype than its kernel's. head_dim: of the video's attention."""
    advice = "Type --profile-set attention=nki"
    if dtype != torch.bfloat16:
        raise UserError(
            f"attention=nki_const_max computes in bfloat16, got --dtype {str(dtype).split('.')[1]}."
            f"\n{advice}"
        )
    if head_dim != CONST_MAX_HEAD_DIM:
        return  # no attention of the model is the kernel's
    lost = {name: b for name, b in largest_bounds(source).items() if not b <= LARGEST_GAP}  # or NaN
    if lost:
        worst = max(lost, key=lost.__getitem__)
        raise UserError(
            f"attention=nki_const_max loses rows with these weights: by the norms of {worst} its"
            f" bound is up to {lost[worst]:.0f} nats above a score, and {LARGEST_GAP:.0f} at most"
            f" are exact.\n{advice}"
        )
