"""Ray: connecting this process to a cluster, and the resources of a replica."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import ray

from ltx_neuron.backends import environment
from ltx_neuron.config.profiles import Profile
from ltx_neuron.errors import UserError

LOCAL = "local"  # the address of a private Ray on this machine
VISIBLE = "NEURON_RT_VISIBLE_CORES"
_STORE_BYTES = 256 * 2**20  # object store of a local Ray: a few finished videos
_ANSWERS = 10.0  # seconds to wait for the head's connection


class Needs(NamedTuple):
    """The resources of one replica on its node: `count` of one of Ray's kinds."""

    kind: str
    count: int

    @classmethod
    def of(cls, profile: Profile, tp: int) -> "Needs":
        kinds = {"neuron": "neuron_cores", "cuda": "GPU"}
        return cls(kinds.get(profile.device, "CPU"), profile.cores_needed(tp))

    @property
    def options(self) -> dict:
        """The options of the replica's actor. Ray names CPU and GPU differently."""
        option = {"CPU": "num_cpus", "GPU": "num_gpus"}.get(self.kind)
        taken = {option: self.count} if option else {"resources": {self.kind: self.count}}
        return {"num_cpus": 0, **taken}

    def capacity(self) -> int:
        """The number of replicas that the cluster's living nodes could run if they were idle."""
        return sum(room for _, room in self._rooms())

    def _rooms(self) -> list[tuple[str, int]]:
        nodes = _living_nodes()
        return [(address, int(has.get(self.kind, 0) // self.count)) for address, has in nodes]

    def layout(self) -> str:
        count = self.capacity()
        room = f"room for {count} replica{'s' * (count != 1)}"
        where = ", ".join(f"{room} on {address}" for address, room in self._rooms() if room)
        return f"{room} with {self.kind} {self.count}: {where}"

    def too_small(self) -> str:
        """An error message: the resources that a replica needs, and those of each node."""
        kinds, nodes = {"CPU", "GPU", self.kind}, []
        for address, has in _living_nodes():
            counts = ", ".join(f"{kind} {n:g}" for kind, n in has.items() if kind in kinds)
            nodes.append(f"\n  {address}: {counts or 'nothing'}")
        declared = f"--num-cpus {self.count}"
        if self.kind == "neuron_cores":
            declared = f"--resources '{{\"neuron_cores\": {self.count}}}'"
        return (
            f"no node of the Ray cluster has {self.kind} {self.count} for a replica; it has:"
            f"{''.join(nodes)}\nStart a node with it: ray start --address=HEAD:6379"
            f" {declared}"
        )


def _living_nodes() -> list[tuple[str, dict[str, float]]]:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [(node["NodeManagerAddress"], node["Resources"]) for node in nodes]


@contextmanager
def connected(address: str, profile: Profile) -> Iterator[None]:
    """Connect to the Ray at an address while the block runs. Raises UserError if there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {}
    if address == LOCAL:
        options = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        if profile.device == "neuron":
            options["resources"] = {"neuron_cores": profile.cores}
    main = threading.current_thread() is threading.main_thread()
    handler = main and signal.getsignal(signal.SIGTERM)
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal():  # Ray itself would retry for four minutes
            socket.create_connection((host.removeprefix("ray://"), int(port)), _ANSWERS).close()
        ray.init(address, **options, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"--ray {address}: this machine could not join it ({lines[0]})\nStart Ray on the head:"
            " ray start --head, and on this machine: ray start --address=HEAD:6379; then type"
            f" --ray auto. --ray {LOCAL} uses only this machine"
        ) from None
    if main:  # Ray replaces the handler
        signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


def check_cores(profile: Profile, tp: int) -> list[int]:
    """The logical cores that Ray assigned to this process. Raises UserError unless they follow each
    other and the links connect them (environment.cores): Ray may mix chips."""
    if profile.device != "neuron":
        return []
    if VISIBLE not in os.environ:
        raise UserError(
            f"{VISIBLE} is not set: Ray assigns a replica's cores with it.\nUnset"
            " RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES where Ray is started"
        )
    try:
        cores = environment.cores(profile, tp)
    except UserError as error:
        wrong, _, _ = str(error).partition("\n")  # what to type is Ray's matter
        raise UserError(
            f"{wrong}\nThe replica releases them. On this node, run only Ray tasks that take"
            f" {max(profile.cores_per_chip, profile.cores_needed(tp))} neuron_cores at a time"
        ) from None
    # A list of single cores, as Ray writes it.
    os.environ[VISIBLE] = ",".join(map(str, cores))
    return cores
