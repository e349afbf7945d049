"""nkilib's flash attention in the place of ltx_neuron::attention_cte, as TorchNeuron takes it. Not run on hardware.

attention.py has its reference; nxd.py does the same for PyTorch/XLA. Source: nki-library, core/attention/attention_cte.py:
heads as batch, D to 128, heads times batch to 512, any length.
"""

from functools import cache

from torch import Tensor


@cache
def native_attention(lnc: int):
    """The operation that stands in a graph; the launch grid is the physical cores of a logical one."""
    from nkilib.core.attention.attention_cte import attention_cte
    from torch_neuronx import nki_op, wrap_nki

    kernel = wrap_nki(attention_cte)[lnc]

    @nki_op("ltx_neuron_nki::attention_cte", mutates_args={})
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, _, size = query.shape
        if size > 128 or heads > 512:
            raise ValueError(f"attention_cte takes heads of 128 and 512 of them at most, got {size} and {heads}")
        # (H, T, D) in and out: nothing is permuted. The query is scaled already.
        layouts = dict(tp_q=True, tp_k=True, tp_out=False)
        return kernel(q=query, k=key, v=value, scale=1.0, causal_mask=False, **layouts)

    return attention
