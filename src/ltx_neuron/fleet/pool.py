"""The pool keeps one replica running on each chip of a Ray cluster.

Nodes may join at any time. If a replica dies, the pool starts another, and the queue gives its job
to a live one.
"""

import os
import secrets
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ltx_neuron import hub
from ltx_neuron.config.profiles import resolve
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.flags import MODEL_FILES
from ltx_neuron.fleet import cluster
from ltx_neuron.fleet.remote_queue import QueueActor
from ltx_neuron.fleet.replica import Replica
from ltx_neuron.job import Job
from ltx_neuron.service.queue import Queue

_LOOK_SECONDS = 0.5  # between two checks of the cluster
_LONG_ENOUGH = 60.0  # a replica that ends sooner without a video has failed early
_LONGEST_WAIT = 30.0  # maximum delay before replicas that fail early are restarted
_LAST_SECONDS = 15.0  # for replicas to finish when the pool ends
_MAX_CALLS = 64  # concurrent calls of the queue's actor


class _Member(NamedTuple):
    name: str
    actor: Any
    began: float


@dataclass
class Pool:
    """Runs a queue's jobs on a cluster, until `stop` is set."""

    queue: Queue  # its database and files are on this machine
    args: Namespace  # flags for a replica's engine
    capability_jobs: list[Job]  # that a replica must be able to run
    max_replicas: int | None = None  # None: as many as the cluster has room for
    # Consecutive early failures before run() raises, if no replica works; it also raises if the
    # cluster has no room at the start. None: retry forever.
    max_failures: int | None = None
    sets: Sequence[tuple] = ()  # further weight sets of the DiT that jobs need

    def __post_init__(self):
        self.args, self.stop = absolute(self.args), threading.Event()
        self.members: dict[ray.ObjectRef, _Member] = {}  # by the reference of run()'s result
        self.profile = resolve(self.args.profile, tuple(self.args.profile_set))
        self.tp = self.profile.degree(self.args.tp_degree)
        self._failures, self._not_before = 0, 0.0
        self._room: str | None = None  # the last message about the cluster's room

    def run(self, look: Callable[[], object] = lambda: None) -> None:
        """Keep replicas running. look: called twice a second."""
        self.queue.release_worker(None, crashed=True)  # of a killed pool: only one uses the queue
        with cluster.connected(self.args.ray, self.profile):
            node = ray.get_runtime_context().get_node_id()
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = ray.remote(QueueActor).options(
                num_cpus=0, max_concurrency=_MAX_CALLS, scheduling_strategy=here
            )
            self.queue_actor = actor.remote(
                self.queue.database.path.absolute(), self.queue.folder.absolute(), self.queue.lease
            )
            self._queue_ended = self.queue_actor.until_it_dies.remote()
            try:
                while not self.stop.is_set():
                    self._fill()
                    self._wait()
                    look()
            finally:
                self._end()

    def _fill(self) -> None:
        needed = cluster.Needs.of(self.profile, self.tp)
        room = needed.capacity()
        text = needed.layout() if room else needed.too_small()
        if not room and self.max_failures and self._room is None:
            raise UserError(text)
        if text != self._room:
            print(text, flush=True)  # nodes may join
        self._room = text
        if time.monotonic() < self._not_before:
            return
        while len(self.members) < min(room, self.max_replicas or room):
            name = f"ray-{secrets.token_hex(4)}"
            actor = ray.remote(Replica).options(**needed.options, max_concurrency=2)
            replica = actor.remote(name, self.queue_actor, self.queue.lease, self.args)
            ended = replica.run.remote(self.capability_jobs, self.sets)
            self.members[ended] = _Member(name, replica, time.monotonic())

    def _wait(self) -> None:
        ended, _ = ray.wait([self._queue_ended, *self.members], timeout=_LOOK_SECONDS)
        if self._queue_ended in ended:
            raise RunError("the queue's process (Ray actor QueueActor) has died")
        for reference in ended:
            self._ended(reference)

    def _ended(self, reference: ray.ObjectRef) -> None:
        """Handle a replica's end: release its jobs, and record the failure."""
        member = self.members.pop(reference)
        state = self.queue.workers().get(member.name, {})
        self.queue.release_worker(member.name, crashed=True)
        try:
            error = ray.get(reference)
        except Exception as raised:
            error = raised
        ray.kill(member.actor)  # after an exception the actor still holds its chip
        why = _reason(error)
        lived = state.get("videos") or time.monotonic() - member.began > _LONG_ENOUGH
        self._failures = 0 if lived else self._failures + 1
        wait = self._failures and min(2.0 ** (self._failures - 1), _LONGEST_WAIT)
        self._not_before = time.monotonic() + wait
        print(f"replica {member.name} has ended: {why}", flush=True)
        if self.max_failures and self._failures >= self.max_failures and not self._working():
            kind = UserError if isinstance(error, UserError) else RunError
            raise kind(why)

    def _end(self) -> None:
        with suppress(RayError):
            for member in self.members.values():
                member.actor.stop.remote()
            if self._working():  # else they are still starting, and have no jobs
                ended = [*self.members]
                ray.wait(ended, num_returns=len(ended), timeout=_LAST_SECONDS)
        for member in self.members.values():
            with suppress(RayError, GetTimeoutError):
                ray.kill(member.actor)
            self.queue.release_worker(member.name)
        self.members.clear()

    def _working(self) -> bool:
        states = self.queue.workers()
        return any(states.get(member.name, {}).get("alive") for member in self.members.values())


def _reason(error: Exception | None) -> str:
    if error is None:
        return "it was stopped"
    cause = getattr(error, "cause", None) or error
    if isinstance(error, UserError | RunError):
        return str(cause)
    first = (str(cause).strip().splitlines() or [""])[0]
    return f"{type(cause).__name__}: {first}"


def absolute(args: Namespace) -> Namespace:
    """The flags with absolute paths, for processes in other working folders."""
    values: dict[str, Any] = dict(vars(args))
    for key, value in values.items():
        if isinstance(value, Path):
            values[key] = Path((hub.absolute if key in MODEL_FILES else os.path.abspath)(value))
    if values["artifacts_url"] and "://" not in str(values["artifacts_url"]):
        values["artifacts_url"] = os.path.abspath(values["artifacts_url"])
    for key in ("lora", "ic_lora", "distilled_lora"):
        values[key] = [[hub.absolute(path), *rest] for path, *rest in values.get(key) or []]
    return Namespace(**values)
