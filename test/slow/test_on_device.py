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
from device import measurements, one_step, step_times, test_device
from device.bench import FP32, TINY_SIZE, Bench, Model, request
from device_rehearsal import command, rehearsal
from helpers import one_thread  # noqa: F401
from safetensors.torch import load_file

from ltx_neuron.denoise import StageRun
from ltx_neuron.files import read_json
from ltx_neuron.models import signatures
from ltx_neuron.sampling import samplers


def test_the_command_keeps_what_it_has_when_it_is_killed_and_goes_on_from_there(tmp_path):
    """SIGKILL in the middle of its second section; then with a budget that has no room for the
    third. A run ends with its page."""
    words = command(tmp_path)
    state, report = tmp_path / "work/report.json", tmp_path / "work/report.md"
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    first, second, third, *_ = test_device.SECTIONS
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
    left = len(test_device.SECTIONS) - 1
    assert f"Sections that were not reached: {left}." in report.read_text()
    # The second section needs 1.5 minutes and the third 4. A busy machine takes the rest to start.
    again = subprocess.run([*words, "--lf", "--minutes", "2.5"], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{first.title} ..." not in again.stdout
    assert f"{second.title} ...\n  done" in again.stdout
    text = report.read_text()
    not_reached = r" \.\.\.\n  not reached: takes about 4 minutes, [0-2]\."
    assert re.search(third.title + not_reached, again.stdout)
    assert f"| {second.title} | done | " in text and f"| {third.title} |" not in text
    assert "sum of a stream" in text and "- versions: torch" in text and "- commit: " in text
    assert f"\n{text}\n" in again.stdout  # the run ends with the page
    assert (tmp_path / "work/bundle.tar.gz").is_file() and "Read it before you send it" in again.stdout


def test_of_ltx25_the_compared_step_is_the_last_one_that_adds_noise(
    tmp_path,
    split,
    monkeypatch,
    one_thread,  # noqa: F811
):
    bench = rehearsal(tmp_path)
    bench.args.tp_degree = 1
    model = Model("ltx25", split.distilled, None, None, TINY_SIZE, tmp_path / "artifacts")
    bench.shard(model, FP32, gemma=False)
    bench.compile(model, FP32, gemma=False)
    taken, step = [], StageRun.step

    def noted(run: StageRun, number: int) -> float:
        noise = signatures.ANCESTRAL.index("noise")
        added = samplers.ancestral_coefficients(run.stage.sigmas, (False, False))[number:, 0, noise]
        taken.append((added > 0).tolist())
        return step(run, number)

    monkeypatch.setattr(StageRun, "step", noted)
    output = tmp_path / "step.safetensors"
    content = request(model, model.size) | {"output": output, "tp": bench.tp}
    content |= {"profile": FP32.profile, "settings": FP32.settings, "dtype": FP32.dtype}
    one_step.take_step(content)
    assert taken == [[True, False]]  # this step's, and those after it
    assert load_file(output).keys() == {"video", "audio"}


@pytest.fixture
def blocks(tmp_path, tiny) -> tuple[Bench, Model]:
    """The model of two blocks, which the tiny one stands for: sharded and compiled."""
    bench = rehearsal(tmp_path)
    (bench.folder / "wide").symlink_to(tiny.checkpoint.parent)
    model = measurements.timed_blocks(bench)
    bench.shard(model, bench.device(model), gemma=False)
    bench.compile(model, bench.device(model), gemma=False)
    return bench, model


def test_a_step_is_timed_by_its_graphs_and_memory_is_asked_for_between_timed_steps(blocks, monkeypatch):
    """Of each core: before loading, loaded, after the steps, unloaded."""
    bench, model = blocks
    text = "\n".join(measurements.wide_step_times(bench, model))
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
    memory = [*measurements._memory(bench, found["memory"], 2_590_000_000)]
    assert memory[0] == "| core | before | loaded | after the steps | unloaded |"
    assert memory[2] == "| core 0 | 100.0 MB | 9.00 GB | 10.00 GB | 1.00 GB |"
    freed = "Unloading freed 9.00 GB of the 9.90 GB that the model took."
    assert memory[-1] == f"{freed} The plan has 2.59 GB a core."
