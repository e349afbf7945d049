"""python -m ltx_neuron.tune on tiny weights, as a user runs it: killed in the middle and continued, with a wrong
kernel, a slow and a fast cut planted."""

import json
import os
import re
import signal
import subprocess
import sys

import psutil
from conftest import ROOT, SCRIPT_SECONDS, succeeded
from helpers import wait_for
from jobs import make_job

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.job import Size
from ltx_neuron.tune.variant import compare_convolutions

JOB = make_job("", Size(64, 64, 9))
# In every process of the tuning: the kernel "matmul" gives nine tenths, and each launch of a graph takes 0.2 s longer:
# the whole step in one graph is the fastest, however busy the machine is.
PLANTED = """
import sys
if "resource_tracker" not in " ".join(sys.orig_argv):
    import time
    from ltx_neuron.backends.torchdist.rank import Rank
    from ltx_neuron.models import attention
    attention.KERNELS["matmul"] = lambda *tensors: attention.sdpa(*tensors) * 0.9
    after_launch = Rank._after_launch
    def slow(self, number, first_time):
        time.sleep(0.2)
        after_launch(self, number, first_time)
    Rank._after_launch = slow
"""


def test_a_killed_tuning_goes_on_and_keeps_what_is_fast_and_right(tiny, tmp_path):
    folder, paths = tmp_path / "artifacts", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    how = dict(env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT)
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    workspace = Workspace(tiny.checkpoint, resolve("cpu"), folder, 1, "float32")
    build.make(workspace, workspace.weight_sets("dit"))
    words = ["--checkpoint-path", tiny.checkpoint, "--artifacts-dir", folder, "--profile", "cpu"]
    words += ["--tp-degree", 1, "--dtype", "float32", "--recipe", "distilled"]
    words += ["--height", 64, "--width", 64, "--num-frames", 9, "--rounds", 1, "--steps", 2]
    tune = [sys.executable, "-m", "ltx_neuron.tune", *map(str, words), "--keys", "attention", "blocks_per_graph"]

    def rows() -> list[dict]:
        return [row for path in folder.glob("tuned/*/*.journal") for row in json.loads(path.read_text())["rows"]]

    def of_ours() -> set[int]:
        return {each.pid for each in psutil.process_iter(["cmdline"]) if str(folder) in str(each.info)}

    process = subprocess.Popen(tune, **how, start_new_session=True, stdout=subprocess.DEVNULL)
    wait_for(lambda: len(rows()) == 1)
    # The next variant is at work. Its PID may be the lower one: PIDs start again at 32768.
    wait_for(lambda: of_ours() - {process.pid})
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not of_ours(), 60)  # what it had started ends by itself
    (first,) = rows()

    done = succeeded(subprocess.run(tune, **how, capture_output=True, text=True, timeout=2 * SCRIPT_SECONDS))
    assert rows()[0] == first  # it was not measured again
    measured, _, table = done.stdout.partition("ms a step  runs")
    assert "the profile's own: " not in measured, done.stdout
    assert "attention=matmul: differs: s1_" in table, done.stdout
    assert "blocks_per_graph=1: not kept" in table and "blocks_per_graph=0: chosen" in table

    workspace = Workspace(tiny.checkpoint, resolve("cpu"), folder, 1, "float32")
    workspace.take_tuned()
    _, manifest = workspace.dit_program_for(JOB, JOB.stages[0])
    assert list(manifest.graphs) == ["step"]  # compiled already


def test_both_forms_of_the_decoder_s_convolutions_are_timed_and_agree(tiny, tmp_path, capsys):
    workspace = Workspace(tiny.checkpoint, resolve("cpu"), tmp_path, 2, "float32")
    build.make(workspace, workspace.weight_sets("vae"))
    compare_convolutions(workspace, JOB, 1)
    line = re.compile(r"vae_convolution=(\w+): ([\d.]+) ms a tile, (\S+) from conv2d")
    (two, ms, none), (three, other, little) = line.findall(capsys.readouterr().out)
    assert (two, three) == ("conv2d", "conv3d") and min(float(ms), float(other)) > 0
    assert float(none) == 0 < float(little) < 1e-5
