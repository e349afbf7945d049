"""The names of groups in a process's graphs.

TorchNeuron replaces a name by ranks while it compiles, and needs every group of the name: a rank's
own alone is refused ("replica id #0 not seen in replica groups"). We did not run it; our tests have
a stand-in, written from public sources.
"""

import json

import torch
from torch import fx
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from ltx_neuron.backends import mesh
from ltx_neuron.config.profiles import STACKS, Profile
from ltx_neuron.errors import UserError


def group_names(groups: mesh.Groups, profile: Profile) -> dict[str, str]:
    """The names of groups in graph files -> those in this process's graphs. Call it in a process
    group with these named groups. Raises UserError if TorchNeuron does not know their ranks."""
    names, registered = {name: name for name in groups}, True
    if groups and profile.compile_backend == "neuron":
        try:
            # torch-neuronx has the module (Difflet's parallel_mesh.py). The table is that of its
            # copy in libtorch-neuronx-lite, which vllm-omni-neuron fills by c10d's names.
            from torch_neuronx.distributed.mesh_registry import _MESH_REGISTRY

            for name, partition in groups.items():
                own = c10d._resolve_process_group(name).group_name  # pyright: ignore[reportArgumentType]
                _MESH_REGISTRY[name] = _MESH_REGISTRY[own] = partition
        except ImportError:
            names, registered = _device_mesh(groups, profile.device), False
        for name, partition in groups.items():
            known = _replica_groups(names[name])
            if known != partition and (known or not registered):
                raise UserError(
                    f"torch-neuronx compiles group {name} as {known or 'unknown ranks'}, wanted"
                    f" {partition}.\nType --profile-set context_parallel=1, or install another"
                    f" release: {STACKS['torchdist'].install}"
                )
    return {mesh.WORLD: names[mesh.TENSOR], **names} if groups else {}


def _device_mesh(groups: mesh.Groups, device: str) -> dict[str, str]:
    """Make the groups once more, by init_device_mesh. Returns their names in c10d."""
    axes = mesh.CONTEXT, mesh.TENSOR
    shape = tuple(len(groups[axis][0]) for axis in axes)
    made = init_device_mesh(device, shape, mesh_dim_names=axes)
    return {axis: made.get_group(axis).group_name for axis in axes}


def _replica_groups(group: str) -> list[list[int]] | None:
    """What TorchNeuron writes into a graph for a group; None if its pass cannot be asked."""
    graph = fx.Graph()
    arguments = graph.placeholder("x"), "sum", group
    summed = graph.call_function(torch.ops._c10d_functional.all_reduce.default, arguments)
    try:
        from torch_neuronx.neuron_dynamo_backend.fx.passes import collective_legalization

        collective_legalization.CollectiveLegalization()(fx.GraphModule({}, graph))
        return json.loads(str(summed.args[2]))
    except (ImportError, AttributeError, ValueError):
        return None
