"""Normalized attention guidance: the equations of Chen et al. 2025 (arXiv 2505.21179) in ltx-core's
text attentions."""

from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor


class Nag(NamedTuple):
    """The scale is that of the implementations, the paper's phi + 1."""

    scale: float
    alpha: float = 0.25
    tau: float = 2.5

    def __call__(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Z of the attentions' outputs (B, T, all heads' channels), before gates and to_out."""
        extrapolated = positive + (self.scale - 1) * (positive - negative)
        ratio = extrapolated.norm(p=1, dim=-1, keepdim=True)
        ratio = ratio / positive.norm(p=1, dim=-1, keepdim=True)
        limited = extrapolated * torch.clamp(ratio, max=self.tau) / ratio
        return self.alpha * limited + (1 - self.alpha) * positive


@contextmanager
def guided(nag, *negative: Tensor, modulated: bool = True):
    """ltx-core's models, within the block, avoid a negative prompt.

    nag        called with Z+ and Z-
    negative   its contexts, of video and of audio; None: a stream without guidance
    modulated  whether they are modulated as the prompt's are
    """
    from ltx_core.model.transformer import transformer

    original = transformer.apply_cross_attention_adaln
    contexts = {context.shape[-1]: context for context in negative}

    def guided(x, context, attn, shift, scale, gate, table, timestep, mask, eps):
        other, attend = contexts[context.shape[-1]], attn.attention_function
        if modulated:
            rows = table[None, None] + timestep.reshape(len(x), timestep.shape[1], 2, -1)
            other = other * (1 + rows[:, :, 1]) + rows[:, :, 0]
        key, value = attn.k_norm(attn.to_k(other)), attn.to_v(other)

        def both(q, k, v, heads, mask):
            return nag(attend(q, k, v, heads, mask), attend(q, key, value, heads, mask))

        with mock.patch.object(attn, "attention_function", both):
            return original(x, context, attn, shift, scale, gate, table, timestep, mask, eps)

    with mock.patch.object(transformer, "apply_cross_attention_adaln", guided):
        yield
