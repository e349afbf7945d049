"""What replicas and guidance groups do on their own node of a Ray cluster.

This module must not import torch: torch reads environment variables that are not set yet.
"""

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ltx_neuron.engine import Engine
    from ltx_neuron.workspace import Workspace


class RankGroup:
    """The Ray actor of a guidance group on another node than its replica. RemoteRanks is its
    client."""

    def __init__(self):
        forget_rays_threads()

    def node(self) -> str:
        """The address of this node."""
        from ray.util import get_node_ip_address

        return get_node_ip_address()

    def start(self, *needed) -> tuple[int, int]:
        """Start the ranks. needed: as engine_for. Returns their tp and cp."""
        from ltx_neuron.backends import registry

        workspace = engine_for(*needed).workspace
        alone = replace(workspace.profile, guidance_parallel=1)
        self.ranks = registry.ranks(alone, workspace.tp, workspace.compiler_cache)
        print(f"{needed[0]}: a guidance group is ready on {place_of(workspace)}", flush=True)
        return self.ranks.tp, self.ranks.cp

    def load(self, weights: Path, folders: dict[str, Path], dtype) -> None:
        """Load a weight set and the programs of these folders, which are this node's own."""
        from ltx_neuron.backends.manifest import Manifest
        from ltx_neuron.errors import UserError

        for folder in (weights, *folders.values()):
            if not folder.is_dir():
                raise UserError(
                    f"node {self.node()} does not have {folder}.\nMake it there, or download it"
                    " from another machine's store: --artifacts-url URL"
                )
        programs = {name: Manifest(folder) for name, folder in folders.items()}
        self.ranks.load(weights, programs, dtype)

    def call(self, method: str, *args, **more) -> tuple:
        """Call a method of the ranks. Returns its result and their totals."""
        result = getattr(self.ranks, method)(*args, **more)
        return result, (self.ranks.bytes_sent, self.ranks.launches, self.ranks.launch_ms)


def engine_for(
    name: str, args: Namespace, capability_jobs: list, sets: Sequence, spread: bool
) -> "Engine":
    """An engine on this node's cores, which has downloaded what it lacks. Raises UserError if this
    node cannot run the capability jobs.

    name    of the replica
    spread  whether the node has one guidance group only
    """
    from ltx_neuron import flags
    from ltx_neuron.engine import Engine
    from ltx_neuron.errors import UserError
    from ltx_neuron.fleet.cluster import check_cores
    from ltx_neuron.fleet.fetch import fetch
    from ltx_neuron.report.recorder import Recorder

    options, workspace = flags.run_options(args), flags.workspace(args, writes=False)
    workspace.profile = replace(workspace.profile, spread=spread)
    check_cores(workspace.profile, workspace.tp)
    if args.artifacts_url:
        try:
            needed = {stage.loras for job in capability_jobs for stage in job.stages} | {*sets}
            own = flags.weight_sets(flags.lora_fields(flags.spec(args)))
            fetch(args.artifacts_url, workspace, options, needed or own)
        except UserError as error:  # this machine may already have all files
            print(f"{name}: nothing was downloaded: {error}", flush=True)
    engine = Engine(workspace, Recorder(), options)
    try:
        engine.preflight.check(capability_jobs)
    except UserError as error:
        if args.artifacts_url:
            raise
        advice = "Or download it from another machine's store: --artifacts-url URL"
        raise UserError(f"{error}\n{advice}") from None
    return engine


def place_of(workspace: "Workspace") -> str:
    """This node's cores, or the name of its profile."""
    from ltx_neuron.fleet.cluster import check_cores

    cores = check_cores(workspace.profile, workspace.tp)
    return f"cores {','.join(map(str, cores))}" if cores else workspace.profile.name


def forget_rays_threads() -> None:
    """Undo Ray's limit on a worker's threads, unless the user set one. The profile decides the
    number of threads, and results depend on it."""
    users = Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(setting.startswith(b"OMP_NUM_THREADS=") for setting in users):
        os.environ.pop("OMP_NUM_THREADS", None)
