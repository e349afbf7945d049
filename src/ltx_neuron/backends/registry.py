"""Selects the backend by `profile.backend`. No other module does."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ltx_neuron.backends import export, mesh
from ltx_neuron.backends.nxd import compile as nxd_compile
from ltx_neuron.backends.nxd import runtime
from ltx_neuron.backends.ranks import Ranks
from ltx_neuron.backends.teams import GuidanceGroups
from ltx_neuron.backends.torchdist import host
from ltx_neuron.config.profiles import PLATFORM_TARGET, Profile
from ltx_neuron.files import exclusive
from ltx_neuron.machine import package_version
from ltx_neuron.models.parallel import Comm, ContextParallel
from ltx_neuron.models.programs import Program


def comm(profile: Profile, tp: int, group: str = mesh.TENSOR) -> Comm:
    """The collectives of graphs that are traced for a profile, over a group of mesh.groups."""
    partition = mesh.groups(profile, tp).get(group)
    size = len(partition[0]) if partition else tp
    if profile.backend == "nxd":
        return nxd_compile.XlaComm(size, partition)
    return export.TorchDistComm(size, mesh.WORLD if group == mesh.TENSOR else group)


def context(profile: Profile, tp: int) -> ContextParallel | None:
    """The collectives between the tensor-parallel groups of a profile's context parallelism."""
    divides = profile.context_parallel > 1
    return ContextParallel(comm(profile, tp, mesh.CONTEXT)) if divides else None


def identity(profile: Profile, model: str) -> dict:
    """Compiler flags and versions on which a model's graphs depend; none for torchdist."""
    if profile.backend != "nxd":
        return {}
    target = dict(profile.environment)[PLATFORM_TARGET]
    return {
        **({} if target == "trn2" else {"target": target}),
        "compiler_flags": nxd_compile.compiler_flags(profile, model),
        "neuron": {package: package_version(package) for package in nxd_compile.PACKAGES},
        # A compiled graph contains the ranks of its groups, not their name.
        **({"context_parallel": cp} if (cp := profile.context_parallel) > 1 else {}),
    }


def compile_program(
    make: Callable[[], Program],
    folder: Path,
    identity: dict,
    dtype: torch.dtype,
    profile: Profile,
    tp: int,
) -> None:
    """Write every graph of the program that `make()` returns into `folder` and, last, the
    manifest. Raises UserError and DeviceFailure as nxd_compile.compile_program does."""
    if profile.backend == "nxd":
        nxd_compile.compile_program(make, folder, identity, dtype, profile, tp)
    else:
        with export.fake_process_group(profile.world_size(tp), groups=mesh.groups(profile, tp)):
            export.compile_program(make(), folder, identity, dtype)


def precompile(folders: list[Path], profile: Profile, tp: int, cache: Path) -> None:
    """Compile graphs into `cache` for profiles whose ranks compile at run time. May raise
    RunError."""
    # NxD's graphs are already compiled, and interpreted graphs need no compiler.
    if profile.backend == "torchdist" and profile.compile_backend != "export":
        # Compiler caches allow two writers; waiting avoids compiling twice.
        with exclusive(cache, "compiling into"):
            host.compile_only(folders, profile, tp, cache)


def ranks(profile: Profile, tp: int, cache: Path) -> Ranks:
    """The started ranks of a run. cache: the folder of `precompile`."""
    if profile.backend == "nxd":
        return runtime.NxdRanks(profile, tp)
    numbers = range(profile.guidance_parallel)
    groups = [partial(host.TorchDistRanks, profile, tp, cache, number) for number in numbers]
    return GuidanceGroups(groups) if len(groups) > 1 else groups[0]()
