"""Rank processes that hold Python's lock, are paused or are frozen in between, which takes
seconds."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import allowed, rel
from toy import EQUAL, SOON, assert_all_end, make_toy, pids_of, ready, wanted

from ltx_neuron.backends.ranks import RankError
from ltx_neuron.backends.torchdist import host, liveness
from ltx_neuron.backends.torchdist.rank import Rank, serve
from ltx_neuron.backends.torchdist.wire import RankSettings
from ltx_neuron.doctor import groups
from ltx_neuron.doctor.groups import probe
from ltx_neuron.profiles import resolve

SOURCE = Path(host.__file__).parents[3]
HELD = (3, 0, 60)  # seconds of runs that hold Python's lock

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


def serve_holding_the_lock(pipe, settings: RankSettings, progress) -> None:
    """A rank whose runs hold Python's lock while a device compiles or computes: nothing in
    TorchNeuron's binding releases it (aws-neuron/torch-neuronx, early 2026). HELD[n]: seconds of
    its n-th run, which uses no CPU."""
    run, runs = Rank.run, iter(HELD)

    def holding(self, *arguments, **numbers):
        ctypes.PyDLL(None).sleep(next(runs))
        return run(self, *arguments, **numbers)

    Rank.run = holding
    serve(pipe, settings, progress)


def test_a_rank_that_holds_python_s_lock_lives_in_a_first_run_and_not_in_a_warm_one(
    toy, monkeypatch
):
    """In the first run the device's compiler may work; a warm run is known to take no time."""
    monkeypatch.setattr(host, "serve", serve_holding_the_lock)
    with ready(toy) as ranks:
        pids = pids_of(ranks)
        monkeypatch.setattr(liveness, "FROZEN_SECONDS", 1.0)
        monkeypatch.setattr(liveness, "HANG_SECONDS", 2.0)
        monkeypatch.setattr(liveness, "HANG_TIMES", 0.0)
        ranks.run("toy", step=3)
        assert rel(ranks.get("toy", "y"), wanted(toy, 3)) < EQUAL
        ranks.run("toy", step=3)
        began = time.monotonic()
        with pytest.raises(RankError, match="of 2 failed: it hangs"):
            ranks.run("toy", step=3)
        # Long before the run would have ended; a busy machine takes longer than SOON to say so.
        assert time.monotonic() - began < HELD[2] / 2
        assert_all_end(pids)


def test_a_rank_that_freezes_while_it_has_nothing_to_do_is_seen_by_a_check(toy, monkeypatch):
    monkeypatch.setattr(liveness, "FROZEN_SECONDS", 2.0)
    with ready(toy) as ranks:
        pids = pids_of(ranks)
        ranks.check()  # of ranks that live, nothing
        os.kill(pids[1], signal.SIGSTOP)
        until = time.monotonic() + allowed(SOON)
        with pytest.raises(RankError, match="1 of 2 failed: the process .*no sign of life for 2.0"):
            while time.monotonic() < until:
                ranks.check()
                time.sleep(0.05)
        assert_all_end(pids)


PAUSED = """
import sys
from pathlib import Path
import torch
from ltx_neuron.backends.torchdist import liveness
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.torchdist.host import Ranks
from ltx_neuron.profiles import PROFILES

liveness.FROZEN_SECONDS = liveness.HANG_SECONDS = 1.0
weights, graphs = map(Path, sys.argv[1:])
with Ranks(PROFILES["cpu"], 2) as ranks:
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


def test_a_job_that_is_paused_and_continued_goes_on(toy, tmp_path):
    """Ctrl-Z and fg, a paused container, a stalled machine; and a script that has no guard for its
    main module."""
    (tmp_path / "host.py").write_text(PAUSED)
    graphs = toy.programs["toy"].folder
    host = subprocess.Popen(
        [sys.executable, tmp_path / "host.py", toy.folders[1], graphs],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        start_new_session=True,
    )
    for line in ("ready\n", "runs\n"):
        assert host.stdout.readline() == line
        os.killpg(host.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.killpg(host.pid, signal.SIGCONT)
    said, _ = host.communicate(timeout=allowed(3 * SOON))
    assert (host.returncode, said) == (0, "done\n")


def test_the_doctor_probes_every_group_of_a_profiles_layout():
    """Four ranks, of which pairs exchange heads."""
    settings = "context_parallel=4", "context_mode=ulysses", "ulysses_degree=2"
    findings = {each.check: each for each in probe(resolve("cpu", settings), 1)}
    assert {name: each.state for name, each in findings.items()} == dict.fromkeys(
        ("group cp", "group ulysses", "group between"), "ok"
    )
    assert re.fullmatch(
        r"2 groups of 2 ranks: gathered, exchanged, summed in \d+\.\d\d ms",
        findings["group ulysses"].text,
    )


def test_a_rank_that_dies_in_the_probe_is_a_finding(monkeypatch):
    """As one whose runtime does not route its group."""

    def refuse(ranks, name, partition):
        os.kill(pids_of(ranks)[1], signal.SIGKILL)
        ranks.run(name)

    monkeypatch.setattr(groups, "_probed", refuse)
    (finding,) = probe(resolve("cpu", ("context_parallel=2",)), 1)
    assert (finding.check, finding.state) == ("group cp", "blocks")
    assert "rank 1 of 2 failed" in finding.text and "context_parallel=N" in finding.fix
