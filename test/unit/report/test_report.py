"""The latency report: what is recorded and printed, what makes the command line fail; and what a terminal shows."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from typed import ended

from ltx_neuron.errors import UserError
from ltx_neuron.report import latency, plot
from ltx_neuron.report.__main__ import main as report_main
from ltx_neuron.report.latency import PHASES, Recorder
from ltx_neuron.report.price import Price
from ltx_neuron.report.progress import TITLES, PhaseLines, bar, line

JOB = {"height": 384, "width": 512, "prompt": "a very long prompt " * 20}


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The recorder's clock, which stands still at `now`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def report_of(recorder: Recorder) -> dict:
    return recorder.report({}, "cpu", 1, {}, {})


def recorded(stage_1=(900.0, 100.0, 110.0, 120.0), stage_2=(500.0, 300.0), peak_flops=1e12) -> dict:
    recorder = Recorder()
    for name in ("load_gemma3", "denoise_stage_1", "decode_video", "decode_video"):
        with recorder.phase(name):
            time.sleep(0.002)
    for stage, steps in (("stage_1", stage_1), ("stage_2", stage_2)):
        for milliseconds in steps:
            recorder.step(stage, milliseconds, 0.75 * milliseconds)
    recorder.counters.bytes_to_device_per_step = 2_000_000
    recorder.counters.collectives_per_step = {"count": 96, "bytes": 5_000_000}
    recorder.counters.flops_per_step = {"stage_1": 1e10, "stage_2": 3e10}
    recorder.counters.peak_flops = peak_flops
    return recorder.report(JOB, "cpu", 4, {"torch": "2.13"}, {"checkpoint": "abc"})


def write(path: Path, report: dict) -> str:
    path.write_text(json.dumps(report))
    return str(path)


def test_phases_do_not_nest_and_have_only_the_known_names():
    recorder = Recorder()
    with pytest.raises(ValueError, match="unknown phase 'cook'"), recorder.phase("cook"):
        pass
    with recorder.phase("upsample"):
        with pytest.raises(RuntimeError, match="warmup starts inside phase upsample"), recorder.phase("warmup"):
            pass
        with pytest.raises(RuntimeError, match="inside phase upsample"):
            report_of(recorder)
    with pytest.raises(ZeroDivisionError), recorder.phase("warmup"):
        raise ZeroDivisionError
    with recorder.phase("warmup"):  # after one that failed
        pass
    with pytest.raises(AttributeError):
        recorder.counters.flops = 1


def test_every_moment_counts_for_one_phase_or_is_the_residual_and_overlapped_time_is_separate(clock):
    """The main thread denoises for 3 s and then waits for 2 s, while two others decode all the time."""
    recorder, until, began = Recorder(), threading.Event(), threading.Semaphore(0)

    def decode(name: str) -> None:
        with recorder.phase(name):
            began.release()
            until.wait()

    with ThreadPoolExecutor(2) as pool:
        for name in ("decode_video", "decode_audio"):
            pool.submit(decode, name)
            began.acquire()
        with recorder.phase("denoise_stage_1"):
            clock.now += 3
        clock.now += 2
        early = {phase["name"]: phase for phase in report_of(recorder)["phases"]}
        until.set()
    clock.now += 5
    report = report_of(recorder)
    phases = {phase["name"]: (phase["seconds"], phase.get("overlapped_seconds")) for phase in report["phases"]}
    assert phases == {"denoise_stage_1": (3, None), "decode_video": (2, 3), "decode_audio": (0, 5)}
    assert (report["residual_seconds"], report["end_to_end_seconds"]) == (5, 10)
    # A report in the middle of a run counts what other threads are in.
    assert early["decode_video"]["seconds"] == 2 and early["decode_video"]["peak_rss_bytes"] > 0
    latency.validate(report)
    text, plain = latency.table(report), latency.table(recorded())
    assert "overlapped s" in text and "overlapped" not in plain and max(map(len, text.splitlines())) <= 100
    assert latency.numbers(report)["phases.decode_video.overlapped_seconds"] == 3


def test_a_paused_phase_does_not_count_the_phases_that_it_waits_for(clock):
    recorder = Recorder()

    def decoded():
        with recorder.phase("decode_video"):
            for number in range(3):
                clock.now += 2
                with recorder.paused():
                    yield number

    numbers = decoded()
    with recorder.phase("encode_mp4"):
        for _ in range(3):
            with recorder.paused():
                next(numbers)
            clock.now += 1
        with recorder.paused():
            assert list(numbers) == []
    with recorder.paused(), recorder.phase("decode_audio"):  # outside a phase
        pass
    phases = report_of(recorder)["phases"]
    seconds = [(phase["name"], phase["seconds"]) for phase in phases]
    assert seconds == [("decode_video", 6), ("encode_mp4", 3), ("decode_audio", 0)]
    assert all("overlapped_seconds" not in phase for phase in phases)


# In a process of its own: in a long session's, which has 1.4 GB with its own children, the child of 60 MB did not show
# once. Two children one after another, then a grandchild.
CHILDREN = """
import subprocess, sys, time
from ltx_neuron.report import latency as recording
recording._PeakMemory.LIST_SECONDS = 0.1
recorder = recording.Recorder()
code = "import time; held = b'x' * {}; print(1, flush=True); time.sleep(0.8)"
with recorder.phase("load_gemma3"):
    pass
