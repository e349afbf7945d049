"""benchmarks/scale.py: exponents between sizes, and a small run of all of it."""

import json
from argparse import Namespace

import pytest
import scale
from helpers import one_thread  # noqa: F401
from lib.sizes import parse_size, video_tokens

from ltx_neuron.errors import UserError


def test_growth_is_the_power_of_the_tokens_between_each_size_and_the_next():
    rates = scale.growth("a step", {100: 1.0, 800: 64.0, 200: 2.0}, 2.0)
    assert [(rate.tokens, round(rate.exponent, 6)) for rate in rates] == [((100, 200), 1.0), ((200, 800), 2.5)]
    assert [rate.exceeded for rate in rates] == [False, True]


def test_values_too_small_to_measure_say_nothing():
    assert scale.growth("memory", {1: 1.0, 2: 100.0, 4: 200.0}, 1.0, least=50.0)[0].tokens == (2, 4)


def test_a_size_is_height_width_and_frames_that_the_model_takes():
    assert video_tokens(parse_size("1024x1536x121")) == 24_576
    for text, message in (
        ("384x512", "wanted HEIGHTxWIDTHxFRAMES"),
        ("axbxc", "wanted"),
        ("384x500x25", "multiple of 32"),
    ):
        with pytest.raises(UserError, match=message):
            parse_size(text)


def test_a_run_measures_and_plans_every_size(capsys):
    scale.main(["--sizes", "64x64x9", "128x192x9", "--tp-degrees", "2", "--rounds", "1"])
    *_, last = capsys.readouterr().out.strip().splitlines()
    tables = json.loads(last)
    for rows in (tables["measured"], tables["planned"]):
        assert [(row["video_tokens"], row["tp"]) for row in rows] == [(8, 2), (48, 2)]
    assert all(row["step_ms"] > 0 and row["memory_bytes"] > 0 for row in tables["measured"])
    small, large = (row["upload_bytes"] for row in tables["measured"])
    assert small < large < 6 * small  # contexts do not grow with the tokens
    assert tables["growth"]["planned flops_per_step"] < 2


def test_what_grows_too_fast_is_said(capsys):
    row = {"size": "s", "tp": 1, "fits": True}
    row |= dict.fromkeys((*scale.LIMITS["measured"], *scale.LIMITS["planned"]), 1e9)
    rows = [{**row, "video_tokens": 10}, {**row, "video_tokens": 20, "step_ms": 5e9}]
    assert scale.conclude(Namespace(record=False), {"measured": rows, "planned": rows}) is True
    assert "grows too fast: measured step_ms, tp 1: tokens ^ 2.32 from 10 to 20, allowed 2.2" in capsys.readouterr().err
