"""Faults of a run in a process of its own, also where its files get their names: it ends cleanly and loses nothing."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import time

import pytest
import warm_python
from conftest import ROOT, SCRIPT_SECONDS
from helpers import allowed, ended, made_film, shared_memories, wait_for
from runs import GENERATE, TP, undisturbed
from safetensors.torch import load_file

from ltx_neuron.commands import dispatch
from ltx_neuron.engine.outputs import SUFFIX

SOON = 10  # seconds until nothing of a run that was told to end is there: docs/failures.md


@pytest.fixture(scope="module")
def run(scripts, tiny, shared):
    return undisturbed(scripts, tiny, shared)


# A script that gets a signal in stage 2. Beforehand it writes to a file when, and which processes its ranks are.
INTERRUPTED = """
import json, os, runpy, sys, time
from pathlib import Path
from ltx_neuron.denoise import StageRun
kind, file, *sys.argv = sys.argv[1:]
step = StageRun.step
def interrupted(run, number):
    if run.stage.title == "stage 2" and number == 1:
        Path(file).write_text(json.dumps([time.monotonic(), [process.pid for process in run.ranks._processes]]))
        os.kill(os.getpid(), int(kind))
    return step(run, number)
StageRun.step = interrupted
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("kind", "message"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_run_that_is_ended_in_stage_2_ends_soon_and_keeps_stage_1(run, tmp_path, kind, message):
    before, out = shared_memories(), tmp_path / "out"
    out.mkdir()
    python, *words = run.command(out)
    command = [python, "-c", INTERRUPTED, str(int(kind)), tmp_path / "ended", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_SECONDS)
    ended_at, ranks = json.loads((tmp_path / "ended").read_text())
    assert time.monotonic() - ended_at < allowed(SOON) and len(ranks) == TP and ended(ranks)
    assert "Traceback" not in done.stderr and "the same command with --resume" in done.stderr
    assert message in done.stderr and done.returncode == 128 + kind
    assert "fox" + SUFFIX in {path.name for path in out.iterdir()} <= {"fox" + SUFFIX, "fox.failure.log"}
    wait_for(lambda: shared_memories() <= before, allowed(SOON))


def test_a_reader_who_leaves_after_a_line_costs_no_video(run, tmp_path):
    """The ranks talk to the same pipe as the host. The undisturbed run's prompt is not encoded again."""
    command = run.command(tmp_path, perf_dump_path=tmp_path / "perf.json")
    piped = f"{shlex.join(command)} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
    assert (tmp_path / "fox.mp4").read_bytes() == run.wanted
    phases = {phase["name"] for phase in json.loads((tmp_path / "perf.json").read_text())["phases"]}
    assert "load_transformer" in phases and "load_gemma3" not in phases


def test_a_disk_that_is_full_when_the_mp4_is_written_keeps_the_latents(run, small_disk, tmp_path, capsys):
    """It has room for the state (0.5 MB, most of it contexts), not for the frames beside it."""
    assert run.here(small_disk, save_tensors=small_disk / "fox.safetensors") == 2
    printed = capsys.readouterr().err
    assert "the disk is full" in printed and "the same command with --resume" in printed
    assert "Traceback" not in printed and [path.name for path in small_disk.iterdir()] == ["fox" + SUFFIX]
    shutil.copy(small_disk / ("fox" + SUFFIX), tmp_path)
    assert run.here(tmp_path, resume=True) == 0
    assert "the decoding is left" in capsys.readouterr().out
    assert (tmp_path / "fox.mp4").read_bytes() == run.wanted


# A script that kills itself (-9) where one of its files gets its name: the one after SKIP others in FOLDER, "before" or
# "after" that; it leaves the file's name in FOLDER.killed.
KILLED = """
import os, runpy, signal, sys
from pathlib import Path
folder, skip, when, *sys.argv = sys.argv[1:]
replace, seen = Path.replace, []
def named(partial, path):
    here = Path(path).parent == Path(folder)
    seen.extend([path] * here)
    if not here or len(seen) <= int(skip):
        return replace(partial, path)
    if when == "after":
        replace(partial, path)
    Path(f"{folder}.killed").write_text(Path(path).name)
    os.kill(os.getpid(), signal.SIGKILL)
Path.replace = named
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FILES = ["resume.safetensors", "safetensors", "mp4", "json"]  # behind the first state, in this order


@pytest.mark.timeout(4 * SCRIPT_SECONDS)
def test_a_dub_killed_at_each_file_leaves_nothing_behind_and_is_resumed_to_the_same_bytes(scripts, tiny, tmp_path):
    """A temporary file is left, or one that the next run must not trust for more than it is."""
    setup, film = scripts(tiny, 2), made_film(tmp_path / "film.mp4", 17, 64, 64)
    flags = {"recipe": "distilled", "height": 64, "width": 64, "two_stage": True}
    flags |= {"reference_video": film, "lora": ((tiny.lora, 1),), "spatial_upsampler_path": tiny.spatial_upsampler}
    dispatch(["prepare", *setup.words(**flags)])
    (tmp_path / "killed.py").write_text(KILLED)

    def run(folder, *hook, **more) -> int:
        files = {"output_path": folder / "a.mp4", "save_tensors": folder / "a.safetensors"}
        command = setup.command(GENERATE, prompt="a red fox says hello", **flags, **files, **more)
        command = [str(tmp_path / "killed.py"), str(folder), *hook, *command] if hook else command
        folder.mkdir(exist_ok=True)
        done = warm_python.run(command, ROOT, SCRIPT_SECONDS)
        printed.append(done.stdout + done.stderr)
        return done.returncode

    def written(folder) -> dict:
        tensors = load_file(folder / "a.safetensors")
        kept = [name for name in tensors if re.match(r"s\d_(?!reference)|frames|waveform", name)]
        return {name: tensors[name].numpy().tobytes() for name in kept} | {"mp4": (folder / "a.mp4").read_bytes()}

    folder, before, killed, printed = tmp_path / "out", shared_memories(), [], []
    assert run(tmp_path / "undisturbed") == 0, printed
    # Each run keeps the states of stages that the runs before it named, and does not write them again.
    for skip, when in (1, "before"), (1, "before"), (1, "before"), (2, "before"), (2, "after"):
        assert run(folder, str(skip), when, resume=True) == -signal.SIGKILL, (killed, printed[-1])
        killed.append((tmp_path / "out.killed").read_text().removeprefix("a."))
    assert killed == [*FILES, FILES[-1]]
    assert run(folder, resume=True) == 0
    assert written(folder) == written(tmp_path / "undisturbed")
    assert {path.name for path in folder.iterdir()} == {"a.mp4", "a.json", "a.safetensors"}
    wait_for(lambda: shared_memories() <= before, allowed(SOON))
