"""The groups of ranks in graphs that a stand-in for TorchNeuron lowers (test/torchneuron)."""

import os
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


def lowered_by_ranks(profile: Profile, knows: str, tp: int, folder: Path) -> list[dict[str, str]]:
    """By rank, in a process of a release that knows these groups: the graph with every collective of each group, as
    the doctor's, as lowered; or the refusal. The stand-in is on sys.path."""
    profile = replace(profile, device="cpu", compile_backend="neuron")
    for name in mesh.groups(profile, tp):

        def make(name=name):
            return groups.program(registry.comm(profile, tp, name))

        identity = {"model": "dit", "bucket": name}
        registry.compile_program(make, folder / name, identity, torch.float32, profile, tp)
    context = get_context("forkserver")
    # As host.Ranks, whose later ranks have the same server.
    context.set_forkserver_preload(["ltx_neuron.backends.torchdist.rank", "torch._export.serde.serialize"])
    with context.Pool(1) as pool:
        return pool.apply(_lowered_by_ranks, [profile, knows, tp, folder])


def _lowered_by_ranks(profile: Profile, knows: str, tp: int, folder: Path) -> list[dict[str, str]]:
    os.environ["TORCHNEURON_KNOWS"] = knows
    import torch_neuronx

    found, named = [], mesh.groups(profile, tp)
    for rank in range(profile.world_size(tp)):
        torch_neuronx.TABLE.clear()
        graphs = {}
        with fake_process_group(profile.world_size(tp), rank, named):
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
