"""A batch of LTX-2.5 from a folder in the layout of the download, made once a session. Test files take the fixture by
assignment."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import serving
import torch
from conftest import QUICK, once

from ltx_neuron.commands import dispatch

SIZE = {"height": 64, "width": 128, "num_frames": 9, "two_stage": True}
LINES = [  # both use one set of graphs; the second has a predicted length
    {"prompt": "a red fox", **SIZE, "num_generated_keyframes": 1},
    {"prompt": "birds sing", **SIZE, "num_frames": None, "num_generated_keyframes": 1},
]
LIMITS = 0.2, 0.4  # seconds of a predicted length: 9 frames


class Runs(SimpleNamespace):
    """folder: the download; artifacts: those of LINES; wanted: the bytes of their videos; settings:
    of the profile."""

    settings = QUICK
    # Those of the first line.
    flags = ["--prompt", "a red fox", "--height", 64, "--width", 128, "--num-frames", 9, "--two-stage"]
    flags += ["--num-generated-keyframes", 1]

    def words(self, verb: str, *more: object) -> list[str]:
        words = [verb, "--checkpoint-path", self.folder, "--artifacts-dir", self.artifacts]
        words += ["--profile", "cpu", "--tp-degree", serving.TP, "--dtype", "float32", "--recipe", "distilled"]
        words += [word for setting in self.settings for word in ("--profile-set", setting)]
        return [*map(str, [*words, *more])]


@pytest.fixture(scope="module")
def runs(shared: Path, split) -> Runs:
    runs = Runs(folder=split.folder, artifacts=shared / "split-artifacts")

    def make(folder: Path) -> None:
        folder.mkdir()
        dispatch(runs.words("prepare", *runs.flags))
        (folder / "jobs.jsonl").write_text("\n".join(map(json.dumps, LINES)))
        outputs = ["--output-dir", folder / "out", "--auto-duration", *LIMITS]
        dispatch(runs.words("batch", folder / "jobs.jsonl", *outputs))

    threads = torch.get_num_threads()
    once(shared / "split-batch", make)
    torch.set_num_threads(threads)
    runs.out = shared / "split-batch/out"
    runs.wanted = [path.read_bytes() for path in sorted(runs.out.glob("*.mp4"))]
    return runs
