"""Tiny random assets in the released LTX-2.3 file format: python -m tiny DIR

All files of the pipeline, with the released names, layout and metadata, and small enough to run on
a laptop in seconds. Weights are random, scaled so that activations stay finite and depend on their
inputs; the output is noise. The same sizes and seed give the same bytes.

Only the command line, the lint rules and tests import this package.
"""

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from ltx_neuron.errors import UserError
from tiny.config import TinySizes, check, merge, tiny_config
from tiny.gemma import write_gemma_root
from tiny.weights import checkpoint_weights, lora_weights, save, upsampler_weights

IMAGE_SIZE = (260, 150)  # width, height; no video has this size

# The released spatial x2 upsampler has 512 mid_channels and 4 blocks; its GroupNorm needs a
# multiple of 32 channels.
SPATIAL_UPSAMPLER = {
    "_class_name": "LatentUpsampler",
    "in_channels": 128,
    "mid_channels": 32,
    "num_blocks_per_stage": 1,
    "dims": 3,
    "spatial_upsample": True,
    "temporal_upsample": False,
    "spatial_scale": 2.0,
    "rational_resampler": False,
}
TEMPORAL_UPSAMPLER = SPATIAL_UPSAMPLER | {
    "spatial_upsample": False,
    "temporal_upsample": True,
    "rational_resampler": True,
}


class TinyAssets(NamedTuple):
    """The paths of one set of assets. gemma_root is a directory, the others are files."""

    checkpoint: Path
    gemma_root: Path
    spatial_upsampler: Path
    temporal_upsampler: Path
    lora: Path
    image: Path


def assets_in(directory: Path) -> TinyAssets:
    """The paths of make_tiny's files in a directory."""
    names = (
        "ltx-2.3-tiny.safetensors",
        "gemma",
        "upsampler.safetensors",
        "temporal_upsampler.safetensors",
        "lora.safetensors",
        "image.png",
    )
    return TinyAssets(*(Path(directory) / name for name in names))


def make_tiny(
    directory: Path,
    sizes: TinySizes = TinySizes(),  # noqa: B008 - frozen, so it may be shared
    config_overrides: dict | None = None,
    model_version: str = "2.3.0",
) -> TinyAssets:
    """Write one set of tiny assets, replacing an earlier one.

    config_overrides  merged into the checkpoint's config at any depth; the weights match the result
    model_version     in the checkpoint's metadata

    All files are written to a hidden directory inside `directory` and renamed when complete.
    UserError for invalid sizes, and if `directory` contains other files under these names.
    """
    check(sizes)
    directory = Path(directory)
    final = assets_in(directory)
    taken = [path.name for path in final if path.exists()]
    if taken and not final.checkpoint.exists():
        raise UserError(
            f"{directory} contains {', '.join(taken)} but no {final.checkpoint.name}, so they are"
            " not tiny assets and are not replaced; type another directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
    config = merge(tiny_config(sizes), config_overrides or {})
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as temporary:
        unfinished = assets_in(Path(temporary))
        _write_assets(unfinished, sizes, config, model_version)
        if final.gemma_root.exists():
            final.gemma_root.rename(Path(temporary) / "replaced-gemma")
        for source, destination in zip(unfinished, final, strict=True):
            source.replace(destination)
    return final


def _write_assets(assets: TinyAssets, sizes: TinySizes, config: dict, model_version: str) -> None:
    checkpoint = checkpoint_weights(config, sizes)
    metadata = {"config": json.dumps(config), "model_version": model_version}
    save(assets.checkpoint, checkpoint, metadata)
    write_gemma_root(assets.gemma_root, sizes)
    upsamplers = {
        assets.spatial_upsampler: (SPATIAL_UPSAMPLER, sizes.seed + 2),
        assets.temporal_upsampler: (TEMPORAL_UPSAMPLER, sizes.seed + 4),
    }
    for path, (upsampler, seed) in upsamplers.items():
        save(path, upsampler_weights(upsampler, seed), {"config": json.dumps(upsampler)})
    save(assets.lora, lora_weights(checkpoint, sizes.seed + 3))
    picture().save(assets.image)


def picture():
    """A PIL image for image-to-video: a house under an evening sky, easy to recognise."""
    from PIL import Image, ImageDraw

    width, height = IMAGE_SIZE
    image = Image.new("RGB", IMAGE_SIZE)
    draw = ImageDraw.Draw(image)
    for row in range(height):
        draw.line([(0, row), (width, row)], fill=(70 + row, 110 + row // 2, 220 - row // 2))
    draw.ellipse([185, 18, 225, 58], fill=(255, 220, 90))
    draw.ellipse([-80, 85, 180, 260], fill=(60, 125, 75))
    draw.ellipse([110, 100, 380, 290], fill=(85, 155, 70))
    draw.rectangle([60, 70, 115, 112], fill=(205, 95, 70))
    draw.polygon([(52, 70), (87, 42), (123, 70)], fill=(110, 55, 50))
    draw.rectangle([80, 88, 94, 112], fill=(70, 45, 40))
    return image
