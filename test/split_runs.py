"""A batch of LTX-2.5 from a folder in the layout of the download, made once a session. Test files take the fixture by
assignment."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import serving
import torch
from conftest import QUICK, once, words

from ltx_neuron.commands import dispatch

FOX = {"prompt": "a red fox", "height": 64, "width": 128, "num_frames": 9, "two_stage": True}
FOX |= {"num_generated_keyframes": 1}
LINES = [FOX, FOX | {"prompt": "birds sing", "num_frames": None}]  # of one set of graphs; with a predicted length
LIMITS = 0.2, 0.4  # seconds of it: 9 frames


class Runs(SimpleNamespace):
    """folder: the download; artifacts: those of LINES; out: the batch's; wanted: the bytes of its videos; settings: of
    the profile."""

    settings = QUICK

    def words(self, verb: str, *more: object) -> list[str]:
        files = {"checkpoint_path": self.folder, "artifacts_dir": self.artifacts}
        how = {"profile": "cpu", "tp_degree": serving.TP, "dtype": "float32", "recipe": "distilled"}
        return [verb, *words(**files, **how, profile_set=QUICK), *map(str, more)]


@pytest.fixture(scope="module")
def runs(shared: Path, split) -> Runs:
    runs = Runs(folder=split.folder, artifacts=shared / "split-artifacts", out=shared / "split-batch/out")

    def make(folder: Path) -> None:
        folder.mkdir()
        dispatch(runs.words("prepare", *words(**FOX)))
        (folder / "jobs.jsonl").write_text("\n".join(map(json.dumps, LINES)))
        outputs = ["--output-dir", folder / "out", "--auto-duration", *LIMITS]
        dispatch(runs.words("batch", folder / "jobs.jsonl", *outputs))

    threads = torch.get_num_threads()
    once(shared / "split-batch", make)
    torch.set_num_threads(threads)
    runs.wanted = [path.read_bytes() for path in sorted(runs.out.glob("*.mp4"))]
    return runs
