"""TorchNeuron compiles a collective over every group of ranks, and one graph for all of them; its compiler is a
stand-in (test/torchneuron)."""

from collections import Counter

import pytest
from neuron_groups import LAYOUTS, STAND_IN, lowered_by_ranks

from ltx_neuron.backends import mesh

TP = 4

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def by_ranks(monkeypatch, tmp_path):
    """by_ranks(layout, knows): each rank's graphs, for a release that knows these groups."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    return lambda layout, knows: lowered_by_ranks(LAYOUTS[layout], knows, TP, tmp_path)


KNOWN = [(layout, "table") for layout in LAYOUTS] + [("cp4", "meshes"), ("cp4", "table, unasked")]


@pytest.mark.parametrize(("layout", "knows"), KNOWN)
def test_every_rank_compiles_one_graph_over_all_groups_of_a_name(by_ranks, layout, knows):
    ranks, named = by_ranks(layout, knows), mesh.groups(LAYOUTS[layout], TP)
    assert len(ranks) == LAYOUTS[layout].world_size(TP)
    assert {graphs.get("refusal") for graphs in ranks} == {None}
    assert all(graphs == ranks[0] for graphs in ranks)
    for name, partition in named.items():
        assert ranks[0][name].count(f"'{partition}'") == 2


@pytest.mark.parametrize("knows", ["nothing", "ignored table"])
def test_a_release_that_knows_the_own_groups_of_a_rank_alone_is_refused_before_it_compiles(by_ranks, knows):
    message = Counter(graphs["refusal"] for graphs in by_ranks("cp4", knows))
    partition = mesh.groups(LAYOUTS["cp4"], TP)[mesh.TENSOR]
    assert len(message) == 4 and {*message.values()} == {4}
    for own in partition:
        (text,) = [each for each in message if f"compiles group tp as {[own]}, wanted" in each]
        assert str(partition) in text
        assert "\nType --profile-set context_parallel=1, or install" in text
