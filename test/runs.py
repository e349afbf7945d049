"""A run of generate_ltx23.py in two stages at TP 2, and what it makes undisturbed."""

import sys
from pathlib import Path
from types import SimpleNamespace

import typed
from conftest import ROOT, once

GENERATE = "src/generate_ltx23.py"
TP = 2
SIZE = {"height": 64, "width": 64, "num_frames": 9, "two_stage": True}


class Run(SimpleNamespace):
    """wanted: the bytes of the video; tensors: what --save-tensors wrote beside it."""

    def words(self, folder: Path, **flags) -> list[str]:
        """The flags of the run, in a folder; the prompt is encoded on the host, which is soonest."""
        files = {"spatial_upsampler_path": self.setup.assets.spatial_upsampler, "output_path": folder / "fox.mp4"}
        return self.setup.words(**SIZE | files | {"prompt": "a red fox"} | flags)

    def here(self, folder: Path, **flags) -> int:
        """Its exit code in this process, which has all imported."""
        return typed.run(GENERATE, self.words(folder, **flags))

    def command(self, folder: Path, **flags) -> list[str]:
        """It in a process of its own."""
        return [sys.executable, str(ROOT / GENERATE), *self.words(folder, **flags)]


def undisturbed(scripts, tiny, shared: Path) -> Run:
    """Made once a session."""
    run = Run(setup=scripts(tiny, TP))
    run.setup.prepare(**SIZE)

    def make(folder: Path) -> None:
        assert run.here(folder, save_tensors=folder / "fox.safetensors") == 0

    once(shared / "undisturbed", make)
    run.wanted = (shared / "undisturbed/fox.mp4").read_bytes()
    run.tensors = shared / "undisturbed/fox.safetensors"
    return run
