"""nkilib's flash attention for the operation ltx_neuron::attention_cte, whose reference is in
models/attention.py. Not run on hardware.

Source: nki-library, core/attention/attention_cte.py: heads as batch, heads of at most 128, at most
512 of them, any length.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType

import torch
from torch import Tensor

from ltx_neuron.errors import UserError


def _kernel():
    """nkilib's kernel, ready to be launched. Raises UserError where nkilib is not installed."""
    try:
        from nkilib.core.attention.attention_cte import attention_cte
    except ImportError as error:
        raise UserError(
            f"the profile has attention=nki, and nkilib cannot be imported: {error}\nIt comes with"
            " Neuron's own neuronx-cc: install that, or type --profile-set attention=matmul"
        ) from None
    # Up to SDK 2.27 nkilib leaves the decoration to its callers.
    is_plain = isinstance(attention_cte, FunctionType)
    return _decorated(attention_cte) if is_plain else attention_cte


def _decorated(function: Callable):
    import nki

    return nki.jit(function)


def _arguments(query: Tensor, key: Tensor, value: Tensor, scale: float) -> dict:
    """The kernel's keywords for (H, T, D) tensors. Raises ValueError for sizes it does not take."""
    heads, _, size = query.shape
    if size > 128 or heads > 512:
        raise ValueError(
            f"attention_cte takes heads of 128 and 512 of them at most, got {size} and {heads}"
        )
    # The models' own layouts in and out: nothing is permuted.
    return dict(
        q=query, k=key, v=value, scale=scale, causal_mask=False, tp_q=True, tp_k=True, tp_out=False
    )


@cache  # an operation may be registered once a process
def native_attention(lnc: int):
    """The operation for TorchNeuron's graphs: (H, T, D) query, key and value, and the scale, to
    (H, T, D)."""
    from torch_neuronx import nki_op, wrap_nki

    # Launched on the physical cores of a logical one. TorchNeuron takes a grid, not a number.
    kernel = wrap_nki(_kernel())[(lnc,)]

    @nki_op("ltx_neuron_nki::attention_cte", mutates_args={})
    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return kernel(**_arguments(query, key, value, scale))

    # What nki_op returns is a definition, which a graph cannot call by its name.
    return torch.ops.ltx_neuron_nki.attention_cte.default


def register_for_xla(lnc: int) -> None:
    """Have PyTorch/XLA trace the kernel where a program has the operation, for NxD."""
    kernel = _kernel()[lnc]  # launched on the physical cores of a logical one

    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return kernel(**_arguments(query, key, value, scale))

    torch.library.register_kernel("ltx_neuron::attention_cte", "xla", attention)
