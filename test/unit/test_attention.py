"""The attention kernels are one function: PyTorch's, two products and a softmax, and the NKI
kernel's reference."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from graphs import block_graph, operations
from helpers import (  # noqa: F401
    BF16_ROUNDING,
    SIZES,
    Held,
    block_summands,
    fp32_bound,
    ltx_model,
    made_config,
    one_thread,
    randn,
    rel,
    run_program,
    step_inputs,
    step_number,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ltx_neuron.backends.export import TorchDistComm, cost, fake_process_group, peak_bytes, trace
from ltx_neuron.config.gemma import GEMMA_3_12B
from ltx_neuron.config.transformer import Bucket, transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.models.attention import KERNELS, attention_cte, matmul, nki_const_max, sdpa
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import dit_program, gemma3_program
from ltx_neuron.sampling.latents import video_positions
from ltx_neuron.tiny.config import released_config
from ltx_neuron.weights.gains import LARGEST_GAP, check_const_max, largest_bounds

# The largest deviation of the scores of `three`: an error of a score, as large as a sum of `size`
# summands of this deviation makes it, is a relative error of its weight.
SCORES_DEVIATION = 4
# Heads and head sizes of one rank of the release at TP=4, and of tiny models; queries and keys of
# other lengths, also such that are multiples of nothing.
SHAPES = {
    "video": (8, 6, 6, 128),
    "audio": (8, 126, 126, 64),
    "audio to video": (2, 40, 7, 64),
    "tiny": (1, 5, 3, 10),
}
# What PyTorch's flash kernels never hold and the others do: the scores of one head of 6144 tokens
# are 151 MB in fp32.
TOKENS, SCORES = 6144, 4 * 6144**2


def three(heads, queries, keys, size, dtype=torch.float32):
    """A query, key and value of which every softmax has a few large weights."""
    query, key, value = (
        randn(1, heads, n, size, seed=i) for i, n in enumerate((queries, keys, keys))
    )
    return (2 * query).to(dtype), (2 * key).to(dtype), value.to(dtype)


def exact(query, key, value, scale):
    scores = query.double() @ key.double().transpose(-1, -2) * scale
    return scores.softmax(-1) @ value.double()


def rounding(dtype, keys: int, size: int) -> float:
    """How far an attention over `keys` of heads of a size may be from the exact one."""
    if dtype == torch.float32:
        return fp32_bound(SCORES_DEVIATION**2 * size, keys)
    # The weights and the result are rounded by at most BF16_ROUNDING, evenly distributed: each by
    # BF16_ROUNDING / sqrt(3) in norm, together by less than BF16_ROUNDING.
    return BF16_ROUNDING


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_kernel_is_attention(name, shape, dtype):
    query, key, value = three(*shape, dtype)
    scale = shape[-1] ** -0.5
    out = KERNELS[name](query, key, value, scale)
    assert out.dtype == dtype and out.shape == query.shape
    wanted = exact(query, key, value, scale)
    allowed = rounding(dtype, shape[2], shape[3])
    if name == "nki" and dtype == torch.bfloat16:
        # It rounds the scaled query to its dtype, as the calls that were published do.
        allowed *= SCORES_DEVIATION
    if name == "nki_const_max" and dtype == torch.bfloat16:
        allowed *= SCORES_DEVIATION  # as that, which is what other heads have
    if name == "nki_const_max" and dtype == torch.bfloat16 and shape[3] == 128:
        # What a bound was subtracted from is rounded to fp16, evenly distributed.
        lengths = query.float().norm(dim=-1).max(), key.float().norm(dim=-1).max()
        allowed += 2**-11 * 3**-0.5 * (scale * lengths[0] * lengths[1]).item()
    assert rel(out, wanted) < allowed
    assert rel(exact(query, key, value, 1.5 * scale), wanted) > allowed  # another scale would show


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_takes_a_mask_and_leaves_masked_keys_out(dtype):
    query, key, value = three(4, 6, 6, 256, dtype)
    mask = torch.full((6, 6), torch.finfo(dtype).min).triu(1).to(dtype)[None, None]
    got = matmul(query, key, value, 1 / 16, mask)
    exact_ones = (x.double() for x in (query, key, value, mask))
    wanted = torch.nn.functional.scaled_dot_product_attention(*exact_ones, scale=1 / 16)
    assert rel(got, wanted) < rounding(dtype, 6, 256)
    changed = value.clone()
    changed[:, :, -1] = 7
    assert torch.equal(matmul(query, key, changed, 1 / 16, mask)[:, :, :-1], got[:, :, :-1])


def test_scores_are_summed_in_fp32():
    """In bf16 a score of 40 is right to 0.1, and its weight to a tenth: the reason for the fp32
    products."""
    query, key, value = three(2, 16, 16, 64, torch.bfloat16)
    query, key = 2 + query / 4, 2 + key / 4
    wanted = exact(query, key, value, 0.125)
    rounded = ((query @ key.transpose(-1, -2)) * 0.125).softmax(-1) @ value
    for name in ("matmul", "sdpa"):
        assert rel(KERNELS[name](query, key, value, 0.125), wanted) < BF16_ROUNDING
    assert rel(rounded, wanted) > 2 * BF16_ROUNDING


def peak(call) -> int:
    """Bytes of the largest allocation while a call runs."""
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        call()
    return max(event.cpu_memory_usage for event in profile.events())


def test_pytorchs_kernel_does_not_hold_the_scores_of_a_long_sequence():
    query = key = value = randn(1, 1, TOKENS, 16)
    assert peak(lambda: sdpa(query, key, value, 0.25)) < SCORES / 10
    short = query[:, :, :1024]
    # What the measure sees where they are held.
    assert peak(lambda: matmul(short, short, short, 0.25)) >= 4 * 1024**2


@pytest.mark.parametrize("shape", [(4, 24, 24, 8), (3, 25, 25, 16), (2, 1, 1, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_flash_kernel_with_a_mask_is_matmul_of_some_queries_at_a_time(shape, dtype):
    """To the bit where a product's rows do not depend on how many there are, else to rounding."""
    query, key, value = three(*shape, dtype)
    mask = torch.where(randn(shape[1], shape[2], seed=4) > 1, -3.0, 0.5).to(dtype)
    got, wanted = (KERNELS[name](query, key, value, 0.3, mask) for name in ("nki", "matmul"))
    assert got.dtype == dtype and got.shape == wanted.shape
    assert rel(got, wanted) < rounding(dtype, shape[2], shape[3])
    if shape[1] > 1:
        other = KERNELS["nki"](query, key, value, 0.3, mask.flip(0))
        assert rel(other, wanted) > 0.1  # a query's own row of the mask


