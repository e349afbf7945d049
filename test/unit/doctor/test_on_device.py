"""test/device without a device: sections, budget, report, the three-way rule, and what it measures."""

import re
import textwrap
from collections.abc import Callable
from contextlib import suppress

import pytest
from device import bench as device_bench
from device import measurements, probes, step_times
from device.bench import Bench
from device.comparisons import three_way
from device.report import Budget, Report, Section, Stopped
from device_rehearsal import rehearsal
from helpers import ended, one_thread, randn, within  # noqa: F401

from ltx_neuron.errors import UserError
from ltx_neuron.files import write_json

ENDS = (pytest.skip.Exception, pytest.fail.Exception, UserError, ZeroDivisionError)
FOUND, HALF = "it found something", "half of it"


def fails(error: BaseException) -> Callable[[list], None]:
    """A section that ends so after a line of what it found."""

    def section(lines: list) -> None:
        lines.append(HALF)
        raise error

    return section


@pytest.fixture
def reports(tmp_path):
    """reports(sections) is a report in one folder; restored: as with --lf."""

    def make(*sections: Section, budget: Budget | None = None, code: str = "1", restored: bool = False) -> Report:
        named = {section.name: section for section in sections}
        report = Report(tmp_path, named, budget or Budget(), {"code": code}, {"profile": "cpu"})
        report.restore(wanted=restored)
        return report

    return make


def run_all(report: Report, **runs: Callable[[list], None]) -> None:
    """Each section that is not done, as pytest runs it with --lf."""
    for name in report.sections:
        if not report.is_done(name):
            with suppress(*ENDS), report.running(name):
                runs.get(name, lambda lines: lines.append(FOUND))(report.lines)


def statuses(report: Report) -> list[str]:
    return [report.result(name)["status"] for name in report.sections]


def test_the_end_and_the_lines_of_a_section_are_recorded_and_what_does_not_need_it_goes_on(reports):
    ends = {
        "raises": (ZeroDivisionError("x"), "failed", "Traceback"),
        "typed": (UserError("typed wrongly"), "failed", "typed wrongly"),
        "finds_it": (pytest.fail.Exception("it | broke\nhere"), "failed", "it | broke\nhere"),
        "skips": (pytest.skip.Exception("no Neuron device"), "not run", "no Neuron device"),
        "stops": (Stopped("the budget ended"), "stopped", "the budget ended"),
    }
    sections = *map(Section, ends), Section("b", needs=("finds_it",)), Section("c"), Section("d", needs=("c",))
    run_all(reports(*sections), **{name: fails(error) for name, (error, *_) in ends.items()})
    report = reports(*sections, restored=True)
    assert statuses(report) == [*(status for _, status, _ in ends.values()), "not run", "done", "done"]
    for name, (_, _, why) in ends.items():
        assert report.done[name]["lines"] == [HALF] and why in report.done[name]["why"]
    assert report.done["b"]["why"] == "needs finds it" and report.done["c"]["lines"] == [FOUND]
    text = report.markdown()
    assert "- profile: cpu" in text and "| c | done | 0.0 |" in text and f"## c\n\n{FOUND}" in text
    assert "| finds it | failed: it \\| broke | 0.0 |" in text and f"{HALF}\n\n```\nit | broke\nhere\n```" in text
    assert "```\nno Neuron device" not in text


def test_results_of_earlier_runs_are_kept_where_they_ran_the_same(reports):
    with pytest.raises(UserError, match="nothing was run in .*: leave --lf out"):
        reports(Section("a"), restored=True)
    sections = Section("a"), Section("b"), Section("c", needs=("a",))
    with pytest.raises(KeyboardInterrupt):
        run_all(reports(*sections), b=fails(KeyboardInterrupt()))
    again = reports(*sections, restored=True)
    assert statuses(again) == ["done", "stopped", "not reached"] and again.done["b"]["lines"] == [HALF]
    assert "Sections that were not reached: 1." in again.markdown()
    run_all(again, a=fails(ZeroDivisionError()))
    assert statuses(reports(*sections, restored=True)) == ["done"] * 3
    with pytest.raises(UserError, match="of another run: code differ. Leave --lf out"):
        reports(*sections, code="2", restored=True)
    assert reports(*sections, code="2").done == {}


