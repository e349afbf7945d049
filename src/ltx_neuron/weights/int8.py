"""Weights in eight-bit integers with a scale per row, as in Lightricks' int8-convrot files.

Source: ComfyUI comfy/ops.py (format "int8_tensorwise") and comfy-kitchen tensor/int8_utils.py. A
weight (N, K) has `weight_scale`, float32 (N, 1) or one number, and a note `comfy_quant`. With
"convrot" each group of K's features was multiplied by H, a symmetric matrix with entries +-1 and
H H = group size * 1, over the root of the group size, before it was rounded; so H undoes it.
"""

from functools import cache, reduce
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

INT8, FORMAT = "I8", "int8_tensorwise"  # as safetensors and ComfyUI name it
# Of a note; the last three change no weight.
_FIELDS = {"format", "convrot", "convrot_groupsize"}
_FIELDS |= {"params", "per_row", "full_precision_matrix_mult"}
_GROUPS = {4**power: power for power in range(1, 7)}  # group size -> factors of H
_GROUP = 256  # ComfyUI's default
_PIECE = 2**18  # weights dequantised at once
_FACTOR = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).float()


class RowScale(NamedTuple):
    """The scale of an int8 weight, float32 (N, 1) or (1, 1), and the number of input features that
    were rotated together; 1 without a rotation."""

    scale: Tensor
    group: int

    def dequantised(self, stored: Tensor, start: int) -> Tensor:
        """The rows of a weight from row `start`, int8 (n, K), as bfloat16.

        Products of H are whole numbers below 2**24, exact in any order of summation. So the result
        depends neither on the number of rows nor on the CPU.
        """
        result = torch.empty(stored.shape, dtype=torch.bfloat16)
        rows = max(1, _PIECE // stored.shape[1])
        left, right = _halves(self.group)
        for first in range(0, len(stored), rows):
            whole = stored[first : first + rows]
            values = whole.float()
            if self.group > 1:
                values = left @ values.view(-1, len(left), len(right)) @ right
            scale = self.scale[start + first :][: len(whole)] if len(self.scale) > 1 else self.scale
            result[first : first + rows] = values.view(whole.shape) * (scale / self.group**0.5)
        return result


@cache
def _halves(group: int) -> tuple[Tensor, Tensor]:
    """Two matrices whose Kronecker product is H: 16 times fewer products than H for 256."""
    power = _GROUPS.get(group, 0)
    sizes = power // 2, power - power // 2
    left, right = (reduce(torch.kron, [_FACTOR] * size, torch.ones(1, 1)) for size in sizes)
    return left, right


def row_scale(shape: tuple[int, ...], scale: Tensor, note: dict) -> RowScale:
    """The scale of a weight (N, K). ValueError, with a message, for an unknown or damaged one."""
    values = {**(params if isinstance(params := note.get("params"), dict) else {}), **note}
    group = values.get("convrot_groupsize", _GROUP) if values.get("convrot") else 1
    known = group == 1 or (group in _GROUPS and len(shape) == 2 and shape[1] % group == 0)
    if note.keys() - _FIELDS or not known:
        raise ValueError(f"quantised as {note} with shape {list(shape)}, not implemented")
    if scale.numel() != 1 and tuple(scale.shape) != (shape[0], 1):
        wanted = f"[{shape[0]}, 1] or one number"
        raise ValueError(f"int8 with a scale of shape {list(scale.shape)}, wanted {wanted}")
    if not ((scale > 0) & (scale < inf)).all():
        raise ValueError("int8 with a scale that is not a finite number above 0")
    return RowScale(scale.reshape(-1, 1), group)
