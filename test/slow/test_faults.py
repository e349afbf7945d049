"""Faults of a run in a process of its own: it ends cleanly, and nothing of it is lost."""

import json
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import allowed, ended, shared_memories, started, unhurried
from runs import STAGE_2, TP, undisturbed

from ltx_neuron.engine.resume import SUFFIX

SOON = 10  # seconds until a run that was told to end has ended


@pytest.fixture(scope="module")
def run(scripts, tiny, shared):
    return undisturbed(scripts, tiny, shared)


def assert_ended(process: subprocess.Popen, ranks: list[int], folder: Path) -> str:
    """A run in its second stage and its ranks end soon, and keep the first one. Returns what was
    said."""
    said = process.communicate(timeout=allowed(SOON))[1]
    assert "Traceback" not in said and "the same command with --resume" in said
    assert ended(ranks) and (folder / ("fox" + SUFFIX)).is_file()
    return said


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_ctrl_c_and_sigterm_end_cleanly(run, tmp_path, number, code, word):
    before = shared_memories()
    process, ranks = started(unhurried(run.command(tmp_path), "stage 2"), STAGE_2)
    process.send_signal(number)
    assert word in assert_ended(process, ranks, tmp_path) and process.returncode == code
    assert [path.name for path in tmp_path.iterdir()] == ["fox" + SUFFIX]
    assert shared_memories() <= before


def test_a_process_with_a_killed_rank_ends(run, tmp_path):
    process, ranks = started(unhurried(run.command(tmp_path), "stage 2"), STAGE_2)
    assert len(ranks) == TP
    os.kill(ranks[1], signal.SIGKILL)
    said = assert_ended(process, ranks, tmp_path)
    assert "rank 1 of 2 failed: the process was killed" in said and process.returncode == 1


def test_a_reader_who_leaves_after_a_line_costs_no_video(run, tmp_path):
    """The ranks talk to the same pipe as the host. The prompt, which the undisturbed run encoded,
    is not encoded again."""
    command = run.command(tmp_path, perf_dump_path=tmp_path / "perf.json")
    piped = f"{shlex.join(command)} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
    assert (tmp_path / "fox.mp4").read_bytes() == run.wanted
    phases = {each["name"] for each in json.loads((tmp_path / "perf.json").read_text())["phases"]}
    assert "load_transformer" in phases and "load_gemma3" not in phases


def test_a_disk_that_is_full_when_the_mp4_is_written_keeps_the_latents(run, small_disk, tmp_path, capsys):
    """It has room for the state (0.5 MB, most of it contexts), not for the frames beside it."""
    assert run.here(small_disk, save_tensors=small_disk / "fox.safetensors") == 2
    said = capsys.readouterr().err
    for words in ("the disk is full", "the same command with --resume"):
        assert words in said
    assert "Traceback" not in said
    assert [path.name for path in small_disk.iterdir()] == ["fox" + SUFFIX]
    shutil.copy(small_disk / ("fox" + SUFFIX), tmp_path)
    assert run.here(tmp_path, resume=True) == 0
    assert "the decoding is left" in capsys.readouterr().out
    assert (tmp_path / "fox.mp4").read_bytes() == run.wanted
