"""test/device without a device: what its tests run."""

import sys
from argparse import Namespace
from pathlib import Path

from conftest import ROOT
from device.bench import Bench
from device.report import Budget

from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor.system import System


def rehearsal(folder: Path, minutes: float | None = None, system: System | None = None) -> Bench:
    """What sections run on, in a folder of its own."""
    none = dict.fromkeys(("tp_degree", "video_path", "profile", "checkpoint_path", "gemma_root", "artifacts_dir"))
    size = {"height": 64, "width": 64, "num_frames": 9, "frame_rate": 24.0, "two_stage": False}
    args = Namespace(work_dir=folder, dtype="bfloat16", profile_set=[], **size, **none)
    return Bench(args, resolve("cpu"), system or System(), Budget(minutes))


def command(folder: Path) -> list:
    """The command that rehearses, with a cache and a work folder of its own."""
    words = [sys.executable, "-m", "pytest", ROOT / "test/device", "-o", f"cache_dir={folder}/c"]
    words += ["--height", "64", "--width", "64", "--num-frames", "9"]
    return [*words, "--profile", "cpu", "--skip-wide", "--work-dir", folder / "work"]
