"""Processes of ranks that compile with a stand-in for TorchNeuron (test/torchneuron) compile one graph, and gloo
computes what it says; a build machine without ranks compiles the same graph."""

import re

import pytest
from neuron_groups import STAND_IN, on_cpu, texts, write_graphs

from ltx_neuron.backends import mesh, registry
from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor.groups import probe
from ltx_neuron.errors import UserError

pytestmark = pytest.mark.timeout(900)

EIGHT, TP = resolve("cpu", ("context_parallel=4",)), 2
REFUSAL = r"compiles group tp as \[\[\d, \d\]\], wanted \[\[0, 1\], \[2, 3\], \[4, 5\], \[6, 7\]\]"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_IN))


def test_all_ranks_compile_one_graph_and_a_build_machine_the_same(tmp_path):
    named = mesh.groups(EIGHT, TP)
    # The doctor's probe compares the results of every rank.
    findings = [*probe(on_cpu(EIGHT, "meshes", tmp_path / "ranks"), TP)]
    assert [(f.check, f.state) for f in findings] == [(f"group {name}", "ok") for name in named]
    by_ranks = texts(tmp_path / "ranks")
    assert len(by_ranks) == 1 + len(named)  # the first is a sum over all ranks
    assert {len(each) for each in by_ranks.values()} == {EIGHT.world_size(TP)}
    built = on_cpu(EIGHT, "meshes", tmp_path / "built")
    registry.precompile(write_graphs(built, TP, tmp_path / "graphs"), built, TP, tmp_path / "cache")
    compiled = texts(tmp_path / "built")
    assert len(compiled) == len(named) and compiled.keys() < by_ranks.keys()


def test_ranks_and_a_build_machine_refuse_a_release_that_does_not_know_the_groups(tmp_path, capfd):
    profile = on_cpu(EIGHT, "nothing", tmp_path / "ranks")
    (finding,) = probe(profile, TP)
    assert finding.state == "blocks" and re.search(REFUSAL, finding.text), finding.text
    with pytest.raises(UserError, match="cannot be compiled; the reason is above"):
        registry.precompile(write_graphs(profile, TP, tmp_path / "graphs"), profile, TP, tmp_path / "cache")
    assert re.search(REFUSAL, capfd.readouterr().err) and not texts(tmp_path / "ranks")
