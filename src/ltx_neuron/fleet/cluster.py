"""Ray: how this process joins it, and what a replica takes of it."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from ltx_neuron.backends import environment
from ltx_neuron.errors import UserError
from ltx_neuron.profiles import Profile

LOCAL = "local"  # the address of a Ray of one's own, on this machine alone
VISIBLE = "NEURON_RT_VISIBLE_CORES"
_STORE_BYTES = 256 * 2**20  # of a local one: a few finished videos
_ANSWERS = 10.0  # seconds within which a head does
_NAMES = {"CPU": "num_cpus", "GPU": "num_gpus"}  # Ray's own resources, as its options name them


def needs(profile: Profile, tp: int) -> dict[str, int]:
    """Ray's resources of one replica."""
    kind = {"neuron": "neuron_cores", "cuda": "GPU"}.get(profile.device, "CPU")
    return {kind: tp}


def options(needed: dict[str, int]) -> dict:
    """The same, as the options of an actor."""
    own = {_NAMES[kind]: count for kind, count in needed.items() if kind in _NAMES}
    others = {kind: count for kind, count in needed.items() if kind not in _NAMES}
    return {"num_cpus": 0, **own, "resources": others}


def capacity(needed: dict[str, int]) -> int:
    """How many replicas the cluster's living nodes have room for, were they empty."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(int(min(node.get(k, 0) // count for k, count in needed.items())) for node in nodes)


def too_small(needed: dict[str, int]) -> str:
    """Why no replica finds a place: what one takes, and what the cluster has."""
    kinds = {"CPU", "GPU", *needed}
    nodes = [
        f"{node['NodeManagerAddress']}: "
        + (", ".join(f"{k} {v:g}" for k, v in node["Resources"].items() if k in kinds) or "nothing")
        for node in ray.nodes()
        if node["Alive"]
    ]
    wanted = ", ".join(f"{kind} {count}" for kind, count in needed.items())
    kind = next(iter(needed))
    declared = f"--num-cpus {needed[kind]}"
    if kind == "neuron_cores":
        declared = f"--resources '{{\"neuron_cores\": {needed[kind]}}}'"
    return (
        f"no node of the Ray cluster has {wanted}, which a replica takes; it has:\n  "
        + "\n  ".join(nodes)
        + f"\nStart one that says so: ray start --address=HEAD:6379 {declared}"
    )


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
        ray.init(address, **own, logging_level="warning")
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
