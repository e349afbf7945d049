"""Kill -9 of each rank at random moments of a generation at TP 4: the run ends with an error soon,
leaves nothing behind, and is resumed to the same bytes."""

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
from conftest import SCRIPT_SECONDS
from helpers import ended, ranks_of, shared_memories, stress_count, wait_for
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(4 * SCRIPT_SECONDS)
TP, KILLS, SEED = 4, stress_count(10), 1
SOON = 10  # seconds until a run with a killed rank has ended: docs/failures.md
# The share of the ranks' life after which they denoise: starting them takes most of it, and a tiny
# model's steps are fast. Every second kill comes then.
DENOISING = 0.85
SIZE = {"height": 64, "width": 64, "num_frames": 9, "two_stage": True}


class Undisturbed(NamedTuple):
    """A run that nobody disturbs: its files, and how many seconds its ranks are there."""

    files: dict[str, bytes]
    seconds: float


@pytest.fixture(scope="module")
def setup(scripts, tiny):
    made = scripts(tiny, TP)
    made.prepare(**SIZE)
    return made


def begun(setup, folder: Path, **more) -> subprocess.Popen:
    flags = SIZE | {"prompt": "a red fox", "neuron_gemma": True} | more
    flags["spatial_upsampler_path"] = setup.assets.spatial_upsampler
    flags |= {"output_path": folder / "fox.mp4", "save_tensors": folder / "fox.safetensors"}
    command = [sys.executable, *setup.command("src/generate_ltx23.py", **flags)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )


def ranks(process: subprocess.Popen) -> list[int]:
    """The pids of a run's ranks, in the order in which they were started; none unless all are
    there. Numbers alone have no order: they begin anew at 1."""
    pids = ranks_of(process.pid)
    try:
        pids.sort(key=lambda pid: (psutil.Process(pid).create_time(), pid))
    except psutil.NoSuchProcess:
        return []
    return pids if len(pids) == TP else []


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
def undisturbed(setup, tmp_path_factory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    process = begun(setup, folder)
    wait_for_ranks(process)
    began = time.monotonic()
    while ranks(process):
        time.sleep(0.02)
    seconds = time.monotonic() - began
    _, said = process.communicate(timeout=SCRIPT_SECONDS)
    assert process.returncode == 0, said
    return Undisturbed(files(folder), seconds)


@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize("rank", range(TP))
def test_a_run_whose_rank_is_killed_ends_soon_and_is_resumed_to_the_same_bytes(
    setup, undisturbed, rank, number, tmp_path
):
    least = undisturbed.seconds * (DENOISING if number % 2 else 0)
    moment = random.Random(f"{SEED} {rank} {number}").uniform(least, undisturbed.seconds)
    shared = shared_memories()
    process = begun(setup, tmp_path)
    wait_for_ranks(process)
    time.sleep(moment)
    pids, killed = ranks(process), time.monotonic()
    if pids:
        os.kill(pids[rank], signal.SIGKILL)
    _, said = process.communicate(timeout=SCRIPT_SECONDS)
    took = time.monotonic() - killed
    assert ended(pids) and shared_memories() <= shared
    if process.returncode:  # else the rank had done its part
        assert took < SOON and f"rank {rank} of {TP} failed: the process was killed" in said, said
        again = begun(setup, tmp_path, resume=True)
        _, said = again.communicate(timeout=SCRIPT_SECONDS)
        assert again.returncode == 0, said
    assert files(tmp_path) == undisturbed.files