with recorder.phase("decode_audio"):
    for size in (1, 60_000_000):
        subprocess.run([sys.executable, "-c", code.format(size)], check=True, stdout=subprocess.DEVNULL)
        time.sleep(0.1)
with recorder.phase("unload_transformer"):
    pass
with recorder.phase("encode_text"):
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code.format(60_000_000)!r}])"
    subprocess.run([sys.executable, "-c", child], check=True, stdout=subprocess.DEVNULL)
print(*(phase["peak_rss_bytes"] for phase in recorder.report({}, "cpu", 1, {}, {})["phases"]))
"""


def test_peak_memory_sees_children_and_grandchildren_that_start_and_end_within_the_phase():
    run = subprocess.run([sys.executable, "-c", CHILDREN], check=True, stdout=subprocess.PIPE)
    before, children, after, grandchild = map(int, run.stdout.split())
    assert children - before > 60e6 and children - after > 50e6 and grandchild - after > 60e6


def test_the_report_has_exactly_the_fields_of_schema_1():
    report = recorded()
    fields = "schema job profile tp versions identity phases denoise_steps_ms warm_step_ms bytes_to_device_per_step"
    fields += " launches_per_step collectives_per_step flops_per_step weight_swaps percent_of_peak end_to_end_seconds"
    assert list(report) == f"{fields} residual_seconds clips video_seconds start_to_first_clip".split()
    inputs = {"schema": 1, "job": JOB, "profile": "cpu", "tp": 4}
    inputs |= {"versions": {"torch": "2.13"}, "identity": {"checkpoint": "abc"}, "start_to_first_clip": None}
    inputs |= {"collectives_per_step": {"count": 96, "bytes": 5_000_000}, "bytes_to_device_per_step": 2_000_000}
    assert report.items() >= inputs.items()
    assert all(list(phase) == ["name", "seconds", "peak_rss_bytes"] for phase in report["phases"])
    latency.validate(report)
    latency.validate(report_of(Recorder()))


def test_the_cold_step_is_kept_in_the_list_and_stays_out_of_the_warm_numbers():
    report = recorded()
    assert report["denoise_steps_ms"] == {"stage_1": [900, 100, 110, 120], "stage_2": [500, 300]}
    assert report["warm_step_ms"]["stage_1"] == {"median": 110, "p90": pytest.approx(118), "host": 27.5, "device": 82.5}
    assert report["warm_step_ms"]["stage_2"] == {"median": 300, "p90": 300, "host": 75, "device": 225}
    for steps in ((), (500.0,)):
        report = recorded(stage_1=steps, stage_2=())
        assert report["denoise_steps_ms"] == {"stage_1": list(steps), "stage_2": []}
        assert report["warm_step_ms"]["stage_1"] == dict.fromkeys(("median", "p90", "host", "device"))
        assert report["percent_of_peak"] is None and "no warm step" in latency.table(report)
        latency.validate(report)


def test_percent_of_peak_is_that_of_the_last_stage_and_null_without_a_peak():
    assert recorded()["flops_per_step"] == 3e10
    assert recorded()["percent_of_peak"] == pytest.approx(10)  # 3e10 FLOP in 0.3 s at 1e12 FLOP/s
    one_stage = recorded(stage_2=())
    assert one_stage["flops_per_step"] == 1e10
    assert one_stage["percent_of_peak"] == pytest.approx(100 * 1e10 / 0.110 / 1e12)
    unknown = recorded(peak_flops=None)
    assert unknown["percent_of_peak"] is None and "no peak for this profile" in latency.table(unknown)


def test_guidance_groups_have_the_median_of_each_pass_and_a_line_for_each_loss():
    recorder = Recorder()
    for milliseconds in (90.0, 10.0, 20.0):
        passes = ((1, "cond", milliseconds), (2, "uncond", 2 * milliseconds), (1, "guide", 0.5))
        recorder.step("stage_1", 100.0, 99.0, passes)
    recorder.lost_groups.append("guidance group 2 lost at step 3 of stage_1 (why), 1 group since")
    table = [line.split() for line in latency.table(report_of(recorder)).splitlines()]
    assert ["stage_1", "1", "cond", "3", "20.000"] in table and ["stage_1", "2", "uncond", "3", "40.000"] in table
    assert recorder.lost_groups[0].split() == table[-1] and "guidance_groups" not in recorded()


def test_a_report_has_the_price_of_its_clips_for_the_part_of_the_machine_that_made_them(clock):
    recorder = Recorder(Price(36.0, 4))
    for seconds in (2.0, 3.0):
        recorder.finished(seconds)
    clock.now += 100
    report = report_of(recorder)
    assert (report["clips"], report["video_seconds"]) == (2, 5.0)
    price = {"dollars_per_clip": pytest.approx(0.125), "dollars_per_video_second": pytest.approx(0.05)}
    assert report["price"].items() >= price.items()
    line = "price                     $0.12 a clip, $0.05 a second of video; $36.00 an hour, 4 runs at once"
    assert line in latency.table(report).splitlines()
    assert "price" not in recorded() and "price" not in latency.table(recorded())
    without_clips = report_of(Recorder(Price(14.56, 1)))
    assert without_clips["price"] == {"dollars_per_hour": 14.56, "runs_at_once": 1}
    assert "no clip; $14.56 an hour, 1 run at once" in latency.table(without_clips)


def test_the_first_clip_is_timed_from_the_start_of_the_process():
    code = (
        "import time; from ltx_neuron.report.latency import Recorder; time.sleep(0.3);"
        "r = Recorder(); time.sleep(0.1); r.finished(5); time.sleep(1); r.finished(5);"
        "print(r.report({}, 'cpu', 1, {}, {})['start_to_first_clip'])"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.4 <= float(done.stdout) < time.monotonic() - began - 0.9


def test_the_table_shows_every_part_within_100_columns():
    text = latency.table(recorded() | {"start_to_first_clip": 41.5})
    assert max(map(len, text.splitlines())) <= 100
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["stage_1"] == ["stage_1", "4", "900.000", "110.000", "118.000", "27.500", "82.500"]
    assert "each step of stage_1, ms: 900.0 100.0 110.0 120.0" in text
    # Two of 2 ms, summed.
    assert text.count("decode_video") == 1 and float(rows["decode_video"][1]) >= 0.004
    assert rows["end"][-2:] == ["100.0", "%"]
    for part in ("residual", "bytes to device per step  2,000,000", "96, 5.000 MB", "percent of peak           10.0 %"):
        assert part in text
    assert "start to first clip       41.500 s" in text.splitlines()


def test_launches_and_weight_swaps_are_reported_and_shown_and_older_reports_have_none():
    recorder = Recorder()
    recorder.counters.launches_per_step = {"count": 14, "host_ms": 0.4321}
    recorder.counters.weight_swaps, recorder.counters.weight_swap_seconds = 3, 41.5
    report = report_of(recorder)
    rows = "launches per step         14, 0.432 ms of the host", "weight swaps              3, 41.500 s"
    assert all(row in latency.table(report) for row in rows) and "weight swaps" not in latency.table(recorded())
    numbers = {"launches_per_step.count": 14, "launches_per_step.host_ms": 0.4321}
    numbers |= {"weight_swaps.count": 3, "weight_swaps.seconds": 41.5}
    assert latency.numbers(report).items() >= numbers.items()
    del report["launches_per_step"], report["weight_swaps"]
    latency.validate(report)
    assert not any(row[:12] in latency.table(report) for row in rows)


def test_a_file_that_is_not_a_report_is_refused_with_what_it_lacks():
    for change, message in (
        (lambda report: report.update(schema=2), "not a latency report of schema 1, its schema is 2"),
        (lambda report: report.pop("phases"), "missing phases"),
        (lambda report: report["phases"][1].pop("seconds"), r"missing phases\[1\].seconds"),
        (lambda report: report["warm_step_ms"].pop("stage_2"), "missing warm_step_ms.stage_2.med"),
    ):
        change(report := recorded())
        with pytest.raises(UserError, match=f"run.json.*{message}"):
            latency.validate(report, "run.json")
    with pytest.raises(UserError, match="not a latency report of schema 1"):
        latency.validate([])


def test_a_limit_kept_passes_one_exceeded_exits_1_with_both_numbers_and_one_of_no_number_is_an_error(tmp_path, capsys):
    path = write(tmp_path / "run.json", recorded(peak_flops=None))
    report_main([path, "--max", "warm_step_ms.stage_1.median=110", "end_to_end_seconds=60"])
    assert ended("report", path, "--max", "end_to_end_seconds=60", "--max", "warm_step_ms.stage_1.median=109.5") == 1
    assert capsys.readouterr().err == f"{path}: warm_step_ms.stage_1.median is 110, the limit is 109.5\n"
    assert ended("report", path, "--max", "phases.decode_video.seconds=0.003") == 1  # two of 2 ms, summed
    for limit, message in (
        ("warm_step_ms.stage1.median=1", "is not a number of this report; similar names: warm_step_ms.stage_1.median"),
        ("percent_of_peak=1", "has no value in this run"),
        ("end_to_end_seconds=nan", "wanted NAME=VALUE"),
    ):
        with pytest.raises(UserError, match=message):
            report_main([path, "--max", limit])


def test_the_command_compares_two_runs_and_names_a_mistake_without_a_traceback(tmp_path, capsys):
    after = recorded(stage_1=(900.0, 55.0)) | {"job": JOB | {"height": 768}}
    report_main([write(tmp_path / "a.json", recorded()), write(tmp_path / "b.json", after)])
    text = capsys.readouterr().out
    assert "B/A" in text and text.count("end to end") == 2
    assert "differs: job.height: 384 -> 768" in text and max(map(len, text.splitlines())) <= 100
    line = next(line for line in text.splitlines() if line.startswith("warm_step_ms.stage_1.median"))
    assert line.split()[1:] == ["110.000", "55.000", "0.500"]
    (tmp_path / "broken.json").write_text("{")
    for path in (tmp_path / "broken.json", tmp_path / "absent.json"):
        assert ended("report", path) == 2
        text = capsys.readouterr().err
        assert text.startswith(f"error: {path} cannot be read as JSON") and "Traceback" not in text


def test_the_plot_is_a_png_of_1200_by_500(tmp_path):
    from matplotlib import image

    for reports in ([recorded(), recorded(stage_1=(174e3, 300.0))], [report_of(Recorder())]):
        plot.plot(reports, tmp_path / "new" / "plot.png")
        assert image.imread(tmp_path / "new" / "plot.png").shape[:2] == (500, 1200)


# A phase of a second, then two steps with a second between them
RUN = """
import sys, time
from pathlib import Path
from ltx_neuron.report.progress import PhaseLines, bar
lines = PhaseLines(Path(sys.argv[1]))
with lines.phase("load_transformer"):
    time.sleep(1.2)
