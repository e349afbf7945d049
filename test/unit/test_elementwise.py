"""The host's kernels on bf16 numbers have torch's bits, and take torch's place where they can."""

import pytest
import torch
from helpers import one_thread, randn  # noqa: F401
from torch import nn

from ltx_neuron.host import elementwise, openmp
from ltx_neuron.models.rope import Rope, rotate
from ltx_neuron.text.streamed import HostKernels


def gelu(x):
    return nn.functional.gelu(x, approximate="tanh")


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def heads_of(batch, heads, tokens, size, tables, seed=0):
    """Heads as a projection leaves them, (B, H, T, D) over (B, T, H, D), and their tables."""
    x = randn(batch, tokens, heads, size, seed=seed).bfloat16().transpose(1, 2)
    return x, Rope(*(randn(1, tables, tokens, size // 2, seed=seed + i) for i in (1, 2)))


def test_gelu_of_every_bf16_number_has_torchs_bits_not_numbers_included():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.stack([every, every.flip(0)])  # more than a thread takes at a time
    assert same_bits(elementwise.gelu(x), gelu(x))


@pytest.mark.parametrize("tables", ["one for all heads", "one a head"])
@pytest.mark.parametrize("tokens", [1, 7, 8, 65])
def test_rotation_has_the_models_bits(tokens, tables):
    x, rope = heads_of(2, 3, tokens, 20, 1 if tables == "one for all heads" else 3)
    assert same_bits(elementwise.rotate(x, *rope), rotate(x, rope))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3.3e38])
def test_rotation_keeps_what_is_no_finite_number(value):
    x, rope = heads_of(1, 2, 4, 8, 1)
    x[0, 1, 2, 3] = value
    got, wanted = elementwise.rotate(x, *rope), rotate(x, rope)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_threads_decide_on_no_bit_and_leave_nothing_out(one_thread, monkeypatch):  # noqa: F811
    x, rope = heads_of(3, 4, 50, 16, 4)
    wide = randn(300, 700).bfloat16()
    wanted = gelu(wide), rotate(x, rope)
    torch.set_num_threads(3)
    assert same_bits(elementwise.gelu(wide), wanted[0])
    assert same_bits(elementwise.rotate(x, *rope), wanted[1])
    monkeypatch.setattr(openmp, "_parallel", None)  # a torch that has another OpenMP
    assert same_bits(elementwise.gelu(wide), wanted[0])
    assert same_bits(elementwise.rotate(x, *rope), wanted[1])


@pytest.fixture
def taken(monkeypatch):
    """Names of the kernels that were taken, in order."""
    names = []
    for name in ("gelu", "rotate"):
        function = getattr(elementwise, name)

        def counted(*args, name=name, function=function):
            names.append(name)
            return function(*args)

        monkeypatch.setattr(elementwise, name, counted)
    return names


def test_the_models_bf16_takes_the_kernels_in_the_hosts_context(taken):
    x, rope = heads_of(1, 2, 5, 8, 2)
    outside = gelu(x.transpose(1, 2)), rotate(x, rope)
    assert not taken
    with HostKernels():
        inside = gelu(x.transpose(1, 2)), rotate(x, rope)
    assert taken == ["gelu", "rotate"]
    assert all(same_bits(a, b) for a, b in zip(inside, outside, strict=True))


def test_what_the_kernels_do_not_read_is_torchs(taken):
    x, rope = heads_of(1, 2, 5, 8, 2)
    other_layout, other_dtype = x.contiguous(), x.float()
    transposed = Rope(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in rope))
    cases = [(other_layout, rope), (other_dtype, rope), (x, transposed)]
    wanted = [rotate(*case) for case in cases]
    with HostKernels():
        got = [rotate(*case) for case in cases]
        exact = nn.functional.gelu(x.transpose(1, 2)), gelu(x.float()), gelu(x)
    assert not taken
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert torch.equal(exact[0], nn.functional.gelu(x.transpose(1, 2)))
    assert torch.equal(exact[1], gelu(x.float())) and torch.equal(exact[2], gelu(x))
