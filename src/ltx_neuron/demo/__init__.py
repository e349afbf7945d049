"""The demo checkpoint: a small trained LTX-2.3 in the released file format, in this folder.

It generates clips of 128x192 pixels and 49 frames, of one moving, bouncing shape with sound, from
prompts such as "a red circle moves to the right slowly on a navy ground". The LoRA makes the shape
cyan and the background navy, as in a blueprint. tools/train_demo trains and writes the files.
"""

from pathlib import Path
from typing import NamedTuple


class DemoAssets(NamedTuple):
    """The paths of one set of assets. gemma_root is a directory, the others are files."""

    checkpoint: Path
    gemma_root: Path
    spatial_upsampler: Path
    style_lora: Path


def assets_in(directory: Path) -> DemoAssets:
    """The paths of the files that tools/train_demo/assemble.py writes in a directory."""
    names = "ltx-2.3-demo", "upsampler", "blueprint-lora"
    checkpoint, upsampler, lora = (directory / f"{name}.safetensors" for name in names)
    return DemoAssets(checkpoint, directory / "gemma", upsampler, lora)


ASSETS = assets_in(Path(__file__).parent)
