"""The benchmarks run at tiny widths and print their results."""

import json
import subprocess
import sys

import host_models
import pytest
import scale
from conftest import ROOT
from helpers import one_thread  # noqa: F401

SMALL = "--tiny --repeats 1 --threads 1 --height 64 --width 64 --num-frames 9 --seconds 0.5"


def last_line(script: str, *flags: object) -> dict:
    command = [sys.executable, ROOT / "benchmarks" / script, "--tiny", *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


def test_host_step_times_both_kinds_of_video_and_sends_a_step_number_only():
    cases = last_line("host_step.py", "--repeats", "1")
    assert [*cases] == ["64x64x9 text to video", "64x64x9 image to video"]
    assert all(0 < case["bytes"] <= 1024 for case in cases.values())


def test_text_encode_compares_equal_contexts_of_ours_and_the_reference():
    result = last_line("text_encode.py", "--repeats", "1", "--threads", "1")
    assert max(result["rel_l2"].values()) < 1e-5
    assert all(way["seconds"] > 0 for way in result["ways"].values())


def test_rehearsal_graphs_exports_and_checks_an_ic_lora_in_tiles(tmp_path):
    assert last_line("rehearsal_graphs.py", "--folder", tmp_path / "rehearsal")["checked_graphs"] == 3
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("model", ["video-decoder", "video-encoder", "image-encoder", "upsampler", "sound"])
def test_host_models_compares_ours_with_ltx_core(model, tmp_path, capsys):
    host_models.main([model, *SMALL.split(), "--folder", str(tmp_path)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(way["seconds"] > 0 for way in result["ways"].values())
    distances, frames = result["rel_l2"], model == "video-decoder"  # which are rounded to bytes
    if model == "sound":
        assert distances["ours"] < 1e-5  # float32 in all
    else:
        assert len(result["ways"]) == 4 and distances["ours"] < 0.05
        assert distances["ours float32"] < (1e-3 if frames else 1e-5)


def test_scale_measures_and_plans_every_size(capsys):
    scale.main(["--sizes", "64x64x9", "128x192x9", "--tp-degrees", "2", "--rounds", "1"])
    tables = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    for rows in (tables["measured"], tables["planned"]):
        assert [(row["video_tokens"], row["tp"]) for row in rows] == [(8, 2), (48, 2)]
    assert all(row["step_ms"] > 0 and row["memory_bytes"] > 0 for row in tables["measured"])
    small, large = (row["upload_bytes"] for row in tables["measured"])
    assert small < large < 6 * small  # contexts do not grow with the tokens
    assert tables["growth"]["planned flops_per_step"] < 2
