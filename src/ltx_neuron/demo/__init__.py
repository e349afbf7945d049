"""A small LTX-2.3 that was trained, in the released file format: the files beside this one.

It makes clips of 128x192 and 49 frames of a moving, bouncing, sounding shape, from prompts such as
"a red circle moves to the right slowly on a navy ground". With the LoRA, what moves is always cyan
and the ground navy, as in a blueprint. tools/train_demo trains them and writes the files.
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
    """The paths that tools/train_demo/assemble.py writes to in a directory."""
    names = "ltx-2.3-demo", "upsampler", "blueprint-lora"
    checkpoint, upsampler, lora = (directory / f"{name}.safetensors" for name in names)
    return DemoAssets(checkpoint, directory / "gemma", upsampler, lora)


ASSETS = assets_in(Path(__file__).parent)
