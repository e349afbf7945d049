"""A rank process: `serve` is its main function, Rank what it holds. The host's side is
torchdist.py, the messages between them wire.py.

The same code drives a CPU, a GPU and a Neuron core: what differs is the profile's device, process
group and compile backend. On CUDA and on TorchNeuron it was not run by us.
"""

import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.backends import compiled, wire
from ltx_neuron.backends.export import GROUP
from ltx_neuron.backends.liveness import Pulse
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.ranks import (
    at,
    broken_latents,
    group,
    kept,
    part_of,
    tensors_digest,
    whole_shape,
)
from ltx_neuron.backends.wire import RankSettings, SharedTensor
from ltx_neuron.models.programs import weight_name
from ltx_neuron.models.signatures import Field
from ltx_neuron.weights.rankfiles import RESHARD, open_rank_file, rank_path
from ltx_neuron.weights.tensorfile import TensorFile

_HEARTBEAT_SECONDS = 0.5
_CLOSING_SECONDS = 0.1  # within which the system closes everything of a killed process
# For ranks to meet, and in a sum: none that counts. The host judges its ranks (liveness.Watch),
# because a clock in a rank runs on while its machine is paused.
_COLLECTIVE_TIMEOUT = timedelta(days=365)


class Call(NamedTuple):
    """A graph that is ready to be called, bound to its weights.

    inputs   (name, suffix) of the tensors it takes; the suffix names a group of blocks, and is
             empty for what all groups share
    outputs  names of the tensors it returns
    """

    graph: Callable
    weights: list[Tensor]
    inputs: list[tuple[str, str]]
    outputs: list[str]


