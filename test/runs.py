"""Runs of generate_ltx23.py at TP 2 and what they make undisturbed, once a session: one in two stages, and a batch of
five jobs that share their graphs, which calls of the Python API make, too."""

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
import typed
from conftest import ROOT, once, succeeded

from ltx_neuron.pipeline import LTXPipeline

GENERATE = "src/generate_ltx23.py"
TP = 2
ONE_STAGE = {"height": 64, "width": 64, "num_frames": 9}
SIZE = ONE_STAGE | {"two_stage": True}


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
    run = Run(setup=scripts(tiny, TP))
    run.setup.prepare(**SIZE)

    def make(folder: Path) -> None:
        assert run.here(folder, save_tensors=folder / "fox.safetensors") == 0

    once(shared / "undisturbed", make)
    run.wanted = (shared / "undisturbed/fox.mp4").read_bytes()
    run.tensors = shared / "undisturbed/fox.safetensors"
    return run


def batch_lines(tiny) -> list[dict]:
    return [
        {"prompt": "waves crash on the shore", **ONE_STAGE},
        {"prompt": "« hello » says a man", "seed": 4, **ONE_STAGE},
        {"prompt": "a golden retriever", "seed": 5, "image": [str(tiny.image), 0, 0.8], **ONE_STAGE},
        {"prompt": "waves crash on the shore", "seed": 6, "num-frames": 9, "height": 64, "width": 64},
        {"prompt": "birds sing", "image": [[str(tiny.image)]], **ONE_STAGE},
    ]


def batch_flags(tiny, folder: Path) -> dict:
    """The flags of the batch in a folder, with its prompts file written."""
    folder.mkdir(exist_ok=True)
    file = folder / "jobs.jsonl"
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in batch_lines(tiny)) + "\n\n")
    flags = dict(neuron_gemma=True, prompts_file=file, no_prompt_cache=True)  # others may have encoded its prompts
    return flags | dict(output_dir=folder / "out", perf_dump_path=folder / "perf.json")


def undisturbed_batch(setup, tiny, shared: Path) -> Path:
    """The folder of its flags. setup: prepared for ONE_STAGE."""

    def make(folder: Path) -> Path:
        succeeded(setup.run(GENERATE, **batch_flags(tiny, folder)))
        return folder

    return once(shared / "batch", make)


def videos(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "out").glob("*.mp4"))}


def opened(setup, tiny, profile_set: tuple[str, ...] = (), **more) -> LTXPipeline:
    where = dict(checkpoint_path=tiny.checkpoint, gemma_root=tiny.gemma_root, artifacts_dir=setup.artifacts)
    how = dict(tp_degree=TP, torch_dtype=torch.float32, profile="cpu", profile_set=(*setup.settings, *profile_set))
    pipe = LTXPipeline.from_pretrained(**where, **how | {"neuron_gemma": True} | more)
    assert pipe.engine.progress is True  # also in a notebook
    pipe.engine.progress = False
    return pipe


def children() -> set[int]:
    """Processes that this one started, but for the two that multiprocessing keeps: they hold no model and no device.
    Ranks may be forked from one of them, and then look like it, one generation down."""
    pids, kept = set(), re.compile("multiprocessing.(resource_tracker|forkserver) ")
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            own = child.ppid() == os.getpid() and kept.search(str(child.cmdline()))
            if not own and child.status() != psutil.STATUS_ZOMBIE:
                pids.add(child.pid)
    return pids
