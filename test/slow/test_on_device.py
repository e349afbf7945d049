"""test/device without a device, as its user runs it and killed in the middle, and a step timed by its graphs."""

import os
import re
import signal
import subprocess
from contextlib import suppress

import psutil
from conftest import ROOT
from device import measurements, step_times, test_device
from device.bench import request
from device_rehearsal import command, rehearsal
from helpers import one_thread  # noqa: F401

from ltx_neuron.files import read_json


def test_the_command_keeps_what_it_has_when_it_is_killed_and_goes_on_from_there(tmp_path):
    """SIGKILL in the middle of its second section; then with a budget that has no room for the third."""
    words, state, page = command(tmp_path), tmp_path / "work/report.json", tmp_path / "work/report.md"
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    first, second, third, *_ = test_device.SECTIONS
    assert any(line.startswith(second.title) for line in process.stdout)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # End its processes only now, when it can start no more.
    for one in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(one.info["cmdline"] or ()):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    assert read_json(state)["sections"][first.name]["status"] == "done"
    assert f"| {first.title} | done |" in page.read_text()
    assert f"Sections that were not reached: {len(test_device.SECTIONS) - 1}." in page.read_text()
    # The second section needs 1.5 minutes and the third 4. A busy machine takes the rest to start.
    again = subprocess.run([*words, "--lf", "--minutes", "2.5"], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{first.title} ..." not in again.stdout and f"{second.title} ...\n  done" in again.stdout
    assert re.search(third.title + r" \.\.\.\n  not reached: takes about 4 minutes, [0-2]\.", again.stdout)
    text = page.read_text()
    assert f"| {second.title} | done | " in text and f"| {third.title} |" not in text
    assert "sum of a stream" in text and "- versions: torch" in text and "- commit: " in text
    assert f"\n{text}\n" in again.stdout  # the run ends with the page
    assert (tmp_path / "work/bundle.tar.gz").is_file() and "Read it before you send it" in again.stdout


def test_a_step_is_timed_by_its_graphs_and_memory_is_asked_for_between_timed_steps(tmp_path, tiny, monkeypatch):
    """Of the model of two blocks, which the tiny one stands for."""
    bench = rehearsal(tmp_path)
    (bench.folder / "wide").symlink_to(tiny.checkpoint.parent)
    model = measurements.timed_blocks(bench)
    target = bench.device(model)
    bench.shard(model, target, gemma=False)
    bench.compile(model, target, gemma=False)
    text = "\n".join(measurements.wide_step_times(bench, model))
    assert re.search(r"\| blocks \| 1 \| [\d.]+ \| - \| 22 \| ", text), text
    assert re.search("By these graphs a step of 48 blocks takes [1-9]", text)
    assert "Memory: no Neuron device." in text

    events, used, timed = [], [10**8, 9 * 10**9, 10**10, 10**9], step_times._milliseconds
    monkeypatch.setattr(step_times, "_milliseconds", lambda *run: events.append("step") or timed(*run))
    monkeypatch.setattr(step_times, "core_memory", lambda _: events.append("memory") or {"core 0": used.pop(0)})
    how = {"profile": target.profile, "settings": target.settings, "dtype": target.dtype, "tp": bench.tp}
    measured = step_times.measure(request(model, model.size) | how | {"folder": str(bench.folder / "copy")})
    steps = ["step"] * 2 * (1 + step_times.STEPS)
    assert events == ["memory", "memory", *steps, "memory", "memory"]
    assert [call["graph"] for call in measured["calls"]] == ["head", "blocks", "tail"]
    memory = [*measurements._memory(bench, measured["memory"], 2_590_000_000)]
    assert memory[0] == "| core | before | loaded | after the steps | unloaded |"
    assert memory[2] == "| core 0 | 100.0 MB | 9.00 GB | 10.00 GB | 1.00 GB |"
    freed = "Unloading freed 9.00 GB of the 9.90 GB that the model took."
    assert memory[-1] == f"{freed} The plan has 2.59 GB a core."
