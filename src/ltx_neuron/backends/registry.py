"""Which backend a profile runs on: the one place that chooses by `profile.backend`."""

from collections.abc import Callable
from pathlib import Path

import torch

from ltx_neuron.backends import export
from ltx_neuron.backends.nxd import compile as nxd_compile
from ltx_neuron.backends.nxd import runtime
from ltx_neuron.backends.ranks import Ranks
from ltx_neuron.backends.torchdist import host
from ltx_neuron.files import exclusive
from ltx_neuron.machine import package_version
from ltx_neuron.models.parallel import Comm
from ltx_neuron.models.programs import Program
from ltx_neuron.profiles import Profile


def comm(profile: Profile, tp: int) -> Comm:
    """The collectives of graphs that are traced for a profile."""
    return nxd_compile.XlaComm(tp) if profile.backend == "nxd" else export.TorchDistComm(tp)


def identity(profile: Profile, model: str) -> dict:
    """What a model's graphs depend on besides the model: how they are compiled and by which
    versions. Empty for torchdist, whose graphs are not compiled yet when they are written."""
    if profile.backend != "nxd":
        return {}
    return {
        "compiler_flags": nxd_compile.compiler_flags(profile, model),
        "neuron": {package: package_version(package) for package in nxd_compile.PACKAGES},
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
        with export.fake_process_group(tp):
            export.compile_program(make(), folder, identity, dtype)


def precompile(folders: list[Path], profile: Profile, tp: int, cache: Path) -> None:
    """Fill `cache` where ranks compile what they run, so that a run finds it there. Raises RunError
    where the compiler fails."""
    # NxD has compiled its graphs already, and interpreted graphs need no compiler.
    if profile.backend == "torchdist" and profile.compile_backend != "export":
        # Caches of compilers take two writers at once; waiting saves compiling the same twice.
        with exclusive(cache, "compiling into"):
            host.compile_only(folders, profile, tp, cache)


def ranks(profile: Profile, tp: int, cache: Path) -> Ranks:
    """The ranks of a run, started. `cache` is where they find what precompile left."""
    if profile.backend == "nxd":
        return runtime.Ranks(profile, tp)
    return host.Ranks(profile, tp, cache)
