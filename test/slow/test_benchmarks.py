"""The benchmarks run at tiny widths and print their results."""

import json
import sys

import host_models
import host_step
import pytest
import rehearsal_graphs
import scale
import text_encode
from helpers import one_thread  # noqa: F401

SMALL = "--tiny --repeats 1 --threads 1 --height 64 --width 64 --num-frames 9 --seconds 0.5 --folder"


@pytest.fixture
def last_line(monkeypatch, capsys):
    """last_line(script, words): what a benchmark prints at last."""

    def run(script, words: str) -> dict:
        monkeypatch.setattr(sys, "argv", [script.__file__, *words.split()])
        script.main()
        return json.loads(capsys.readouterr().out.strip().splitlines()[-1])

    return run


def test_host_step_times_both_kinds_of_video_and_sends_a_step_number_only(last_line):
    cases = last_line(host_step, "--tiny --repeats 1")
    assert [*cases] == ["64x64x9 text to video", "64x64x9 image to video"]
    assert all(0 < case["bytes"] <= 1024 for case in cases.values())


def test_text_encode_compares_equal_contexts_of_ours_and_the_reference(last_line):
    result = last_line(text_encode, "--tiny --repeats 1 --threads 1")
    assert max(result["rel_l2"].values()) < 1e-5
    assert all(way["seconds"] > 0 for way in result["ways"].values())


def test_rehearsal_graphs_exports_and_checks_an_ic_lora_in_tiles(last_line, tmp_path):
    assert last_line(rehearsal_graphs, f"--tiny --folder {tmp_path}/rehearsal")["checked_graphs"] == 3
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("model", ["video-decoder", "video-encoder", "image-encoder", "upsampler", "sound"])
def test_host_models_compares_ours_with_ltx_core(last_line, model, tmp_path):
    result = last_line(host_models, f"{model} {SMALL} {tmp_path}")
    assert all(way["seconds"] > 0 for way in result["ways"].values())
    distances, frames = result["rel_l2"], model == "video-decoder"  # which are rounded to bytes
    if model == "sound":
        assert distances["ours"] < 1e-5  # float32 in all
    else:
        assert len(result["ways"]) == 4 and distances["ours"] < 0.05
        assert distances["ours float32"] < (1e-3 if frames else 1e-5)


def test_scale_measures_and_plans_every_size(last_line):
    tables = last_line(scale, "--sizes 64x64x9 128x192x9 --tp-degrees 2 --rounds 1")
    for rows in (tables["measured"], tables["planned"]):
        assert [(row["video_tokens"], row["tp"]) for row in rows] == [(8, 2), (48, 2)]
    assert all(row["step_ms"] > 0 and row["memory_bytes"] > 0 for row in tables["measured"])
    small, large = (row["upload_bytes"] for row in tables["measured"])
    assert small < large < 6 * small  # contexts do not grow with the tokens
    assert tables["growth"]["planned flops_per_step"] < 2
