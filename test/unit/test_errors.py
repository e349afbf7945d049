"""How a script ends: the system's errors are sentences, and no reader who leaves ends the work."""

import errno
import os
import pickle
import subprocess
import sys
from unittest.mock import Mock

import pytest

from ltx_neuron import errors

# Talks on both streams, as a generation does, and makes its file at the end.
TALKER = """
import sys
from pathlib import Path
from tqdm import tqdm
from ltx_neuron import errors

def main():
    for _ in tqdm(range(int(sys.argv[2])), mininterval=0):
        print("talk " * 20)
        print("more " * 20, file=sys.stderr)
    Path(sys.argv[1]).write_text("made")
    print("the last word")

errors.run(main)
"""


def test_a_mistake_in_fields_is_spelled_by_whoever_tells_it_and_travels_between_processes():
    error = errors.FieldError("{seed} {got} is too large for {num_frames}", got="{height} 5")
    assert error.fields == ["seed", "num_frames"]
    for same in (error, pickle.loads(pickle.dumps(error))):
        assert str(same) == "--seed {height} 5 is too large for --num-frames"
        assert same.render(str.upper) == "SEED {height} 5 is too large for NUM_FRAMES"


def test_what_the_system_refuses_is_a_sentence_and_no_traceback(capsys):
    for number, path, words in (
        (errno.EACCES, ["/a/b"], "/a/b: you may not read or write it, or not enter its folder\nChange the perm"),
        (errno.ESTALE, ["/a/b"], f"/a/b: {os.strerror(errno.ESTALE)}"),  # one without words of ours
        (errno.ENOSPC, [], "the disk is full"),
    ):
        with pytest.raises(SystemExit) as ending:
            errors.run(Mock(side_effect=OSError(number, os.strerror(number), *path)))
        message = capsys.readouterr().err
        assert ending.value.code == 2 and message.startswith(f"error: {words}")
        assert "Traceback" not in message and ("Errno" not in message or number == errno.ENOSPC)


def test_an_error_that_is_about_no_path_keeps_its_traceback_and_the_streams_are_as_before(capsys):
    before = sys.stdout, sys.stderr
    with pytest.raises(ConnectionResetError):
        errors.run(Mock(side_effect=ConnectionResetError(errno.ECONNRESET, "reset")))
    errors.run(lambda: print("said"))
    assert (sys.stdout, sys.stderr) == before and capsys.readouterr().out == "said\n"


FULL = "2>&1 | head -1", "| true", ">/dev/full", "2>/dev/full", ">&- 2>&-"


@pytest.mark.parametrize(("redirection", "lines"), [*((how, 2000) for how in FULL), ("| true", 1), (">/dev/full", 1)])
def test_a_reader_who_leaves_and_a_log_that_is_full_end_no_work(tmp_path, lines, redirection):
    (tmp_path / "talker.py").write_text(TALKER)
    script = f"{sys.executable} {tmp_path}/talker.py {tmp_path}/made {lines} {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-1000:]
    assert (tmp_path / "made").read_text() == "made" and "Traceback" not in done.stderr
