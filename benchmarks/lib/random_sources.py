"""Files of the released sizes with random weights, of which a file system keeps few bytes.

A tensor of at most DENSE_BYTES is random throughout. Of a larger one every ROW_STEP-th row along
its first dimension is, and the others are holes, which read as zeros and take no room: every matrix
of every layer gives some channels of its output values, and all of it is still read and multiplied.
The random values' scale is that of the tiny assets, so that activations keep theirs from layer to
layer.
"""

import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import Generator, Tensor

from lib.full_size import Shapes, checkpoint_metadata, released_shapes, write_sparse
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.tiny import SPATIAL_UPSAMPLER
from ltx_neuron.tiny.config import TinySizes, released_config
from ltx_neuron.tiny.gemma import gemma_shapes, random_gemma_weight, write_gemma_settings
from ltx_neuron.tiny.weights import random_weight, upsampler_shapes, vocoder_weights
from ltx_neuron.weights.tensorfile import TORCH_DTYPES

DENSE_BYTES, ROW_STEP = 2**20, 128
FIRST_TOKENS = 1024  # rows of the embedding table that are random: prompts have no other tokens
NOT_RUN = ("vae.encoder.", "audio_vae.encoder.")  # holes: no job without images reads them
# Gemma3-12B; its tokenizer is trained on two sentences, and its image tower is tiny.
GEMMA_SIZES = TinySizes(
    gemma_layers=48,
    gemma_heads=16,
    gemma_kv_heads=8,
    gemma_head_dim=256,
    gemma_hidden=3840,
    gemma_intermediate=15360,
    gemma_vocab=262208,
    gemma_sliding_window_pattern=6,
)
UPSAMPLER = SPATIAL_UPSAMPLER | {"mid_channels": 512, "num_blocks_per_stage": 4}
# Random fp32 values for some rows of a tensor, given its name and those rows on the meta device.
Draw = Callable[[str, Tensor, Generator], Tensor]
# Which rows of a tensor are random, given its name, shape and bytes.
Rows = Callable[[str, list[int], int], list[range]]


def random_rows(name: str, shape: list[int], nbytes: int) -> list[range]:
    """All rows of a small tensor, of a large one those that the module's text says."""
    count = shape[0] if shape else 1
    if nbytes <= DENSE_BYTES:
        return [range(count)]
    first = FIRST_TOKENS if name.endswith("embed_tokens.weight") else 1
    return [range(min(first, count)), *(range(i, i + 1) for i in range(first, count, ROW_STEP))]


def write_checkpoint(path: Path, seed: int) -> None:
    """The released checkpoint, with all 48 blocks."""
    import_ltx_core()
    generator = Generator().manual_seed(seed)
    vocoder = vocoder_weights(released_config(), generator)  # its filters are not learned

    def draw(name: str, like: Tensor, generator: Generator) -> Tensor:
        return vocoder[name] if name in vocoder else random_weight(name, like, generator)

    def rows(name: str, shape: list[int], nbytes: int) -> list[range]:
        if name.startswith(NOT_RUN):
            return []
        return random_rows(name, shape, 0 if name in vocoder else nbytes)

    write_random(path, checkpoint_metadata(), released_shapes(), draw, rows, generator)


def write_gemma(folder: Path, seed: int, sizes: TinySizes = GEMMA_SIZES) -> None:
    """Gemma3's folder."""
    folder.mkdir(exist_ok=True)
    shapes = _bf16(gemma_shapes(write_gemma_settings(folder, sizes)))
    path, generator = folder / "model.safetensors", Generator().manual_seed(seed)
    write_random(path, {"format": "pt"}, shapes, random_gemma_weight, random_rows, generator)


def write_upsampler(path: Path, seed: int) -> None:
    """The spatial upsampler."""
    metadata, shapes = {"config": json.dumps(UPSAMPLER)}, _bf16(upsampler_shapes(UPSAMPLER))
    generator = Generator().manual_seed(seed)
    write_random(path, metadata, shapes, random_weight, random_rows, generator)


def _bf16(tensors: dict[str, Tensor]) -> Shapes:
    return {name: ("BF16", list(tensor.shape)) for name, tensor in tensors.items()}


def write_random(
    path: Path,
    metadata: dict[str, str],
    shapes: Shapes,
    draw: Draw,
    rows: Rows,
    generator: Generator,
) -> None:
    """Write a safetensors file, which appears under its name when it is whole."""
    partial = path.with_name(path.name + ".partial")
    offsets = write_sparse(partial, metadata, shapes)
    with open(partial, "r+b", buffering=0) as file:
        for name, (stored, shape) in shapes.items():
            dtype = TORCH_DTYPES[stored]
            chosen = rows(name, shape, prod(shape) * dtype.itemsize)
            like = torch.empty(sum(map(len, chosen)), *shape[1:], device="meta")
            if not chosen:
                continue
            values = draw(name, like if shape else like[0], generator).to(dtype).contiguous()
            data = memoryview(values.flatten().view(torch.uint8).numpy())
            row_bytes = len(data) // len(like)
            for part in chosen:
                taken, data = data[: len(part) * row_bytes], data[len(part) * row_bytes :]
                os.pwrite(file.fileno(), taken, offsets[name] + part.start * row_bytes)
    partial.rename(path)
