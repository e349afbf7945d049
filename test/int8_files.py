"""Lightricks' int8-convrot files in small, by an implementation of their format of its own: the
rotation by its formula, in float64."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

# A layer that stays in bfloat16 in the released files.
_KEPT = "adaln", "gate_logits", "norm", "embed_tokens", "patchify_proj", "proj_out", "aggregate"


def rotation(size: int) -> torch.Tensor:
    """H (size, size): the product, over the digits of row and column to base 4, of -1 where the two
    digits add up to 3 and 1 elsewhere, over the root of the size."""
    numbers, result = torch.arange(size), torch.ones(size, size, dtype=torch.float64)
    place = 1
    while place < size:
        digits = numbers // place % 4
        result *= torch.where(digits[:, None] + digits[None] == 3, -1.0, 1.0)
        place *= 4
    return result / size**0.5


def note(**fields) -> torch.Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def stored(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight (N, K): its int8 values, scales (N, 1), and the bfloat16 weight they stand for."""
    rows, columns = weight.shape
    turned = (weight.double().view(rows, -1, group) @ rotation(group).T).view(rows, columns)
    scale = (turned.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30).float()
    values = (turned / scale).round().clamp(-128, 127).to(torch.int8)
    back = (values.double() * scale).view(rows, -1, group) @ rotation(group)
    return values, scale, back.view(rows, columns).float().bfloat16()


def download(split, folder: Path) -> tuple[Path, Path]:
    """Folders with the layout of LTX-2.5's download: with transformer and text encoder in int8, and
    with the bfloat16 files that they stand for."""
    folders = folder / "int8", folder / "plain"
    for path in split:
        for each in folders:
            target = each / path.relative_to(split.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path not in (split.distilled, split.text_encoder, split.dev):
                target.symlink_to(path)
    for path in (split.distilled, split.text_encoder):
        name = path.relative_to(split.folder)
        int8 = str(name).replace("bf16", "comfy-int8-convrot")
        _write(path, folders[0] / int8, folders[1] / name)
    return folders


def _write(source: Path, path: Path, bfloat16: Path) -> None:
    tensors, plain = load_file(source), load_file(source)
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
    layers = {}
    for name, weight in plain.items():
        module, _, part = name.rpartition(".")
        if part != "weight" or weight.ndim != 2 or any(word in module for word in _KEPT):
            continue
        group = next((size for size in (256, 64, 16) if weight.shape[1] % size == 0), 4)
        values, scale, plain[name] = stored(weight, group)
        layers[module] = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
        tensors |= {name: values, f"{module}.weight_scale": scale}
        tensors[f"{module}.comfy_quant"] = note(**layers[module])
    assert layers
    listed = {"_quantization_metadata": json.dumps({"layers": layers})}
    save_file(tensors, path, metadata | listed)
    save_file(plain, bfloat16, metadata)
