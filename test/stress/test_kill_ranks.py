"""A run whose rank is killed (-9) ends with an error soon, leaves nothing behind, and is resumed to
the same bytes. The tests kill each rank at random moments of a generation, at TP 4 and at TP 2 in
two groups, and in each graph of the groups."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from conftest import SCRIPT_SECONDS, Setup, succeeded
from helpers import allowed, ended, ranks_of, shared_memories, stress_count, wait_for
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(4 * SCRIPT_SECONDS)
RANKS, KILLS, SEED = 4, stress_count(10), 1
SOON = 10  # seconds until a run with a killed rank has ended: docs/failures.md
# The share of the ranks' life after which they denoise: starting them takes most of it, and a tiny
# model's steps are fast. Every second kill comes then.
DENOISING = 0.85
SIZE = {"height": 64, "width": 64, "num_frames": 9, "two_stage": True}
# Stage 1 has two passes per step, so a step ends with their combination. Stage 2 has one.
GUIDED = {"num_inference_steps": 2, "video_stg_guidance_scale": 0, "audio_stg_guidance_scale": 0}
GUIDED |= {"a2v_guidance_scale": 1, "v2a_guidance_scale": 1}
# TP degree, the flags of the size, and those of a generation.
LAYOUTS = {
    "TP 4": (4, SIZE, {}),
    "TP 2 x context 2": (*(2, SIZE | {"recipe": "dev", "profile_set": ("context_parallel=2",)}, GUIDED),),
}
# Runs first in every process of a run: rank KILLED_RANK dies at a call of the graph KILLED_IN, or
# while it loads weights.
PLANTED = """
import os, signal, sys
if "resource_tracker" not in " ".join(sys.orig_argv):
    from ltx_neuron.backends.torchdist.rank import Rank
    rank, graph, left = os.environ["KILLED_RANK"], os.environ["KILLED_IN"], [2]
    def dies(self, name):
        left[0] -= name == graph
        if str(self.rank) == rank and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    load, of_manifest = Rank._load_weights, Rank._graph
    def loading(self, *arguments):
        dies(self, "load")
        return load(self, *arguments)
    def mortal(self, manifest, name):
        call = of_manifest(self, manifest, name)
        def called(*tensors):
            dies(self, name)
            return call(*tensors)
        return called
    Rank._load_weights, Rank._graph = loading, mortal
