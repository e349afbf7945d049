"""A stand-in for the part of TorchNeuron that puts ranks in the place of groups: a test fixture.

What public sources say (collective_legalization.py of an early release; vllm-omni-neuron on its
successor): before it lowers a graph, a pass replaces each group's name by replica groups. It takes
them from a table by name, else it has the caller's own group alone. The compiler then verifies them
as StableHLO does.

TORCHNEURON_KNOWS says which groups it knows whole: "table": those in the table of a module; "table, unasked": the
same, and the pass is elsewhere; "meshes": DeviceMesh's alone, in a table elsewhere; "ignored table": none, despite the
table; "nothing": none, and no table (the early release).
"""

import copy
import json
import os
import sys
from types import ModuleType

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__path__ = []  # a package, whose modules are made below
KNOWS = os.environ["TORCHNEURON_KNOWS"]
TABLE: dict[str, list[list[int]]] = {}


def replica_groups(name: str) -> list[list[int]]:
    if name in TABLE and KNOWS != "ignored table":
        return TABLE[name]
    return [dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name))]


def refusal(groups: list[list[int]]) -> str | None:
    """What StableHLO's verifyReplicaGroups says to replica groups; None if it accepts them."""
    ids = [rank for ranks in groups for rank in ranks]
    if twice := [rank for rank in ids if ids.count(rank) > 1]:
        return f"replica id #{twice[0]} seen more than once"
    missing = [rank for rank in range(len(ids)) if rank not in ids]
    return f"replica id #{missing[0]} not seen in replica groups" if missing else None


class CollectiveLegalization:
    def __call__(self, module):
        for node in module.graph.nodes:
            if "_c10d_functional" in str(node.target) and "wait" not in str(node.target):
                node.args = *node.args[:-1], str(replica_groups(node.args[-1]))
        module.recompile()


def lowered(module) -> str:
    """The text of a graph with ranks for its groups. Raises RuntimeError if StableHLO refuses them."""
    module = copy.deepcopy(module)
    CollectiveLegalization()(module)
    for node in module.graph.nodes:
        if node.args and isinstance(node.args[-1], str):
            groups = json.loads(node.args[-1])
            if refused := refusal(groups):
                raise RuntimeError(f"{groups}: {refused}")
    return "\n".join(f"{node.name} {node.target} {node.args}" for node in module.graph.nodes)


def _make(name: str, **contents) -> None:
    """Make a module of this package."""
    parts = [__name__, *name.split(".")]
    for end in range(2, len(parts) + 1):
        module = sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
        module.__path__ = []
        setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
    vars(module).update(contents)


def _remember_meshes() -> None:
    make = DeviceMesh.__init__

    def made(self, /, *arguments, **options):
        make(self, *arguments, **options)
        for axis, size in enumerate(self.mesh.shape):
            partition = self.mesh.movedim(axis, -1).reshape(-1, size)
            TABLE[self.get_group(axis).group_name] = partition.tolist()

    DeviceMesh.__init__ = made


if KNOWS != "table, unasked":
    _make("neuron_dynamo_backend.fx.passes.collective_legalization", CollectiveLegalization=CollectiveLegalization)
if "table" in KNOWS:
    _make("distributed.mesh_registry", _MESH_REGISTRY=TABLE)
if KNOWS == "meshes":
    _remember_meshes()
