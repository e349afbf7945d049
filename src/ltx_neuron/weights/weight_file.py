"""Files with float8 or int8 weights, dequantised to bfloat16 when they are read.

Source: ltx-core quantization/fp8_cast.py (1.2.0): bf16(float32(weight) * scale), then as from a
bfloat16 file. Layouts, by the other tensors of a weight X.weight:
  released, scaled   X.weight_scale, one number; the file's metadata may list the layers
  released, cast     none: weights and biases were cast without a scale
  ComfyUI            X.scale_weight for X.weight_scale and a marker scaled_fp8 in the file, or
                     X.comfy_quant, JSON with the name of the format
X.input_scale (ComfyUI: X.scale_input) is for activations, which stay in bfloat16 here. nvfp4, with
X.weight_scale_2, is refused.

Lightricks' int8-convrot files have a scale per row. Source: ComfyUI comfy/ops.py (format
"int8_tensorwise") and comfy-kitchen tensor/int8_utils.py. A weight (N, K) has `weight_scale`,
float32 (N, 1) or one number, and a note `comfy_quant`. With "convrot" each group of K's features
was multiplied by H, a symmetric matrix with entries +-1 and H H = group size * 1, over the root of
the group size, before it was rounded; so H undoes it.
"""

import json
from functools import cache, reduce
from math import inf, prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ltx_neuron.errors import UserError
from ltx_neuron.format import few
from ltx_neuron.weights.tensorfile import WEIGHT_DTYPES, TensorFile

FLOAT8, _FORMAT = "F8_E4M3", "float8_e4m3fn"  # as safetensors and torch name it
_SCALES = "weight_scale", "scale_weight"
_OF_ACTIVATIONS = "input_scale", "scale_input"
_NOTE, _MARKER = "comfy_quant", "scaled_fp8"
_FIELDS = {"format", "full_precision_matrix_mult"}  # of a note; neither changes a weight
_NVFP4 = "weight_scale_2"  # the second scale that nvfp4 alone has
_PIECE = 2**18  # weights dequantised at once: their indices fit in a core's cache
INT8, INT8_FORMAT = "I8", "int8_tensorwise"  # as safetensors and ComfyUI name it
# Of a note; the last three change no weight.
_INT8_FIELDS = {"format", "convrot", "convrot_groupsize"}
_INT8_FIELDS |= {"params", "per_row", "full_precision_matrix_mult"}
_GROUPS = {4**power: power for power in range(1, 7)}  # group size -> factors of H
_GROUP = 256  # ComfyUI's default
_FACTOR = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).float()


class RowScale(NamedTuple):
    """The scale of an int8 weight, float32 (N, 1) or (1, 1), and the number of input features that
    were rotated together; 1 without a rotation."""

    scale: Tensor
    group: int

    def dequantised(self, stored: Tensor, start: int) -> Tensor:
        """The rows of a weight from row `start`, int8 (n, K), as bfloat16. Products of H are whole
        numbers below 2**24, exact in any order of summation. So the result depends neither on the
        number of rows nor on the CPU."""
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
    if note.keys() - _INT8_FIELDS or not known:
        raise ValueError(f"quantised as {note} with shape {list(shape)}, not implemented")
    if scale.numel() != 1 and tuple(scale.shape) != (shape[0], 1):
        shapes = f"[{shape[0]}, 1] or one number"
        raise ValueError(f"int8 with a scale of shape {list(scale.shape)}, wanted {shapes}")
    if not ((scale > 0) & (scale < inf)).all():
        raise ValueError("int8 with a scale that is not a finite number above 0")
    return RowScale(scale.reshape(-1, 1), group)


