"""benchmarks/on_device.py: sections that survive failures and restarts, the budget, the three-way
rule, what it measures, and the report."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from argparse import Namespace
from pathlib import Path

import on_device
import psutil
import pytest
from conftest import ROOT
from helpers import one_thread, randn  # noqa: F401
from lib import measurements, probes, step_times
from lib.bench import TINY_SIZE, WIDE, Bench, Model, request
from lib.sections import (
    Budget,
    Failed,
    NotRun,
    Section,
    Stopped,
    markdown,
    restored,
    run_all,
    three_way,
)

from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json, write_json
from ltx_neuron.profiles import resolve
from ltx_neuron.tiny.config import TinySizes, released_config, tiny_config

FACTS = {"profile": "cpu"}


def section(
    name: str, *needs: str, raises: Exception | None = None, ran: list | None = None
) -> Section:
    """A section that appends its name to `ran`, then reports a line or fails with `raises`."""

    def run(bench) -> list[str]:
        if ran is not None:
            ran.append(name)
        if raises:
            raise raises
        return [f"{name} found something"]

    return Section(name, run, needs)


def test_a_failed_section_is_recorded_and_what_does_not_need_it_goes_on():
    broken = Failed("it broke", ["a row"])
    sections = (
        section("a", raises=broken),
        section("b", "a"),
        section("c"),
        section("d", "b"),
        section("e", "c"),
    )
    kept = []
    done = run_all(sections, None, {}, lambda now: kept.append(dict(now)), Budget())
    assert {name: result["status"] for name, result in done.items()} == {
        "a": "failed",
        "b": "not run",
        "c": "done",
        "d": "not run",
        "e": "done",
    }
    assert (
        done["a"]["why"] == "it broke"
        and done["a"]["lines"] == ["a row"]
        and done["b"]["why"] == "needs a"
    )
    assert [len(now) for now in kept] == [1, 2, 3, 4, 5]


def test_any_error_is_a_failed_section_and_no_section_that_cannot_run_is_one():
    sections = (
        section("a", raises=ZeroDivisionError("x")),
        section("b", raises=UserError("typed wrongly")),
        section("c", raises=NotRun("no Neuron device")),
    )
    done = run_all(sections, None, {}, lambda now: None, Budget())
    assert (
        done["a"]["status"] == done["b"]["status"] == "failed" and done["c"]["status"] == "not run"
    )
    assert (
        "Traceback" in done["a"]["why"]
        and done["b"]["why"] == "typed wrongly"
        and done["c"]["why"] == "no Neuron device"
    )


def test_typed_again_only_what_is_not_finished_runs(tmp_path):
    ran, path = [], tmp_path / "state.json"

    def sections(**raises):
        return tuple(section(name, ran=ran, raises=raises.get(name)) for name in ("a", "b", "c"))

    keep = lambda now: write_json(path, {"identity": {"code": "1"}, "sections": now})  # noqa: E731
    run_all(
        sections(b=Failed("broke"), c=NotRun("no file")),
        None,
        restored(path, {"code": "1"}, False),
        keep,
        Budget(),
    )
    again = run_all(sections(), None, restored(path, {"code": "1"}, False), keep, Budget())
    assert ran == ["a", "b", "c", "b", "c"] and {result["status"] for result in again.values()} == {
        "done"
    }
    assert restored(path, {"code": "1"}, anew=True) == {}
    with pytest.raises(UserError, match="of another run: code differ. Type --anew"):
        restored(path, {"code": "2"}, False)


def test_the_report_names_every_section_and_shows_what_each_found():
    sections = (
        section("a"),
        section("b", raises=Failed("it | broke\nhere", ["half of it"])),
        section("c"),
        section("d"),
    )
    done = run_all(sections[:3], None, {}, lambda now: None, Budget())
    text = markdown(sections, done, FACTS)
    assert (
        "- profile: cpu" in text
        and "| a | done |" in text
        and "| b | failed: it \\| broke |" in text
    )
    assert "| d | not run: not reached |" in text and "## a\n\na found something" in text
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

    assert "| video | 2.3" in three_way(off(0.023, 2), off(0.01, 3), exact, ("video", "audio"))[2]
    with pytest.raises(
        Failed, match="further from fp32 than the rule allows: video, audio"
    ) as failed:
        three_way(off(0.027, 2), off(0.01, 3), exact, ("video", "audio"))
    assert len(failed.value.lines) == 4
    nan = {name: value * float("nan") for name, value in exact.items()}
    with pytest.raises(Failed):
        three_way(nan, off(0.01, 3), exact, ("video",))
    with pytest.raises(Failed):
        three_way(exact, nan, exact, ("video",))


def test_the_wide_model_has_the_release_s_width_and_two_blocks():
    wide, released = (
        transformer_config(config) for config in (tiny_config(WIDE), released_config())
    )
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


def test_sections_need_only_sections_that_come_before_them():
    names = [section.name for section in on_device.SECTIONS]
    assert len(names) == len(set(names))
    for index, section in enumerate(on_device.SECTIONS):
        assert set(section.needs) <= set(names[:index])


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
def bench(tmp_path, monkeypatch):
    """bench(minutes) in a folder of its own. Scripts have little time to tidy up."""
    monkeypatch.setattr("lib.bench.TIDY_SECONDS", 0.5)

    def make(minutes: float | None = None, system: System | None = None) -> Bench:
        args = Namespace(work_dir=tmp_path, dtype="bfloat16", tp_degree=None)
        args = Namespace(**vars(args), height=64, width=64, num_frames=9, frame_rate=24.0)
        args.two_stage, args.video_path = False, None
        return Bench(args, resolve("cpu"), system or System(), Budget(minutes))

    return make


def hanging(minutes: float) -> Section:
    """A section that yields a line, and then never ends."""

    def run(bench: Bench):
        yield "half of it"
        bench.run("hangs", "-c", textwrap.dedent(HANGS))
        yield "never"

    return Section("hangs", run, minutes=minutes)


def pids_of(folder: Path) -> list[int]:
    words = (folder / "logs/hangs.log").read_text().split()
    return [int(word) for word in words if word.isdigit() and word != "1"]


def runs(pid: int) -> bool:
    """Whether a process runs: one that has ended stays in the table until its parent asks."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_does_not_fit_the_budget_is_left_out_and_what_does_still_runs():
    ran = []
    long, short = (section(name, ran=ran)._replace(minutes=m) for name, m in (("a", 9), ("b", 1)))
    done = run_all((long, short), None, {}, lambda now: None, Budget(5))
    assert ran == ["b"] and done["a"]["status"] == "not run"
    assert done["a"]["why"] == "takes about 9 minutes, 5.0 are left"
    assert run_all((long, short), None, {}, lambda now: None, Budget())["a"]["status"] == "done"


