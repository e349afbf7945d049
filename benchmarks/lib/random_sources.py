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
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from tiny import SPATIAL_UPSAMPLER
from tiny.config import TinySizes, released_config
from tiny.gemma import (
    gemma_4_config,
    gemma_4_shapes,
    gemma_4_tokenizer,
    gemma_shapes,
    random_gemma_4_weight,
    random_gemma_weight,
    write_gemma_settings,
)
from tiny.split import ABSENT, SOURCE, TRANSFORMER, SplitAssets, labels, sections, split_assets_in
from tiny.weights import DIFFUSION, random_weight, upsampler_shapes, vocoder_weights
from torch import Generator, Tensor

from lib.full_size import Shapes, checkpoint_metadata, released_shapes, write_sparse
from ltx_neuron.host.models import import_ltx_core
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
# LTX-2.5's text encoder: Gemma 4, and the projections to both streams.
GEMMA_4_SIZES = replace(GEMMA_SIZES, gemma_vocab=262144, heads=32, head_dim=128, audio_head_dim=64)
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


def write_split(folder: Path, seed: int) -> SplitAssets:
    """Write the files of LTX-2.5 that a distilled video needs, with the convolutional VAE."""
    import_ltx_core()
    paths, shapes, config = split_assets_in(folder), released_shapes(), released_config()
    config["transformer"] |= TRANSFORMER
    generator = Generator().manual_seed(seed)
    vocoder = vocoder_weights(config, generator)

    def draw(name: str, like: Tensor, generator: Generator) -> Tensor:
        return vocoder[name] if name in vocoder else random_weight(name, like, generator)

    def rows(name: str, shape: list[int], nbytes: int) -> list[range]:
        return random_rows(name, shape, 0 if name in vocoder else nbytes)

    def write(path: Path, prefixes: tuple[str, ...], *names: str, **labelled: str) -> None:
        own = {n: shapes[n] for n in shapes if n.startswith(prefixes) and not ABSENT.fullmatch(n)}
        if DIFFUSION in prefixes:
            width = config["transformer"]["cross_attention_dim"]
            own[f"{DIFFUSION}keyframes_abs_pos_embedding"] = "BF16", [1, width]
        own = {name.removeprefix("vae."): described for name, described in own.items()}
        metadata = labels() | {"config": json.dumps(sections(config, *names))} | labelled
        path.parent.mkdir(parents=True, exist_ok=True)
        write_random(path, metadata, own, draw, rows, generator)

    write(paths.distilled, (DIFFUSION,), "transformer", "scheduler", **SOURCE)
    write(paths.video_vae, ("vae.",), "vae")
    write(paths.audio_vae, ("audio_vae.", "vocoder."), "audio_vae", "vocoder")
    _write_text_encoder(paths.text_encoder, generator)
    paths.spatial_upsampler.parent.mkdir(exist_ok=True)
    write_upsampler(paths.spatial_upsampler, seed)
    return paths


def _write_text_encoder(path: Path, generator: Generator) -> None:
    """Write the file with Gemma 4, the projections and the tokenizer."""
    config, tokenizer = gemma_4_config(GEMMA_4_SIZES), gemma_4_tokenizer(GEMMA_4_SIZES)
    shapes = _bf16(gemma_4_shapes(config, GEMMA_4_SIZES))
    shapes |= {name: ("U8", list(tensor.shape)) for name, tensor in tokenizer.items()}

    def draw(name: str, like: Tensor, generator: Generator) -> Tensor:
        if name in tokenizer:
            return tokenizer[name]
        return random_gemma_4_weight(name, like, generator)

    def rows(name: str, shape: list[int], nbytes: int) -> list[range]:
        return random_rows(name, shape, 0 if name in tokenizer else nbytes)

    path.parent.mkdir(exist_ok=True)
    metadata = {"format": "pt", "gemma_config": json.dumps(config)}
    write_random(path, metadata, shapes, draw, rows, generator)


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
