"""The service and a resumed run make the bytes of a batch with LTX-2.5; a run with the int8 files
makes those of the files that they stand for."""

import os
import signal
from types import SimpleNamespace

import int8_files
import pytest
import serving
import split_runs

from ltx_neuron.commands import dispatch
from ltx_neuron.denoise import StageRun
from ltx_neuron.service.fields import read_request
from ltx_neuron.service.jobs import VIDEO

runs = split_runs.runs  # a fixture


def test_the_service_makes_the_bytes_of_the_batch(runs, split, tmp_path):
    assets = SimpleNamespace(checkpoint=split.distilled, gemma_root=None, spatial_upsampler=None)
    with serving.worker(runs, assets, tmp_path, neuron_gemma=False) as (working, intake):
        fields = {"prompt": "a red fox", "size": "128x64", "two_stage": True}
        entry = intake.accept(read_request(fields | {"num_generated_keyframes": 1}), "ada")
        stopping = serving.stop_after(working, entry)
        working.run()
        stopping.join()
        assert (working.queue.folder_of(entry.id) / VIDEO).read_bytes() == runs.wanted[0]
        assert intake.sizes.inputs["num_generated_keyframes"]


def test_a_run_that_is_killed_in_its_second_stage_is_resumed_to_the_same_bytes(runs, tmp_path, monkeypatch, capsys):
    step = StageRun.step

    def kill(stage_run, number):
        if stage_run.stage.title == "stage 2" and number == 1:
            os.kill(stage_run.ranks._processes[0].pid, signal.SIGKILL)
        return step(stage_run, number)

    words = runs.words("generate", *runs.flags, "--output-path", tmp_path / "fox.mp4")
    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "step", kill)
        with pytest.raises(Exception, match="the process was killed"):
            dispatch(words)
    dispatch([*words, "--resume"])
    said = capsys.readouterr().out
    assert "is left" in said and "video decoder: convolutional, from " in said
    assert (tmp_path / "fox.mp4").read_bytes() == runs.wanted[0]


def test_a_run_with_the_int8_files_makes_the_bytes_of_the_bfloat16_files_they_stand_for(runs, split, tmp_path):
    made = []
    for folder in int8_files.download(split, tmp_path):
        of = split_runs.Runs(folder=folder, artifacts=runs.artifacts)
        dispatch(of.words("prepare", *runs.flags))
        dispatch(of.words("generate", *runs.flags, "--output-path", folder / "fox.mp4"))
        made.append((folder / "fox.mp4").read_bytes())
    assert made[0] == made[1] != runs.wanted[0]
