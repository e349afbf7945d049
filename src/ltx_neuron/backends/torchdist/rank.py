"""A rank process: `serve` is its main function, Rank its state. host.py: the host's side.

The same code drives a CPU, a GPU and a Neuron core. We did not run it on CUDA or TorchNeuron.
"""

import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, parent_process
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.backends import mesh, ranks
from ltx_neuron.backends.export import name_groups
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.torchdist import compiled
from ltx_neuron.backends.torchdist.protocol import RankSettings, SharedTensor, failure_of
from ltx_neuron.models.programs import weight_name
from ltx_neuron.weights.rankfiles import RESHARD, open_rank_file, rank_path
from ltx_neuron.weights.tensorfile import TensorFile

_CLOSING_SECONDS = 0.1  # within which the system closes a killed process's files


class Rank:
    """The state of one rank process: weights, programs and named tensors. Its public methods are
    the host's commands. Only copies and compiled graphs run on the device. barrier: waits until
    every rank has called it. groups: the names of groups in graph files -> those in this process's
    graphs."""

    def __init__(
        self,
        settings: RankSettings,
        device: torch.device,
        barrier: Callable[[], None],
        groups: dict[str, str],
    ):
        self.settings, self.device = settings, device
        self.rank, self.tp = settings.rank, settings.tp
        self.cp = settings.profile.context_parallel
        # Ranks with the same heads have the same weights.
        self.weight_file = self.rank % self.tp
        self._barrier, self._groups = barrier, groups
        self._synchronize = torch.get_device_module(device).synchronize
        # Graphs contain no weights and survive unload, so that a reloaded model compiles nothing.
        self._graphs: dict[tuple[str, str, str], Callable] = {}
        self._clear()
        self._first_collective()

    def _first_collective(self) -> None:
        """Sum over all ranks once: the first collective, which all join, makes the communicator."""
        total = compiled.runner(compiled.sum_of_ones, self.settings.profile.compile_backend)
        self._barrier()
        (summed,) = total(torch.ones(1).to(self.device))
        if summed.cpu().item() != (size := self.tp * self.cp):
            raise RuntimeError(f"ones of {size} ranks sum to {summed.cpu().item()}")
        self._barrier()

    def _clear(self) -> None:
        # The names of a model's weights -> their folder, and the tensors.
        self.weights: dict[frozenset[str], tuple[Path, dict[str, Tensor]]] = {}
        self.programs: dict[str, Manifest] = {}
        # (program, graph, first block) -> the graph, and its weights in order.
        self.bound: dict[tuple[str, str, int], tuple[Callable, list[Tensor]]] = {}
        self.sequences: dict[tuple[str, str], list] = {}
        self.tensors: dict[str, Tensor] = {}

    def load(
        self, weights: Path, shapes: dict, programs: dict[str, Path], dtype: torch.dtype
    ) -> None:
        """Load a folder of rank files, and the program folders that use it. shapes: this rank's
        shape of each weight."""
        tensors = self._load_weights(weights, shapes, dtype)
        for name, folder in programs.items():
            manifest = self.programs[name] = Manifest(folder)
            for graph, first in (call for calls in manifest.runs.values() for call in calls):
                parameters = manifest.graphs[graph]["parameters"]
                held = [tensors[weight_name(parameter, first)] for parameter in parameters]
                self.bound[name, graph, first] = self._graph(manifest, graph), held

    def _graph(self, manifest: Manifest, name: str) -> Callable:
        key = str(manifest.folder), name, manifest.graphs[name]["sha256"]
        if key not in self._graphs:
            module = manifest.load(name).graph_module
            self._graphs[key] = compiled.ready(module, self.settings, self._groups)
        return self._graphs[key]

    def _load_weights(self, folder: Path, shapes: dict, dtype: torch.dtype) -> dict[str, Tensor]:
        """A folder's weights on the device. They replace those of the same model, so that there is
        never a second copy. Those of sound alone are a part of a model's."""
        model = next((names for names in self.weights if names & shapes.keys()), frozenset())
        loaded_from, tensors = self.weights.pop(model, (None, {}))
        needed = {name: tuple(tensor.shape) for name, tensor in tensors.items()} | shapes
        missing = needed if loaded_from != folder else needed.keys() - tensors.keys()
        if missing:
            file = open_rank_file(rank_path(folder, self.weight_file), needed, dtype)
            for name, tensor in file.tensors(missing):
                if name not in tensors:
                    # On a CPU these are the mapped pages of the file.
                    tensors[name] = tensor.to(self.device)
                elif tensors[name].device == tensor.device:
                    # In place: calls hold these very tensors.
                    tensors[name].set_(tensor)  # pyright: ignore[reportArgumentType]
                else:
                    tensors[name].copy_(tensor)
        self.weights[frozenset(tensors)] = folder, tensors
        return tensors

    def replace_weights(self, weights: Path) -> None:
        names = TensorFile(rank_path(weights, self.weight_file), RESHARD).shapes.keys()
        # The nearest model: if none has exactly these names, loading reports the difference.
        model = min(self.weights, key=lambda loaded: len(loaded ^ names))
        tensors = self.weights[model][1]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._load_weights(weights, shapes, next(iter(tensors.values())).dtype)

    def unload(self) -> None:
        self._clear()
        gc.collect()

    def put(self, program: str, uploads: list[tuple]) -> None:
        """Keep this rank's parts of whole tensors in shared memory. uploads:
        (name, its field, shape, shared memory)."""
        for whole, like, shape, memory in uploads:
            field = self.programs[program].fields[like]
            with SharedTensor(shape, field.dtype, memory) as shared:
                parts = ranks.rank_parts(field, whole, shared.tensor, self.rank, self.tp)
                for name, part in parts.items():
                    # A copy: devices accept no views, and the shared memory is freed soon.
                    copied = part.clone(memory_format=torch.contiguous_format)
                    self.tensors[name] = copied.to(self.device)

    def define(self, program: str, sequence: str, runs: list) -> None:
        self.sequences[program, sequence] = runs

    def run(self, program: str, sequence: str, numbers: dict[str, int]) -> dict:
        """Run a sequence. The answer has the milliseconds until the device was done, launches and
        their milliseconds (see ranks.Ranks), and the names of latents with NaN or Inf."""
        runs = self.sequences.get((program, sequence), [(sequence, {}, {})])
        manifest = self.programs[program]
        calls = ranks.calls_of(manifest, runs, numbers)
        os.environ.update(self.settings.compilers.get(manifest.identity.get("model"), {}))
        self._synchronize()
        start, in_graphs = time.perf_counter(), 0.0
        for number, call in enumerate(calls, 1):
            graph, weights = self.bound[program, call.graph, call.first]
            values = (self.tensors[name] for name in call.reads.values())
            first_time = not getattr(graph, "warm", True)  # interpreted graphs are always warm
            called = time.perf_counter()
            results = graph(*weights, *values)
            in_graphs += time.perf_counter() - called
            self._after_launch(number, first_time)
            self.tensors.update(zip(call.writes.values(), results, strict=True))
        launched = time.perf_counter() - start
        self._synchronize()  # a device's launches are asynchronous
        milliseconds = (time.perf_counter() - start) * 1e3
        launched -= in_graphs if self.settings.profile.device == "cpu" else 0
        return {
            "milliseconds": milliseconds,
            "launches": len(calls),
            "launch_ms": launched * 1e3,
            "not_finite": ranks.broken_latents(
                call.writes.values(), lambda name: self.tensors[name].cpu()
            ),
        }

    def _after_launch(self, number: int, first_time: bool) -> None:
        drain = self.settings.profile.drain_every
        # A device's launch queue has limited length.
        if first_time or drain and number % drain == 0:
            self._synchronize()
        # Otherwise a rank ahead of one that compiles would join another graph's collectives.
        if first_time:
            self._barrier()

    def get(self, program: str, name: str, memory: str) -> None:
        """Copy this rank's part of a tensor into the whole one in shared memory."""
        field = self.programs[program].fields[name]
        # Of ranks with the same part, one writes it.
        same = field.context_split is None and self.rank >= self.tp
        if same or (field.split is None and self.rank % self.tp):
            return
        with SharedTensor(
            ranks.whole_shape(field, self.tp, self.cp), field.dtype, memory
        ) as shared:
            ranks.rank_slice(field, shared.tensor, self.rank, self.tp).copy_(
                self.tensors[name].cpu()
            )

    def hash(self, names: list[str]) -> str:
        return ranks.tensors_digest(self.tensors[name] for name in names)


