"""One process per rank: `Ranks` is the host's handle on them; a rank's own side is in rank.py.

Commands are JSON lines of a few dozen bytes, tensors travel through shared memory, and both are
counted. A rank keeps named tensors on its device: what was uploaded, and what its graphs return.
Running a program touches only those, so a denoising step costs the host one command with the step's
number.
"""

import json
import os
import signal
import tempfile
import time
from multiprocessing import connection, get_context
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from ltx_neuron.backends import compiled, environment
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.rank import START_SECONDS, Shared, serve
from ltx_neuron.backends.ranks import NotFiniteError, RankError, RankRefusal, whole_shape
from ltx_neuron.errors import RunError
from ltx_neuron.models.signatures import Field
from ltx_neuron.profiles import Profile

LATE_SECONDS = 8.0  # how long a rank may be frozen, or keep the others waiting in a sum
# the same where ranks compile what they run: one may be much later than another
_COMPILE_SECONDS = 1800.0
_GRACE_SECONDS = 1.0  # after the first failure: how long the others may take to say what they know
_LEAVE_SECONDS = 2.0  # how long ranks may take to end by themselves
_KILLED_BY = {
    signal.SIGKILL: ": by somebody, or by the system because memory ran out (dmesg says so)",
    signal.SIGBUS: ": its weight file was cut short, or its disk failed, while it was in use",
}


def rank_settings(profile: Profile, tp: int, rank: int, cache: Path | None) -> dict:
    """What a rank is told when it starts."""
    return {
        "rank": rank,
        "tp": tp,
        "process_group": profile.process_group,
        "device": profile.device,
        "lnc": profile.lnc,
        "compile_backend": profile.compile_backend,
        "drain_every": profile.drain_every,
        "threads": profile.rank_threads(tp),
        "environment": environment.of_rank(profile, tp, rank, cache),
    }


def compile_only(folders: list[Path], profile: Profile, tp: int, cache: Path) -> None:
    """Compile programs' graphs in a process of their own, for every rank: graphs are alike on all
    of them."""
    settings = rank_settings(profile, tp, 0, cache)
    if profile.device == "neuron":
        settings["environment"]["TORCH_NEURONX_COMPILE_ONLY"] = "1"
    process = get_context("spawn").Process(
        target=compiled.compile_only, args=([str(f) for f in folders], settings)
    )
    with environment.added(settings["environment"]):
        process.start()
    process.join()
    if process.exitcode:
        raise RunError(
            f"compiling {', '.join(map(str, folders))} ended with exit code {process.exitcode}; its"
            " error is above"
        )


