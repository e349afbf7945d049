"""benchmarks/lib/harness.py: the numbers of a run, and the file of results."""

import csv
import json
import math
import re
import sys

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
