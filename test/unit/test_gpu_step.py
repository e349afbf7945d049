"""benchmarks/gpu_step.py: all of it runs on a CPU at tiny width, and says what it wants where there
is no GPU."""

import dataclasses

import gpu_step
import pytest
import torch
from helpers import one_thread  # noqa: F401
from lib.sections import Failed

from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.profiles import resolve
from ltx_neuron.tiny import TinySizes
from ltx_neuron.tiny.config import tiny_config

PROFILE, CPU, SIZE = dataclasses.replace(resolve("cpu"), tp=1), torch.device("cpu"), Size(64, 64, 9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_and_it_is_said_what_to_type():
    with pytest.raises(
        UserError,
        match="(?s)not measured: .*needs 1 GPUs.*found 0.*gpu_step.py --profile cpu --tiny",
    ):
        gpu_step.main([])


def test_every_form_runs_at_tiny_width_on_a_cpu(capsys):
    gpu_step.main(
        ["--profile", "cpu", "--tiny", "--blocks", "3", "--sizes", "64x64x9", "--steps", "2"]
    )
    lines = capsys.readouterr().out.strip().splitlines()
    assert "3 blocks (tiny)" in lines[0] and "float32: ours is" in lines[1]
    rows = {
        cells[2].strip(): cells
        for line in lines
        if (cells := line.split("|"))[1:2] == [" 64x64x9 "]
    }
    assert tuple(rows) == gpu_step.FORMS
    assert all(float(cells[3].replace(",", "")) > 0 for cells in rows.values())
    assert lines[-1].endswith("(no GPU: not measured)")


def test_a_step_that_is_not_ltx_cores_is_never_timed(tmp_path, monkeypatch):
    ours = gpu_step.Case.ours

    def with_another_context(case, local):
        contexts = case.contexts
        case.contexts = contexts._replace(video=contexts.video.flip(2))
        step = ours(case, local)
        case.contexts = contexts
        return step

    monkeypatch.setattr(gpu_step.Case, "ours", with_another_context)
    with torch.no_grad(), pytest.raises(Failed, match="our step is not ltx-core's"):
        gpu_step.checked(tiny_config(TinySizes()), PROFILE, CPU, SIZE, tmp_path)
