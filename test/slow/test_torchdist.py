"""A job whose processes are all paused in between, and the doctor's probe of groups, which take
seconds."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import allowed
from toy import SOON, make_toy, pids_of

from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor import groups

pytestmark = pytest.mark.timeout(60)

# It has no guard for its main module.
PAUSED = """
import sys
from pathlib import Path
import torch
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.config.profiles import PROFILES

weights, graphs = map(Path, sys.argv[1:])
with TorchDistRanks(PROFILES["cpu"], 2) as ranks:
    ranks.load(weights, {"toy": Manifest(graphs)}, torch.float32)
    ranks.put("toy", x=torch.zeros(1, 4, 256), table=torch.zeros(1, 4, 256))
    ranks.put_numbers("toy", "step", 2)
    print("ready", flush=True)
    for step in range(1000):
        ranks.run("toy", step=step % 2)
        ranks.check()
        if step == 200:
            print("runs", flush=True)
print("done", flush=True)
"""


def test_a_job_that_is_paused_and_continued_goes_on(tmp_path):
    """Ctrl-Z and fg, a paused container, a stalled machine."""
    toy = make_toy(tmp_path)
    (tmp_path / "host.py").write_text(PAUSED)
    words = [sys.executable, tmp_path / "host.py", toy.folders[1], toy.programs["toy"].folder]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    host = subprocess.Popen(words, **streams, start_new_session=True)
    for line in ("ready\n", "runs\n"):
        assert host.stdout.readline() == line
        os.killpg(host.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.killpg(host.pid, signal.SIGCONT)
    output, _ = host.communicate(timeout=allowed(3 * SOON))
    assert (host.returncode, output) == (0, "done\n")


def test_the_doctor_probes_the_groups_of_a_layout_and_a_rank_that_dies_in_it_is_a_finding(monkeypatch):
    profile = resolve("cpu", ("context_parallel=2",))
    (finding,) = groups.probe(profile, 1)
    assert (finding.check, finding.state) == ("group cp", "ok")
    assert re.fullmatch(r"1 group of 2 ranks: gathered, summed in \d+\.\d\d ms", finding.text)

    def refuse(ranks, name, partition):  # as one whose runtime does not route its group
        os.kill(pids_of(ranks)[1], signal.SIGKILL)
        ranks.run(name)

    monkeypatch.setattr(groups, "_probed", refuse)
    (finding,) = groups.probe(profile, 1)
    assert (finding.check, finding.state) == ("group cp", "blocks")
    assert "rank 1 of 2 failed" in finding.text and "context_parallel=N" in finding.fix
