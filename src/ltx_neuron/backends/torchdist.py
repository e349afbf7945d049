"""One process per rank: `Ranks` is the host's handle on them; a rank's own side is in rank.py.

Commands are JSON lines of a few dozen bytes, tensors travel through shared memory, and both are counted. A rank keeps named
tensors on its device: what was uploaded, and what its graphs return. Running a program touches only those, so a denoising
step costs the host one command with the step's number.
"""

import json
import os
import tempfile
from multiprocessing import connection, get_context
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.backends.export import Manifest
from ltx_neuron.backends.rank import Shared, serve, whole_shape
from ltx_neuron.errors import UserError
from ltx_neuron.graphs import Field
from ltx_neuron.profiles import Profile


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
            context.set_forkserver_preload(["ltx_neuron.backends.rank", "torch._export.serde.serialize"])
        if profile.process_group == "gloo" and os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not matter
        for rank in range(tp):
            ours, theirs = context.Pipe()
            settings = {"rank": rank, "tp": tp, "process_group": profile.process_group, "device": profile.device,
                        "threads": profile.rank_threads(tp), "store": f"{self._store.name}/store"}  # fmt: skip
            process = context.Process(target=serve, args=(theirs, settings), daemon=True, name=f"ltx-rank{rank}")
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
            whole = whole_shape(field, self.tp)
            if field.per_block:
                field, whole = field._replace(shape=tuple(tensor.shape)), tuple(tensor.shape)
            if tuple(tensor.shape) != whole:
                raise ValueError(f"{program}.{name}: got shape {tuple(tensor.shape)}, wanted {whole}")
            with Shared(whole, field.dtype) as shared:
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
        with Shared(whole_shape(field, self.tp), field.dtype) as shared:
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
