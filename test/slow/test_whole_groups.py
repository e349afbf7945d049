"""Processes of ranks that compile with a stand-in for TorchNeuron (test/torchneuron) compile one
graph, and gloo computes what it says; a build machine without ranks compiles the same graph."""

import re

import pytest
from neuron_groups import LAYOUTS, STAND_IN, on_cpu, texts, write_graphs

from ltx_neuron.backends import mesh, registry
from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor.groups import probe
from ltx_neuron.errors import UserError

pytestmark = pytest.mark.timeout(900)

EIGHT = resolve("cpu", ("context_parallel=4",))
# Layout, ranks of a tensor-parallel group, what the release of TorchNeuron knows.
CASES = {"8 ranks": (EIGHT, 2, "meshes"), "trn2.48xlarge-cp4": (LAYOUTS["cp4"], 4, "table")}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_IN))


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_compile_one_graph_and_a_build_machine_the_same(case, tmp_path):
    profile, tp, knows = CASES[case]
    named, ranks = mesh.groups(profile, tp), profile.world_size(tp)
    # The doctor's probe compares the results of every rank.
    findings = [*probe(on_cpu(profile, knows, tmp_path / "ranks"), tp)]
    assert [(f.check, f.state) for f in findings] == [(f"group {name}", "ok") for name in named]
    by_ranks = texts(tmp_path / "ranks")
    assert len(by_ranks) == 1 + len(named)  # the first is a sum over all ranks
    assert {len(each) for each in by_ranks.values()} == {ranks}
    built = on_cpu(profile, knows, tmp_path / "built")
    registry.precompile(write_graphs(built, tp, tmp_path / "graphs"), built, tp, tmp_path / "cache")
    compiled = texts(tmp_path / "built")
    assert len(compiled) == len(named) and compiled.keys() < by_ranks.keys()


def test_ranks_and_a_build_machine_refuse_a_release_that_does_not_know_the_groups(tmp_path, capfd):
    profile = on_cpu(EIGHT, "nothing", tmp_path / "ranks")
    refusal = r"compiles group tp as \[\[\d, \d\]\], wanted \[\[0, 1\], \[2, 3\], \[4, 5\], \[6, 7\]\]"
    (finding,) = probe(profile, 2)
    assert finding.state == "blocks" and re.search(refusal, finding.text), finding.text
    folders = write_graphs(profile, 2, tmp_path / "graphs")
    with pytest.raises(UserError, match="cannot be compiled; the reason is above"):
        registry.precompile(folders, profile, 2, tmp_path / "cache")
    assert re.search(refusal, capfd.readouterr().err) and not texts(tmp_path / "ranks")
