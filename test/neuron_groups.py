"""CPU ranks that compile with a stand-in for TorchNeuron (test/torchneuron)."""

import os
from collections import defaultdict
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from ltx_neuron.backends import mesh, registry
from ltx_neuron.backends.export import fake_process_group
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.torchdist.compiled import _rename_groups, group_names
from ltx_neuron.config.profiles import Profile, resolve
from ltx_neuron.doctor import groups
from ltx_neuron.errors import UserError

STAND_IN = Path(__file__).parent / "torchneuron"
LAYOUTS = {
    "cp4": resolve("trn2.48xlarge-cp4", ("backend=torchdist",)),
    "cp8": resolve("trn2.48xlarge-cp8", ("backend=torchdist",)),
    "g4cp4": resolve("trn2.48xlarge-g4cp4"),
}


def on_cpu(profile: Profile, knows: str, folder: Path) -> Profile:
    """A profile with CPU ranks that compile with a release of TorchNeuron that knows these groups.
    The graphs' texts go to `folder`. Its ranks find the stand-in on sys.path."""
    told = ("TORCHNEURON_KNOWS", knows), ("TORCHNEURON_TEXTS", str(folder))
    folder.mkdir(exist_ok=True)
    return replace(profile, device="cpu", compile_backend="neuron", environment=told)


def texts(folder: Path) -> dict[str, set[str]]:
    """The ranks that compiled a graph, by its text."""
    ranks = defaultdict(set)
    for path in folder.iterdir():
        ranks[path.read_text()].add(path.name.partition("-")[0])
    return ranks


def write_graphs(profile: Profile, tp: int, folder: Path) -> list[Path]:
    """Write a graph with every collective of each group, as the doctor's. Returns their folders."""
    named = mesh.groups(profile, tp)
    for name in named:

        def make(name=name):
            return groups.program(registry.comm(profile, tp, name))

        identity = {"model": "dit", "bucket": name}
        registry.compile_program(make, folder / name, identity, torch.float32, profile, tp)
    return [folder / name for name in named]


def lowered_by_ranks(profile: Profile, tp: int, folder: Path) -> list[dict[str, str]]:
    """By rank, in a process of the stand-in's: each group's graph as lowered, or the refusal."""
    context = get_context("forkserver")
    # As host.Ranks, whose later ranks have the same server.
    context.set_forkserver_preload(["ltx_neuron.backends.torchdist.rank", "torch._export.serde.serialize"])
    with context.Pool(1) as pool:
        return pool.apply(_lowered_by_ranks, [profile, tp, write_graphs(profile, tp, folder)])


def _lowered_by_ranks(profile: Profile, tp: int, folders: list[Path]) -> list[dict[str, str]]:
    os.environ.update(profile.environment)
    import torch_neuronx

    found, named = [], mesh.groups(profile, tp)
    for rank in range(profile.world_size(tp)):
        torch_neuronx.TABLE.clear()
        graphs = {}
        with fake_process_group(profile.world_size(tp), rank, named):
            try:
                names = group_names(named, profile)
                for folder in folders:
                    module = Manifest(folder).load("collectives").graph_module
                    _rename_groups(module, names)
                    graphs[folder.name] = torch_neuronx.lowered(module)
            except (UserError, RuntimeError) as error:
                graphs["refusal"] = str(error)
        found.append(graphs)
    return found
