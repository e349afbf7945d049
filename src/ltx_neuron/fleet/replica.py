"""A replica: a Ray actor that keeps an engine open and runs the queue's jobs on its chips.

This module must not import torch: torch reads environment variables that are not set yet.
"""

import os
import tempfile
import threading
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ltx_neuron.engine.run import Engine


class Replica:
    """The Ray actor. Its methods run in threads, so that `stop` can be called during `run`. name:
    of this worker in the queue. queue_actor: the QueueActor. lease: of the queue, in seconds. args:
    the command's flags; paths are the same on all machines."""

    def __init__(self, name: str, queue_actor, lease: float, args: Namespace):
        forget_rays_threads()
        self.name, self.queue_actor, self.lease, self.args = name, queue_actor, lease, args
        self.stopped = threading.Event()

    def stop(self) -> None:
        """Claim no further jobs. `run` returns when the claimed ones are done."""
        self.stopped.set()

    def run(self, capability_jobs: list, sets: Sequence = ()) -> None:
        """Run jobs until `stop` is called. Raises UserError if this machine cannot. See Pool."""
        from ltx_neuron.fleet.cluster import check_cores
        from ltx_neuron.fleet.remote_queue import RemoteQueue
        from ltx_neuron.service.worker import Worker

        scratch = tempfile.TemporaryDirectory(prefix="ltx-neuron-")
        needed = self.name, self.args, capability_jobs, sets
        with scratch as folder, engine_for(*needed) as engine:
            queue = RemoteQueue(self.queue_actor, self.lease, Path(folder))
            previews = not getattr(self.args, "no_page", True)  # a batch has no page
            # RemoteQueue has the methods that a worker calls.
            worker = Worker(queue, engine, self.name, previews)  # pyright: ignore[reportArgumentType]
            worker.stop = self.stopped
            cores = check_cores(engine.workspace.profile, engine.workspace.tp)
            place = f"cores {','.join(map(str, cores))}" if cores else engine.workspace.profile.name
            print(f"{self.name} is ready on {place}", flush=True)
            worker.run()


def engine_for(name: str, args: Namespace, capability_jobs: list, sets: Sequence) -> "Engine":
    """An engine on this node's cores, which has downloaded what it lacks. Raises UserError if this
    node cannot run the capability jobs. name: of the replica."""
    from ltx_neuron import flags
    from ltx_neuron.artifacts.build import fetch
    from ltx_neuron.engine.run import Engine
    from ltx_neuron.errors import UserError
    from ltx_neuron.fleet.cluster import check_cores
    from ltx_neuron.report.latency import Recorder

    options, workspace = flags.run_options(args), flags.workspace(args, writes=False)
    check_cores(workspace.profile, workspace.tp)
    if args.artifacts_url:
        try:
            needed = {stage.loras for job in capability_jobs for stage in job.stages} | {*sets}
            default = flags.spec(args).weight_sets
            fetch(args.artifacts_url, workspace, options, needed or default)
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


def forget_rays_threads() -> None:
    """Undo Ray's limit on a worker's threads, unless the user set one: the profile decides."""
    users = Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(setting.startswith(b"OMP_NUM_THREADS=") for setting in users):
        os.environ.pop("OMP_NUM_THREADS", None)
