"""Benchmarks' numbers and their file of results (benchmarks/lib/harness.py), and the contact sheet of a clip."""

import csv
import json
import math
import re
import sys

import contact_sheet
import numpy as np
import pytest
from lib import harness


def test_numbers_are_the_last_line_and_recorded_without_paths_when_that_is_asked_for(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results.csv"
    monkeypatch.setattr(harness.record, "__defaults__", (results,))
    numbers = {"ways": {"ours": {"seconds": 1.5}}, "ratios": [2, 0], "model": "sound", "fits": True}
    harness.finish(harness.parser("").parse_args([]), **numbers)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == numbers and not results.exists()
    for folder in (["--folder", "/somewhere"], ["--folder=/somewhere"]):
        monkeypatch.setattr(sys, "argv", ["benchmarks/clip.py", *folder, "--record"])
        harness.finish(harness.parser("").parse_args(["--record"]), **numbers)
    head, *rows = csv.reader(results.read_text().splitlines())
    assert tuple(head) == harness.COLUMNS and len(rows) == 6
    assert [row[5:] for row in rows[:3]] == [["ways ours seconds", "1.5"], ["ratios 0", "2"], ["ratios 1", "0"]]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", row[0]) and all(row) for row in rows)
    assert {row[4] for row in rows} == {"clip.py --folder DIR", "clip.py --folder=DIR"}


def test_the_published_results_are_numbers_with_what_they_were_measured_on():
    head, *rows = csv.reader(harness.RESULTS.read_text().splitlines())
    assert tuple(head) == harness.COLUMNS and len(rows) > 20
    assert all(len(row) == len(head) and all(row) for row in rows)
    assert all(math.isfinite(float(row[-1])) for row in rows)


def test_a_tone_is_bright_at_its_pitch_and_time_alone_in_a_contact_sheet():
    times = np.arange(2 * 48000) / 48000
    tone = np.sin(2 * np.pi * 500 * times) * ((times >= 1) & (times < 1.5))
    image = contact_sheet.spectrogram(tone, 48000, 100, 200)
    y, x = np.unravel_index(image.argmax(), image.shape)
    assert y == pytest.approx(75, abs=2) and 100 <= x < 150  # 500 of 2000 Hz, from the bottom
    assert image[75, 50] == 0 and image[20, 125] < 100
    assert not contact_sheet.spectrogram(np.zeros(0), 48000, 10, 20).any()