def test_the_budget_s_end_stops_a_section_with_all_it_started_and_keeps_what_was_found(bench):
    bench = bench(minutes=0.1)
    path, sections = bench.folder / "state.json", (section("a"), hanging(0.05), section("c"))
    sections = (sections[0]._replace(minutes=0), sections[1], sections[2])
    keep = lambda now: write_json(path, {"identity": {}, "sections": now})  # noqa: E731
    began = time.monotonic()
    run_all(sections, bench, {}, keep, bench.budget)
    assert time.monotonic() - began < 30
    kept = restored(path, {}, False)
    assert [kept[name]["status"] for name in ("a", "hangs", "c")] == ["done", "stopped", "not run"]
    assert kept["a"]["lines"] == ["a found something"] and kept["hangs"]["lines"] == ["half of it"]
    assert "the budget ended" in kept["hangs"]["why"] and "measured: 1 ms" in kept["hangs"]["why"]
    pids = pids_of(bench.folder)
    assert len(pids) == 2 and not any(map(runs, pids))
    text = markdown(sections, kept, FACTS)
    assert "| hangs | stopped: hangs was stopped after 0.1 minutes" in text and "half of it" in text
    # Typed again, with time of its own.
    again = run_all((*sections[:1], section("hangs"), sections[2]), None, kept, keep, Budget())
    assert {result["status"] for result in again.values()} == {"done"}


def test_what_an_interrupted_section_found_is_kept():
    def run(bench):
        yield "half of it"
        raise KeyboardInterrupt

    kept = {}
    sections = (Section("a", run), section("b"))
    with pytest.raises(KeyboardInterrupt):
        run_all(sections, None, {}, kept.update, Budget())
    assert kept["a"]["status"] == "stopped" and kept["a"]["lines"] == ["half of it"]
    assert "b" not in kept


def test_a_tuning_that_is_stopped_shows_what_it_measured(bench, tiny, monkeypatch):
    """Its own process writes a row for each variant; what it measured it does not measure again."""
    rows = "the profile's own: 12.50 ms a step\nattention=matmul: 13.00 ms a step\n"

    def run(self, log: str, *command):
        self.log(log).parent.mkdir()
        self.log(log).write_text(rows)
        raise Stopped("the budget ended")

    monkeypatch.setattr(Bench, "run", run)
    model = Model("tiny", tiny.checkpoint, None, None, TINY_SIZE, Path("artifacts"))
    tuning = Section("tune", lambda bench: measurements.tune(bench, model))
    done = run_all((tuning,), bench(minutes=5), {}, lambda now: None, Budget())
    assert done["tune"]["status"] == "stopped"
    assert done["tune"]["lines"] == ["```", rows.rstrip(), "```"]


def test_a_script_with_a_time_of_its_own_leaves_its_section_the_rest(bench):
    bench = bench(minutes=30)
    with pytest.raises(Failed, match="sleeps was stopped after 0.0 minutes, its longest time"):
        bench.run("sleeps", "-c", "import time; time.sleep(600)", seconds=0.5)
    assert bench.run("sleeps", "-c", "print('on')").output == "on\n"


