"""test/device without a device: its time, the three-way rule, and what it probes."""

import re

import pytest
from device import bench as device_bench
from device import measurements, probes
from device.bench import Bench, Section, rehearsal
from device.comparisons import three_way
from helpers import ended, one_thread, randn, within  # noqa: F401

from ltx_neuron.errors import UserError

# Asks to be left alone, as what hangs in a driver does, and has a child.
HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("minutes", "estimate", "why"), [(0.05, 0.02, "the budget ended"), (30, 0.01, "4 times the estimate")]
)
def test_a_section_that_hangs_is_stopped_with_all_it_started(tmp_path, monkeypatch, minutes, estimate, why):
    monkeypatch.setattr(device_bench, "TIDY_SECONDS", 0.5)
    bench = rehearsal(tmp_path, minutes)
    bench.begin(Section("hangs", estimate, None))
    with within(30), pytest.raises(pytest.skip.Exception, match=f"hangs was stopped after 0.*{why}") as stopped:
        bench.run("hangs", "-c", HANGS)
    assert ended([int(re.search(r"child (\d+)", str(stopped.value))[1])])
    assert bench.page.read_text() == "\n## hangs\n\n"
    if why == "the budget ended":
        with pytest.raises(pytest.skip.Exception, match=r"takes about 1 minutes, 0\.0 are left"):
            bench.begin(Section("next", 1, None))
    else:
        bench.begin(Section("next", 1, None))


def test_a_section_waits_for_those_it_needs_and_a_failed_script_shows_its_last_lines(tmp_path):
    bench = rehearsal(tmp_path)
    with pytest.raises(pytest.skip.Exception, match="needs tiny compiles"):
        bench.begin(Section("step", 1, None, ("tiny_compiles",)))
    bench.done.add("tiny_compiles")
    bench.begin(Section("step", 1, None, ("tiny_compiles",)))
    with pytest.raises(pytest.fail.Exception, match=r"(?s)wrong ended with exit code 3 .*said last"):
        bench.run("wrong", "-c", "print('said last'); raise SystemExit(3)")
    assert bench.run("right", "-c", "print('said'); raise SystemExit(1)", codes=(0, 1)) == "said\n"
    with pytest.raises(UserError, match="--minutes 0: wanted minutes above 0"):
        rehearsal(tmp_path, 0)


def test_the_rule_compares_with_twice_the_rounding_of_the_cpu():
    exact = {"video": randn(1, 8, 16), "audio": randn(1, 4, 16, seed=1)}

    def off(share: float, seed: int) -> dict:
        """The tensors with an error of that share of their norm."""
        errors = {name: randn(*value.shape, seed=seed) for name, value in exact.items()}
        return {name: x + share * x.norm() * errors[name] / errors[name].norm() for name, x in exact.items()}

    rows = [*three_way(off(0.023, 2), off(0.01, 3), exact, exact)]
    assert "| video | 2.3" in rows[2] and len(rows) == 4
    nan = {name: value * float("nan") for name, value in exact.items()}
    for device, bf16 in ((off(0.027, 2), off(0.01, 3)), (nan, off(0.01, 3)), (exact, nan)):
        with pytest.raises(pytest.fail.Exception, match="further from fp32 than the rule allows: video, audio"):
            [*three_way(device, bf16, exact, exact)]


def test_collectives_and_outputs_are_probed_on_ranks_and_wrong_sums_are_found(tmp_path, monkeypatch):
    def probed(bench, name, **content):
        request = {"profile": "cpu", "settings": [], "dtype": "float32", "tp": 2, "folder": str(tmp_path / name)}
        return probes.PROBES[name](request | content)

    monkeypatch.setattr(Bench, "probed", probed)
    monkeypatch.setattr(probes, "RUNS", 2)
    names, bench = [*measurements.COLLECTIVES], rehearsal(tmp_path)
    rows = [line.strip("| ").split(" | ") for line in measurements.collectives(bench, names)][4:]
    assert [row[0] for row in rows] == names and all(row[-1] == "True" and float(row[4]) > 0 for row in rows)
    assert "unchanged." in next(measurements.outputs(bench))
    monkeypatch.setitem(probes.OPERATIONS, "sum", (probes.OPERATIONS["sum"][0], lambda x: x))
    with pytest.raises(pytest.fail.Exception, match="wrong numbers: sum of its norms"):
        list(measurements.collectives(bench, names[1:2]))
