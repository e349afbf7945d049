"""Five jobs that share their graphs, as a batch by script and as calls of the Python API."""

import contextlib
import json
import os
import re
from pathlib import Path

import psutil
from conftest import once, succeeded
from jobs import make_job

from ltx_neuron.job import Job, Size
from ltx_neuron.pipeline import LTXPipeline

TP = 2
SIZE = {"height": 64, "width": 64, "num_frames": 9}


def lines(tiny) -> list[dict]:
    return [
        {"prompt": "waves crash on the shore", **SIZE},
        {"prompt": "« hello » says a man", "seed": 4, **SIZE},
        {"prompt": "a golden retriever", "seed": 5, "image": [str(tiny.image), 0, 0.8], **SIZE},
        {"prompt": "waves crash on the shore", "seed": 6, "num-frames": 9, "height": 64, "width": 64},
        {"prompt": "birds sing", "image": [[str(tiny.image)]], **SIZE},
    ]


def jobs(count: int) -> list[Job]:
    return [make_job("birds sing", Size(**SIZE), seed=seed) for seed in range(count)]


def prepared(scripts, tiny):
    setup = scripts(tiny, TP)
    setup.prepare(**SIZE)
    return setup


def flags_of(tiny, folder: Path) -> dict:
    """The flags of the batch in a folder, with its prompts file written."""
    folder.mkdir(exist_ok=True)
    file = folder / "jobs.jsonl"
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines(tiny)) + "\n\n")
    flags = dict(neuron_gemma=True, prompts_file=file, no_prompt_cache=True)  # others may have encoded its prompts
    return flags | dict(output_dir=folder / "out", perf_dump_path=folder / "perf.json")


def undisturbed(setup, tiny, shared: Path) -> Path:
    def make(folder: Path) -> Path:
        succeeded(setup.run("src/generate_ltx23.py", **flags_of(tiny, folder)))
        return folder

    return once(shared / "batch", make)


def videos(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "out").glob("*.mp4"))}


def opened(setup, tiny, profile_set: tuple[str, ...] = (), **more) -> LTXPipeline:
    where = dict(checkpoint_path=tiny.checkpoint, gemma_root=tiny.gemma_root, artifacts_dir=setup.artifacts)
    how = dict(tp_degree=TP, dtype="float32", profile="cpu", profile_set=(*setup.settings, *profile_set))
    pipe = LTXPipeline.from_pretrained(**where, **how | {"neuron_gemma": True} | more)
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