def test_a_section_that_hangs_takes_no_more_than_some_times_its_estimate(bench):
    bench = bench(minutes=30)
    sections = (hanging(0.02), section("next"))
    done = run_all(sections, bench, {}, lambda now: None, bench.budget)
    assert done["hangs"]["status"] == "stopped"
    assert "4 times the estimate" in done["hangs"]["why"]
    assert done["next"]["status"] == "done" and done["hangs"]["seconds"] < 30
    assert not any(map(runs, pids_of(bench.folder)))


def test_the_command_keeps_what_it_has_when_it_is_killed_and_goes_on_from_there(tmp_path):
    """SIGKILL in the middle of its second section; then with a budget that has no room for the
    third."""
    command = [sys.executable, ROOT / "benchmarks/on_device.py", "--profile", "cpu"]
    command += ["--skip-wide", "--work-dir", tmp_path / "work"]
    state, report = tmp_path / "work/state.json", tmp_path / "work/report.md"
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    printed = iter(process.stdout.readline, "")
    second = on_device.SECTIONS[1].name
    assert any(line.startswith(second) for line in printed)
    started = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for each in started:
        each.kill()
    assert read_json(state)["sections"]["doctor"]["status"] == "done"
    assert "| doctor | done |" in report.read_text() and f"| {second} | not" in report.read_text()
    again = subprocess.run(
        [*command, "--minutes", "3.5"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "doctor: done before" in again.stdout and f"{second} ...\n  done" in again.stdout
    text = report.read_text()
    for each in on_device.SECTIONS:
        assert f"| {each.name} | " in text
    assert "tiny: shard and compile | not run: takes about 4 minutes, 3." in text
    assert "unchanged." in text and "- versions: torch" in text


def test_the_report_has_no_names_of_people(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lib.redact._user", lambda: "erika")

    def found(bench) -> list[str]:
        return [f"weights of erika in {Path.home()}/clips", "hf_abcdefghijklmnopqrstuv"]

    monkeypatch.setattr(on_device, "SECTIONS", (Section("a", found),))
    monkeypatch.setattr("sys.argv", ["on_device.py", "--profile", "cpu", "--work-dir", "w"])
    on_device.main()
    text = (tmp_path / "w/report.md").read_text()
    assert "weights of <user> in ~/clips" in text and "hf_abc" not in text


def test_minutes_that_are_none_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for minutes in ("0", "nan", "inf"):
        monkeypatch.setattr("sys.argv", ["on_device.py", "--profile", "cpu", "--minutes", minutes])
        with pytest.raises(UserError, match="wanted minutes above 0"):
            on_device.main()


# --- what it measures -----------------------------------------------------------------------------


def test_neuron_monitor_is_not_started_beside_a_script(bench, tmp_path, monkeypatch):
    """Where the driver has no counters it alone tells the memory, and is a process to start."""
    started = []
    monkeypatch.setattr("lib.core_memory.first_line_of", lambda *words: started.append(words))
    bench(system=System(tmp_path)).run("sleeps", "-c", "import time; time.sleep(1.2)")
    assert started == []


def test_the_driver_s_counters_are_read_beside_a_script(bench, tmp_path):
    counter = tmp_path / "sys/devices/virtual/neuron_device/neuron0/neuron_core1/stats/device_mem"
    counter.mkdir(parents=True)
    (counter / "total").write_text("100")
    run = bench(system=System(tmp_path)).run("sleeps", "-c", "import time; time.sleep(1.2)")
    assert run.memory == {"neuron0/neuron_core1": 100}


def test_an_output_that_is_kept_survives_the_graph_s_next_run(bench):
    lines = [*measurements.outputs(bench())]
    assert lines[0].endswith("next runs: unchanged.")


def test_an_overwritten_output_is_a_failure(bench, monkeypatch):
    found = {"right": True, "kept": False, "raw": False}
    monkeypatch.setattr(measurements, "_probe", lambda *_: found)
    with pytest.raises(Failed, match="guided generation combines overwritten predictions"):
        list(measurements.outputs(bench()))


def test_collectives_are_timed_and_give_what_they_should(bench):
    lines = [*measurements.collectives(bench())]
    assert lines[0] == "4 ranks, 8 tokens."
    rows = [line.strip("| ").split(" | ") for line in lines[4:]]
    assert [row[0] for row in rows] == [
        "sum of a stream",
        "sum of its norms",
        "gather and scattered sum of a stream",
    ]
    assert all(row[-1] == "True" and float(row[3]) > 0 for row in rows)


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
    with pytest.raises(NotRun, match="16 chips are wanted, trn2.3xlarge has 1"):
        list(measurements.groups(small))


def test_a_group_that_cannot_be_routed_leaves_the_others(bench, monkeypatch):
    def probe(bench, name: str, content: dict) -> dict:
        if len(content["groups"][0]) == 8:
            raise Failed("group ended with exit code 1 (log):\nno hierarchical, no mesh algorithm")
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


@pytest.fixture
def blocks(bench, tiny) -> tuple[Bench, Model]:
    """The model of two blocks, which the tiny one stands for: sharded."""
    bench = bench()
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
