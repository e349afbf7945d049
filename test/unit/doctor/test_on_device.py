"""test/device without a device: sections that survive failures and restarts, the budget, the
three-way rule, what it measures, and the report."""

import dataclasses
import json
import subprocess
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from device import conftest as device_run
from device import measurements, probes, test_device
from device.bench import TINY_SIZE, WIDE, Bench, Model, Run
from device.comparisons import doctor, three_way
from device.report import Budget, Report, Section, Stopped
from device_rehearsal import command, rehearsal
from helpers import one_thread, randn, within  # noqa: F401
from tiny.config import TinySizes, released_config, tiny_config

from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.doctor.finding import Finding
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import UserError
from ltx_neuron.plan import __main__ as plan

ENDS = (pytest.skip.Exception, pytest.fail.Exception, UserError, ZeroDivisionError)
FOUND = "it found something"


def fails(error: Exception, *lines: str) -> Callable[[list], None]:
    """A section that finds these lines before it ends so."""

    def section(actual: list) -> None:
        actual.extend(lines)
        raise error

    return section


def finds(actual: list) -> None:
    actual.append(FOUND)


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
                runs.get(name, finds)(report.lines)


def statuses(report: Report) -> list[str]:
    return [report.result(name)["status"] for name in report.sections]


def test_a_failed_section_is_recorded_and_what_does_not_need_it_goes_on(reports):
    sections = (Section("a"), Section("b", needs=("a",)), Section("c"), Section("d", needs=("b",)))
    report = reports(*sections, Section("e", needs=("c",)))
    run_all(report, a=fails(pytest.fail.Exception("it broke"), "a row"))
    assert statuses(report) == ["failed", "not run", "done", "not run", "done"]
    assert report.done["a"]["why"] == "it broke" and report.done["a"]["lines"] == ["a row"]
    assert report.done["b"]["why"] == "needs a" and report.done["c"]["lines"] == [FOUND]


@pytest.mark.parametrize(
    ("error", "status", "why"),
    [
        (ZeroDivisionError("x"), "failed", "Traceback"),
        (UserError("typed wrongly"), "failed", "typed wrongly"),
        (pytest.skip.Exception("no Neuron device"), "not run", "no Neuron device"),
        (Stopped("the budget ended"), "stopped", "the budget ended"),
    ],
    ids=["error", "mistake", "skipped", "stopped"],
)
def test_how_a_section_ends_and_what_it_found_before_are_recorded(reports, error, status, why):
    run_all(reports(Section("a"), Section("b")), a=fails(error, "half of it"))
    report = reports(Section("a"), Section("b"), restored=True)
    assert statuses(report) == [status, "done"] and why in report.done["a"]["why"]
    assert report.done["a"]["lines"] == ["half of it"] and report.done["b"]["lines"] == [FOUND]


def test_what_earlier_runs_found_is_kept_where_they_ran_the_same(reports):
    with pytest.raises(UserError, match="nothing was run in .*: leave --lf out"):
        reports(Section("a"), restored=True)
    sections = (Section("a"), Section("b"), Section("c", needs=("a",)))
    run_all(reports(*sections), b=fails(pytest.fail.Exception("broke")))
    again = reports(*sections, restored=True)
    assert statuses(again) == ["done", "failed", "done"]
    run_all(again, a=fails(ZeroDivisionError()), c=fails(ZeroDivisionError()))
    assert statuses(reports(*sections, restored=True)) == ["done"] * 3
    with pytest.raises(UserError, match="of another run: code differ. Leave --lf out"):
        reports(*sections, code="2", restored=True)
    assert reports(*sections, code="2").done == {}


def test_the_report_names_every_section_and_shows_what_each_found(reports):
    report = reports(*map(Section, ("a", "b_c", "d")))
    run_all(report, b_c=fails(pytest.fail.Exception("it | broke\nhere"), "half of it"))
    report.done.pop("d")
    text = report.markdown()
    assert "- profile: cpu" in text and "| a | done | 0.0 |" in text
    assert "| b c | failed: it \\| broke | 0.0 |" in text
    assert "Sections that were not reached: 1." in text and f"## a\n\n{FOUND}" in text
    assert "half of it\n\n```\nit | broke\nhere\n```" in text


