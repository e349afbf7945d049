"""The five scripts as command lines, on tiny assets or others, in a folder of their own."""

import os
import subprocess
import sys
from pathlib import Path

from ltx_neuron.tiny import make_tiny
from ltx_neuron.tiny.config import TinySizes

ROOT = Path(__file__).resolve().parents[2]
GENERATE = Path("src/generate_ltx23.py")


class Scripts:
    """The commands that run on assets that are there.

    assets    paths: checkpoint, gemma_root, spatial_upsampler
    folder    of what is sharded and compiled
    size      flags of the video's size, as in ["--height", "64"]
    checkout  of the project: its scripts and package are taken
    """

    def __init__(
        self,
        assets,
        folder: Path,
        tp: int,
        size: list[str],
        dtype: str = "float32",
        checkout: Path = ROOT,
    ):
        self.assets, self.size = assets, size
        self.checkout, self.env = checkout, os.environ | {"PYTHONPATH": str(checkout / "src")}
        self.common = ["--checkpoint-path", self.assets.checkpoint, "--profile", "cpu"]
        self.common += ["--artifacts-dir", folder / "artifacts"]
        self.common += ["--tp-degree", tp, "--dtype", dtype]

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


class TinyScripts(Scripts):
    """The same on tiny assets in float32.

    sizes   of the models, and `config` what differs from theirs
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
        assets = make_tiny(folder / "assets", sizes, config)
        super().__init__(assets, folder, tp, size, checkout=checkout)
