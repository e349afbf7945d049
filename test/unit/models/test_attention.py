"""The attention kernels are one function: PyTorch's, two products and a softmax, and the NKI kernel's reference."""

import dataclasses

import pytest
import torch
from graphs import block_graph, operations
from helpers import BF16_ROUNDING, fp32_bound, made_config, one_thread, randn, rel  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from ltx_neuron.backends.export import TorchDistComm, cost, fake_process_group, trace
from ltx_neuron.config.gemma import GEMMA_3_12B
from ltx_neuron.models.attention import KERNELS, attention_cte, part_of_attention, sdpa
from ltx_neuron.models.programs import gemma3_program

# The largest deviation of the scores of `three`: an error of a score, as large as a sum of `size`
# summands of this deviation makes it, is a relative error of its weight.
SCORES_DEVIATION = 4
# Heads and head sizes of one rank of the release at TP=4, and of tiny models; queries and keys of
# other lengths, also such that are multiples of nothing.
SHAPES = {"video": (8, 6, 6, 128), "audio": (8, 126, 126, 64), "audio to video": (2, 40, 7, 64), "tiny": (1, 5, 3, 10)}


def three(heads, queries, keys, size, dtype=torch.float32):
    """A query, key and value of which every softmax has a few large weights."""
    query, key, value = (randn(1, heads, n, size, seed=i) for i, n in enumerate((queries, keys, keys)))
    return (2 * query).to(dtype), (2 * key).to(dtype), value.to(dtype)


def exact(query, key, value, scale, mask=0.0):
    scores = query.double() @ key.double().transpose(-1, -2) * scale + mask
    return scores.softmax(-1) @ value.double()


def rounding(dtype, keys: int, size: int) -> float:
    """How far an attention over `keys` of heads of a size may be from the exact one."""
    # In bf16 the weights and the result are rounded by at most BF16_ROUNDING, evenly distributed: each by
    # BF16_ROUNDING / sqrt(3) in norm, together by less than BF16_ROUNDING.
    return fp32_bound(SCORES_DEVIATION**2 * size, keys) if dtype == torch.float32 else BF16_ROUNDING


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_kernel_is_attention(name, shape, dtype):
    query, key, value = three(*shape, dtype)
    scale = shape[-1] ** -0.5
    out = KERNELS[name](query, key, value, scale)
    assert out.dtype == dtype and out.shape == query.shape
    wanted, allowed = exact(query, key, value, scale), rounding(dtype, *shape[2:])
    if name == "nki" and dtype == torch.bfloat16:
        # It rounds the scaled query to its dtype, as the calls that were published do.
        allowed *= SCORES_DEVIATION
    assert rel(out, wanted) < allowed
    assert rel(exact(query, key, value, 1.5 * scale), wanted) > allowed  # another scale would show


def test_scores_are_summed_in_fp32():
    """In bf16 a score of 40 is right to 0.1, and its weight to a tenth: the reason for the fp32 products."""
    query, key, value = three(2, 16, 16, 64, torch.bfloat16)
    query, key = 2 + query / 4, 2 + key / 4
    wanted = exact(query, key, value, 0.125)
    rounded = ((query @ key.transpose(-1, -2)) * 0.125).softmax(-1) @ value
    for name in ("matmul", "sdpa"):
        assert rel(KERNELS[name](query, key, value, 0.125), wanted) < BF16_ROUNDING
    assert rel(rounded, wanted) > 2 * BF16_ROUNDING


@pytest.mark.parametrize("shape", [(4, 24, 24, 8), (3, 25, 25, 16), (4, 6, 6, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_adds_to_a_querys_scores_its_own_row_of_a_mask_or_the_only_one(shape, dtype):
    """The flash kernel for some queries at a time."""
    query, key, value = three(*shape, dtype)
    mask = torch.where(randn(shape[1], shape[2], seed=4) > 1, torch.finfo(dtype).min, 0.5).to(dtype)
    scale = shape[-1] ** -0.5
    wanted, of_one_row = (exact(query, key, value, scale, bias) for bias in (mask, mask[:1]))
    for name, kernel in KERNELS.items():
        for bias, result in ((mask, wanted), (mask[:1], of_one_row)):
            got = kernel(query, key, value, scale, bias)
            assert got.dtype == dtype and rel(got, result) < rounding(dtype, *shape[2:]), name
    assert rel(of_one_row, wanted) > 0.1


def test_the_flash_kernel_with_a_mask_holds_no_more_than_half_of_one_heads_scores():
    """Of stage 1 of an IC-LoRA at 512x768x121 on one of four ranks: eight heads, 12,288 tokens."""
    made = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            made.extend([result.nbytes] if isinstance(result, torch.Tensor) and not result._is_view() else [])
            return result

    query, key, value = (torch.empty(1, 8, 12288, 128, device="meta", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.empty(12288, 12288, device="meta", dtype=torch.bfloat16)
    with Noted():
        KERNELS["nki"](query, key, value, 0.1, mask)
    assert max(made) == 4 * 12288**2 / 2


def test_a_part_of_attention_sums_its_weights_in_the_product_with_the_values():
    """And nowhere a channel is concatenated: on trn2 one was lost (vllm-neuron, 2026)."""
    query, key, value = three(2, 6, 400, 64)
    sums, maximum = part_of_attention(query, key, value, 0.125)
    weights = (query.double() @ key.double().transpose(-1, -2) * 0.125 - maximum).exp()
    allowed = rounding(torch.float32, 400, 64)
    assert rel(sums[..., :-1], weights @ value.double()) < allowed
    assert rel(sums[..., -1], weights.sum(-1)) < allowed

    class Part(torch.nn.Module):
        def forward(self, *rows):
            return part_of_attention(*rows, 0.125)

    graph = torch.export.export(Part(), (query, key, value))
    targets = [node.target for node in operations(graph)]
    assert targets.count(torch.ops.aten.bmm.default) == 2
    assert torch.ops.aten.cat.default not in targets


KERNELS_OF = {"sdpa": {"scaled_dot_product_attention"}, "matmul": {"bmm", "softmax.int"}, "nki": {"attention_cte"}}


def kernels_of(graph) -> set[str]:
    names = {node.target.__name__.removesuffix(".default") for node in operations(graph)}
    return names & {name for kernel in KERNELS_OF.values() for name in kernel}


@pytest.mark.parametrize("name", KERNELS)
def test_a_program_holds_the_kernel_it_was_built_with_and_no_other_and_all_count_the_same_flops(name):
    graph = block_graph(name)
    assert kernels_of(graph) == KERNELS_OF[name] and cost(graph)["flops"] == cost(block_graph("sdpa"))["flops"]
    if name == "nki":
        targets = [node.target for node in operations(graph)]
        assert targets.count(torch.ops.ltx_neuron.attention_cte.default) == 6


def test_gemma3s_attention_is_products_and_a_softmax():
    """Its heads of 256 are larger than a kernel takes, so no profile chooses one."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 8}
    gemma = dataclasses.replace(GEMMA_3_12B, **sizes, full_attention_layers=(0,))
    with fake_process_group(2):
        program = gemma3_program(gemma, made_config()[1], 8, 2, TorchDistComm(2), torch.bfloat16, states=False)
        assert kernels_of(trace(program, "gemma3", torch.bfloat16)) == {"bmm", "softmax.int"}


def test_the_kernels_operation_is_one_that_a_compiled_graph_keeps():
    rows = [x.flatten(0, 1) for x in three(4, 6, 5, 8)]
    torch.library.opcheck(torch.ops.ltx_neuron.attention_cte.default, (*rows, 0.3), test_utils="test_faketensor")
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