def test_a_masked_block_of_the_release_holds_no_more_than_one_head_s_scores():
    """Counted in the graph that is compiled, stage 1 of an IC-LoRA at 512x768x121, of one of four
    ranks: eight heads, 12,288 tokens. No tensor has the scores of more than half a head, and two of
    those are the most that are alive at once, beside the mask's rows in fp32."""
    tokens, bucket = 12288, Bucket(12288, 126, timesteps=2, max_steps=8, biased=True)
    head, config = 4 * tokens**2, transformer_config(released_config())
    graphs = {}
    with fake_process_group(4):
        for each in (bucket, dataclasses.replace(bucket, biased=False)):
            program = dit_program(config, each, 4, TorchDistComm(4), torch.bfloat16, 1, "nki")
            graphs[each.biased] = trace(program, "blocks", torch.bfloat16)
    values = [node.meta["val"] for node in operations(graphs[True])]
    scores = [x for x in values if isinstance(x, torch.Tensor) and x.shape[-1] == tokens]
    assert max(x.nbytes for x in scores) == head / 2
    masked, plain = (peak_bytes(graphs[biased]) for biased in (True, False))
    assert masked - plain < (1 + 1 / 16) * head < 0.65e9


def planted(gap: float, dtype=torch.float32):
    """A query, key and value whose every row has scores within a nat of 0 and one key so long, at
    right angles to all queries, that its bound is `gap` above them."""
    query, key = torch.zeros(2, 1, 1, 16, 128)
    query[..., 0] = key[..., 0, 1] = gap**0.5
    key[..., 1:, 0] = torch.linspace(-1, 1, 15) / gap**0.5
    return [x.to(dtype) for x in (query, key, randn(1, 1, 16, 128, seed=1))]


def test_the_constant_maximum_is_exact_up_to_its_largest_gap_and_loses_rows_beyond():
    for gap in (1.0, 20.0, LARGEST_GAP):
        rows = planted(gap)
        got, wanted = nki_const_max(*rows, 1.0), exact(*rows, 1.0)
        # A score that is shifted by the gap is right to a rounding of the gap.
        assert rel(got, wanted) < fp32_bound(gap**2, 16)
    lost = nki_const_max(*planted(LARGEST_GAP + 15), 1.0)
    assert lost.norm() < 0.01 * wanted.norm()


