"""A small LTX-2.3 that was trained, in the released file format: the files beside this one.

It makes clips of 128x192 and 49 frames of a moving, bouncing, sounding shape, from prompts such as
"a red circle moves to the right slowly on a navy ground". tools/train_demo trains it and writes
the files.
"""

from pathlib import Path
from typing import NamedTuple


class DemoAssets(NamedTuple):
    """The paths of one set of assets. gemma_root is a directory, the others are files."""

    checkpoint: Path
    gemma_root: Path
    spatial_upsampler: Path


def assets_in(directory: Path) -> DemoAssets:
    """The paths that tools/train_demo/assemble.py writes to in a directory."""
    names = "ltx-2.3-demo.safetensors", "gemma", "upsampler.safetensors"
    return DemoAssets(*(directory / name for name in names))


ASSETS = assets_in(Path(__file__).parent)
