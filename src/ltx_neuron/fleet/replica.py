"""A replica: an actor that has a chip, keeps an engine up on it, and makes the queue's videos.

Importing this imports no torch: it reads the environment then, which is not yet as it should be.
"""

import os
import tempfile
import threading
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path


class Replica:
    """What Ray places. Its methods run in threads: `stop` while `run` works.

    name         by which the queue knows it
    queue_actor  the QueueActor, and the queue's `lease`
    args         the command's flags; paths are the same on all machines
    """

    def __init__(self, name: str, queue_actor, lease: float, args: Namespace):
        forget_rays_threads()
        self.name, self.queue_actor, self.lease, self.args = name, queue_actor, lease, args
        self.stopped = threading.Event()

    def stop(self) -> None:
        """Take no further job; `run` returns when those that were taken are made."""
        self.stopped.set()

    def run(self, capability_jobs: list, sets: Sequence = ()) -> None:
        """Make videos until `stop` is called. UserError if this machine cannot.

        capability_jobs  jobs that it must be able to make
        sets             weight sets that other jobs need
        """
        from ltx_neuron import flags
        from ltx_neuron.engine import Engine
        from ltx_neuron.errors import UserError
        from ltx_neuron.fleet.cluster import check_cores
        from ltx_neuron.fleet.fetch import fetch
        from ltx_neuron.fleet.remote_queue import RemoteQueue
        from ltx_neuron.report.recorder import Recorder
        from ltx_neuron.service.worker import Worker

        args, options = self.args, flags.run_options(self.args)
        workspace = flags.workspace(args, writes=False)
        cores = check_cores(workspace.profile, workspace.tp)
        if args.artifacts_url:
            try:
                needed = {stage.loras for job in capability_jobs for stage in job.stages} | {*sets}
                own = flags.weight_sets(flags.lora_fields(flags.spec(args)))
                fetch(args.artifacts_url, workspace, options, needed or own)
            except UserError as error:  # all that is needed may be here
                print(f"{self.name}: nothing was fetched: {error}", flush=True)
        scratch = tempfile.TemporaryDirectory(prefix="ltx-neuron-")
        with scratch as folder, Engine(workspace, Recorder(), options) as engine:
            try:
                engine.preflight.check(capability_jobs)
            except UserError as error:
                if args.artifacts_url:
                    raise
                advice = "Or take it from where it was made: --artifacts-url URL"
                raise UserError(f"{error}\n{advice}") from None
            queue = RemoteQueue(self.queue_actor, self.lease, Path(folder))
            previews = not getattr(args, "no_page", True)  # a batch has no page
            # The queue has what workers use of one.
            worker = Worker(queue, engine, self.name, previews)  # pyright: ignore[reportArgumentType]
            worker.stop = self.stopped
            on = f"cores {','.join(map(str, cores))}" if cores else workspace.profile.name
            print(f"{self.name} is ready on {on}", flush=True)
            worker.run()


def forget_rays_threads() -> None:
    """Undo that Ray limits a worker's threads to the CPUs that it asked for: the profile says how
    many compute, and results change with their number. What the user set stays."""
    users = Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(setting.startswith(b"OMP_NUM_THREADS=") for setting in users):
        os.environ.pop("OMP_NUM_THREADS", None)