def test_the_constant_maximum_rounds_shifted_scores_to_fp16_as_its_kernel_does():
    """So in bf16 it is the further from the exact result the larger the gap, and attention_cte is
    not."""
    distances = {}
    for gap in (4.0, LARGEST_GAP):
        rows = planted(gap, torch.bfloat16)
        wanted = exact(*rows, 1.0)
        distances[gap] = [rel(KERNELS[n](*rows, 1.0), wanted) for n in ("nki_const_max", "nki")]
    assert distances[LARGEST_GAP][0] > 3 * distances[4.0][0]
    assert distances[LARGEST_GAP][1] < BF16_ROUNDING


@pytest.mark.parametrize("tokens", [128, 130])
def test_the_constant_maximum_is_for_self_attention_of_heads_of_128_and_the_rest_is_nki_s(tokens):
    long = torch.ops.ltx_neuron.attention_const_max
    with Counted(long) as count:
        nki_const_max(*three(2, tokens, tokens, 128), 0.1)
    assert count.calls == 1
    mask = torch.zeros(tokens, tokens)
    cases = [
        (three(2, tokens, tokens, 64), None),
        (three(2, tokens, 7, 128), None),
        (three(2, tokens, tokens, 128), mask),
    ]
    for rows, masked in cases:
        with Counted(long) as count:
            got = nki_const_max(*rows, 0.1, masked)
        assert count.calls == 0 and torch.equal(got, KERNELS["nki"](*rows, 0.1, masked))


class Counted(TorchDispatchMode):
    """Counts the calls of an operation."""

    def __init__(self, operation):
        super().__init__()
        self.operation, self.calls = operation.default, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += function is self.operation
        return function(*args, **(kwargs or {}))


# --- whether weights suit it ----------------------------------------------------------------------


def made_source(gain: float, loud: int = 0, shape=(4, 128)):
    """A source of two attentions whose norms have a gain; `loud` heads' projections are ten times
    as large as the others'."""
    inner = shape[0] * shape[1]
    weight = randn(inner, 8, seed=3)
    weight[: loud * shape[1]] *= 10
    tensors = {}
    for block, gains in enumerate((torch.ones(inner), torch.full((inner,), gain))):
        for of in "qk":
            name = f"transformer_blocks.{block}.attn1."
            tensors[f"{name}to_{of}.weight"] = weight
            tensors[f"{name}to_{of}.bias"] = torch.zeros(inner)
            tensors[f"{name}{of}_norm.weight"] = gains
    return SimpleNamespace(names=tensors, tensor=tensors.__getitem__)


def test_the_bound_that_weights_show_is_that_of_queries_and_keys_of_average_length():
    """sqrt(128) * sqrt(128) / sqrt(128) nats at gains of 1, of tokens twice as long as on average
    each."""
    bounds = largest_bounds(made_source(1.5))
    assert bounds == {
        "transformer_blocks.0.attn1": pytest.approx(4 * 128**0.5, rel=0.2),
        "transformer_blocks.1.attn1": pytest.approx(1.5**2 * 4 * 128**0.5, rel=0.2),
    }


def test_weights_that_lose_rows_are_refused_with_the_block_and_what_to_type():
    check_const_max(made_source(1.0), 128, torch.bfloat16)
    for source in (made_source(2.0), made_source(torch.nan)):
        with pytest.raises(UserError, match=r"norms of transformer_blocks.1.*\n.*attention=nki$"):
            check_const_max(source, 128, torch.bfloat16)
    with pytest.raises(UserError, match="norms of transformer_blocks"):
        check_const_max(made_source(1.0, loud=1), 128, torch.bfloat16)
    check_const_max(made_source(2.0), 64, torch.bfloat16)  # no kernel for such heads
    with pytest.raises(UserError, match="bfloat16, got --dtype float32.\nType"):
        check_const_max(made_source(1.0), 128, torch.float32)


def test_rows_that_the_check_refuses_are_lost_by_the_reference():
    """Queries and keys of gains that are refused, as the norm leaves them."""
    x = randn(2, 1024, 512, seed=7)
    query, key = (x / x.square().mean(-1, keepdim=True).sqrt() * 2.7).unflatten(-1, (4, 128))
    rows = [part.transpose(0, 1)[None] for part in (query, key, query)]
    wanted = exact(*rows, 128**-0.5)
    lost = nki_const_max(*rows, 128**-0.5).norm(dim=-1) < 0.5 * wanted.norm(dim=-1)
    assert lost.any()
    source = made_source(2.7)
    with pytest.raises(UserError, match="loses rows"):
        check_const_max(source, 128, torch.bfloat16)


