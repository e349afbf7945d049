"""Faults while a video is made: nothing that was computed is lost, and nothing is left behind."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, words
from helpers import ended, shared_memories, started, unhurried

from ltx_neuron.errors import UserError
from ltx_neuron.files import MARK
from ltx_neuron.job import Job
from ltx_neuron.progress import LOG_SUFFIX, SUFFIX, restore_state

pytestmark = pytest.mark.slow
SIZE = {"height": 64, "width": 64, "num_frames": 9, "two_stage": True}
SOON = 10  # seconds until a run with a broken rank has ended


@pytest.fixture(scope="module")
def made(tiny, scripts):
    """The scripts on the tiny assets, a command that makes a video, and what an undisturbed run of
    it makes."""
    setup = scripts(tiny)
    setup.prepare(**SIZE)

    def command(folder: Path, *more, **flags) -> list[str]:
        given = {
            "checkpoint_path": tiny.checkpoint,
            "gemma_root": tiny.gemma_root,
            "artifacts_dir": setup.artifacts,
            "tp_degree": 4,
            "dtype": "float32",
            "spatial_upsampler_path": tiny.spatial_upsampler,
            "neuron_gemma": True,
            "prompt": "a red fox",
            "output_path": folder / "fox.mp4",
        }
        return [
            str(word)
            for word in (
                sys.executable,
                ROOT / "src/generate_ltx23.py",
                *words(**SIZE | given | flags),
                *more,
            )
        ]

    folder = setup.folder / "undisturbed"
    run(command(folder, save_tensors=folder / "fox.safetensors"))
    return SimpleNamespace(
        command=command,
        wanted=(folder / "fox.mp4").read_bytes(),
        tensors=folder / "fox.safetensors",
    )


def run(command: list[str], code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done


STAGE_2 = r"stage_2:\s+33%"
PAUSE = 12  # seconds: longer than any rank may show no sign of life


def test_a_rank_killed_in_stage_2_loses_nothing_and_resume_makes_the_same_bytes(made, tmp_path):
    process, ranks = started(unhurried(made.command(tmp_path), "stage_2"), STAGE_2)
    assert len(ranks) == 4
    began = time.monotonic()
    os.kill(ranks[2], signal.SIGKILL)
    said = process.communicate(timeout=SOON)[1]
    assert time.monotonic() - began < SOON
    assert (
        process.returncode == 1 and "rank 2 of 4 failed: the process was killed (SIGKILL)" in said
    )
    assert "Traceback" not in said and "the same command with --resume" in said
    assert ended(ranks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fox" + LOG_SUFFIX, "fox" + SUFFIX]
    log = (tmp_path / ("fox" + LOG_SUFFIX)).read_text()
    assert log.startswith(MARK + "\n") and "rank 2 of 4 failed: the process was killed" in log
    for rank in range(4):
        seen = rf"rank {rank}: process {ranks[rank]}, last sign of life \d\.\d s ago"
        assert re.search(seen, log)
    assert "the host's own gaps" in log and re.search(r"load: [\d. ]+, \d+ CPUs", log)
    resumed = run(made.command(tmp_path, "--resume"))
    assert "stage_2 is left" in resumed.stdout and "stage_1:" not in resumed.stderr
    assert (tmp_path / "fox.mp4").read_bytes() == made.wanted
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"fox.mp4", "fox.json"}


def test_a_run_that_is_paused_goes_on_and_makes_the_same_bytes(made, tmp_path):
    """Ctrl-Z in the steps, and fg."""
    command = unhurried(made.command(tmp_path), "stage_2")
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    said = b""
    while not re.search(STAGE_2.encode(), said):
        said += (read := process.stderr.read(1))
        assert read, said
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(PAUSE)
    os.killpg(process.pid, signal.SIGCONT)
    said += process.communicate(timeout=60)[1]
    assert process.returncode == 0, said.decode()
    assert (tmp_path / "fox.mp4").read_bytes() == made.wanted


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_ctrl_c_and_sigterm_end_cleanly(made, tmp_path, number, code, word):
    before = shared_memories()
    process, ranks = started(unhurried(made.command(tmp_path), "stage_2"), STAGE_2)
    process.send_signal(number)
    said = process.communicate(timeout=SOON)[1]
    assert process.returncode == code and word in said and "Traceback" not in said
    assert ended(ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["fox" + SUFFIX]
    assert shared_memories() <= before


def test_a_reader_who_leaves_after_a_line_costs_no_video(made, tmp_path):
    """The ranks talk to the same pipe as the host."""
    piped = f"{shlex.join(made.command(tmp_path))} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"
    assert len(run(["bash", "-c", piped]).stdout.splitlines()) == 1
    assert (tmp_path / "fox.mp4").read_bytes() == made.wanted


def test_the_decoding_alone_runs_again_from_saved_tensors(made, tmp_path):
    done = run(made.command(tmp_path, "--resume", str(made.tensors)))
    assert "the decoding is left" in done.stdout and "load_transformer" not in done.stdout
    assert (tmp_path / "fox.mp4").read_bytes() == made.wanted


def test_another_runs_latents_are_refused_by_the_flags_that_differ(made, tmp_path):
    said = run(
        made.command(tmp_path, "--resume", str(made.tensors), seed=11, prompt="a blue fox"), code=2
    ).stderr
    assert (
        "is of another run: prompt: got a red fox, wanted a blue fox; seed: got 10, wanted 11"
        in said
    )
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_state_of_a_run_is_refused(made, tmp_path, tiny):
    said = run(made.command(tmp_path / "out", "--resume", str(tiny.lora)), code=2).stderr
    assert "leave" in said and "to begin anew" in said and "Traceback" not in said


@pytest.mark.parametrize("content", [b"", b"no safetensors file"])
def test_what_is_no_safetensors_file_is_no_state(tmp_path, content):
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(UserError, match="leave --resume out to begin anew"):
        restore_state(tmp_path / "state", Job("a red fox"), {}, torch.float32)


def test_a_disk_that_is_full_when_the_mp4_is_written_keeps_the_latents(made, small_disk, tmp_path):
    """It has room for the state (0.5 MB, most of it contexts), not for the frames beside it."""
    command = made.command(small_disk, save_tensors=small_disk / "fox.safetensors")
    said = run(command, code=2).stderr
    assert (
        "the disk is full" in said
        and "the same command with --resume" in said
        and "Traceback" not in said
    )
    assert [path.name for path in small_disk.iterdir()] == ["fox" + SUFFIX]
    shutil.copy(small_disk / ("fox" + SUFFIX), tmp_path)
    assert "the decoding is left" in run(made.command(tmp_path, "--resume")).stdout
    assert (tmp_path / "fox.mp4").read_bytes() == made.wanted


def test_a_prompt_that_an_earlier_run_encoded_is_not_encoded_again_and_gives_the_same_bytes(
    made, tmp_path
):
    done = run(made.command(tmp_path))
    if "load_gemma3" in done.stdout:  # this test alone: no test before it left the contexts
        done = run(made.command(tmp_path))
    assert "load_gemma3" not in done.stdout and "load_transformer" in done.stdout
    assert (tmp_path / "fox.mp4").read_bytes() == made.wanted
