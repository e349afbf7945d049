"""Ranks that are all paused, and the doctor's probe of groups, which take seconds."""

import os
import re
import signal
import threading
import time

import pytest
from toy import STEPS, make_toy, pids_of, ready

from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor import groups

pytestmark = pytest.mark.timeout(60)


def test_ranks_that_are_paused_and_continued_go_on(tmp_path):
    """Ctrl-Z and fg, a paused container, a stalled machine: in the middle of a run, and between two."""
    with ready(make_toy(tmp_path)) as ranks:
        pids = pids_of(ranks)

        def continue_all() -> None:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        timer, began = threading.Timer(3.0, continue_all), time.monotonic()
        timer.start()
        ranks.run("toy", step=1)
        assert time.monotonic() - began > 2.9
        timer.join()
        for step in range(STEPS):
            ranks.run("toy", step=step)
            ranks.check()


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
