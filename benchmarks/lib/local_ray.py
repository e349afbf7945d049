"""A Ray cluster whose nodes are processes of this machine: a head that computes nothing, as the
front's machine, and nodes with room for one replica each."""

import os
from pathlib import Path

# Of the nodes' processes, which have no working folder in common with this one.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2] / "src")

from ray.cluster_utils import Cluster

_STORE_BYTES = 100 * 2**20
# That a node is gone is known within seconds: Ray's default is half a minute.
_HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}
_HEALTH |= {"health_check_failure_threshold": 6, "health_check_timeout_ms": 5000}


class LocalRay:
    """A context manager: leaving it ends all of the cluster's processes."""

    def __init__(self, nodes: int):
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self.cluster = Cluster(True, head_node_args=head | {"_system_config": _HEALTH})
        self.nodes = []
        for _ in range(nodes):
            self.join()

    def __enter__(self) -> "LocalRay":
        return self

    def __exit__(self, *_) -> None:
        self.cluster.shutdown()

    @property
    def address(self) -> str:
        return self.cluster.address

    def join(self) -> None:
        """Another node joins."""
        self.nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES))

    def kill(self) -> None:
        """A node is gone, with all that runs on it."""
        self.cluster.remove_node(self.nodes.pop(0), allow_graceful=False)
