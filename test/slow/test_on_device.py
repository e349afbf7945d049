"""test/device without a device, as its user runs it, killed and continued; and a step that is measured."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
from conftest import ROOT
from device import comparisons, test_device
from device.bench import rehearsal
from device.bench import tiny as tiny_model
from helpers import one_thread, wait_for  # noqa: F401
from jobs import replace
from tiny import make_tiny

from ltx_neuron.files import read_json


def test_the_command_keeps_what_it_has_when_it_is_killed_and_goes_on_from_there(tmp_path):
    """SIGKILL in the middle of its second section; then with a budget that has no room for the third. A run ends with
    its page."""
    work = tmp_path / "work"
    words = [sys.executable, "-m", "pytest", ROOT / "test/device", "-o", f"cache_dir={tmp_path}/c", "--work-dir", work]
    words += ["--height=64", "--width=64", "--num-frames=9", "--profile=cpu", "--skip-wide"]
    state, page = work / "report.json", work / "report.md"
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    first, second, third, *_ = test_device.SECTIONS
    wait_for(lambda: page.is_file() and f"## {second.title}" in page.read_text())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # End its processes only now, when it can start no more.
    for one in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(one.info["cmdline"] or ()):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    assert read_json(state)["done"] == [first.name]
    assert f"{first.title}: passed after" in page.read_text()
    # The second section needs 1.5 minutes and the third 4. A busy machine takes the rest to start.
    again = subprocess.run([*words, "--lf", "--minutes", "2.5"], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"test_section[{first.name}]" not in again.stdout and f"test_section[{second.name}] PASSED" in again.stdout
    text = page.read_text()
    assert f"{second.title}: passed after" in text and "sum of a stream" in text and "- commit: " in text
    assert re.search(third.title + r": skipped after 0\.0 s: takes about 4 minutes, [0-2]\.", text)
    assert f"\n{text}\n" in again.stdout  # the run ends with the page
    assert (work / "bundle.tar.gz").is_file() and "Read it before you send it" in again.stdout
    other = subprocess.run([*words, "--lf", "--dtype", "float32"], cwd=ROOT, capture_output=True, text=True)
    assert "not of a run of this code with these flags: leave --lf out" in other.stderr


def test_a_step_is_compared_with_the_cpu_and_timed(tmp_path):
    """Of the tiny model in one stage, on whose "device" it has the CPU's own errors."""
    bench = rehearsal(tmp_path)
    make_tiny(tmp_path / "tiny")
    model = tiny_model(bench)
    model = model._replace(size=replace(model.size, two_stage=False))
    bench.make(model, bench.device(model), "shard_dit")
    text = "\n".join(comparisons.one_step(bench, model))
    rows = re.findall(r"^\| s1_(?:video|audio) \| (\S+) \| (\S+) \| \S+ \|$", text, re.MULTILINE)
    assert len(rows) == 2 and all(device == cpu for device, cpu in rows)
    timed = r"stage_1: the first step [\d.]+ s, a warm one [\d.]+ ms\.\nForecast: none, profile cpu"
    assert re.search(timed, text), text
