"""benchmarks/rehearsal.py and what it is made of: random sources that take little room, a command
that is watched, and a report's phases placed in what was watched."""

import os
import signal
import sys

import psutil
import pytest
import rehearsal
import torch
from lib.random_sources import ROW_STEP, random_rows, write_random
from lib.watch import Sample, Watched, run_watched
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


def test_a_watched_command_tells_its_own_memory_from_mapped_files_with_its_children(tmp_path):
    file = tmp_path / "mapped"
    file.write_bytes(b"x" * 50_000_000)
    child = f"""
import mmap, time
own = bytearray(b"y" * 30_000_000)
with open({str(file)!r}, "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sum(pages[i] for i in range(0, len(pages), 4096))
    time.sleep(1.5)
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    watched = run_watched([sys.executable, "-c", parent], tmp_path / "log")
    assert watched.exit_code == 0 and watched.seconds > 1.5
    assert 30e6 < watched.peak("anonymous_bytes") < 70e6
    assert 50e6 < watched.peak("file_bytes") < 150e6


def test_what_an_ended_child_read_from_the_disk_is_counted_once(tmp_path):
    """The parent goes on after its child, as a fork server does. In a file system in memory nothing
    is read from a disk."""
    path = tmp_path / "read"
    with open(path, "wb") as file:
        file.write(os.urandom(40_000_000))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    child = f"import time; open({str(path)!r}, 'rb').read(); time.sleep(1.2)"
    parent = f"""
import subprocess, sys, time
subprocess.run([sys.executable, "-c", {child!r}], check=True)
time.sleep(1.2)
"""
    watched = run_watched([sys.executable, "-c", parent], tmp_path / "log")
    assert watched.exit_code == 0, (tmp_path / "log").read_text()
    assert watched.samples[-1].read_bytes < 70e6


def test_an_interrupt_ends_the_watched_command(tmp_path):
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_watched([sys.executable, "-c", code], tmp_path / "log")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not psutil.pid_exists(int(pid.read_text()))


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


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "ROOM", 1e18)
    with pytest.raises(UserError, match=r"(?s)writes 1000000000.0 GB to .*Type --folder"):
        rehearsal.Rehearsal(tmp_path / "r", tiny=False, dense=False, split=False).take_folder()
    assert not any((tmp_path / "r").iterdir())


def test_a_folder_with_other_files_is_refused_since_it_is_deleted_at_the_end(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UserError, match=r"(?s)holds files of others.*an empty folder"):
        rehearsal.Rehearsal(tmp_path, tiny=True, dense=False, split=False).take_folder()
    ours = rehearsal.Rehearsal(tmp_path / "ours", tiny=True, dense=False, split=False)
    ours.take_folder()
    (ours.folder / "kept").touch()
    ours.take_folder()  # of an earlier run with --keep


def test_zeros_become_holes_in_gemma_s_rank_files_alone(tmp_path):
    made = rehearsal.Rehearsal(tmp_path, tiny=True, dense=False, split=False)
    folders = [made.artifacts / "weights" / name for name in ("gemma3-x", "dit-x")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "rank0.safetensors").write_bytes(b"header" + bytes(2**20))
    before = [rehearsal.used(folder) for folder in folders]
    made.dig_holes()
    after = [rehearsal.used(folder) for folder in folders]
    assert after[0] < before[0] / 10 and after[1] == before[1]
    assert (folders[0] / "rank0.safetensors").read_bytes() == b"header" + bytes(2**20)