def test_the_rule_compares_with_twice_the_rounding_of_the_cpu():
    exact = {"video": randn(1, 8, 16), "audio": randn(1, 4, 16, seed=1)}

    def off(share: float, seed: int) -> dict:
        """The tensors with an error of that share of their norm."""
        errors = {name: randn(*value.shape, seed=seed) for name, value in exact.items()}
        return {name: x + share * x.norm() * errors[name] / errors[name].norm() for name, x in exact.items()}

    rows = [*three_way(off(0.023, 2), off(0.01, 3), exact, ("video", "audio"))]
    assert "| video | 2.3" in rows[2] and len(rows) == 4
    nan = {name: value * float("nan") for name, value in exact.items()}
    for device, bf16 in ((off(0.027, 2), off(0.01, 3)), (nan, off(0.01, 3)), (exact, nan)):
        with pytest.raises(pytest.fail.Exception, match="further from fp32 than the rule allows: video, audio"):
            [*three_way(device, bf16, exact, ("video", "audio"))]


# Asks to be left alone, as what hangs in a driver does, and has a child.
HANGS = """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("minutes", "estimate", "why", "next_status"),
    [(0.05, 0.02, "the budget ended", "not reached"), (30, 0.01, "4 times the estimate", "done")],
)
def test_a_section_that_hangs_is_stopped_with_all_it_started(
    tmp_path, monkeypatch, reports, minutes, estimate, why, next_status
):
    monkeypatch.setattr(device_bench, "TIDY_SECONDS", 0.5)
    bench = rehearsal(tmp_path, minutes)

    def hang(lines: list) -> None:
        lines.append(HALF)
        bench.run("hangs", "-c", textwrap.dedent(HANGS))

    sections = Section("a", minutes=0), Section("hangs", minutes=estimate), Section("c")
    with within(30):
        run_all(reports(*sections, budget=bench.budget), hangs=hang)
    kept = reports(*sections, restored=True)
    assert statuses(kept) == ["done", "stopped", next_status]
    assert kept.done["hangs"]["lines"] == [HALF] and why in kept.done["hangs"]["why"]
    child = re.search(r"child (\d+)", kept.done["hangs"]["why"])
    assert ended([int(child[1])])
    assert "| hangs | stopped: hangs was stopped after 0." in kept.markdown()


def test_collectives_and_outputs_are_probed_on_ranks_and_wrong_sums_are_found(tmp_path, monkeypatch):
    def scripted(bench, script, name, target, content):
        how = {"profile": "cpu", "settings": [], "dtype": "float32", "tp": 2, "output": bench.folder / "found.json"}
        write_json(bench.folder / "request.json", content | how | {"output": str(how["output"])})
        monkeypatch.setattr("sys.argv", ["probes", str(bench.folder / "request.json")])
        probes.main()
        return how["output"]

    monkeypatch.setattr(Bench, "scripted", scripted)
    monkeypatch.setattr(probes, "RUNS", 2)
    bench, names = rehearsal(tmp_path), [*measurements.COLLECTIVES]
    rows = [line.strip("| ").split(" | ") for line in measurements.collectives(bench, names)][4:]
    assert [row[0] for row in rows] == names
    assert all(row[-1] == "True" and float(row[4]) > 0 for row in rows)
    assert "unchanged." in next(measurements.outputs(bench))
    monkeypatch.setitem(probes.OPERATIONS, "sum", (probes.OPERATIONS["sum"][0], lambda x: x))
    with pytest.raises(pytest.fail.Exception, match="wrong numbers: sum of its norms"):
        list(measurements.collectives(bench, names[1:2]))


# Where a driver has its counter: to 2.30, and "moved several nodes to new paths" (2.31), we do not know where to.
def test_device_memory_is_read_core_by_core_wherever_the_driver_counts_it(tmp_path):
    place = "memory/device_mem"
    for core, counter, used in ((0, place, 5), (1, place, 7), (1, f"{place}/tensors", 1), (1, "host_mem", 2)):
        folder = tmp_path / f"sys/devices/virtual/neuron_device/neuron3/neuron_core{core}" / counter
        folder.mkdir(parents=True)
        (folder / "total").write_text(f"{used}\n")
    assert step_times.core_memory(tmp_path) == {"neuron3/neuron_core0": 5, "neuron3/neuron_core1": 7}
    assert step_times.core_memory(tmp_path / "elsewhere") == {}
