"""nkilib's flash attention in the place of ltx_neuron::attention_cte, as each compiler takes it.
Not run on hardware.

attention.py has its reference. Source: nki-library, core/attention/attention_cte.py: heads as
batch, D to 128, heads times batch to 512, any length.
"""

from functools import cache

import torch
from torch import Tensor

from ltx_neuron.errors import UserError


def _kernel():
    try:
        from nkilib.core.attention.attention_cte import attention_cte
    except ImportError as error:
        raise UserError(
            f"the profile has attention=nki, and nkilib cannot be imported: {error}\nInstall the"
            " SDK's nki-library, or type --profile-set attention=matmul"
        ) from None
    return attention_cte


def _arguments(query: Tensor, key: Tensor, value: Tensor) -> dict:
    """Operands and layouts: (H, T, D) in and out, so nothing is permuted. The query is scaled
    already."""
    heads, _, size = query.shape
    if size > 128 or heads > 512:
        raise ValueError(
            f"attention_cte takes heads of 128 and 512 of them at most, got {size} and {heads}"
        )
    return dict(
        q=query, k=key, v=value, scale=1.0, causal_mask=False, tp_q=True, tp_k=True, tp_out=False
    )


@cache
def native_attention(lnc: int):
    """The operation that stands in TorchNeuron's graphs; the launch grid is the physical cores of a
    logical one."""
    from torch_neuronx import nki_op, wrap_nki

    kernel = wrap_nki(_kernel())[lnc]

    @nki_op("ltx_neuron_nki::attention_cte", mutates_args={})
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel(**_arguments(query, key, value))

    return attention


def register_for_xla(lnc: int) -> None:
    """Have PyTorch/XLA trace the kernel where a program has the operation: what NxD's ModelBuilder
    needs."""
    kernel = _kernel()[lnc]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel(**_arguments(query, key, value))

    torch.library.register_kernel("ltx_neuron::attention_cte", "xla", attention)