def kernels_of(graph) -> set[str]:
    names = {node.target.__name__.removesuffix(".default") for node in operations(graph)}
    kernels = {"scaled_dot_product_attention", "bmm", "softmax.int"}
    return names & {*kernels, "attention_cte", "attention_const_max"}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("sdpa", {"scaled_dot_product_attention"}),
        ("matmul", {"bmm", "softmax.int"}),
        ("nki", {"attention_cte"}),
    ],
)
def test_a_program_holds_the_kernel_it_was_built_with_and_no_other(name, wanted):
    assert kernels_of(block_graph(name)) == wanted
    if name == "nki":
        assert (
            sum(
                node.target is torch.ops.ltx_neuron.attention_cte.default
                for node in operations(block_graph(name))
            )
            == 6
        )


def test_of_a_released_block_self_attention_of_the_video_alone_has_the_constant_maximum():
    config = transformer_config(released_config())
    with fake_process_group(4):
        comm = TorchDistComm(4)
        for tokens, count in ((1024, 2), (6144, 1)):  # a prompt has 1024
            bucket = Bucket(tokens, 126, 1, 2)
            program = dit_program(config, bucket, 4, comm, torch.bfloat16, 1, "nki_const_max")
            graph = trace(program, "blocks", torch.bfloat16)
            targets = [node.target for node in operations(graph)]
            assert targets.count(torch.ops.ltx_neuron.attention_const_max.default) == count
            assert targets.count(torch.ops.ltx_neuron.attention_cte.default) == 6 - count


def test_gemma3s_attention_is_products_and_a_softmax():
    """Its heads of 256 are larger than a kernel takes, so no profile chooses one."""
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "full_attention_layers": (0,),
    }
    gemma, (_, config) = (
        dataclasses.replace(GEMMA_3_12B, **small),
        made_config(SIZES["4 heads of 8"]),
    )
    with fake_process_group(2):
        program = gemma3_program(
            gemma, config, 8, 2, TorchDistComm(2), torch.bfloat16, states=False
        )
        assert kernels_of(trace(program, "gemma3", torch.bfloat16)) == {"bmm", "softmax.int"}


def test_a_step_gives_the_same_latents_with_every_kernel():
    content, config = made_config(SIZES["4 heads of 8"])
    weights, positions = ltx_model(content).state_dict(), video_positions((1, 2, 3), 24.0)
    held = Held(torch.ones(6, 1), torch.zeros(1, 6, 128), torch.ones(1), torch.ones(6, 1))
    inputs = step_inputs(config, weights, (1.0, 0.5, 0.0), positions, 4, held) | step_number(0)
    bound = fp32_bound(*block_summands(config.video.inner) * config.num_layers)
    outputs = {}
    for name in KERNELS:
        program = dit_program(config, Bucket(6, 4, 1, 2), 1, SingleRank(), torch.float32, 0, name)
        outputs[name] = run_program(program, weights, inputs)
    for stream in ("video_latent", "audio_latent"):
        assert all(
            rel(values[stream], outputs["sdpa"][stream]) < bound for values in outputs.values()
        )
        assert rel(outputs["sdpa"][stream], inputs[stream]) > 0.01


def test_all_kernels_count_the_same_flops():
    assert len({cost(block_graph(name))["flops"] for name in KERNELS}) == 1


def test_the_kernels_operation_is_one_that_a_compiled_graph_keeps():
    rows = [x.flatten(0, 1) for x in three(4, 6, 5, 8)]
    torch.library.opcheck(
        torch.ops.ltx_neuron.attention_cte.default, (*rows, 0.3), test_utils="test_faketensor"
    )
    long = torch.ops.ltx_neuron.attention_const_max.default
    tokens_first = [x.transpose(1, 2) for x in three(4, 6, 6, 128)]
    torch.library.opcheck(long, (*tokens_first, 0.3), test_utils="test_faketensor")
    whole = torch.compile(attention_cte, backend="aot_eager", fullgraph=True, dynamic=False)
    assert torch.equal(whole(*rows, 0.3), attention_cte(*rows, 0.3))


def test_the_kernels_operation_scales_in_fp32():
    """Not the query in bf16, which would round once more: 2 ** -0.5 is no power of two."""
    query, key, value = (x.flatten(0, 1).bfloat16() for x in three(4, 6, 5, 8))
    scale = 2**-0.5
    exact = sdpa(*(x.double()[None] for x in (query, key, value)), scale)[0]
    scaled_before = attention_cte(query * scale, key, value, 1.0)
    error = (attention_cte(query, key, value, scale) - exact).norm()
    assert error < 0.9 * (scaled_before - exact).norm()