def test_the_rule_compares_with_twice_the_cpu_s_own_rounding():
    exact = {"video": randn(1, 8, 16), "audio": randn(1, 4, 16, seed=1)}

    def off(share: float, seed: int) -> dict:
        """The tensors with an error of that share of their norm."""
        tensors = {}
        for name, value in exact.items():
            error = randn(*value.shape, seed=seed)
            tensors[name] = value + share * value.norm() * error / error.norm()
        return tensors

    rows = [*three_way(off(0.023, 2), off(0.01, 3), exact, ("video", "audio"))]
    assert "| video | 2.3" in rows[2] and len(rows) == 4
    wrong = "further from fp32 than the rule allows: video, audio"
    with pytest.raises(pytest.fail.Exception, match=wrong):
        [*three_way(off(0.027, 2), off(0.01, 3), exact, ("video", "audio"))]
    nan = {name: value * float("nan") for name, value in exact.items()}
    for device, bf16 in ((nan, off(0.01, 3)), (exact, nan)):
        with pytest.raises(pytest.fail.Exception):
            [*three_way(device, bf16, exact, ("video",))]


def test_the_wide_model_has_the_release_s_width_and_two_blocks():
    wide, released = (transformer_config(config) for config in (tiny_config(WIDE), released_config()))
    assert wide.num_layers == 2 and released.num_layers == 48
    for size in ("video", "audio", "video_connector", "audio_connector"):
        assert getattr(wide, size) == getattr(released, size)


def test_the_tiny_model_s_heads_are_too_small_for_the_kernel_and_the_wide_one_s_are_not():
    def settings(profile: str, name: str) -> tuple[str, ...]:
        bench = Bench(Namespace(dtype="bfloat16"), resolve(profile, ("lnc=2",)))
        model = Model(name, None, None, None, TINY_SIZE, None)
        return bench.device(model).settings

    # nki-library tests attention_cte with heads of 64 channels and more.
    assert min(TinySizes().head_dim, TinySizes().audio_head_dim) < 64
    assert min(WIDE.head_dim, WIDE.audio_head_dim) >= 64
    assert settings("trn2.3xlarge", "tiny") == ("lnc=2", "attention=matmul")
    for profile, name in (("trn2.3xlarge", "wide"), ("trn2.3xlarge", "full"), ("cpu", "tiny")):
        assert settings(profile, name) == ("lnc=2",)


# --- the budget -----------------------------------------------------------------------------------

