"""test/device without a device, as its user runs it and killed in the middle, and a step timed by
its graphs."""

import os
import re
import signal
import subprocess
from contextlib import suppress

import psutil
import pytest
from conftest import ROOT
from device import measurements, step_times, test_device
from device.bench import Bench, Model, request
from device_rehearsal import command, rehearsal
from helpers import one_thread  # noqa: F401

from ltx_neuron.files import read_json


def test_the_command_keeps_what_it_has_when_it_is_killed_and_goes_on_from_there(tmp_path):
    """SIGKILL in the middle of its second section; then with a budget that has no room for the
    third."""
    words = command(tmp_path)
    state, report = tmp_path / "work/report.json", tmp_path / "work/report.md"
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    first, second, third, *_ = test_device.SECTIONS.values()
    assert any(line.startswith(second.title) for line in process.stdout)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # End its processes only now, when it can start no more.
    for each in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(each.info["cmdline"] or ()):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    assert read_json(state)["sections"][first.name]["status"] == "done"
    assert f"| {first.title} | done |" in report.read_text()
    assert f"| {second.title} | not" in report.read_text()
    # The second section needs 3 minutes and the third 4. A busy machine takes the rest to start.
    again = subprocess.run(
        [*words, "--lf", "--minutes", "3.95"], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{first.title} ..." not in again.stdout
    assert f"{second.title} ...\n  done" in again.stdout
    text = report.read_text()
    for each in test_device.SECTIONS.values():
        assert f"| {each.title} | " in text
    assert re.search(rf"\| {third.title} \| not run: takes about 4 minutes, [0-3]\.", text)
    assert "unchanged." in text and "- versions: torch" in text and "- commit: " in text
    assert (
        tmp_path / "work/bundle.tar.gz"
    ).is_file() and "Read it before you send it" in again.stdout


@pytest.fixture
def blocks(tmp_path, tiny) -> tuple[Bench, Model]:
    """The model of two blocks, which the tiny one stands for: sharded."""
    bench = rehearsal(tmp_path)
    (bench.folder / "wide").symlink_to(tiny.checkpoint.parent)
    model = measurements.timed_blocks(bench)
    bench.shard(model, bench.device(model), gemma=False)
    return bench, model


def test_a_step_is_timed_by_its_graphs_and_memory_is_asked_for_between_timed_steps(
    blocks, monkeypatch
):
    """Of each core: before loading, loaded, after the steps, unloaded."""
    bench, model = blocks
    text = "\n".join(measurements.wide_step_times(bench))
    assert re.search(r"\| blocks \| 1 \| [\d.]+ \| - \| 22 \| ", text), text
    assert re.search("By these graphs a step of 48 blocks takes [1-9]", text)
    assert "Memory: no Neuron device." in text

    events, used = [], [10**8, 9 * 10**9, 10**10, 10**9]
    timed, target = step_times._milliseconds, bench.device(model)

    def counted(root) -> dict[str, int]:
        events.append("memory")
        return {"core 0": used.pop(0)}

    def noted(*given) -> list[float]:
        events.append("step")
        return timed(*given)

    monkeypatch.setattr(step_times, "_milliseconds", noted)
    monkeypatch.setattr(step_times, "core_memory", counted)
    content = request(model, model.size) | {"folder": str(bench.folder / "copy"), "tp": bench.tp}
    content |= {"profile": target.profile, "settings": target.settings, "dtype": target.dtype}
    found = step_times.measure(content)
    steps = ["step"] * 2 * (1 + step_times.STEPS)
    assert events == ["memory", "memory", *steps, "memory", "memory"]
    assert [call["graph"] for call in found["calls"]] == ["head", "blocks", "tail"]
    memory = [*measurements._memory(bench, found["memory"])]
    assert memory[0] == "| core | before | loaded | after the steps | unloaded |"
    assert memory[2] == "| core 0 | 100.0 MB | 9.00 GB | 10.00 GB | 1.00 GB |"
    assert memory[-1] == "Unloading freed 9.00 GB of the 9.90 GB that the model took."
