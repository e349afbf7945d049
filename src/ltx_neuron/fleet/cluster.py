"""Ray: how this process joins it, and what a replica takes of it."""

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
from ltx_neuron.errors import UserError
from ltx_neuron.profiles import Profile

LOCAL = "local"  # the address of a Ray of one's own, on this machine alone
VISIBLE = "NEURON_RT_VISIBLE_CORES"
_STORE_BYTES = 256 * 2**20  # of a local one: a few finished videos
_ANSWERS = 10.0  # seconds within which a head does


class Needs(NamedTuple):
    """What one replica takes of a node: so many of one of Ray's resources."""

    kind: str
    count: int

    @classmethod
    def of(cls, profile: Profile, tp: int) -> "Needs":
        kinds = {"neuron": "neuron_cores", "cuda": "GPU"}
        return cls(kinds.get(profile.device, "CPU"), tp)

    @property
    def options(self) -> dict:
        """The options of an actor that takes it. CPU and GPU have names of their own there."""
        own = {"CPU": "num_cpus", "GPU": "num_gpus"}.get(self.kind)
        taken = {own: self.count} if own else {"resources": {self.kind: self.count}}
        return {"num_cpus": 0, **taken}

    def capacity(self) -> int:
        """How many replicas the cluster's living nodes have room for, were they empty."""
        return sum(int(has.get(self.kind, 0) // self.count) for _, has in _living_nodes())

    def too_small(self) -> str:
        """Why no replica finds a place: what one takes, and what the cluster has."""
        kinds, nodes = {"CPU", "GPU", self.kind}, []
        for address, has in _living_nodes():
            counts = ", ".join(f"{kind} {n:g}" for kind, n in has.items() if kind in kinds)
            nodes.append(f"\n  {address}: {counts or 'nothing'}")
        declared = f"--num-cpus {self.count}"
        if self.kind == "neuron_cores":
            declared = f"--resources '{{\"neuron_cores\": {self.count}}}'"
        return (
            f"no node of the Ray cluster has {self.kind} {self.count}, which a replica takes; it"
            f" has:{''.join(nodes)}\nStart one that says so: ray start --address=HEAD:6379"
            f" {declared}"
        )


def _living_nodes() -> list[tuple[str, dict[str, float]]]:
    """The address and the resources of each."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [(node["NodeManagerAddress"], node["Resources"]) for node in nodes]


@contextmanager
def connected(address: str, profile: Profile) -> Iterator[None]:
    """Be a driver of the Ray at an address while the block runs. UserError where there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own = {}
    if address == LOCAL:
        own = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        if profile.device == "neuron":
            own["resources"] = {"neuron_cores": profile.cores}
    main = threading.current_thread() is threading.main_thread()
    handler = main and signal.getsignal(signal.SIGTERM)
    try:
        _check_answers(address)
        ray.init(address, **own, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"--ray {address}: this machine could not join it ({said[0]})\nStart Ray on the head:"
            " ray start --head, and on this machine: ray start --address=HEAD:6379; then type"
            f" --ray auto. --ray {LOCAL} uses this machine alone"
        ) from None
    if main:  # Ray puts one of its own in its place
        signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT: Ray itself would try for four minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.removeprefix("ray://"), int(port)), _ANSWERS).close()


def check_cores(profile: Profile, tp: int) -> list[int]:
    """The logical cores that Ray gave this process. UserError unless they are `tp` cores of one
    chip: between chips a step would take several times as long, and Ray promises nothing."""
    if profile.device != "neuron":
        return []
    if VISIBLE not in os.environ:
        raise UserError(
            f"{VISIBLE} is not set: Ray tells a replica by it which cores are its own.\nUnset"
            " RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES where Ray is started"
        )
    cores = environment.cores(profile, tp)
    assert profile.chip
    a_chip = profile.chip.cores // profile.lnc
    if tp <= a_chip and len({core // a_chip for core in cores}) > 1:
        raise UserError(
            f"{VISIBLE}={os.environ[VISIBLE]} are cores of more than one chip, which has {a_chip}:"
            f" the replica gives them back.\nLet nothing on this node take other than {a_chip}"
            " neuron_cores at a time"
        )
    # For whoever reads it further on, in the form in which Ray itself does.
    os.environ[VISIBLE] = ",".join(map(str, cores))
    return cores