def serve(pipe: connection.Connection, settings: RankSettings) -> None:
    """Run a rank process until the host closes the pipe. An error is the last answer."""
    # Ctrl-C reaches every process of a terminal, but the host ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(settings.store).parent
    threading.Thread(target=_end_with_host, args=(folder,), daemon=True).start()

    try:
        os.environ.update(settings.environment)  # children of a fork server do not have it yet
        torch.set_num_threads(settings.profile.rank_threads(settings.tp))
        barrier, groups = _join_group(settings)
        device = torch.device(settings.profile.device)
        if device.type == "cuda":  # a process sees all GPUs, but only one Neuron core
            device = torch.device("cuda", settings.place)
            torch.cuda.set_device(device)
        rank = Rank(settings, device, barrier, groups)
        gc.freeze()  # collections skip what was imported: graphs load in 4/5 of the time
        pipe.send(True)
        with torch.no_grad():
            while True:
                method, arguments = pipe.recv()
                pipe.send(getattr(rank, method)(**arguments) or True)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        # The host is done, ends the run, or was killed and cannot remove its folder.
        if connection.wait([_host_sentinel()], timeout=_CLOSING_SECONDS):
            shutil.rmtree(folder, ignore_errors=True)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the host must hear it
        pipe.send(failure_of(error, settings.profile.device))
    finally:
        os._exit(0)  # gloo's threads may wait for a dead rank


def _host_sentinel() -> int:
    host = parent_process()
    assert host is not None  # ranks are multiprocessing's children
    return host.sentinel


def _end_with_host(folder: Path) -> None:
    """End this process when the host has ended, and remove the host's temporary folder."""
    connection.wait([_host_sentinel()])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _join_group(settings: RankSettings) -> tuple[Callable[[], None], dict[str, str]]:
    """Join the process group and its groups; returns Rank's `barrier` and `groups`."""
    import torch.distributed as dist

    profile, tp = settings.profile, settings.tp
    size = profile.world_size(tp)
    # Of every collective. A rank that is not stopped keeps the others waiting while it loads
    # weights or compiles a graph, which takes minutes, or hours on Neuron.
    timeout = timedelta(seconds=profile.first_run_seconds)
    store = dist.FileStore(settings.store, size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}[profile.device],
        store=store,
        rank=settings.rank,
        world_size=size,
        timeout=timeout,
    )
    name = dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]
    if name != mesh.WORLD:
        raise RuntimeError(f"the default process group is {name!r}, graphs say {mesh.WORLD!r}")
    name_groups(groups := mesh.groups(profile, tp), timeout=timeout)
    # A device's group reduces only device tensors, so host tensors need a group of their own.
    host = dist.new_group(backend="gloo", timeout=timeout)

    def barrier() -> None:
        dist.all_reduce(torch.ones(1, dtype=torch.int32), group=host)

    return barrier, compiled.group_names(groups, profile)
