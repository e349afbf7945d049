"""A rank process: `serve` is its life, Rank what it holds. The host's side is in torchdist.py.

A rank joins the process group, then answers the host's commands until the host closes the pipe. The
same code drives a CPU, a GPU and a Neuron core: what differs is the profile's device, process group
and compile backend. On CUDA and on TorchNeuron it was not run by us.
"""

import hashlib
import json
import math
import mmap
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, parent_process
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.backends import compiled
from ltx_neuron.backends.export import GROUP
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.neuron_errors import failure
from ltx_neuron.backends.ranks import finite, part_of, whole_shape
from ltx_neuron.errors import UserError
from ltx_neuron.models.programs import weight_name
from ltx_neuron.models.signatures import LATENTS, Field
from ltx_neuron.weights.rankfiles import RESHARD, open_rank_file, rank_file
from ltx_neuron.weights.tensorfile import TensorFile

# until a process has imported torch and met the others: slow on a busy machine
START_SECONDS = 120.0
_PULSE_SECONDS = 0.5
_CLOSING_SECONDS = 0.1  # within which everything of a killed process is closed


class Shared:
    """A shared-memory tensor, made by the host and opened by the ranks under its name.

    The name is that of the host's descriptor, and no file: what is left when processes are killed
    is left to nobody, and the size of /dev/shm, 64 MB in many containers, does not matter.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, name: str | None = None):
        size = max(1, math.prod(shape) * dtype.itemsize)
        self._file = os.memfd_create("ltx-neuron") if name is None else os.open(name, os.O_RDWR)
        if name is None:
            os.truncate(self._file, size)
        self.name = name or f"/proc/{os.getpid()}/fd/{self._file}"
        self._memory = mmap.mmap(self._file, size)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape)).view(
            shape
        )

    def __enter__(self) -> "Shared":
        return self

    def __exit__(self, *_) -> None:
        self.tensor = None  # the buffer cannot be closed while a tensor lies on it
        self._memory.close()
        os.close(self._file)


class Rank:
    """What one rank process holds: its weights, its programs and its named tensors.

    Nothing but copies and compiled graphs runs on the device: whatever is made, cut or looked at is
    so on the host.
    """

    def __init__(
        self,
        settings: dict,
        device: torch.device,
        meet: Callable[[], None],
        patience: Callable[[float], None],
    ):
        self.settings, self.rank, self.tp, self.device = (
            settings,
            settings["rank"],
            settings["tp"],
            device,
        )
        self._meet, self._set_patience, self._patience = meet, patience, None
        self._synchronize, self._graphs = torch.get_device_module(device).synchronize, {}
        self._clear()
        self._join()

    def _join(self) -> None:
        """The first collective, with every rank there: a device's communicator is made by it, and
        hangs without one."""
        total = compiled.runner(compiled.sum_of_ones, self.settings["compile_backend"])
        self._meet()
        (summed,) = total(torch.ones(1).to(self.device))
        if summed.cpu().item() != self.tp:
            raise RuntimeError(f"ones of {self.tp} ranks sum to {summed.cpu().item()}")
        self._meet()
        self._compiled_before = self._compiled()

    def _wait_at_most(self, seconds: float) -> None:
        """How long another rank may be late for a sum: long where it may still compile, short in
        what ran before."""
        if seconds != self._patience:
            self._set_patience(seconds)
            self._patience = seconds

    def _clear(self) -> None:
        self.weights: dict[
            frozenset[str], tuple[str, dict[str, Tensor]]
        ] = {}  # of each model: folder and tensors
        self.runs: dict[str, dict[str, list]] = {}
        self.sequences: dict[tuple[str, str], list] = {}
        self.fields: dict[str, dict[str, Field]] = {}
        self.tensors: dict[str, Tensor] = {}

    def load(self, weights: str, wanted: dict, programs: dict, dtype: str) -> dict:
        held = self._hold(weights, wanted, getattr(torch, dtype))
        for name, folder in programs.items():
            manifest = Manifest(Path(folder))
            self.fields[name] = manifest.fields
            graphs = {graph: self._graph(manifest, graph) for graph in manifest.graphs}
            self.runs[name] = {
                run: [self._bind(manifest, graphs, held, *call) for call in calls]
                for run, calls in manifest.runs.items()
            }
        return {}

    def _graph(self, manifest: Manifest, name: str) -> Callable:
        """A graph ready to be called. It holds no weights and stays: a model that comes again
        compiles nothing."""
        key = str(manifest.folder), name, manifest.graphs[name]["sha256"]
        if key not in self._graphs:
            self._graphs[key] = compiled.ready(manifest.load(name).graph_module, self.settings)
        return self._graphs[key]

    def _hold(self, weights: str, wanted: dict, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights of that folder on the device. A model's next set takes the place of the one
        before it."""
        model = frozenset(wanted)
        before, held = self.weights.get(model, (None, {}))
        if before != weights:
            for name, tensor in open_rank_file(
                Path(weights) / rank_file(self.rank), wanted, dtype
            ).tensors():
                if name not in held:
                    held[name] = tensor.to(
                        self.device
                    )  # on a CPU these are the file's own pages: no copy
                elif held[name].device == tensor.device:
                    held[name].set_(tensor)  # the graphs hold these very tensors
                else:
                    held[name].copy_(tensor)
            self.weights[model] = weights, held
        return held

    def replace_weights(self, weights: str) -> dict:
        names = TensorFile(Path(weights) / rank_file(self.rank), RESHARD).shapes.keys()
        model = min(
            self.weights, key=lambda held: len(held ^ names)
        )  # where none is the same, loading says what differs
        held = self.weights[model][1]
        self._hold(
            weights,
            {name: tuple(tensor.shape) for name, tensor in held.items()},
            next(iter(held.values())).dtype,
        )
        return {}

    def _bind(
        self, manifest: Manifest, graphs: dict, held: dict, name: str, first_block: int
    ) -> tuple:
        """A call: the graph's code, its weights in the graph's order, and the names it takes and
        returns."""
        described, fields = manifest.graphs[name], manifest.fields
        weights = [held[weight_name(p, first_block)] for p in described["parameters"]]
        inputs = [
            (n, f"@{first_block}" if fields[n].per_block else "") for n in described["inputs"]
        ]
        return graphs[name], weights, inputs, described["outputs"]

    def define(self, program: str, sequence: str, runs: list) -> dict:
        self.sequences[program, sequence] = runs
        return {}

    def unload(self) -> dict:
        self._clear()
        import gc

        gc.collect()
        return {}

    def put(self, program: str, name: str, like: str, memory: str, shape: list[int]) -> dict:
        field = self.fields[program][like]
        with Shared(tuple(shape), field.dtype, memory) as shared:
            if (
                field.per_block
            ):  # one tensor per group of blocks: graphs take whole tensors, not views
                for first in range(0, shape[0], field.shape[0]):
                    rows = shared.tensor[first : first + field.shape[0]]
                    self.tensors[f"{name}@{first}"] = _copied(rows).to(self.device)
            else:
                self.tensors[name] = _copied(part_of(field, shared.tensor, self.rank)).to(
                    self.device
                )
        return {}

    def run(self, program: str, sequence: str, numbers: dict[str, int]) -> dict:
        for name, number in numbers.items():
            field = self.fields[program][name]
            self.tensors[name] = torch.full(field.shape, number, dtype=field.dtype).to(self.device)
        calls = self.sequences.get((program, sequence), [(sequence, {}, {})])
        cold = [
            graph
            for run, _, _ in calls
            for graph, *_ in self.runs[program][run]
            if not _warm(graph)
        ]
        self._wait_at_most(self.settings["compile_seconds" if cold else "late_seconds"])
        self._synchronize()
        start, launches = time.perf_counter(), 0
        for run, reads, writes in calls:
            for graph, weights, inputs, outputs in self.runs[program][run]:
                values = (self.tensors[reads.get(name, name) + group] for name, group in inputs)
                first = not _warm(graph)
                results = graph(*weights, *values)
                launches += 1
                self._after_launch(launches, first)
                self.tensors.update(
                    zip((writes.get(name, name) for name in outputs), results, strict=True)
                )
        self._synchronize()  # a device's launches return before they are done
        milliseconds = (time.perf_counter() - start) * 1e3
        latents = [
            n for n in LATENTS if n in {writes.get(name, name) for name in outputs}
        ]  # of the last graph
        not_finite = [n for n in latents if not finite(self.tensors[n].cpu())]
        return {"milliseconds": milliseconds, "not_finite": not_finite}

    def _after_launch(self, launches: int, first: bool) -> None:
        """Wait for the device where its queue may be full; and for all ranks after a graph's first
        launch: one that ran ahead of another that still compiles would offer its collectives to the
        wrong graph."""
        drain = self.settings["drain_every"]
        if first or drain and launches % drain == 0:
            self._synchronize()
        if first:
            self._meet()

    def compiled_graphs(self) -> dict:
        return {"count": self._compiled() - self._compiled_before}

    def _compiled(self) -> int:
        return 0 if self.settings["compile_backend"] == "export" else compiled.graphs_compiled()

    def get(self, program: str, name: str, memory: str) -> dict:
        field = self.fields[program][name]
        if self.rank == 0 or field.split is not None:
            with Shared(whole_shape(field, self.tp), field.dtype, memory) as shared:
                part_of(field, shared.tensor, self.rank).copy_(self.tensors[name].cpu())
        return {}

    def hash(self, names: list[str]) -> dict:
        hasher = hashlib.sha256()
        for name in names:
            hasher.update(self.tensors[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return {"hash": hasher.hexdigest()}


def _warm(graph: Callable) -> bool:
    """Whether calling a graph compiles nothing."""
    return getattr(graph, "warm", True)


def _copied(tensor: Tensor) -> Tensor:
    """A copy of its own memory, contiguous: a device takes no views, and shared memory is gone
    soon."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _pulse(pulses, rank: int, folder: str) -> None:
    """Say that this process lives; end it when the host's has ended, in whatever way, and leave
    nothing of the host's.

    A process that is stopped, or whose machine hangs, says nothing. The thread of the commands need
    not be free for it.
    """
    host = parent_process().sentinel
    pulses[rank] = time.monotonic()
    while not connection.wait([host], timeout=_PULSE_SECONDS):
        pulses[rank] = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _device(settings: dict) -> torch.device:
    """This rank's device. A Neuron process sees one core; a CUDA one sees all GPUs and takes its
    own."""
    if settings["device"] == "cuda":
        torch.cuda.set_device(settings["rank"])
        return torch.device("cuda", settings["rank"])
    return torch.device(settings["device"])


# What gloo says to a rank that lost another one; its own error is not the cause.
_LOST_ANOTHER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Broken pipe",
)


def serve(pipe: connection.Connection, settings: dict, pulses) -> None:
    """A rank's life: join the group, then answer commands until the host closes the pipe. An error
    is the last answer."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches every process of a terminal: the host ends its ranks
    threading.Thread(
        target=_pulse,
        args=(pulses, settings["rank"], str(Path(settings["store"]).parent)),
        daemon=True,
    ).start()
    try:
        os.environ.update(settings["environment"])  # a fork server's children do not have it yet
        torch.set_num_threads(settings["threads"])
        store = dist.FileStore(settings["store"], settings["tp"])
        dist.init_process_group(
            settings["process_group"],
            store=store,
            rank=settings["rank"],
            world_size=settings["tp"],
            timeout=timedelta(seconds=START_SECONDS),
        )
        if dist.group.WORLD.group_name != GROUP:
            raise RuntimeError(
                f"the default process group is named {dist.group.WORLD.group_name!r}, graphs say"
                f" {GROUP!r}"
            )
        # What the host's side of the ranks says to each other: the device's group carries tensors
        # of the device alone.
        host = dist.new_group(backend="gloo", timeout=timedelta(seconds=START_SECONDS))

        def meet() -> None:
            dist.all_reduce(torch.ones(1, dtype=torch.int32), group=host)

        def set_patience(seconds: float) -> None:
            for group in (dist.group.WORLD, host):
                _set_pg_timeout(timedelta(seconds=seconds), group)

        rank = Rank(settings, _device(settings), meet, set_patience)
        pipe.send_bytes(b"{}")
        with torch.no_grad():
            while True:
                message = json.loads(pipe.recv_bytes())
                answer = getattr(rank, message.pop("op"))(**message)
                pipe.send_bytes(json.dumps(answer).encode())
    except (
        EOFError,
        BrokenPipeError,
        KeyboardInterrupt,
    ):  # the host is done, or is ending the run, or was killed
        if connection.wait([parent_process().sentinel], timeout=_CLOSING_SECONDS):
            shutil.rmtree(Path(settings["store"]).parent, ignore_errors=True)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the host must hear it
        pipe.send_bytes(json.dumps(last_answer(error, settings["device"])).encode())
    finally:
        os._exit(0)  # gloo's threads may wait for a rank that is gone


def last_answer(error: BaseException, device: str) -> dict:
    """What a rank says before it ends: its error in words where it has some, else its traceback."""
    user, known = isinstance(error, UserError), failure(error) if device == "neuron" else None
    text = str(known or error) if known or user else "".join(traceback.format_exception(error))
    lost = isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_ANOTHER)
    return {"error": text, "user": user, "blame": 3 if lost else 1}
