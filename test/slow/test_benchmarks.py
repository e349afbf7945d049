"""The benchmarks of the host's work run at tiny widths and print their results."""

import json
import subprocess
import sys

import host_models
import pytest
from conftest import ROOT
from helpers import one_thread  # noqa: F401

HOST_BYTES = 1024  # what a step may send to the device; the times are not a test's to judge


def printed(script: str, *flags: str) -> str:
    command = [sys.executable, ROOT / "benchmarks" / script, "--tiny", *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_host_step_times_both_kinds_of_video_and_sends_a_step_number_only():
    last = json.loads(printed("host_step.py", "--repeats", "1").splitlines()[-1])
    assert [*last] == ["64x64x9 text to video", "64x64x9 image to video"]
    assert all(0 < case["bytes"] <= HOST_BYTES for case in last.values())


def test_text_encode_compares_equal_contexts_of_ours_and_the_reference():
    output = printed("text_encode.py", "--repeats", "1", "--threads", "1")
    found = json.loads(output.splitlines()[-1])
    assert max(found["rel_l2"].values()) < 1e-5, output
    assert all(way["seconds"] > 0 for way in found["ways"].values())


MODELS = ("video-decoder", "video-encoder", "image-encoder", "upsampler", "sound")
SMALL = "--tiny --repeats 1 --threads 1 --height 64 --width 64 --num-frames 9 --seconds 0.5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("host_models"))


@pytest.mark.parametrize("model", MODELS)
def test_host_models_compares_ours_with_ltx_core(model, folder, capsys):
    host_models.main([model, *SMALL.split(), "--folder", folder])
    last = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(last)
    assert all(way["seconds"] > 0 for way in found["ways"].values())
    if model == "sound":  # float32 in all
        assert found["rel_l2"]["ours"] < 1e-5
        return
    assert len(found["ways"]) == 4
    bound = 1e-5 if model != "video-decoder" else 1e-3  # frames are rounded to bytes
    assert found["rel_l2"]["ours float32"] < bound and found["rel_l2"]["ours"] < 0.05


def test_rehearsal_graphs_exports_and_checks_an_ic_lora_and_tiles(tmp_path):
    output = printed("rehearsal_graphs.py", "--folder", str(tmp_path / "rehearsal"))
    assert json.loads(output.splitlines()[-1])["checked_graphs"] == 9, output
    assert "in 9 tiles each" in output and not [*tmp_path.iterdir()]
