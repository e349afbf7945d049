"""A guidance group on another node of a Ray cluster, as its replica sees it.

Only names, folders and tensors cross the network: weights and graphs are the node's own.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from torch import Tensor

from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.ranks import RankError, Ranks
from ltx_neuron.fleet.cluster import within
from ltx_neuron.fleet.node import RankGroup

_NODE_SECONDS = 120.0  # for Ray to start the actor's process
_CLOSE_SECONDS = 10.0  # for ranks to end


class RemoteRanks(Ranks):
    """The ranks of a RankGroup actor. Raises its errors, and RankError with the node's address if
    the actor or its node is lost.

    placement  of the replica, and `part`, the group's place in it
    options    the actor's resources
    needed     what node.engine_for takes
    """

    def __init__(self, placement: PlacementGroup, part: int, options: dict, needed: tuple):
        self._node = f"{part + 1} of the replica"
        self._actor: Any = (
            ray.remote(RankGroup).options(**options, **within(placement, part)).remote()
        )
        try:
            self._node = self._get(self._actor.node.remote(), _NODE_SECONDS)
            super().__init__(*self._get(self._actor.start.remote(*needed)))
        except BaseException:
            self.close()
            raise

    def load(self, weights: Path, programs: dict[str, Manifest], dtype: torch.dtype) -> None:
        self.programs |= programs
        folders = {name: manifest.folder for name, manifest in programs.items()}
        self._get(self._actor.load.remote(weights, folders, dtype))

    def replace_weights(self, weights: Path) -> None:
        self._call("replace_weights", weights)

    def unload(self) -> None:
        self.programs.clear()
        self._call("unload")

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        # A view would travel with the whole tensor behind it.
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        self._call("put", program, like, **own)

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        self._call("define", program, sequence, runs)

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        return self._call("run", program, sequence, **numbers)

    def get(self, program: str, name: str) -> Tensor:
        return self._call("get", program, name)

    def hashes(self, *names: str) -> list[str]:
        return self._call("hashes", *names)

    def check(self) -> None:
        self._call("check")

    def close(self) -> None:
        with suppress(RayError):
            ray.get(self._actor.call.remote("close"), timeout=_CLOSE_SECONDS)
        ray.kill(self._actor)

    def _call(self, method: str, *args, **more) -> Any:
        result, totals = self._get(self._actor.call.remote(method, *args, **more))
        self.bytes_sent, self.launches, self.launch_ms = totals
        return result

    def _get(self, reference: ray.ObjectRef, seconds: float | None = None) -> Any:
        """The result of the actor's method."""
        try:
            return ray.get(reference, timeout=seconds)
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            reason = str(error).strip().splitlines()[0]
            raise RankError(
                f"node {self._node} is lost: {type(error).__name__}: {reason}"
            ) from None
