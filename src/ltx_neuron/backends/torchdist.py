"""One process per rank: `Ranks` is the host's handle, `_serve` the loop of a rank. Process groups by torch.distributed.

Commands are JSON lines of a few dozen bytes, tensors travel through shared memory, and both are counted. A rank keeps named
tensors on its device: what was uploaded, and what its graphs return. Running a program touches only those, so a denoising
step costs the host one command with the step's number.
"""

import hashlib
import json
import math
import os
import tempfile
import time
import traceback
from multiprocessing import connection, get_context, shared_memory
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.backends.export import GROUP, Manifest
from ltx_neuron.errors import UserError
from ltx_neuron.graphs import Field
from ltx_neuron.profiles import Profile
from ltx_neuron.programs import weight_name
from ltx_neuron.rankfiles import load, rank_file


class RankError(RuntimeError):
    """A rank failed; the text is that rank's own error."""


class RankRefusal(RankError, UserError):
    """A rank refused the files it was given: a mistake the user can mend."""


class Ranks:
    """The rank processes of one run. Use as a context manager: leaving it ends every process, whatever happened."""

    def __init__(self, profile: Profile, tp: int):
        self.tp, self.bytes_sent = tp, 0
        self.fields: dict[str, dict[str, Field]] = {}
        self.outputs: dict[str, set[str]] = {}
        self._store = tempfile.TemporaryDirectory(prefix="ltx-neuron-")
        context, self._pipes, self._processes = get_context(profile.start_method), [], []
        if profile.start_method == "forkserver":
            context.set_forkserver_preload(["ltx_neuron.backends.torchdist", "torch._export.serde.serialize"])
        if profile.process_group == "gloo" and os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not matter
        for rank in range(tp):
            ours, theirs = context.Pipe()
            settings = {"rank": rank, "tp": tp, "process_group": profile.process_group, "device": profile.device,
                        "threads": profile.rank_threads(tp), "store": f"{self._store.name}/store"}  # fmt: skip
            process = context.Process(target=_serve, args=(theirs, settings), daemon=True, name=f"ltx-rank{rank}")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._gather()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._store.cleanup()

    def load(self, weights: Path, programs: dict[str, Manifest], dtype: torch.dtype) -> None:
        """Load one weight set and the programs that share it. Strict: each tensor is used, each weight is there."""
        wanted = {name: shape for manifest in programs.values() for name, shape in manifest.weights().items()}
        self.fields |= {name: manifest.fields for name, manifest in programs.items()}
        self.outputs |= {name: {o for g in m.graphs.values() for o in g["outputs"]} for name, m in programs.items()}
        folders = {name: str(manifest.folder) for name, manifest in programs.items()}
        name = str(dtype).removeprefix("torch.")
        self._call(op="load", weights=str(weights), wanted=wanted, programs=folders, dtype=name)

    def replace_weights(self, weights: Path) -> None:
        """Put another weight set of the same model in the loaded one's place; graphs and tensors stay."""
        self._call(op="replace_weights", weights=str(weights))

    def unload(self) -> None:
        """Free the weights, the graphs and every named tensor."""
        self._call(op="unload")

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        """Upload named tensors (whole ones: each rank takes its part). Shapes must be the program's; dtypes become so.

        `like` is the field that describes them when their own names are none, as those that a sequence reads by alias.
        """
        for name, tensor in tensors.items():
            field = self.fields[program][like or name]
            whole = _whole(field, self.tp)
            if field.per_block:
                field, whole = field._replace(shape=tuple(tensor.shape)), tuple(tensor.shape)
            if tuple(tensor.shape) != whole:
                raise ValueError(f"{program}.{name}: got shape {tuple(tensor.shape)}, wanted {whole}")
            with _Shared(whole, field.dtype) as shared:
                shared.tensor.copy_(tensor)
                self.bytes_sent += shared.tensor.nbytes
                self._call(op="put", program=program, name=name, like=like or name, memory=shared.name, shape=whole)

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        """Name a sequence of a program's runs. Each is (run, reads, writes): where it takes an input or leaves an output
        under another name than the graph's. Defined once, a step still costs one short command."""
        self._call(op="define", program=program, sequence=sequence, runs=runs)

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        """Run a sequence once on the tensors the ranks hold; returns the slowest rank's milliseconds.

        Without `define`, a program's runs are sequences of their own names.
        """
        answers = self._call(op="run", program=program, sequence=sequence, numbers=numbers)
        return max(answer["milliseconds"] for answer in answers)

    def get(self, program: str, name: str) -> Tensor:
        """Download a named tensor: rank 0's, or all parts put together."""
        field = self.fields[program][name]
        with _Shared(_whole(field, self.tp), field.dtype) as shared:
            self._call(op="get", program=program, name=name, memory=shared.name)
            return shared.tensor.clone()

    def returns(self, program: str, name: str) -> bool:
        """Whether a program hands back a tensor of that name."""
        return name in self.outputs[program]

    def hashes(self, *names: str) -> list[str]:
        """Each rank's digest over the bits of its named tensors."""
        return [answer["hash"] for answer in self._call(op="hash", names=names)]

    def _call(self, **message) -> list[dict]:
        line = json.dumps(message).encode()
        for pipe in self._pipes:
            try:
                pipe.send_bytes(line)
            except (BrokenPipeError, ConnectionResetError):
                break  # that rank is gone: _gather says why
            self.bytes_sent += len(line)
        return self._gather()

    def _gather(self) -> list[dict]:
        """Every rank's answer. The first failure ends all ranks: the others would wait for it for ever."""
        answers: dict[int, dict] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = connection.wait([*waiting, *(self._processes[r].sentinel for r in waiting.values())])
            for pipe in [p for p in waiting if p in ready or self._processes[waiting[p]].sentinel in ready]:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = json.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=1)
                    code = self._processes[rank].exitcode
                    answers[rank] = {"error": f"the process ended with exit code {code}"}
                if "error" in answers[rank]:
                    for process in self._processes:
                        process.kill()
                    kind = RankRefusal if answers[rank].get("user") else RankError
                    raise kind(f"rank {rank} of {self.tp} failed: {answers[rank]['error']}")
        return [answers[rank] for rank in range(self.tp)]