"""


class Undisturbed(NamedTuple):
    """A run that nobody disturbs: its files, and how many seconds its ranks are there."""

    files: dict[str, bytes]
    seconds: float


class Layout(NamedTuple):
    """The scripts of a layout, with everything compiled, and the flags of its generations."""

    setup: Setup
    flags: dict


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(scripts, tiny, request):
    return prepared(scripts, tiny, request.param)


@pytest.fixture(scope="module")
def groups(scripts, tiny):
    return prepared(scripts, tiny, "TP 2 x context 2")


def prepared(scripts, tiny, name: str) -> Layout:
    tp, size, flags = LAYOUTS[name]
    made = scripts(tiny, tp)
    made.prepare(**size)
    if "recipe" in size:
        flags = flags | {"distilled_lora": (tiny.lora,)}
        loras = {"distilled_lora": flags["distilled_lora"]}
        succeeded(made.run("shards/shard_backbone_weights.py", gemma=False, **loras))
    return Layout(made, size | flags)


def begun(layout: Layout, folder: Path, environment: dict | None = None, **more):
    flags = layout.flags | {"prompt": "a red fox", "neuron_gemma": True} | more
    setup = layout.setup
    flags["spatial_upsampler_path"] = setup.assets.spatial_upsampler
    flags |= {"output_path": folder / "fox.mp4", "save_tensors": folder / "fox.safetensors"}
    command = [sys.executable, *setup.command("src/generate_ltx23.py", **flags)]
    return subprocess.Popen(
        command,
        env=os.environ | (environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def ranks(process: subprocess.Popen) -> list[int]:
    """The pids of a run's ranks, in the order in which they were started; none unless all are
    there. Numbers alone have no order: they begin anew at 1."""
    pids = ranks_of(process.pid)
    try:
        pids.sort(key=lambda pid: (psutil.Process(pid).create_time(), pid))
    except psutil.NoSuchProcess:
        return []
    return pids if len(pids) == RANKS else []


def wait_for_ranks(process: subprocess.Popen) -> None:
    wait_for(lambda: ranks(process) or process.poll() is not None)


def files(folder: Path) -> dict[str, bytes]:
    """Video and tensors, but for hidden_states: a kept state has none, so a resumed run does not
    save them."""
    tensors = load_file(folder / "fox.safetensors")
    tensors.pop("hidden_states", None)
    video = {"video": (folder / "fox.mp4").read_bytes()}
    return video | {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def undisturbed(layout, tmp_path_factory) -> Undisturbed:
    return without_a_kill(layout, tmp_path_factory.mktemp("undisturbed"))


def without_a_kill(layout: Layout, folder: Path) -> Undisturbed:
    process = begun(layout, folder)
    wait_for_ranks(process)
    began = time.monotonic()
    while ranks(process):
        time.sleep(0.02)
    seconds = time.monotonic() - began
    _, said = process.communicate(timeout=SCRIPT_SECONDS)
    assert process.returncode == 0, said
    return Undisturbed(files(folder), seconds)


@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_run_whose_rank_is_killed_ends_soon_and_is_resumed_to_the_same_bytes(
    layout, undisturbed, rank, number, tmp_path
):
    least = undisturbed.seconds * (DENOISING if number % 2 else 0)
    moment = random.Random(f"{SEED} {rank} {number}").uniform(least, undisturbed.seconds)
    shared = shared_memories()
    process = begun(layout, tmp_path)
    wait_for_ranks(process)
    time.sleep(moment)
    pids, killed = ranks(process), time.monotonic()
    if pids:
        os.kill(pids[rank], signal.SIGKILL)
    _, said = process.communicate(timeout=SCRIPT_SECONDS)
    took = time.monotonic() - killed
    assert ended(pids) and shared_memories() <= shared
    if process.returncode:  # else the rank had done its part
        print(f"rank {rank} killed after {moment:.2f} s, named after {took:.2f} s")
        assert took < allowed(SOON), took
        assert f"rank {rank} of {RANKS} failed: the process was killed" in said, said
        resume(layout, tmp_path)
    assert files(tmp_path) == undisturbed.files


def resume(layout: Layout, folder: Path) -> None:
    process = begun(layout, folder, resume=True)
    _, said = process.communicate(timeout=SCRIPT_SECONDS)
    assert process.returncode == 0, said


@pytest.fixture(scope="module")
def whole(groups, tmp_path_factory) -> dict[str, bytes]:
    return without_a_kill(groups, tmp_path_factory.mktemp("whole")).files


# Head and combination have no collectives, so the other ranks wait in those of the next graph.
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("graph", ["load", "head", "blocks", "tail", "guide"])
def test_a_rank_killed_in_any_graph_of_several_groups_is_named(groups, whole, graph, rank, tmp_path):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted/sitecustomize.py").write_text(PLANTED)
    path = os.pathsep.join([str(tmp_path / "planted"), os.environ["PYTHONPATH"]])
    environment = {"PYTHONPATH": path, "KILLED_RANK": str(rank), "KILLED_IN": graph}
    process = begun(groups, tmp_path, environment)
    wait_for_ranks(process)
    pids = ranks(process)
    wait_for(lambda: len(ranks_of(process.pid)) < RANKS)
    killed = time.monotonic()
    _, said = process.communicate(timeout=SCRIPT_SECONDS)
    took = time.monotonic() - killed
    print(f"rank {rank} killed in {graph}, named after {took:.2f} s")
    assert took < allowed(SOON), took
    assert f"rank {rank} of {RANKS} failed: the process was killed" in said, said
    assert pids and ended(pids)
    resume(groups, tmp_path)
    assert files(tmp_path) == whole
