"""How exact attention=nki_const_max is, by its reference: with queries and keys of the release's
statistics, and by the gap between a row's bound and its largest score.

python benchmarks/attention_bound.py
"""

import math
import platform
from functools import partial

import torch
from lib.harness import finish, parser

from ltx_neuron.config.transformer import CONST_MAX_HEAD_DIM, transformer_config
from ltx_neuron.models.attention import attention_const_max, nki, sdpa
from ltx_neuron.tiny.config import released_config
from ltx_neuron.tune.tolerance import rel_l2
from ltx_neuron.weights.gains import LARGEST_GAP, largest_bound

HEADS = 4  # that are compared: those with the largest bounds
TOKENS = (1536, 1500)  # of which 128 divides the first
# Gains of the norms; the released ones are not known here. From and to, evenly distributed.
GAINS = ((1.0, 1.0), (0.5, 1.5), (1.0, 2.0), (1.5, 2.5), (2.0, 3.0))
# Deviations of the logarithm of a head's energy, which its weights show, and of a token's in it,
# which nothing does before it runs.
SPREADS = ((0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (1.0, 0.0), (1.0, 0.5))
GAPS = (4, 8, 16, 32, 64, 80, 84, 85, 86, 88, 92, 100)


def main() -> None:
    args = parser(__doc__).parse_args()
    print(
        f"torch {torch.__version__}, {platform.machine()}; distances are of norms, from float64\n"
    )
    print(
        "RMS norm over all heads, of 128 channels; the bound is what the check at load allows for"
    )
    print(
        "tokens  gains       heads tokens  bound   gap  const max  attention_cte  ratio  lost rows"
    )
    for tokens in TOKENS:
        for gains in GAINS:
            for spreads in SPREADS:
                print(_statistics(tokens, gains, *spreads))
    print("\nA gap that is planted, scores within 3 nats of each other: distance, and rows lost")
    print("gap    float32    bfloat16   attention_cte in bfloat16")
    lost = {}
    for gap in GAPS:
        text, lost[gap] = _planted(gap)
        print(text)
    finish(args, rows_lost_at_gap=lost)


def _statistics(tokens: int, gains: tuple[float, float], heads: float, spread: float) -> str:
    generator = torch.Generator().manual_seed(tokens)
    size = transformer_config(released_config()).video
    normal = partial(torch.randn, generator=generator)
    rows, sides = [], []
    for _ in range(2):
        gain = torch.empty(size.inner).uniform_(*gains, generator=generator)
        energy = normal(size.heads, 1).mul(heads).exp().expand(-1, size.head_dim)
        share = energy * normal(tokens, size.heads, 1).mul(spread).exp()
        x = (normal(tokens, *energy.shape) * share.sqrt()).flatten(1)
        x = x / x.square().mean(-1, keepdim=True).sqrt() * gain
        rows.append(x.unflatten(1, energy.shape))
        sides.append((gain, energy.flatten()))
    bound, scale = largest_bound(*sides), size.head_dim**-0.5
    # The heads that have the longest queries and keys, and so the largest bounds.
    longest = (rows[0].norm(dim=-1).amax(0) * rows[1].norm(dim=-1).amax(0)).topk(HEADS).indices
    query, key = (x[:, longest] for x in rows)
    compared = _compared(query, key, normal(tokens, HEADS, size.head_dim), scale)
    refused = "  refused" if bound > LARGEST_GAP else ""
    return (
        f"{tokens:6}  {gains[0]:.1f} to {gains[1]:.1f}  {heads:5}  {spread:5}  {bound:5.0f}"
        f"  {compared}{refused}"
    )


def _compared(query, key, value, scale: float) -> str:
    """Of (T, H, 128) tensors."""
    rows = [x.bfloat16()[None] for x in (query, key, value)]
    exact_rows = [x.double().transpose(1, 2) for x in rows]
    exact = sdpa(*exact_rows, scale)
    q, k = exact_rows[:2]
    gap = scale * q.norm(dim=-1) * k.norm(dim=-1).amax(-1, keepdim=True)
    gap = (gap - (q @ k.mT).mul(scale).amax(-1)).max().item()
    got = attention_const_max(*rows, scale)
    other = nki(*(x.transpose(1, 2) for x in rows), scale)
    ours, cte = rel_l2(got, exact), rel_l2(other, exact)
    return f"{gap:5.1f}  {ours:9.2e}  {cte:13.2e}  {ours / cte:5.2f}  {_lost(got, exact):9}"


def _lost(got, exact) -> int:
    """Rows that came out with less than half of their length."""
    return int((got.double().norm(dim=-1) < 0.5 * exact.norm(dim=-1)).sum())


def _planted(gap: float) -> tuple[str, int]:
    """Scores of up to 3 on the first channel; one key is as long as the gap wants, on the second,
    which no query has. Returns the line, and how many rows are lost."""
    generator, tokens = torch.Generator().manual_seed(0), 256
    size, length = CONST_MAX_HEAD_DIM, math.sqrt(gap + 3)
    query, key = torch.zeros(2, tokens, 1, size)
    query[..., 0] = length
    key[..., 0] = 3 / length * torch.empty(tokens, 1).uniform_(-1, 1, generator=generator)
    key[0, 0, 0], key[1, 0] = 3 / length, 0
    key[1, 0, 1] = length
    value = torch.randn(tokens, 1, size, generator=generator)
    texts = []
    for dtype in (torch.float32, torch.bfloat16):
        rows = [x.to(dtype)[None] for x in (query, key, value)]
        exact = sdpa(*(x.double().transpose(1, 2) for x in rows), 1.0)
        got = attention_const_max(*rows, 1.0)
        texts.append(f"{rel_l2(got, exact):9.2e}")
        other = rel_l2(nki(*(x.transpose(1, 2) for x in rows), 1.0), exact)
    lost = _lost(got, exact)
    line = f"{gap:3}   {texts[0]}  {texts[1]}   {other:9.2e}   {lost} of {tokens}"
    return line, lost


if __name__ == "__main__":
    main()