def _whole(field: Field, tp: int) -> tuple[int, ...]:
    return tuple(size * tp if dim == field.split else size for dim, size in enumerate(field.shape))


class _Shared:
    """A shared-memory tensor, made by the host and opened by the ranks under its name."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, name: str | None = None):
        size = max(1, math.prod(shape) * dtype.itemsize)
        self._memory = shared_memory.SharedMemory(name=name, create=name is None, size=size)
        self._owner, self.name = name is None, self._memory.name
        self.tensor = torch.frombuffer(self._memory.buf, dtype=dtype, count=math.prod(shape)).view(shape)

    def __enter__(self) -> "_Shared":
        return self

    def __exit__(self, *_) -> None:
        self.tensor = None  # the buffer cannot be closed while a tensor lies on it
        self._memory.close()
        if self._owner:
            self._memory.unlink()


class _Rank:
    """What one rank process holds: its weights, its programs and its named tensors."""

    def __init__(self, settings: dict):
        self.rank, self.tp, self.device = settings["rank"], settings["tp"], torch.device(settings["device"])
        self._clear()

    def _clear(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.runs: dict[str, dict[str, list]] = {}
        self.sequences: dict[tuple[str, str], list] = {}
        self.fields: dict[str, dict[str, Field]] = {}
        self.tensors: dict[str, Tensor] = {}

    def load(self, weights: str, wanted: dict, programs: dict, dtype: str) -> dict:
        tensors = load(Path(weights) / rank_file(self.rank), wanted, getattr(torch, dtype))
        self.weights = {name: tensor.to(self.device, copy=True) for name, tensor in tensors.items()}
        for name, folder in programs.items():
            manifest = Manifest(Path(folder))
            self.fields[name] = manifest.fields
            graphs = {graph: manifest.load(graph).graph_module for graph in manifest.graphs}
            self.runs[name] = {
                run: [self._bind(manifest, graphs, *call) for call in calls] for run, calls in manifest.runs.items()
            }
        return {}

    def replace_weights(self, weights: str) -> dict:
        wanted = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        dtype = next(iter(self.weights.values())).dtype
        for name, tensor in load(Path(weights) / rank_file(self.rank), wanted, dtype).items():
            self.weights[name].copy_(tensor)  # in place: the graphs hold these very tensors
        return {}

    def _bind(self, manifest: Manifest, graphs: dict, name: str, first_block: int) -> tuple:
        """A call: the graph's code, its weights in the graph's order, and the names it takes and returns."""
        described, fields = manifest.graphs[name], manifest.fields
        weights = [self.weights[weight_name(p, first_block)] for p in described["parameters"]]
        inputs = [(n, f"@{first_block}" if fields[n].per_block else "") for n in described["inputs"]]
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
        with _Shared(tuple(shape), field.dtype, memory) as shared:
            if field.per_block:  # one tensor per group of blocks: graphs take whole tensors, not views
                for first in range(0, shape[0], field.shape[0]):
                    rows = shared.tensor[first : first + field.shape[0]]
                    self.tensors[f"{name}@{first}"] = rows.to(self.device, copy=True)
            else:
                self.tensors[name] = self._part(shared.tensor, field).to(self.device, copy=True).contiguous()
        return {}

    def _part(self, whole: Tensor, field: Field) -> Tensor:
        if field.split is None:
            return whole
        return whole.narrow(field.split, field.shape[field.split] * self.rank, field.shape[field.split])

    def run(self, program: str, sequence: str, numbers: dict[str, int]) -> dict:
        for name, number in numbers.items():
            field = self.fields[program][name]
            self.tensors[name] = torch.full(field.shape, number, dtype=field.dtype, device=self.device)
        start = time.perf_counter()
        for run, reads, writes in self.sequences.get((program, sequence), [(sequence, {}, {})]):
            for graph, weights, inputs, outputs in self.runs[program][run]:
                values = (self.tensors[reads.get(name, name) + group] for name, group in inputs)
                results = graph(*weights, *values)
                self.tensors.update(zip((writes.get(name, name) for name in outputs), results, strict=True))
        return {"milliseconds": (time.perf_counter() - start) * 1e3}

    def get(self, program: str, name: str, memory: str) -> dict:
        field = self.fields[program][name]
        if self.rank == 0 or field.split is not None:
            with _Shared(_whole(field, self.tp), field.dtype, memory) as shared:
                self._part(shared.tensor, field).copy_(self.tensors[name])
        return {}

    def hash(self, names: list[str]) -> dict:
        hasher = hashlib.sha256()
        for name in names:
            hasher.update(self.tensors[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return {"hash": hasher.hexdigest()}


def _serve(pipe: connection.Connection, settings: dict) -> None:
    """A rank's life: join the group, then answer commands until the host closes the pipe. An error is the last answer."""
    import torch.distributed as dist

    try:
        torch.set_num_threads(settings["threads"])
        store = dist.FileStore(settings["store"], settings["tp"])
        dist.init_process_group(settings["process_group"], store=store, rank=settings["rank"], world_size=settings["tp"])
        if dist.group.WORLD.group_name != GROUP:
            raise RuntimeError(f"the default process group is named {dist.group.WORLD.group_name!r}, graphs say {GROUP!r}")
        rank = _Rank(settings)
        pipe.send_bytes(b"{}")
        with torch.no_grad():
            while True:
                message = json.loads(pipe.recv_bytes())
                answer = getattr(rank, message.pop("op"))(**message)
                pipe.send_bytes(json.dumps(answer).encode())
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the host is done, or is ending the run
    except BaseException as error:  # noqa: BLE001 - whatever it was, the host must hear it
        user = isinstance(error, UserError)
        text = str(error) if user else traceback.format_exc()
        pipe.send_bytes(json.dumps({"error": text, "user": user}).encode())
    finally:
        os._exit(0)  # gloo's threads may wait for a rank that is gone