class WeightFile(TensorFile):
    """A file of a model's weights. Tensors stored as F8_E4M3 or as int8 with scales are read as
    bfloat16; `shapes` leaves out their scales and notes, and `others`, of other models. UserError,
    with the tensors' names, for an unknown layout and for a damaged scale."""

    def __init__(self, path: str | Path, download: str):
        super().__init__(path, download)
        names = {key: name for key in self.shapes if (name := self.name_of(key)) is not None}
        self.others = [key for key in self.shapes if key not in names]
        for attribute in ("shapes", "dtypes", "_offsets"):
            values = getattr(self, attribute)
            setattr(self, attribute, {name: values[key] for key, name in names.items()})
        # Float8 tensor -> its scale, float32 without dimensions; None if it has none.
        self.scales: dict[str, Tensor | RowScale | None] = {}
        float8, dropped, problems = [], [], []
        beside: dict[str, dict[str, str]] = {}  # weight -> names of its scales and note
        for key in self.shapes:
            module, _, part = key.rpartition(".")
            if part == _MARKER:
                dropped.append(key)
            elif part in (*_SCALES, *_OF_ACTIVATIONS, _NOTE):
                beside.setdefault(f"{module}.weight", {})[part] = key
                dropped.append(key)
            elif self.dtypes[key] == FLOAT8:
                float8.append(key)
            elif part != "bias" and self.dtypes.get(f"{module}.weight") == FLOAT8:
                problems.append(f"{key} is of an unknown layout")
        if not float8 and not beside:
            return
        if any(key.endswith(f".{_NVFP4}") for key in self.shapes):
            raise UserError(
                f"{self.path} has weights in nvfp4, which this toolkit does not read\nDownload the"
                f" file in bfloat16 (LTX-2.5: or in int8-convrot): {self.download}"
            )
        formats = self._listed_formats()
        # If no metadata lists the scaled layers, either all layers have scales or none has.
        scaled = not formats and any(part in _SCALES for parts in beside.values() for part in parts)
        for key in dict.fromkeys([*float8, *beside]):
            needs_scale = scaled and key.endswith(".weight")
            try:
                self.scales[key] = self._scale(
                    key, beside.get(key, {}), formats.get(key), needs_scale
                )
            except ValueError as problem:
                problems.append(str(problem))
        if problems:
            raise UserError(
                "\n  ".join(
                    [f"{self.path} has weights that cannot be read:", *few(sorted(problems), 20)]
                )
                + "\nWanted: BF16, or F8_E4M3 with one number as weight_scale, or without scales,"
                f" or I8 with {INT8_FORMAT}; the published file: {self.download}"
            )
        for key in dropped:
            del self.shapes[key], self.dtypes[key]

    def _listed_formats(self) -> dict[str, dict]:
        try:
            layers = json.loads(self.metadata.get("_quantization_metadata", "{}")).get("layers", {})
            formats = {self.name_of(f"{layer}.weight"): {**of} for layer, of in layers.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise self._broken(f"its _quantization_metadata is damaged ({error})") from None
        return {weight: fields for weight, fields in formats.items() if weight in self.shapes}

    def name_of(self, key: str) -> str | None:
        """The name that this class gives a tensor of the file; None for one that it leaves out."""
        return key

    def _scale(
        self, key: str, beside: dict[str, str], fields: dict | None, needs_scale: bool
    ) -> Tensor | RowScale | None:
        """The scale of a float8 or int8 tensor. ValueError, with a message, if a needed scale is
        missing, or if a scale or note is damaged or of an unknown layout."""
        if _NOTE in beside:
            try:
                fields = {**json.loads(bytes(self.read(beside[_NOTE]).tolist()))}
            except (ValueError, TypeError):
                raise ValueError(f"{beside[_NOTE]} is not a JSON object") from None
        scales = [beside[part] for part in _SCALES if part in beside]
        whole = self.dtypes.get(key) == INT8 and len(scales) == 1
        if whole and fields and fields.get("format") == INT8_FORMAT:
            try:
                return row_scale(self.shapes[key], self.read(scales[0]).float(), fields)
            except ValueError as problem:
                raise ValueError(f"{key} is {problem}") from None
        if fields and (fields.get("format") != _FORMAT or fields.keys() - _FIELDS):
            raise ValueError(f"{key} is quantised as {json.dumps(fields)}, not implemented")
        if self.dtypes.get(key) != FLOAT8:
            stored = self.dtypes.get(key, "missing")
            raise ValueError(f"{[*scales, *beside.values()][0]} exists, but {key} is {stored}")
        stored = f"{key} is stored as {FLOAT8}"
        if not scales:
            if needs_scale or beside or fields:
                raise ValueError(f"{stored}, but its weight_scale is missing")
            return None
        name = scales[0].rpartition(".")[2]
        if len(scales) > 1:
            raise ValueError(f"{stored} with both a weight_scale and a scale_weight")
        if prod(self.shapes[scales[0]]) != 1:
            shape = list(self.shapes[scales[0]])
            raise ValueError(f"{stored} with a {name} of shape {shape}, wanted one number")
        if problem := TensorFile.weight_problem(self, scales[0]):
            raise ValueError(f"{scales[0]} is {problem}")
        scale = self.read(scales[0]).float().reshape(())
        if not 0 < scale.item() < inf:
            raise ValueError(f"{scales[0]} is {scale.item()}, wanted a finite number above 0")
        return scale

    def torch_dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self.scales else super().torch_dtype(name)

    def weight_problem(self, name: str, known: tuple[str, ...] = (*WEIGHT_DTYPES, FLOAT8)) -> str:
        return "" if name in self.scales else super().weight_problem(name, known)

    def _value(self, name: str, stored: Tensor, start: int = 0) -> Tensor:
        if name not in self.scales:
            return stored
        scale = self.scales[name]
        if isinstance(scale, RowScale):
            return scale.dequantised(stored, start)
        return _dequantised(stored, scale)

    @property
    def quantised(self) -> str:
        """How its quantised tensors are stored, such as "int8"; empty if it has none."""
        kinds = {isinstance(scale, RowScale) for scale in self.scales.values()}
        return " and ".join(["float8", "int8"][kind] for kind in sorted(kinds))

    def describe_quantised(self) -> str:
        """A line about its quantised tensors for the user; empty if it has none."""
        if not self.scales:
            return ""
        scaled = sum(scale is not None for scale in self.scales.values())
        return (
            f"{len(self.scales):,} weights in {self.quantised} are dequantised while sharding; the"
            f" sharded set is as large as the bf16 file's ({scaled:,} have a scale)"
        )


def _dequantised(stored: Tensor, scale: Tensor | None) -> Tensor:
    """float8 -> bfloat16, as a copy. A lookup table converts 1.4 billion values per second and
    core; torch converts 0.1 billion, and only to float32."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    table = (values if scale is None else values * scale).bfloat16().view(torch.int16).numpy()
    result = torch.empty(stored.shape, dtype=torch.bfloat16)
    codes, into = stored.view(torch.uint8).reshape(-1), result.view(torch.int16).view(-1)
    for piece, part in zip(codes.split(_PIECE), into.split(_PIECE), strict=True):
        np.take(table, piece.numpy(), out=part.numpy(), mode="clip")
    return result
