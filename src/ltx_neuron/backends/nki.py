"""The NKI kernel for attention_cte of models/attention.py. We did not run it on hardware.

Source: nki-library, core/attention/attention_cte.py (heads as batch, any length).
"""

import importlib
from collections.abc import Callable
from functools import cache
from types import FunctionType

import torch
from torch import Tensor

from ltx_neuron.errors import UserError

PACKAGE = "nkilib"
MISSING = "Install Neuron's own neuronx-cc, which has it, or type --profile-set attention=matmul"


def load() -> Callable:
    """The kernel, ready to launch. Raises UserError if it is not installed."""
    try:
        kernel = importlib.import_module(f"{PACKAGE}.core.attention.attention_cte").attention_cte
    except ImportError as error:
        raise UserError(f"{PACKAGE} cannot be imported: {error}\n{MISSING}") from None
    if not isinstance(kernel, FunctionType):
        return kernel
    import nki

    # Up to SDK 2.27 nkilib leaves the decoration to its callers.
    return nki.jit(kernel)  # pyright: ignore[reportAttributeAccessIssue]


def arguments(query: Tensor, key: Tensor, value: Tensor, scale: float) -> dict:
    """The kernel's keywords for (H, T, D) tensors. ValueError for unsupported sizes."""
    heads, _, size = query.shape
    if size > 128 or heads > 512:
        raise ValueError(
            f"attention_cte takes heads of 128 and 512 of them at most, got {size} and {heads}"
        )
    # The models' layouts in and out, without permutations.
    return dict(
        q=query, k=key, v=value, scale=scale, causal_mask=False, tp_q=True, tp_k=True, tp_out=False
    )


@cache  # an operation can be registered once per process
def native_attention(lnc: int):
    """The kernel as an operation of TorchNeuron's graphs."""
    from torch_neuronx import nki_op, wrap_nki

    # Launched on the physical cores of a logical one. TorchNeuron expects a grid, not a number.
    launched = wrap_nki(load())[(lnc,)]

    @nki_op("ltx_neuron_nki::attention_cte", mutates_args={})
    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return launched(**arguments(query, key, value, scale))

    # nki_op returns a definition, which a graph cannot call by its name.
    return torch.ops.ltx_neuron_nki.attention_cte.default


def register_for_xla(lnc: int) -> None:
    """Make PyTorch/XLA trace the kernel for attention_cte, for NxD."""
    launched = load()[lnc]  # pyright: ignore[reportIndexIssue] on a logical core's physical ones

    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return launched(**arguments(query, key, value, scale))

    torch.library.register_kernel("ltx_neuron::attention_cte", "xla", attention)
