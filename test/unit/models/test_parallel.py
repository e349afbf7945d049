"""Layers that are divided over ranks compute what one rank computes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import Together, fp32_bound, one_thread, randn, rel  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ltx_neuron.config.common import AttentionSize
from ltx_neuron.models.attention import Attention, AttentionCall, attend, normalized_guidance, part_of_attention, sdpa
from ltx_neuron.models.parallel import ContextParallel, FeedForward, ShardedRMSNorm, SingleRank, sum_partials
from ltx_neuron.models.rope import split_rope

HEADS, SIZE, TOKENS, KEYS = 8, 6, 5, 7
INNER = HEADS * SIZE
BOUND = fp32_bound(4 * INNER, INNER, KEYS)  # a projection, an attention and another projection
DEGREES = pytest.mark.parametrize("tp", [1, 2, 4])
# Which dimension of a parameter is divided, by the ends of its names
DIVIDED = {
    **dict.fromkeys(("to_q", "to_k", "to_v", "to_gate_logits", "net.0.proj"), {"weight": 0, "bias": 0}),
    **dict.fromkeys(("q_norm", "k_norm"), {"weight": 0}),
    **dict.fromkeys(("to_out.0", "net.2"), {"weight": 1}),
}


def on_ranks(tp: int, function) -> list:
    """function(rank, comm) on each of tp ranks, which are threads."""
    comm = Together(tp) if tp > 1 else SingleRank()

    def run(rank: int):
        if tp > 1:
            comm.join(rank)
        return function(rank, comm)

    with ThreadPoolExecutor(tp) as pool:
        return [*pool.map(run, range(tp))]


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Random parameters of a whole module, of the size that keeps activations near 1."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    return {
        name: randn(*shape, seed=i) / (shape[1] ** 0.5 if len(shape) == 2 else 1)
        for i, (name, shape) in enumerate(shapes.items())
    }


def part(whole: dict[str, torch.Tensor], rank: int, tp: int) -> dict[str, torch.Tensor]:
    made = dict(whole)
    for name, tensor in whole.items():
        layer, _, kind = name.rpartition(".")
        if (dim := DIVIDED[layer].get(kind)) is not None:
            made[name] = tensor.chunk(tp, dim)[rank].contiguous()
    return made


def attention(tp: int = 1, rank: int = 0) -> Attention:
    sizes = AttentionSize(HEADS, SIZE), INNER, INNER
    module = Attention(*sizes, tp, sdpa)
    module.load_state_dict(part(parameters(Attention(*sizes, 1, sdpa)), rank, tp))
    return module


def rope(tokens: int, tp: int = 1, rank: int = 0):
    tables = split_rope(randn(1, 1, tokens, seed=9).abs(), (2,), INNER, HEADS, 100.0)
    return type(tables)(*(table.chunk(tp, 1)[rank] for table in tables))


@DEGREES
@pytest.mark.parametrize("bias", [True, False])
def test_a_feed_forward_is_that_of_one_rank_at_every_degree(tp, bias):
    whole, x = parameters(FeedForward(16, 1, bias)), randn(1, TOKENS, 16, seed=1)

    def run(rank, comm):
        module = FeedForward(16, tp, bias)
        module.load_state_dict(part(whole, rank, tp))
        return module.finish(sum_partials(comm, [module.partial(x)], [False])[0])

    exact = {name: tensor.double() for name, tensor in whole.items()}
    inner = nn.functional.linear(x.double(), exact["net.0.proj.weight"], exact.get("net.0.proj.bias"))
    inner = nn.functional.gelu(inner, approximate="tanh")
    expected = nn.functional.linear(inner, exact["net.2.weight"], exact.get("net.2.bias"))
    assert all(rel(output, expected) < fp32_bound(16, 64) for output in on_ranks(tp, run))


@DEGREES
@pytest.mark.parametrize("context", ["self", "text"])
def test_an_attention_is_that_of_one_rank_at_every_degree(tp, context):
    x = randn(1, TOKENS, INNER, seed=1)
    text = x if context == "self" else randn(1, KEYS, INNER, seed=2)
    bias = torch.zeros(1, len(text[0]))
    bias[0, -1] = -3.0

    def run(rank, comm):
        tables = rope(TOKENS, comm.size, rank), rope(len(text[0]), comm.size, rank)
        return attend(comm, AttentionCall(attention(comm.size, rank), x, text, *tables, bias=bias))[0]

    (expected,) = on_ranks(1, run)
    assert all(rel(output, expected) < BOUND for output in on_ranks(tp, run))


@pytest.mark.parametrize("divided", [(False, True, False), (True, True, True)], ids=str)
def test_partial_sums_are_whole_or_of_a_ranks_own_tokens(divided):
    partials = [[randn(1, 4, 3, seed=10 * rank + i) for i in range(3)] for rank in range(2)]
    outputs = on_ranks(2, lambda rank, comm: sum_partials(comm, partials[rank], divided))
    for rank, output in enumerate(outputs):
        for first, second, got, parts in zip(*partials, output, divided, strict=True):
            assert torch.equal(got, (first + second).chunk(2, 1)[rank] if parts else first + second)


@pytest.mark.parametrize("count", [1, KEYS - 1])
def test_tokens_of_the_context_with_a_bias_of_minus_infinity_are_as_if_absent(count):
    module, x, context = attention(), randn(1, TOKENS, INNER, seed=1), randn(1, KEYS, INNER, seed=2)
    changed, bias = context.clone(), torch.zeros(1, KEYS)
    changed[:, count:], bias[:, count:] = 100, torch.finfo(torch.float32).min
    calls = (context, bias), (changed, bias), (context[:, :count], None)
    biased, same, without = attend(SingleRank(), *(AttentionCall(module, x, c, bias=b) for c, b in calls))
    assert torch.equal(biased, same) and rel(biased, without) < BOUND


@given(keys=st.integers(2, 9), seed=st.integers(0, 99))
def test_parts_of_the_keys_on_groups_are_gathered_and_merge_to_the_attention_to_all(keys, seed):
    """With padding in the last group, which has no weight and is left out."""
    query, key, value = (randn(1, 2, n, 4, seed=seed + i) for i, n in enumerate((3, keys, keys)))
    own = -(-keys // 2)
    padding = 2 * own - keys
    padded = [nn.functional.pad(x, (0, 0, 0, padding), value=5.0) for x in (key, value)]
    bias = torch.zeros(1, 2 * own)
    bias[:, keys:] = torch.finfo(torch.float32).min

    def run(rank, comm):
        context = ContextParallel(comm, keys, own)
        mine = [x.split(own, 2)[rank] for x in padded]
        part = part_of_attention(query, *mine, 0.5, bias.split(own, 1)[rank])
        return context.merged(*part), context.gathered(*mine)

    expected = sdpa(query, key, value, 0.5)
    for merged, gathered in on_ranks(2, run):
        assert rel(merged, expected) < fp32_bound(16, keys) and all(map(torch.equal, gathered, (key, value)))


# Scale, alpha and tau of normalized attention guidance, and how many tokens' norms are limited
@pytest.mark.parametrize(("settings", "limited"), [((6.0, 0.5, 1.5), 5), ((1.5, 1.0, 1.5), 4), ((1.0, 1.0, 2.5), 0)])
@DEGREES
def test_guidance_measures_the_norm_of_all_ranks_heads(tp, settings, limited):
    positive, negative = (randn(1, TOKENS, 4, 3, seed=seed) for seed in (1, 2))

    def run(rank, comm):
        mine = [(positive.chunk(tp, 2)[rank], negative.chunk(tp, 2)[rank])]
        return normalized_guidance(comm, torch.tensor(settings), mine)[0]

    scale, alpha, tau = settings
    guided = scale * positive.double() - (scale - 1) * negative.double()
    norm, most = (x.abs().sum((2, 3), keepdim=True) for x in (guided, tau * positive.double()))
    assert (norm > most).sum() == limited
    expected = positive + alpha * (guided * (most / norm).clamp(max=1) - positive)
    assert rel(torch.cat(on_ranks(tp, run), 2), expected) < fp32_bound(12) * scale


def test_the_squares_of_a_norm_over_ranks_are_summed_in_fp32():
    x = randn(3, 4096).bfloat16()
    expected = x.double().square().sum(-1, keepdim=True)
    assert rel(ShardedRMSNorm.statistic(x), expected) < fp32_bound(4096)