class Ranks:
    """The rank processes of one run. Use as a context manager: leaving it ends every process,
    whatever happened.

    A rank that dies, freezes or keeps the others waiting in a sum ends the run within 10 s (rank.py
    says how it is seen).
    """

    def __init__(self, profile: Profile, tp: int, cache: Path | None = None):
        self.tp, self.bytes_sent, self._cache = tp, 0, cache
        self.fields: dict[str, dict[str, Field]] = {}
        self.outputs: dict[str, set[str]] = {}
        self._store = tempfile.TemporaryDirectory(prefix="ltx-neuron-")
        context, self._pipes, self._processes = get_context(profile.start_method), [], []
        if profile.start_method == "forkserver":
            context.set_forkserver_preload(
                ["ltx_neuron.backends.rank", "torch._export.serde.serialize"]
            )
        if os.path.exists(
            "/sys/class/net/lo"
        ):  # of gloo, which carries what hosts say to each other on any device
            os.environ.setdefault(
                "GLOO_SOCKET_IFNAME", "lo"
            )  # a host name that does not resolve must not matter
        self._pulses = context.RawArray(
            "d", tp
        )  # when each rank last gave a sign of life: time.monotonic()
        try:
            self._start(context, profile)
            self._gather()
        except BaseException:
            self.close()
            raise

    def _start(self, context, profile: Profile) -> None:
        environment.check_ports(profile, self.tp)
        for rank in range(self.tp):
            ours, theirs = context.Pipe()
            settings = {
                **rank_settings(profile, self.tp, rank, self._cache),
                "store": f"{self._store.name}/store",
                "late_seconds": LATE_SECONDS,
                "compile_seconds": _COMPILE_SECONDS,
            }
            arguments = theirs, settings, self._pulses
            process = context.Process(
                target=serve, args=arguments, daemon=True, name=f"ltx-rank{rank}"
            )
            self._pulses[rank] = time.monotonic() + START_SECONDS - LATE_SECONDS
            with environment.added(settings["environment"]):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            process.join(timeout=max(0, until - time.monotonic()))
        for process in self._processes:
            process.kill()
            process.join()
        self._store.cleanup()

    def load(self, weights: Path, programs: dict[str, Manifest], dtype: torch.dtype) -> None:
        """Load one weight set and the programs that share it. Strict: each tensor is used, each
        weight is there."""
        wanted = {
            name: shape
            for manifest in programs.values()
            for name, shape in manifest.weights().items()
        }
        self.fields |= {name: manifest.fields for name, manifest in programs.items()}
        self.outputs |= {
            name: {o for g in m.graphs.values() for o in g["outputs"]}
            for name, m in programs.items()
        }
        folders = {name: str(manifest.folder) for name, manifest in programs.items()}
        name = str(dtype).removeprefix("torch.")
        self._call(op="load", weights=str(weights), wanted=wanted, programs=folders, dtype=name)

    def replace_weights(self, weights: Path) -> None:
        """Put another weight set of the same model in the loaded one's place; graphs and tensors
        stay."""
        self._call(op="replace_weights", weights=str(weights))

    def unload(self) -> None:
        """Free the weights and every named tensor."""
        self._call(op="unload")

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        """Upload named tensors (whole ones: each rank takes its part). Shapes must be the
        program's; dtypes become so.

        `like` is the field that describes them when their own names are none, as those that a
        sequence reads by alias.
        """
        for name, tensor in tensors.items():
            field = self.fields[program][like or name]
            whole = whole_shape(field, self.tp)
            if field.per_block:
                field, whole = field._replace(shape=tuple(tensor.shape)), tuple(tensor.shape)
            if tuple(tensor.shape) != whole:
                raise ValueError(
                    f"{program}.{name}: got shape {tuple(tensor.shape)}, wanted {whole}"
                )
            with Shared(whole, field.dtype) as shared:
                shared.tensor.copy_(tensor)
                self.bytes_sent += shared.tensor.nbytes
                self._call(
                    op="put",
                    program=program,
                    name=name,
                    like=like or name,
                    memory=shared.name,
                    shape=whole,
                )

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        """Name a sequence of a program's runs. Each is (run, reads, writes): where it takes an
        input or leaves an output under another name than the graph's. Defined once, a step still
        costs one short command."""
        self._call(op="define", program=program, sequence=sequence, runs=runs)

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        """Run a sequence once on the tensors the ranks hold; returns the slowest rank's
        milliseconds.

        Without `define`, a program's runs are sequences of their own names. Raises NotFiniteError
        where latents are not.
        """
        answers = self._call(op="run", program=program, sequence=sequence, numbers=numbers)
        if names := sorted({name for answer in answers for name in answer["not_finite"]}):
            raise NotFiniteError(names)
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

    def compiled_graphs(self) -> int:
        """Graphs that torch.compile made for the programs so far; every rank has as many."""
        (count,) = {answer["count"] for answer in self._call(op="compiled_graphs")}
        return count

    def _call(self, **message) -> list[dict]:
        line = json.dumps(message).encode()
        for pipe in self._pipes:
            try:
                pipe.send_bytes(line)
            except (BrokenPipeError, ConnectionResetError):
                break  # that rank is gone: _gather says why
            self.bytes_sent += len(line)
        return self._gather()

    def check(self) -> None:
        """Raise RankError if a rank that waits for a command has ended or is frozen."""
        answers = {
            rank: self._answer(rank)
            for rank, process in enumerate(self._processes)
            if not process.is_alive()
        }
        answers |= {
            rank: said
            for rank in range(self.tp)
            if rank not in answers and (said := self._frozen(rank))
        }
        if answers:
            self._fail(answers, set())

    def _frozen(self, rank: int) -> dict | None:
        """What is wrong with a rank whose last sign of life is too long ago."""
        if time.monotonic() - self._pulses[rank] <= LATE_SECONDS:
            return None
        return {"error": f"the process gives no sign of life for {LATE_SECONDS} s", "blame": 2}

    def _gather(self) -> list[dict]:
        """Every rank's answer. The first failure ends all ranks: the others would wait for it for
        ever."""
        answers: dict[int, dict] = {}
        waiting, until = dict(enumerate(self._pipes)), float("inf")
        while waiting and time.monotonic() < until:
            said = connection.wait(
                [*waiting.values(), *(self._processes[r].sentinel for r in waiting)], timeout=0.5
            )
            for rank, pipe in list(waiting.items()):
                if pipe in said or self._processes[rank].sentinel in said:
                    answers[rank] = self._answer(rank)
                elif frozen := self._frozen(rank):
                    answers[rank] = frozen
                if rank in answers:
                    del waiting[rank]
            if until == float("inf") and any("error" in answer for answer in answers.values()):
                until = time.monotonic() + _GRACE_SECONDS
        if any("error" in answer for answer in answers.values()):
            self._fail(answers, set(waiting))
        return [answers[rank] for rank in range(self.tp)]

    def _answer(self, rank: int) -> dict:
        try:
            return json.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(timeout=1)
            code = self._processes[rank].exitcode
            ended = f"ended with exit code {code}"
            if code and code < 0:
                killed = signal.Signals(-code)
                ended = f"was killed ({killed.name}){_KILLED_BY.get(killed, '')}"
            return {"error": f"the process {ended}", "blame": 0}

    def _fail(self, answers: dict[int, dict], silent: set[int]) -> NoReturn:
        """End all ranks and raise the error of the one that began it.

        A rank that is gone (blame 0) comes before one with an error of its own (1), that before a
        frozen one (2), and a rank that only lost another (3) comes last: then it is one that does
        not answer which the others waited for.
        """
        for process in self._processes:
            process.kill()
        errors = {rank: answer for rank, answer in answers.items() if "error" in answer}
        rank = min(errors, key=lambda r: (errors[r]["blame"], r))
        error = errors[rank]
        if error["blame"] == 3 and silent:
            rank, error = (
                min(silent),
                {"error": f"it hangs; the other ranks waited for it in a sum for {LATE_SECONDS} s"},
            )
        kind = RankRefusal if error.get("user") else RankError
        raise kind(f"rank {rank} of {self.tp} failed: {error['error']}")
