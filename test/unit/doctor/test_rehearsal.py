"""benchmarks/rehearsal.py: random sources that take little room, a watched command, phases of a report."""

import pytest
import rehearsal
import torch
from lib.random_sources import ROW_STEP, random_rows, write_random
from lib.watch import Sample, Watched
from tiny.weights import random_weight
from torch import Generator

from ltx_neuron.errors import UserError
from ltx_neuron.weights.tensorfile import TensorFile


def test_of_a_large_tensor_few_rows_are_random_and_the_others_take_no_room(tmp_path):
    shapes = {
        "large.weight": ("BF16", [1024, 4096]),
        "norm.weight": ("BF16", [5]),
        "scale": ("F32", []),
        "left_out.weight": ("BF16", [8, 8]),
    }

    def rows(name, shape, nbytes):
        return [] if name == "left_out.weight" else random_rows(name, shape, nbytes)

    path = tmp_path / "x.safetensors"
    write_random(path, {"a": "b"}, shapes, random_weight, rows, Generator().manual_seed(1))
    file = TensorFile(path, "")
    large = file.read("large.weight").float()
    assert torch.nonzero(large.any(dim=1)).flatten().tolist() == [0, *range(1, 1024, ROW_STEP)]
    assert large[1].std() == pytest.approx(1 / 64, rel=0.1)  # 1 / sqrt(4096)
    assert file.read("norm.weight").float().mean() == pytest.approx(1, abs=0.2)
    assert file.read("scale").item() != 0 and not file.read("left_out.weight").any()
    assert path.stat().st_blocks * 512 < path.stat().st_size / 10
    assert [*tmp_path.iterdir()] == [path]


def test_phases_and_steps_of_a_report_are_placed_back_from_its_end():
    """From 100 to 110 s a process read 1 GB a second, then nothing."""
    reads = [(t, min(t - 100, 10) * 10**9) for t in range(100, 121)]
    samples = [Sample(t, 10**9 * (t < 108), 2 * 10**9, read) for t, read in reads]
    phases = [("denoise_stage_1", 1.0), ("denoise_stage_1", 6.0), ("decode_video", 10.0)]
    report = {
        "phases": [{"name": name, "seconds": seconds} for name, seconds in phases],
        "denoise_steps_ms": {"stage_1": [2000.0, 4000.0], "stage_2": []},
    }
    rows = rehearsal.phase_rows(report, 118.5, Watched(0, 21.0, samples))
    assert [(row.name.strip(), row.seconds, row.read_gb) for row in rows] == [
        ("denoise_stage_1", 1.0, 1.0),
        ("denoise_stage_1", 6.0, 6.0),
        ("step 1", 2.0, 2.0),
        ("step 2", 4.0, 4.0),
        ("decode_video", 10.0, 1.5),
    ]
    assert [row.own_memory_gb for row in rows] == [1, 1, 1, 1, 0]
    assert {row.mapped_gb for row in rows} == {2.0}


def test_a_folder_without_room_or_with_files_of_others_is_refused_before_it_is_taken(tmp_path, monkeypatch):
    """It is deleted at the end."""
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UserError, match=r"(?s)holds files of others.*an empty folder"):
        rehearsal.Rehearsal(tmp_path, tiny=True, dense=False, split=False).take_folder()
    ours = rehearsal.Rehearsal(tmp_path / "ours", tiny=True, dense=False, split=False)
    ours.take_folder()
    (ours.folder / "kept").touch()
    ours.take_folder()  # of an earlier run with --keep
    monkeypatch.setattr(rehearsal, "ROOM", 1e18)
    with pytest.raises(UserError, match=r"(?s)writes 1000000000.0 GB to .*Type --folder"):
        rehearsal.Rehearsal(tmp_path / "r", tiny=False, dense=False, split=False).take_folder()
    assert not any((tmp_path / "r").iterdir())
