"""Faults while a video is made: nothing that was computed is lost, and nothing is left behind."""

import os
import re
import signal
import time

import pytest
from helpers import allowed, ended
from runs import TP, undisturbed

from ltx_neuron.denoise import StageRun
from ltx_neuron.engine.outputs import LOG_SUFFIX, SUFFIX
from ltx_neuron.files import MARK

SOON = 10  # seconds until a run with a broken rank has ended


@pytest.fixture(scope="module")
def run(scripts, tiny, shared):
    return undisturbed(scripts, tiny, shared)


def test_a_rank_killed_in_stage_2_loses_nothing_and_resume_makes_the_same_bytes(run, tmp_path, monkeypatch, capfd):
    ranks, killed, step = [], [], StageRun.step

    def kill(stage_run, number):
        if stage_run.stage.title == "stage 2" and number == 1:
            ranks.extend(process.pid for process in stage_run.ranks._processes)
            os.kill(ranks[1], signal.SIGKILL)
            killed.append(time.monotonic())
        return step(stage_run, number)

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "step", kill)
        assert run.here(tmp_path) == 1
    assert time.monotonic() - killed[0] < allowed(SOON)
    printed = capfd.readouterr().err
    assert "rank 1 of 2 failed: the process was killed (SIGKILL)" in printed
    assert "Traceback" not in printed and "the same command with --resume" in printed
    assert len(ranks) == TP and ended(ranks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fox" + LOG_SUFFIX, "fox" + SUFFIX]
    log = (tmp_path / ("fox" + LOG_SUFFIX)).read_text()
    assert log.startswith(MARK + "\n") and "rank 1 of 2 failed: the process was killed" in log
    assert re.search(r"load: [\d. ]+, \d+ CPUs", log)
    assert run.here(tmp_path, resume=True) == 0
    resumed = capfd.readouterr()
    assert "stage 2 is left" in resumed.out and "stage 1:" not in resumed.err
    assert (tmp_path / "fox.mp4").read_bytes() == run.wanted
    assert {path.name for path in tmp_path.iterdir()} == {"fox.mp4", "fox.json"}


def test_the_decoding_alone_runs_again_from_saved_tensors(run, tmp_path, capsys):
    assert run.here(tmp_path, resume=run.tensors) == 0
    printed = capsys.readouterr().out
    assert "the decoding is left" in printed and "load_transformer" not in printed
    assert (tmp_path / "fox.mp4").read_bytes() == run.wanted


def test_another_runs_latents_and_what_is_no_state_are_refused(run, tmp_path, tiny, capsys):
    out, text = tmp_path / "out", tmp_path / "text"
    out.mkdir()
    text.write_bytes(b"no safetensors file")
    assert run.here(out, resume=run.tensors, seed=11, prompt="a blue fox") == 2
    differ = "prompt: got a red fox, wanted a blue fox; seed: got 10, wanted 11"
    assert f"is from another run: {differ}" in capsys.readouterr().err
    for state in (tiny.lora, text):
        assert run.here(out, resume=state) == 2
        printed = capsys.readouterr().err
        assert "leave" in printed and "to start over" in printed and "Traceback" not in printed
    assert list(out.iterdir()) == []
