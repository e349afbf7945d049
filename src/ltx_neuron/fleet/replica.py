"""A replica: a Ray actor that keeps an engine open and runs the queue's jobs, on one chip or
more. Its guidance groups on other nodes are actors of their own.

This module must not import torch: torch reads environment variables that are not set yet.
"""

import tempfile
import threading
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ltx_neuron.fleet.node import engine_for, forget_rays_threads, place_of


class Replica:
    """The Ray actor. Its methods run in threads, so that `stop` can be called during `run`.

    name         of this worker in the queue
    queue_actor  the QueueActor
    lease        of the queue, in seconds
    args         the command's flags; paths are the same on all machines
    """

    def __init__(self, name: str, queue_actor, lease: float, args: Namespace):
        forget_rays_threads()
        self.name, self.queue_actor, self.lease, self.args = name, queue_actor, lease, args
        self.stopped = threading.Event()

    def stop(self) -> None:
        """Claim no further jobs. `run` returns when the claimed ones are done."""
        self.stopped.set()

    def run(self, capability_jobs: list, sets: Sequence = ()) -> None:
        """Run jobs until `stop` is called. Raises UserError if this machine cannot.

        capability_jobs  jobs that it must be able to run
        sets             weight sets that other jobs need
        """
        from ray.util.placement_group import get_current_placement_group

        from ltx_neuron.fleet.cluster import Needs
        from ltx_neuron.fleet.remote_group import RemoteRanks
        from ltx_neuron.fleet.remote_queue import RemoteQueue
        from ltx_neuron.service.worker import Worker

        args, placement = self.args, get_current_placement_group()
        scratch = tempfile.TemporaryDirectory(prefix="ltx-neuron-")
        needed = self.name, args, capability_jobs, sets, placement is not None
        with scratch as folder, engine_for(*needed) as engine:
            workspace = engine.workspace
            if placement:
                options = Needs.of(workspace.profile, workspace.tp).options
                engine.residency.elsewhere = [
                    partial(RemoteRanks, placement, part, options, needed)
                    for part in range(1, placement.bundle_count)
                ]
                engine.residency.start()  # before a job is claimed: other nodes may lack files
            queue = RemoteQueue(self.queue_actor, self.lease, Path(folder))
            previews = not getattr(args, "no_page", True)  # a batch has no page
            # RemoteQueue has the methods that a worker calls.
            worker = Worker(queue, engine, self.name, previews)  # pyright: ignore[reportArgumentType]
            worker.stop = self.stopped
            print(f"{self.name} is ready on {place_of(workspace)}", flush=True)
            worker.run()
