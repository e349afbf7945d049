"""TorchNeuron compiles a collective over every group of ranks, and one graph for all of them."""

import os
from collections import Counter
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from ltx_neuron.backends import mesh, registry
from ltx_neuron.backends.export import fake_process_group
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.torchdist.compiled import _rename_groups, group_names
from ltx_neuron.config.profiles import Profile, resolve
from ltx_neuron.doctor import groups
from ltx_neuron.errors import UserError

TP, STAND_IN = 4, Path(__file__).parents[2] / "torchneuron"  # of TorchNeuron's compiler
LAYOUTS = {
    "cp4": resolve("trn2.48xlarge-cp4", ("backend=torchdist",)),
    "cp8": resolve("trn2.48xlarge-cp8", ("backend=torchdist",)),
    "g4cp4": resolve("trn2.48xlarge-g4cp4"),
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def by_ranks(monkeypatch, tmp_path):
    """by_ranks(layout, knows): as `lowered_by_ranks`, in a process of a release that knows these groups."""
    monkeypatch.syspath_prepend(str(STAND_IN))

    def by_ranks(layout: str, knows: str) -> list[dict[str, str]]:
        profile = replace(LAYOUTS[layout], device="cpu", compile_backend="neuron")
        for name in mesh.groups(profile, TP):
            make, identity = partial(groups.program, registry.comm(profile, TP, name)), {"model": "dit", "bucket": name}
            registry.compile_program(make, tmp_path / name, identity, torch.float32, profile, TP)
        context = get_context("forkserver")
        # As host.Ranks, whose later ranks have the same server.
        context.set_forkserver_preload(["ltx_neuron.backends.torchdist.rank", "torch._export.serde.serialize"])
        with context.Pool(1) as pool:
            return pool.apply(lowered_by_ranks, [profile, knows, tmp_path])

    return by_ranks


def lowered_by_ranks(profile: Profile, knows: str, folder: Path) -> list[dict[str, str]]:
    """By rank: the graph with every collective of each group, as the doctor's, as lowered; or the refusal."""
    os.environ["TORCHNEURON_KNOWS"] = knows
    import torch_neuronx

    found, named = [], mesh.groups(profile, TP)
    for rank in range(profile.world_size(TP)):
        torch_neuronx.TABLE.clear()
        graphs = {}
        with fake_process_group(profile.world_size(TP), rank, named):
            try:
                names = group_names(named, profile)
                for name in named:
                    module = Manifest(folder / name).load("collectives").graph_module
                    _rename_groups(module, names)
                    graphs[name] = torch_neuronx.lowered(module)
            except (UserError, RuntimeError) as error:
                graphs["refusal"] = str(error)
        found.append(graphs)
    return found


KNOWN = [(layout, "table") for layout in LAYOUTS] + [("cp4", "meshes"), ("cp4", "table, unasked")]


@pytest.mark.parametrize(("layout", "knows"), KNOWN)
def test_every_rank_compiles_one_graph_over_all_groups_of_a_name(by_ranks, layout, knows):
    ranks, named = by_ranks(layout, knows), mesh.groups(LAYOUTS[layout], TP)
    assert len(ranks) == LAYOUTS[layout].world_size(TP) and "refusal" not in ranks[0]
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
