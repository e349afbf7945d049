"""test/device without a device: what its tests run."""

import sys
from argparse import Namespace
from pathlib import Path

from conftest import ROOT
from device.bench import Bench

from ltx_neuron.config.profiles import resolve


def rehearsal(folder: Path, minutes: float | None = None) -> Bench:
    """What sections run on, in a folder of its own."""
    args = Namespace(work_dir=folder, minutes=minutes, dtype="bfloat16", tp_degree=None, profile=None, profile_set=[])
    args = Namespace(**vars(args), height=64, width=64, num_frames=9, frame_rate=24.0, two_stage=False, video_path=None)
    args.checkpoint_path = args.gemma_root = args.artifacts_dir = None
    return Bench(args, resolve("cpu"))


def command(folder: Path) -> list:
    """The command that rehearses, with a cache and a work folder of its own."""
    words = [sys.executable, "-m", "pytest", ROOT / "test/device", "-o", f"cache_dir={folder}/c"]
    words += ["--height", "64", "--width", "64", "--num-frames", "9"]
    return [*words, "--profile", "cpu", "--skip-wide", "--work-dir", folder / "work"]