for _ in bar(range(2), "stage 1", "step"):
    time.sleep(1.2)
lines.save()
"""
# A print in a phase of two seconds
PRINTS = """
import time
from ltx_neuron.report.progress import line, printing
with line("checking the files"), printing():
    time.sleep(0.7)
    print("recipe:", "distilled")
    time.sleep(0.7)
"""
TIMES = "artifacts/calibration/phases.json"  # of this machine


def on_a_terminal(*command: str) -> str:
    """What a command prints on a terminal of 80 columns."""
    host, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    process, printed = subprocess.Popen([sys.executable, *command], stdout=terminal, stderr=terminal), bytearray()
    os.close(terminal)
    with suppress(OSError):  # the process has ended
        while True:
            printed += os.read(host, 4096)
    os.close(host)
    assert process.wait(60) == 0
    return printed.decode()


def test_a_terminal_shows_seconds_of_phases_and_steps_and_of_the_last_time_below_what_is_printed_meanwhile(tmp_path):
    (tmp_path / "artifacts").mkdir()
    first, second = (on_a_terminal("-c", RUN, str(tmp_path / TIMES)) for _ in range(2))
    assert re.search(r"loading the transformer: 00:00", first) and "last time" not in first
    assert re.search(r"loading the transformer: 00:01", first), "its seconds pass"
    assert re.search(r"loading the transformer: 1\.\d s\r\n", first)
    assert re.search(r"stage 1: +0%[^\r]*\[00:01<", first), "time passes between steps"
    assert "loading the transformer: 00:00, last time 1 s" in second
    assert all(len(text) <= 80 for text in re.split(r"[\r\n]+", re.sub(r"\x1b\[\w", "", second)))
    printed = on_a_terminal("-c", PRINTS).split("recipe: distilled")
    assert len(printed) == 2 and printed[0].endswith("\r"), "the line is cleared first"
    assert re.match(r"\r\n\r?checking", printed[1])


def test_the_recorder_shows_each_phase_but_those_that_have_a_bar():
    recorder, titles = Recorder(), []
    recorder.show = lambda name: line(titles.append(name) or name)
    with recorder.phase("encode_text"):
        pass
    with recorder.phase("denoise_stage_1", shown=False):
        pass
    assert titles == ["encode_text"] and {*PHASES} == {*TITLES} - {"check"}


def test_times_of_another_video_size_are_not_shown_for_this_one(tmp_path):
    (tmp_path / "artifacts").mkdir()
    lines = PhaseLines(tmp_path / TIMES)
    lines.size = "512x768, 121 frames"
    for name in ("decode_video", "load_transformer"):
        with lines.phase(name):
            pass
    lines.save()
    assert {*PhaseLines(tmp_path / TIMES)._seconds} == {"decode_video 512x768, 121 frames", "load_transformer"}


def test_nothing_is_printed_where_stderr_is_no_terminal_but_a_bar_in_a_notebook(tmp_path, capsys):
    done = subprocess.run([sys.executable, "-c", RUN, tmp_path / TIMES], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / TIMES).exists(), "there is no artifacts folder"
    for shown in (True, False):
        assert [*bar(range(3), "stage 1", "step", shown=shown)] == [0, 1, 2]
        assert ("stage 1: 100%" in capsys.readouterr().err) == shown
