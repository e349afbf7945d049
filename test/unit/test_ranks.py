"""Both backends keep the one protocol of ranks.py."""

import inspect

import pytest
import torch

from ltx_neuron.backends import nxd, ranks, torchdist
from ltx_neuron.models.signatures import Field

BACKENDS = {"torchdist": torchdist.Ranks, "nxd": nxd.Ranks}
METHODS = [
    name
    for name, member in vars(ranks.Ranks).items()
    if inspect.isfunction(member) and getattr(member, "__isabstractmethod__", False)
]
WHOLE = Field((1, 4, 8), torch.float32, split=2)
PER_BLOCK = Field((3, 4), torch.float32, per_block=True)


def test_the_protocol_says_what_callers_use():
    assert {*METHODS} == {
        *("load", "replace_weights", "unload", "put", "define", "run", "get"),
        *("hashes", "check", "close"),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_backend_s_method_has_the_signature_of_the_protocol(backend, method):
    own = inspect.signature(getattr(BACKENDS[backend], method))
    assert own == inspect.signature(getattr(ranks.Ranks, method))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_leaves_no_method_of_the_protocol_out(backend):
    assert not inspect.isabstract(BACKENDS[backend])


@pytest.mark.parametrize(
    ("field", "shape"), [(WHOLE, (1, 4, 16)), (PER_BLOCK, (3, 4)), (PER_BLOCK, (6, 4))]
)
def test_a_tensor_of_the_whole_shape_may_be_uploaded(field, shape):
    ranks.check_shape("toy", "x", field, torch.empty(shape), tp=2)


@pytest.mark.parametrize(
    ("field", "shape"),
    [(WHOLE, (1, 4, 8)), (PER_BLOCK, (4, 4)), (PER_BLOCK, (3, 5)), (PER_BLOCK, (0, 4))],
)
def test_a_tensor_of_another_shape_is_refused(field, shape):
    with pytest.raises(ValueError, match="toy.x: got shape"):
        ranks.check_shape("toy", "x", field, torch.empty(shape), tp=2)
