"""The project's scripts as command lines, for one model and one size of video."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tiny import make_tiny
from tiny.config import TinySizes

from ltx_neuron.job import Size

ROOT = Path(__file__).resolve().parents[2]
# Each script, and what of a model it takes besides the flags of all.
SCRIPTS = {
    "shard_dit": ("shards/shard_backbone_weights.py", ()),
    "shard_gemma3": ("shards/shard_gemma3_weights.py", ("gemma",)),
    "shard_vae": ("shards/shard_vae_weights.py", ()),
    "compile_dit": ("compile/compile_transformer.py", ("size",)),
    "compile_gemma3": ("compile/compile_gemma3.py", ("gemma",)),
    "compile_vae": ("compile/compile_vae.py", ("size",)),
    "generate": ("src/generate_ltx23.py", ("size", "gemma", "upsampler", "on_ranks")),
}


def size_flags(size: Size) -> list:
    """The flags of a size, for the scripts that compile and generate."""
    flags = ["--height", size.height, "--width", size.width, "--num-frames", size.num_frames]
    flags += ["--frame-rate", size.frame_rate]
    return flags + (["--two-stage"] if size.two_stage else [])


@dataclass(frozen=True)
class Scripts:
    """What scripts are run on.

    run       flags of the profile, TP degree and dtype
    size      flags of the video's size
    checkout  of the project: its scripts and package are taken
    """

    checkpoint: Path
    artifacts: Path
    run: list
    size: list
    gemma_root: Path | None = None
    upsampler: Path | None = None
    checkout: Path = ROOT

    @property
    def common(self) -> list:
        """The flags that every script takes."""
        paths = ["--checkpoint-path", self.checkpoint, "--artifacts-dir", self.artifacts]
        return [*paths, *self.run]

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.checkout / "src")}

    def command(self, name: str, *more: object) -> list[str]:
        """What to type after `python` for one of SCRIPTS. Prompts are encoded on the ranks."""
        script, takes = SCRIPTS[name]
        flags = {
            "size": self.size,
            "gemma": ["--gemma-root", self.gemma_root] if self.gemma_root else [],
            "upsampler": ["--spatial-upsampler-path", self.upsampler] if self.upsampler else [],
            "on_ranks": ["--neuron-gemma"],
        }
        own = [word for kind in takes for word in flags[kind]]
        return list(map(str, [self.checkout / script, *self.common, *own, *more]))

    def prepare(self) -> None:
        """Shard and compile what a generation needs."""
        for name in ("shard_dit", "shard_gemma3", "compile_dit", "compile_gemma3"):
            command = [sys.executable, *self.command(name)]
            subprocess.run(command, check=True, capture_output=True, env=self.env)


def tiny_scripts(
    folder: Path,
    tp: int,
    size: list,
    dtype: str = "float32",
    sizes: TinySizes = TinySizes(),  # noqa: B008 - frozen, so it may be shared
    config: dict | None = None,
    checkout: Path = ROOT,
) -> Scripts:
    """The scripts on a tiny model that is made in a folder. sizes: of the models; config: what
    differs from theirs."""
    assets = make_tiny(folder / "assets", sizes, config)
    run = ["--profile", "cpu", "--tp-degree", tp, "--dtype", dtype]
    paths = assets.gemma_root, assets.spatial_upsampler
    return Scripts(assets.checkpoint, folder / "artifacts", run, size, *paths, checkout)
