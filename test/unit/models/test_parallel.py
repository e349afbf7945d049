"""Layers that are divided over ranks compute what one rank computes, for any sizes and contents."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import Together, fp32_bound, one_thread, randn, rel  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ltx_neuron.config.common import AttentionSize
from ltx_neuron.models import attention as layers
from ltx_neuron.models.attention import Attention, AttentionCall, attend, matmul, part_of_attention, sdpa
from ltx_neuron.models.parallel import ContextParallel, FeedForward, ShardedRMSNorm, SingleRank, rms_norm, sum_partials
from ltx_neuron.models.rope import split_rope

HEADS, SIZE, TOKENS, KEYS = 8, 6, 5, 7
INNER = HEADS * SIZE
BOUND = fp32_bound(4 * INNER, INNER, KEYS)  # a projection, an attention and another projection
SHOWS = 0.01  # a relative difference that no rounding makes
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


def parameters(module: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random parameters of a whole module, of the size that keeps activations near 1."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    return {
        name: randn(*shape, seed=seed + i) / (shape[1] ** 0.5 if len(shape) == 2 else 1)
        for i, (name, shape) in enumerate(shapes.items())
    }


def part(whole: dict[str, torch.Tensor], rank: int, tp: int) -> dict[str, torch.Tensor]:
    made = dict(whole)
    for name, tensor in whole.items():
        layer, _, kind = name.rpartition(".")
        if (dim := DIVIDED[layer].get(kind)) is not None:
            made[name] = tensor.chunk(tp, dim)[rank].contiguous()
    return made


def attention(tp: int = 1, rank: int = 0, seed: int = 0, kernel=sdpa) -> Attention:
    sizes = AttentionSize(HEADS, SIZE), INNER, INNER
    module = Attention(*sizes, tp, kernel)
    module.load_state_dict(part(parameters(Attention(*sizes, 1, kernel), seed), rank, tp))
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


def alone(module: Attention, x: torch.Tensor, context: torch.Tensor | None = None, **options) -> torch.Tensor:
    call = AttentionCall(module, x, x if context is None else context, **options)
    return attend(SingleRank(), call)[0]


@given(order=st.permutations(range(HEADS)))
def test_the_order_of_the_heads_does_not_matter(order):
    module, x = attention(), randn(1, TOKENS, INNER, seed=1)
    expected, state = alone(module, x), module.state_dict()
    for name, dims in DIVIDED.items():
        for kind, dim in dims.items():
            if (tensor := state.get(f"{name}.{kind}")) is not None:
                heads = tensor.unflatten(dim, (HEADS, -1)).index_select(dim, torch.tensor(order))
                state[f"{name}.{kind}"] = heads.flatten(dim, dim + 1)
    module.load_state_dict(state)
    assert rel(alone(module, x), expected) < BOUND


@given(order=st.permutations(range(KEYS)))
def test_the_order_of_the_context_does_not_matter_without_positions(order):
    module, x, context = attention(), randn(1, TOKENS, INNER, seed=1), randn(1, KEYS, INNER, seed=2)
    assert rel(alone(module, x, context[:, [*order]]), alone(module, x, context)) < BOUND


@given(order=st.permutations(range(TOKENS)))
def test_tokens_that_move_with_their_positions_keep_their_outputs(order):
    module, x, tables, order = attention(), randn(1, TOKENS, INNER, seed=1), rope(TOKENS), [*order]
    moved = type(tables)(*(table[:, :, order] for table in tables))
    output = alone(module, x, rope=tables)
    assert rel(alone(module, x[:, order], rope=moved), output[:, order]) < BOUND
    assert order == sorted(order) or rel(alone(module, x[:, order], rope=tables), output[:, order]) > SHOWS


@pytest.mark.parametrize("kernel", [sdpa, matmul])
@pytest.mark.parametrize("count", [1, KEYS - 1])
def test_tokens_of_the_context_with_a_bias_of_minus_infinity_are_as_if_absent(kernel, count):
    module, x, context = attention(kernel=kernel), randn(1, TOKENS, INNER, seed=1), randn(1, KEYS, INNER, seed=2)
    bias = torch.zeros(1, KEYS)
    bias[0, count:] = torch.finfo(torch.float32).min
    output = alone(module, x, context, bias=bias)
    assert rel(output, alone(module, x, context[:, :count])) < BOUND
    changed = torch.cat([context[:, :count], 100 * context[:, count:]], 1)
    assert torch.equal(alone(module, x, changed, bias=bias), output)


def test_one_bias_for_all_queries_is_that_bias_for_each():
    module, x = attention(), randn(1, TOKENS, INNER, seed=1)
    one, rows = randn(1, TOKENS, seed=3), randn(TOKENS, TOKENS, seed=4)
    of_all, of_each, of_rows, of_first = (
        alone(module, x, bias=bias) for bias in (one, one.expand(TOKENS, -1), rows, rows[:1].expand(TOKENS, -1))
    )
    assert rel(of_all, of_each) < BOUND and rel(of_rows[:, :1], of_first[:, :1]) < BOUND


def test_without_attention_each_token_passes_its_own_value():
    """keep = 0: the output of a token depends on no other token, and not on queries and keys."""
    module, x, off = attention(), randn(1, TOKENS, INNER, seed=1), torch.tensor(0.0)
    output = alone(module, x, keep=off)
    value = module.to_v(x) * (2 * torch.sigmoid(module.to_gate_logits(x))).repeat_interleave(SIZE, -1)
    assert rel(output, module.to_out[0](value)) < BOUND
    assert rel(alone(module, x, keep=torch.tensor(1.0)), alone(module, x)) < BOUND
    assert rel(alone(module, x), output) > SHOWS


def test_independent_attentions_that_run_together_are_those_that_run_alone():
    x, y = randn(1, TOKENS, INNER, seed=1), randn(1, KEYS, INNER, seed=2)
    calls = [AttentionCall(attention(seed=1), x, x, rope(TOKENS)), AttentionCall(attention(seed=50), y, x)]
    for output, call in zip(attend(SingleRank(), *calls), calls, strict=True):
        assert torch.equal(output, attend(SingleRank(), call)[0])


@given(keys=st.integers(2, 9), seed=st.integers(0, 99))
def test_parts_of_the_keys_on_groups_merge_to_the_attention_to_all(keys, seed):
    """With padding in the last group, whose weight is nothing."""
    query, key, value = (randn(1, 2, n, 4, seed=seed + i) for i, n in enumerate((3, keys, keys)))
    own = -(-keys // 2)
    padding = 2 * own - keys
    padded = [nn.functional.pad(x, (0, 0, 0, padding), value=5.0) for x in (key, value)]
    bias = torch.zeros(1, 2 * own)
    bias[:, keys:] = torch.finfo(torch.float32).min

    def run(rank, comm):
        context = ContextParallel(comm, keys, own)
        mine = [x.split(own, 2)[rank] for x in padded]
        return context.merged(*part_of_attention(query, *mine, 0.5, bias.split(own, 1)[rank]))

    expected = matmul(query, key, value, 0.5)
    assert all(rel(merged, expected) < fp32_bound(16, keys) for merged in on_ranks(2, run))


def test_gathered_keys_and_values_are_those_of_all_groups_without_padding():
    key, value = randn(1, 2, 6, 4), randn(1, 2, 6, 4, seed=1)

    def run(rank, comm):
        context = ContextParallel(comm, 5, 3)
        assert context.padding == 1
        return context.gathered(*(x.split(3, 2)[rank] for x in (key, value)))

    for gathered in on_ranks(2, run):
        assert torch.equal(gathered[0], key[:, :, :5]) and torch.equal(gathered[1], value[:, :, :5])


POSITIVE, NEGATIVE = randn(1, TOKENS, 4, 3, seed=1), randn(1, TOKENS, 4, 3, seed=2)


def guided(positive, negative, *settings, tp=1):
    """The guided attention of (B, T, H, D) tensors whose heads are divided over tp ranks."""

    def run(rank, comm):
        mine = [(positive.chunk(tp, 2)[rank], negative.chunk(tp, 2)[rank])]
        return layers.normalized_guidance(comm, torch.tensor(settings), mine)[0]

    return torch.cat(on_ranks(tp, run), 2)


def test_guidance_of_no_strength_or_of_equal_prompts_changes_nothing():
    for strength in ((1.0, 0.5, 2.5), (11.0, 0.0, 2.5)):  # a scale of 1, an alpha of 0
        assert rel(guided(POSITIVE, NEGATIVE, *strength), POSITIVE) < fp32_bound(4)
    assert torch.equal(guided(POSITIVE, POSITIVE, 11.0, 0.25, 1.0), POSITIVE)


@given(scale=st.floats(1.5, 20.0), tau=st.floats(1.0, 4.0))
def test_no_token_grows_beyond_tau_times_its_prompts_norm_and_smaller_ones_are_exact(scale, tau):
    output = guided(POSITIVE, NEGATIVE, scale, 1.0, tau)
    limit = tau * POSITIVE.abs().sum((2, 3))
    free = scale * POSITIVE.double() - (scale - 1) * NEGATIVE.double()
    assert (output.abs().sum((2, 3)) <= limit * (1 + fp32_bound(12))).all()
    small = free.abs().sum((2, 3)) < 0.99 * limit
    assert not small.any() or rel(output[small], free[small]) < fp32_bound(4) * scale
    direction = torch.nn.functional.cosine_similarity(output.double().flatten(2), free.flatten(2), dim=-1)
    assert (direction > 1 - 1e-5).all()


@DEGREES
def test_guidance_measures_the_norm_of_all_ranks_heads(tp):
    expected = guided(POSITIVE, NEGATIVE, 6.0, 0.5, 1.5)
    assert rel(guided(POSITIVE, NEGATIVE, 6.0, 0.5, 1.5, tp=tp), expected) < fp32_bound(12)


def test_the_squares_of_a_norm_over_ranks_are_summed_in_fp32():
    x = randn(3, 4096).bfloat16()
    expected = x.double().square().sum(-1, keepdim=True)
    assert rel(ShardedRMSNorm.statistic(x), expected) < fp32_bound(4096)


@given(factor=st.floats(0.01, 100.0), seed=st.integers(0, 99))
def test_an_rms_norm_forgets_the_length_of_a_token_and_keeps_its_direction(factor, seed):
    x = randn(1, 3, 16, seed=seed)
    normed = rms_norm(factor * x, eps=0.0)
    assert rel(normed, rms_norm(x, eps=0.0)) < fp32_bound(16)
    assert torch.allclose(normed.square().mean(-1), torch.ones(1, 3), atol=fp32_bound(16))


def test_gates_of_zero_pass_every_head_and_large_ones_double_or_drop_it():
    module, x = attention(), randn(1, TOKENS, INNER, seed=1)
    state = module.state_dict()

    def gated(logit: float) -> torch.Tensor:
        gates = {"weight": torch.zeros(HEADS, INNER), "bias": torch.full((HEADS,), logit)}
        module.load_state_dict(state | {f"to_gate_logits.{kind}": tensor for kind, tensor in gates.items()})
        return alone(module, x) - module.to_out[0].bias

    plain, doubled, dropped = map(gated, (0.0, 50.0, -50.0))
    assert rel(doubled, 2 * plain) < BOUND and dropped.abs().max() < BOUND < plain.abs().max()
