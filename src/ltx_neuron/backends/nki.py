"""NKI kernels in the place of ltx_neuron::attention_cte (attention.py has its reference). Not run on hardware.

nkilib's attention_cte (nki-library, core/attention): heads as batch, D to 128, heads times batch to 512, any length.
"""

from functools import cache

import torch
from torch import Tensor


def _kernel_arguments(query: Tensor, key: Tensor, value: Tensor) -> dict:
    """Operands and layouts: (H, T, D) in and out, so nothing is permuted. The query is scaled already."""
    heads, _, size = query.shape
    if size > 128 or heads > 512:
        raise ValueError(f"attention_cte takes head sizes to 128 and 512 heads, got {size} and {heads}")
    return dict(q=query, k=key, v=value, scale=1.0, causal_mask=False, tp_q=True, tp_k=True, tp_out=False)


@cache
def native_attention(lnc: int):
    """The operation as TorchNeuron's graphs take it; the launch grid is the physical cores of a logical one."""
    from nkilib.core.attention.attention_cte import attention_cte
    from torch_neuronx import nki_op, wrap_nki

    kernel = wrap_nki(attention_cte)[lnc]

    @nki_op("ltx_neuron_nki::attention_cte", mutates_args={})
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel(**_kernel_arguments(query, key, value))

    return attention


def register_for_xla(lnc: int) -> None:
    """Have PyTorch/XLA trace the kernel where a program has the operation: what NxD's ModelBuilder needs."""
    from nkilib.core.attention.attention_cte import attention_cte

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention_cte[lnc](**_kernel_arguments(query, key, value))

    torch.library.register_kernel("ltx_neuron::attention_cte", "xla", attention)
