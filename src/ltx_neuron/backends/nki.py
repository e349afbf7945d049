"""NKI kernels for the operations of models/attention.py, which has their references. We did not run
them on hardware.

Sources: nki-library, core/attention/attention_cte.py (heads as batch, any length);
aws-neuron/vllm-omni-neuron, ring_attention_const_max_fwd.py, in its own copy of that library
(tokens before heads, trn2 and later, for nki 0.6 of neuronx-cc 2.27).
"""

import importlib
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.errors import UserError


class Kernel(NamedTuple):
    """A kernel for an operation.

    module     its module; the function has the operation's name, or `name`
    arguments  its keywords for the operation's query, key, value and scale
    missing    what to type if the module cannot be imported
    """

    module: str
    name: str
    arguments: Callable[[Tensor, Tensor, Tensor, float], dict]
    missing: str

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def load(self) -> Callable:
        """The kernel, ready to launch. Raises UserError if it is not installed."""
        try:
            kernel = getattr(importlib.import_module(self.module), self.name)
        except ImportError as error:
            raise UserError(f"{self.package} cannot be imported: {error}\n{self.missing}") from None
        if not isinstance(kernel, FunctionType):
            return kernel
        import nki

        # Up to SDK 2.27 nkilib leaves the decoration to its callers.
        return nki.jit(kernel)  # pyright: ignore[reportAttributeAccessIssue]


def _cte_arguments(query: Tensor, key: Tensor, value: Tensor, scale: float) -> dict:
    """For (H, T, D) tensors. Raises ValueError for sizes that the kernel does not support."""
    heads, _, size = query.shape
    if size > 128 or heads > 512:
        raise ValueError(
            f"attention_cte takes heads of 128 and 512 of them at most, got {size} and {heads}"
        )
    # The models' layouts in and out, without permutations.
    return dict(
        q=query, k=key, v=value, scale=scale, causal_mask=False, tp_q=True, tp_k=True, tp_out=False
    )


def _const_max_arguments(query: Tensor, key: Tensor, value: Tensor, scale: float) -> dict:
    """For (B, T, H, D) tensors. Raises ValueError for sizes that the kernel does not support."""
    if query.shape != key.shape or query.shape[-1] != 128 or query.dtype != torch.bfloat16:
        shapes = tuple(query.shape), tuple(key.shape)
        raise ValueError(
            "ring_attention_const_max_fwd takes queries and keys of one shape, heads of 128, in"
            f" bfloat16; got {shapes} in {query.dtype}"
        )
    return dict(q=query, k=key, v=value, softmax_scale=scale, num_workers=1, training=False)


# By the names of the operations.
KERNELS = {
    "attention_cte": Kernel(
        "nkilib.core.attention.attention_cte",
        "attention_cte",
        _cte_arguments,
        "Install Neuron's own neuronx-cc, which has it, or type --profile-set attention=matmul",
    ),
    "attention_const_max": Kernel(
        "vllm_omni_neuron.kernels.nkilib.experimental.attention.ring_attention_const_max_fwd",
        "ring_attention_const_max_fwd",
        _const_max_arguments,
        "Install github.com/aws-neuron/vllm-omni-neuron, with neuronx-cc 2.27 or newer, or type"
        " --profile-set attention=nki",
    ),
}


@cache  # an operation can be registered once per process
def native_attention(name: str, lnc: int):
    """An operation of KERNELS for TorchNeuron's graphs."""
    from torch_neuronx import nki_op, wrap_nki

    # Launched on the physical cores of a logical one. TorchNeuron expects a grid, not a number.
    launched = wrap_nki(KERNELS[name].load())[(lnc,)]

    @nki_op(f"ltx_neuron_nki::{name}", mutates_args={})
    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return launched(**KERNELS[name].arguments(query, key, value, scale))

    # nki_op returns a definition, which a graph cannot call by its name.
    return getattr(torch.ops.ltx_neuron_nki, name).default


def register_for_xla(name: str, lnc: int) -> None:
    """Make PyTorch/XLA trace the kernel for an operation of KERNELS, for NxD."""
    launched = KERNELS[name].load()[lnc]  # pyright: ignore[reportIndexIssue] on a logical core's physical ones

    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return launched(**KERNELS[name].arguments(query, key, value, scale))

    torch.library.register_kernel(f"ltx_neuron::{name}", "xla", attention)
