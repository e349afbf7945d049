"""The five scripts on tiny assets in a folder of their own, as command lines."""

import os
import subprocess
import sys
from pathlib import Path

from ltx_neuron.tiny import make_tiny
from ltx_neuron.tiny.config import TinySizes

ROOT = Path(__file__).resolve().parents[2]
GENERATE = Path("src/generate_ltx23.py")


class TinyScripts:
    """Tiny assets in float32, and the commands that run on them.

    size      flags of the video's size, as in ["--height", "64"]
    sizes     of the models, and `config` what differs from theirs
    checkout  of the project: its scripts and package are taken
    """

    def __init__(
        self,
        folder: Path,
        tp: int,
        size: list[str],
        sizes: TinySizes = TinySizes(),  # noqa: B008 - frozen, so it may be shared
        config: dict | None = None,
        checkout: Path = ROOT,
    ):
        self.assets, self.size = make_tiny(folder / "assets", sizes, config), size
        self.checkout, self.env = checkout, os.environ | {"PYTHONPATH": str(checkout / "src")}
        self.common = ["--checkpoint-path", self.assets.checkpoint, "--profile", "cpu"]
        self.common += ["--artifacts-dir", folder / "artifacts"]
        self.common += ["--tp-degree", tp, "--dtype", "float32"]

    def prepare(self) -> None:
        """Shard and compile what a generation needs."""
        gemma = ["--gemma-root", self.assets.gemma_root]
        for script, flags in {
            "shards/shard_backbone_weights.py": [],
            "shards/shard_gemma3_weights.py": gemma,
            "compile/compile_transformer.py": self.size,
            "compile/compile_gemma3.py": gemma,
        }.items():
            command = [sys.executable, self.checkout / script, *self.common, *flags]
            subprocess.run(list(map(str, command)), check=True, capture_output=True, env=self.env)

    def generate(self, *more) -> list[str]:
        """What to type to generate, with the prompt encoded on the ranks; the first word is the
        script."""
        words = [self.checkout / GENERATE, *self.common, *self.size, "--neuron-gemma"]
        words += ["--gemma-root", self.assets.gemma_root]
        words += ["--spatial-upsampler-path", self.assets.spatial_upsampler]
        return list(map(str, [*words, *more]))