class Rank:
    """What one rank process holds: weights, programs and named tensors. Its public methods are the
    host's commands; their results travel as JSON.

    Nothing but copies and compiled graphs runs on the device: whatever is made, cut or looked at
    is so on the host.

    barrier   waits until every rank has called it
    launched  called after every launch of a graph
    """

    def __init__(
        self,
        settings: RankSettings,
        device: torch.device,
        barrier: Callable[[], None],
        launched: Callable[[], None],
    ):
        self.settings, self.device = settings, device
        self.rank, self.tp = settings.rank, settings.tp
        self._barrier, self._launched = barrier, launched
        self._synchronize = torch.get_device_module(device).synchronize
        # Graphs hold no weights and survive unload: a model that comes again compiles nothing.
        self._graphs: dict[tuple[str, str, str], Callable] = {}
        self._clear()
        self._first_collective()
        self._compiled_at_start = self._compiled()

    def _first_collective(self) -> None:
        """Sum over all ranks once: a device makes its communicator in the first collective, which
        hangs unless every rank joins it."""
        total = compiled.runner(compiled.sum_of_ones, self.settings.compile_backend)
        self._barrier()
        (summed,) = total(torch.ones(1).to(self.device))
        if summed.cpu().item() != self.tp:
            raise RuntimeError(f"ones of {self.tp} ranks sum to {summed.cpu().item()}")
        self._barrier()

    def _clear(self) -> None:
        # By the names of a model's weights: the folder they are from, and the tensors.
        self.weights: dict[frozenset[str], tuple[str, dict[str, Tensor]]] = {}
        self.calls: dict[str, dict[str, list[Call]]] = {}  # program -> run
        self.fields: dict[str, dict[str, Field]] = {}  # program -> name
        self.models: dict[str, str] = {}  # program -> model
        self.sequences: dict[tuple[str, str], list] = {}
        self.tensors: dict[str, Tensor] = {}

    def load(self, weights: str, wanted: dict, programs: dict[str, str], dtype: str) -> dict:
        """Load a folder of rank files and programs, given as folders, that share it.

        wanted  this rank's shape of each weight
        """
        tensors = self._load_weights(weights, wanted, getattr(torch, dtype))
        for name, folder in programs.items():
            manifest = Manifest(Path(folder))
            self.fields[name], self.models[name] = manifest.fields, manifest.identity.get("model")
            graphs = {graph: self._graph(manifest, graph) for graph in manifest.graphs}
            self.calls[name] = {
                run: [_bind(manifest, graphs, tensors, *call) for call in calls]
                for run, calls in manifest.runs.items()
            }
        return {}

    def _graph(self, manifest: Manifest, name: str) -> Callable:
        key = str(manifest.folder), name, manifest.graphs[name]["sha256"]
        if key not in self._graphs:
            self._graphs[key] = compiled.ready(manifest.load(name).graph_module, self.settings)
        return self._graphs[key]

    def _load_weights(self, folder: str, wanted: dict, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights of a folder on the device, in the place of the same model's, if it is
        loaded: there is never a second copy of a model."""
        model = frozenset(wanted)
        loaded_from, tensors = self.weights.get(model, (None, {}))
        if loaded_from != folder:
            file = open_rank_file(rank_path(Path(folder), self.rank), wanted, dtype)
            for name, tensor in file.tensors():
                if name not in tensors:
                    # On a CPU these are the file's own pages: no copy.
                    tensors[name] = tensor.to(self.device)
                elif tensors[name].device == tensor.device:
                    tensors[name].set_(tensor)  # in place: calls hold these very tensors
                else:
                    tensors[name].copy_(tensor)
            self.weights[model] = folder, tensors
        return tensors

    def replace_weights(self, weights: str) -> dict:
        names = TensorFile(rank_path(Path(weights), self.rank), RESHARD).shapes.keys()
        # The nearest model: where none has just these names, loading says what differs.
        model = min(self.weights, key=lambda loaded: len(loaded ^ names))
        tensors = self.weights[model][1]
        wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._load_weights(weights, wanted, next(iter(tensors.values())).dtype)
        return {}

    def unload(self) -> dict:
        self._clear()
        gc.collect()
        return {}

    def put(self, program: str, uploads: list[dict]) -> dict:
        """Keep this rank's parts of whole tensors that lie in shared memory."""
        for upload in uploads:
            self._keep_part(self.fields[program][upload.pop("like")], **upload)
        return {}

    def _keep_part(self, field: Field, name: str, memory: str, shape: list[int]) -> None:
        with SharedTensor(tuple(shape), field.dtype, memory) as shared:
            parts = kept(field, name, shared.tensor, self.rank)
            self.tensors.update({name: self._copied(part) for name, part in parts.items()})

    def _copied(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the device: it takes no views, and shared memory is gone soon."""
        return tensor.clone(memory_format=torch.contiguous_format).to(self.device)

    def define(self, program: str, sequence: str, runs: list) -> dict:
        self.sequences[program, sequence] = runs
        return {}

    def run(self, program: str, sequence: str, numbers: dict[str, int]) -> dict:
        """Run a sequence. The answer has the milliseconds until the device was done, its launches
        and what these took (see ranks.Ranks), and the names of latents with NaN or Inf."""
        chosen = {name: at(name, number) for name, number in numbers.items()}
        runs = self.sequences.get((program, sequence), [(sequence, {}, {})])
        launches = [
            (call, reads | chosen, writes)
            for run, reads, writes in runs
            for call in self.calls[program][run]
        ]
        os.environ.update(self.settings.compilers.get(self.models[program], {}))
        self._synchronize()
        start, in_graphs = time.perf_counter(), 0.0
        for number, (call, reads, writes) in enumerate(launches, 1):
            values = (self.tensors[reads.get(name, name) + end] for name, end in call.inputs)
            first_time = not _is_compiled(call.graph)
            called = time.perf_counter()
            results = call.graph(*call.weights, *values)
            in_graphs += time.perf_counter() - called
            self._after_launch(number, first_time)
            names = (writes.get(name, name) for name in call.outputs)
            self.tensors.update(zip(names, results, strict=True))
        launched = time.perf_counter() - start
        self._synchronize()  # a device's launches return before they are done
        milliseconds = (time.perf_counter() - start) * 1e3
        launched -= in_graphs if self.settings.device == "cpu" else 0
        not_finite = broken_latents(call.outputs, writes, lambda name: self.tensors[name].cpu())
        return {
            "milliseconds": milliseconds,
            "launches": len(launches),
            "launch_ms": launched * 1e3,
            "not_finite": not_finite,
        }

    def _after_launch(self, number: int, first_time: bool) -> None:
        self._launched()
        drain = self.settings.drain_every
        # The queue of a device may be full after so many launches.
        if first_time or drain and number % drain == 0:
            self._synchronize()
        # A rank that ran ahead of one that still compiles would offer its collectives to the wrong
        # graph.
        if first_time:
            self._barrier()

    def get(self, program: str, name: str, memory: str) -> dict:
        """Copy a tensor to its place in the whole one, in shared memory."""
        field = self.fields[program][name]
        if self.rank == 0 or field.split is not None:  # else every rank would write the same
            with SharedTensor(whole_shape(field, self.tp), field.dtype, memory) as shared:
                part_of(field, shared.tensor, self.rank).copy_(self.tensors[name].cpu())
        return {}

    def hash(self, names: list[str]) -> dict:
        return {"hash": tensors_digest(self.tensors[name] for name in names)}

    def compiled_graphs(self) -> dict:
        return {"count": self._compiled() - self._compiled_at_start}

    def _compiled(self) -> int:
        return 0 if self.settings.compile_backend == "export" else compiled.graphs_compiled()


def _bind(
    manifest: Manifest, graphs: dict[str, Callable], tensors: dict, name: str, first_block: int
) -> Call:
    """A call of a graph for the blocks from `first_block` on, with weights in the graph's order."""
    described, fields = manifest.graphs[name], manifest.fields
    weights = [tensors[weight_name(p, first_block)] for p in described["parameters"]]
    inputs = [(field, group(fields[field], first_block)) for field in described["inputs"]]
    return Call(graphs[name], weights, inputs, described["outputs"])


def _is_compiled(graph: Callable) -> bool:
    """Whether calling a graph compiles nothing; a graph that is interpreted never does."""
    return getattr(graph, "warm", True)


def serve(pipe: connection.Connection, settings: RankSettings, pulse: Pulse) -> None:
    """A rank process: join the group, then answer commands until the host closes the pipe. An error
    is the last answer. Never returns."""
    # Ctrl-C reaches every process of a terminal; it is the host that ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(settings.store).parent
    threading.Thread(target=_beat, args=(pulse, settings.rank, folder), daemon=True).start()
    advance = partial(pulse.advance, settings.rank)
    try:
        os.environ.update(settings.environment)  # a fork server's children do not have it yet
        torch.set_num_threads(settings.threads)
        barrier = _join_group(settings)
        rank = Rank(settings, _device(settings), barrier, advance)
        pipe.send_bytes(wire.encode_answer({}))
        with torch.no_grad():
            while True:
                op, arguments = wire.decode_command(pipe.recv_bytes())
                advance()
                pipe.send_bytes(wire.encode_answer(getattr(rank, op)(**arguments)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        # The host is done, or is ending the run, or was killed: then it cannot remove its folder.
        if connection.wait([parent_process().sentinel], timeout=_CLOSING_SECONDS):
            shutil.rmtree(folder, ignore_errors=True)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the host must hear it
        pipe.send_bytes(wire.encode_answer(wire.failure_of(error, settings.device)))
    finally:
        os._exit(0)  # gloo's threads may wait for a rank that is gone


def _beat(pulse: Pulse, rank: int, folder: Path) -> None:
    """Show the host that this process lives; end it when the host's has ended, in whatever way,
    and remove the host's temporary folder.

    A thread of its own, because a command may take long. A process that is stopped, or whose
    machine hangs, shows nothing.
    """
    host = parent_process().sentinel
    pulse.beat(rank)
    while not connection.wait([host], timeout=_HEARTBEAT_SECONDS):
        pulse.beat(rank)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _join_group(settings: RankSettings) -> Callable[[], None]:
    """Join the process group; returns Rank's `barrier`."""
    import torch.distributed as dist

    dist.init_process_group(
        settings.process_group,
        store=dist.FileStore(settings.store, settings.tp),
        rank=settings.rank,
        world_size=settings.tp,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    if dist.group.WORLD.group_name != GROUP:
        raise RuntimeError(
            f"the default process group is named {dist.group.WORLD.group_name!r}, graphs say"
            f" {GROUP!r}"
        )
    # The device's group carries tensors of the device alone: the host's side has one of its own.
    host = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)

    def barrier() -> None:
        dist.all_reduce(torch.ones(1, dtype=torch.int32), group=host)

    return barrier


def _device(settings: RankSettings) -> torch.device:
    """This rank's device. A Neuron process sees one core; a CUDA one sees all GPUs."""
    if settings.device == "cuda":
        torch.cuda.set_device(settings.rank)
        return torch.device("cuda", settings.rank)
    return torch.device(settings.device)