# Asks to be left alone, as what hangs in a driver does, and has children: one beside it, and one in
# a session of its own, as a variant of a tuning is.
HANGS = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    print("measured: 1 ms", *(child.pid for child in children), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def bench(tmp_path, monkeypatch) -> Callable[..., Bench]:
    """bench(minutes). Scripts have little time to tidy up."""
    monkeypatch.setattr("device.bench.TIDY_SECONDS", 0.5)
    return partial(rehearsal, tmp_path)


def hanging(bench: Bench) -> Callable[[list], None]:
    """A section that finds a line, and then never ends."""

    def section(actual: list) -> None:
        actual.append("half of it")
        bench.run("hangs", "-c", textwrap.dedent(HANGS))

    return section


def pids_of(folder: Path) -> list[int]:
    words = (folder / "logs/hangs.log").read_text().split()
    return [int(word) for word in words if word.isdigit() and word != "1"]


def runs(pid: int) -> bool:
    """Whether a process runs: one that has ended stays in the table until its parent asks."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_does_not_fit_the_budget_is_left_out_and_what_does_still_runs(reports):
    sections = (Section("a", minutes=9), Section("b", minutes=1))
    report = reports(*sections, budget=Budget(5))
    run_all(report)
    assert statuses(report) == ["not reached", "done"]
    assert report.done["a"]["why"] == "takes about 9 minutes, 5.0 are left"
    unlimited = reports(*sections, restored=True)
    run_all(unlimited)
    assert statuses(unlimited) == ["done", "done"]


def test_the_budget_s_end_stops_a_section_with_all_it_started_and_keeps_what_was_found(bench, reports):
    bench = bench(minutes=0.1)
    sections = (Section("a", minutes=0), Section("hangs", minutes=0.05), Section("c"))
    report = reports(*sections, budget=bench.budget)
    with within(30):
        run_all(report, hangs=hanging(bench))
    kept = reports(*sections, restored=True)
    assert statuses(kept) == ["done", "stopped", "not reached"]
    assert kept.done["a"]["lines"] == [FOUND] and kept.done["hangs"]["lines"] == ["half of it"]
    why = kept.done["hangs"]["why"]
    assert "the budget ended" in why and "measured: 1 ms" in why
    pids = pids_of(bench.folder)
    assert len(pids) == 2 and not any(map(runs, pids))
    text = kept.markdown()
    assert "| hangs | stopped: hangs was stopped after 0.1 minutes" in text and "half of it" in text
    run_all(kept)  # with time of its own
    assert statuses(kept) == ["done"] * 3


def test_what_an_interrupted_section_found_is_kept(reports):
    report = reports(Section("a"), Section("b"))
    with pytest.raises(KeyboardInterrupt):
        run_all(report, a=fails(KeyboardInterrupt(), "half of it"))
    assert statuses(report) == ["stopped", "not reached"] and "b" not in report.done
    assert report.done["a"]["lines"] == ["half of it"]


def test_a_tuning_that_is_stopped_shows_what_it_measured(bench, reports, tiny, monkeypatch):
    """Its own process writes a row for each variant; what it measured it does not measure again."""
    rows = "the profile's own: 12.50 ms a step\nattention=matmul: 13.00 ms a step\n"

    def run(self, log: str, *command):
        self.log(log).parent.mkdir()
        self.log(log).write_text(rows)
        raise Stopped("the budget ended")

    monkeypatch.setattr(Bench, "run", run)
    model = Model("tiny", tiny.checkpoint, None, None, TINY_SIZE, Path("artifacts"))
    report, bench = reports(Section("tune")), bench(minutes=5)
    run_all(report, tune=lambda actual: actual.extend(measurements.tune(bench, model)))
    assert statuses(report) == ["stopped"]
    assert report.done["tune"]["lines"] == ["```", rows.rstrip(), "```"]


def test_a_script_with_a_time_of_its_own_leaves_its_section_the_rest(bench):
    bench = bench(minutes=30)
    with pytest.raises(pytest.fail.Exception, match="sleeps was stopped after 0.0 minutes, its longest time"):
        bench.run("sleeps", "-c", "import time; time.sleep(600)", seconds=0.5)
    assert bench.run("sleeps", "-c", "print('on')").output == "on\n"


def test_a_section_that_hangs_takes_no_more_than_some_times_its_estimate(bench, reports):
    bench = bench(minutes=30)
    report = reports(Section("hangs", minutes=0.02), Section("next"), budget=bench.budget)
    run_all(report, hangs=hanging(bench))
    assert statuses(report) == ["stopped", "done"]
    assert "4 times the estimate" in report.done["hangs"]["why"]
    assert report.done["hangs"]["seconds"] < 30
    assert not any(map(runs, pids_of(bench.folder)))


# --- the command ----------------------------------------------------------------------------------


def test_without_a_device_each_section_is_skipped_with_the_command_that_would_run_it():
    words = [sys.executable, "-m", "pytest", "test/device", "-p", "no:cacheprovider"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    count = len(test_device.SECTIONS)
    assert f"{count} cases skipped: no Neuron device; with one: {device_run.RUN}; " in run.stdout
    assert device_run.REHEARSAL in run.stdout and "failed" not in run.stdout


def test_a_mistake_in_the_flags_ends_the_command_before_its_first_section(tmp_path):
    for minutes in (0.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="wanted minutes above 0"):
            Budget(minutes)
    run = subprocess.run([*command(tmp_path), "--minutes", "0"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "wanted minutes above 0" in run.stderr and "..." not in run.stdout


def test_by_their_estimates_a_page_takes_ten_minutes_and_ltx25_ends_within_the_hour():
    ends, minutes = {}, 0.0
    for section in test_device.SECTIONS:
        minutes += section.minutes
        ends[section.name] = minutes
    first = [name for name, end in ends.items() if end <= 9.5]  # starting takes time too
    assert first == [
        "doctor",
        "a_collective",
        "two_blocks_shard_and_compile",
        "two_blocks_one_step_against_the_cpu",
        "two_blocks_a_step_by_its_graphs",
    ]
    later = [end for name, end in ends.items() if "ltx25" in name]
    assert len(later) == 4 and max(later) <= 60


# --- what it measures -----------------------------------------------------------------------------


def test_the_page_has_the_doctor_s_verdict_and_of_its_findings_those_that_are_not_ok(bench, monkeypatch):
    findings = [
        Finding("torch", "ok", "2.9.0"),
        Finding("nxd", "note", "ends | with 2.34"),
        Finding("driver", "ok", "2.29"),
    ]
    content = {"can_run": True, "findings": list(map(dataclasses.asdict, findings))}
    output = f"a warning\n{json.dumps(content, indent=1)}\nanother"
    monkeypatch.setattr(Bench, "run", lambda *_, **__: Run(output, 1.0, {}))
    lines = [*doctor(bench())]
    assert lines[0] == "2 checks are ok; nothing blocks this run."
    assert lines[-1] == "| note | nxd | ends \\| with 2.34 |" and len(lines) == 5
    findings[0] = dataclasses.replace(findings[0], state="blocks")
    content = {"can_run": False, "findings": list(map(dataclasses.asdict, findings))}
    output = json.dumps(content, indent=1)
    actual = doctor(bench())
    assert next(actual) == "1 checks are ok; this run is blocked by: torch."
    with pytest.raises(pytest.fail.Exception, match="something blocks"):
        list(actual)


def test_a_measured_step_has_the_plan_s_forecast_of_the_same_step_beside_it(bench, tiny, capsys):
    """Of the same counts as `ltx-neuron plan`."""
    on_cpu = bench()
    on_chip = dataclasses.replace(on_cpu, profile=resolve("trn2.3xlarge"))
    model = Model("tiny", tiny.checkpoint, None, None, TINY_SIZE, Path("artifacts"))
    words = ["--profile", "trn2.3xlarge", "--checkpoint-path", str(tiny.checkpoint)]
    words += [str(word) for word in on_chip.scripts(model, on_chip.device(model)).size]
    plan.main([*words, "--json"])
    expected = measurements.planned(on_chip, model)
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert json.loads(json.dumps(dataclasses.asdict(expected)["stages"])) == stages
    forecast = expected.stages[-1].forecast
    lines = [*measurements.forecast_lines(expected, 1.5 * forecast.middle)]
    assert lines[0].startswith(f"Forecast of this step: {forecast.low:.1f} to {forecast.high:.1f}")
    assert lines[0].endswith("Measured / forecast: 1.50.")
    assert [line.split(" | ")[0][2:] for line in lines[4:]] == [p.name for p in forecast.parts]
    (none,) = measurements.forecast_lines(measurements.planned(on_cpu, model), 1.0)
    assert none == "Forecast: none, profile cpu has no documented limits."


def test_the_driver_s_counters_are_read_beside_a_script(bench, tmp_path):
    counter = tmp_path / "sys/devices/virtual/neuron_device/neuron0/neuron_core1/stats/device_mem"
    counter.mkdir(parents=True)
    (counter / "total").write_text("100")
    run = bench(system=System(tmp_path)).run("sleeps", "-c", "import time; time.sleep(1.2)")
    assert run.memory == {"neuron0/neuron_core1": 100}


def test_an_overwritten_output_is_a_failure(bench, monkeypatch):
    actual = {"right": True, "kept": False, "raw": False}
    monkeypatch.setattr(measurements, "_probe", lambda *_: actual)
    with pytest.raises(pytest.fail.Exception, match="guided generation combines overwritten predictions"):
        list(measurements.outputs(bench()))


def test_collectives_are_timed_and_give_what_they_should(bench):
    lines = [*measurements.collectives(bench(), measurements.COLLECTIVES)]
    assert lines[0] == "4 ranks, 8 tokens."
    rows = [line.strip("| ").split(" | ") for line in lines[4:]]
    assert [row[0] for row in rows] == ["sum of a stream", "sum of its norms", "gather and scattered sum of a stream"]
    assert all(row[-1] == "True" and float(row[4]) > 0 for row in rows)


def test_what_collectives_should_give_depends_on_the_groups():
    x = probes.rank_numbers(4, (2, 1))  # 0 0 1 1 2 2 3 3
    groups = [[0, 2], [1, 3]]
    wanted = {
        "sum": [2, 2, 4, 4, 2, 2, 4, 4],
        "gather": [0, 0, 2, 2, 1, 1, 3, 3] * 2,
        "gather and scatter": [0, 0, 2, 2, 4, 4, 6, 6],
    }
    for operation, values in wanted.items():
        assert probes.expected(x, groups, operation).flatten().tolist() == values


def test_groups_to_try_on_a_torus_divide_all_ranks_equally():
    for name, groups in probes.torus_groups(4).items():
        assert sorted(rank for group in groups for rank in group) == [*range(64)], name
        assert len({len(group) for group in groups}) == 1
    rows = probes.torus_groups(4)["a rank of each of a row"]
    assert rows[0] == [0, 4, 8, 12] and len(rows) == 16


def test_groups_are_not_tried_on_one_chip(bench):
    small = dataclasses.replace(bench(), profile=resolve("trn2.3xlarge"))
    with pytest.raises(pytest.skip.Exception, match="16 chips are wanted, trn2.3xlarge has 1"):
        list(measurements.groups(small))


def test_a_group_that_cannot_be_routed_leaves_the_others(bench, monkeypatch):
    def probe(bench, name: str, content: dict) -> dict:
        if len(content["groups"][0]) == 8:
            pytest.fail("group ended with exit code 1 (log):\nno hierarchical, no mesh algorithm")
        return {"cases": [{"ms": 1.0, "right": True}, {"ms": 2.0, "right": True}]}

    monkeypatch.setattr(measurements, "_probe", probe)
    system = System(output=lambda *_: "neuron-ls says this")
    large = dataclasses.replace(bench(system=system), profile=resolve("trn2.48xlarge"))
    lines = [*measurements.groups(large)]
    failed = [line for line in lines if "(log): no hierarchical, no mesh algorithm |" in line]
    names = [line.split(" | ")[0] for line in failed]
    assert names == ["| a rank of each of two rows", "| two neighbours"]
    assert sum("| 1.000 | 2.000 | both |" in line for line in lines) == 6
    assert "neuron-ls says this" in lines
