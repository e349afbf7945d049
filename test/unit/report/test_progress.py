"""What a run shows on a terminal of 80 columns, and that it shows nothing elsewhere."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

from ltx_neuron.report.latency import PHASES, Recorder
from ltx_neuron.report.progress import TITLES, PhaseLines, bar, line

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
COLUMNS = 80

# A print in a phase of two seconds
PRINTS = """
import time
from ltx_neuron.report.progress import line, printing
with line("checking the files"), printing():
    time.sleep(0.7)
    print("recipe:", "distilled")
    time.sleep(0.7)
"""


def on_a_terminal(*command: str) -> str:
    """What a command prints on a terminal of 80 columns."""
    host, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, COLUMNS, 0, 0))
    process = subprocess.Popen([sys.executable, *command], stdout=terminal, stderr=terminal)
    os.close(terminal)
    printed = bytearray()

    def read() -> None:
        while True:
            try:
                printed.extend(os.read(host, 4096))
            except OSError:  # the process has ended
                return

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(60) == 0
    reader.join()
    os.close(host)
    return printed.decode()


@pytest.fixture
def times(tmp_path):
    """The file of this machine's times, in an artifacts folder."""
    return tmp_path / "artifacts" / "calibration" / "phases.json"


def test_a_terminal_shows_the_seconds_of_phases_and_of_steps_and_those_of_the_last_time(times):
    times.parents[1].mkdir()
    first, second = (on_a_terminal("-c", RUN, str(times)) for _ in range(2))
    assert re.search(r"loading the transformer: 00:00", first) and "last time" not in first
    assert re.search(r"loading the transformer: 00:01", first), "its seconds pass"
    assert re.search(r"loading the transformer: 1\.\d s\r\n", first)
    assert re.search(r"stage 1: +0%[^\r]*\[00:01<", first), "time passes between steps"
    assert "loading the transformer: 00:00, last time 1 s" in second
    printed = re.sub(r"\x1b\[\w", "", second)
    assert all(len(text) <= COLUMNS for text in re.split(r"[\r\n]+", printed))


def test_what_is_printed_while_a_line_counts_stands_above_it():
    printed = on_a_terminal("-c", PRINTS).split("recipe: distilled")
    assert len(printed) == 2 and printed[0].endswith("\r"), "the line is cleared first"
    assert re.match(r"\r\n\r?checking", printed[1])


def test_nothing_is_printed_where_stderr_is_no_terminal(times):
    done = subprocess.run([sys.executable, "-c", RUN, times], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not times.exists(), "there is no artifacts folder"


def test_the_recorder_shows_each_phase_but_those_that_have_a_bar():
    recorder, titles = Recorder(), []
    recorder.show = lambda name: line(titles.append(name) or name)
    with recorder.phase("encode_text"):
        pass
    with recorder.phase("denoise_stage_1", shown=False):
        pass
    assert titles == ["encode_text"] and {*PHASES} == {*TITLES} - {"check"}


def test_times_of_another_video_size_are_not_shown_for_this_one(times):
    times.parents[1].mkdir()
    lines = PhaseLines(times)
    lines.size = "512x768, 121 frames"
    for name in ("decode_video", "load_transformer"):
        with lines.phase(name):
            pass
    lines.save()
    assert {*PhaseLines(times)._seconds} == {"decode_video 512x768, 121 frames", "load_transformer"}


def test_a_bar_can_be_shown_in_a_notebook_and_hidden_in_a_service(capsys):
    for shown in (True, False):
        assert [*bar(range(3), "stage 1", "step", shown=shown)] == [0, 1, 2]
        assert ("stage 1: 100%" in capsys.readouterr().err) == shown
