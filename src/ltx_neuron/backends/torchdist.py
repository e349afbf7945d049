"""One process per rank: `Ranks` is the host's handle on them. A rank's own side is rank.py, the
messages between them wire.py.

Commands are JSON lines of a few dozen bytes, tensors travel through shared memory, and both are
counted. Running a program touches only tensors that the ranks hold, so a denoising step costs the
host one command with the step's number.
"""

import os
import signal
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from multiprocessing import connection, get_context
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from ltx_neuron.backends import compiled, environment, ranks
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.rank import serve
from ltx_neuron.backends.ranks import NotFiniteError, RankError, RankRefusal
from ltx_neuron.backends.wire import (
    START_SECONDS,
    Blame,
    Failure,
    RankSettings,
    SharedTensor,
    decode_answer,
    encode_command,
)
from ltx_neuron.errors import RunError
from ltx_neuron.profiles import Profile

# How long a rank may be without a heartbeat, or keep the others waiting in a collective.
TIMEOUT_SECONDS = 8.0
# The same for collectives where ranks compile what they run: one may be much later than another.
_COMPILE_SECONDS = 1800.0
_POLL_SECONDS = 0.5  # between two looks at the heartbeats
_GRACE_SECONDS = 1.0  # after the first failure: how long the others may take to say what they know
_LEAVE_SECONDS = 2.0  # how long ranks may take to end by themselves
_KILLED_BY = {
    signal.SIGKILL: ": by somebody, or by the system because memory ran out (dmesg says so)",
    signal.SIGBUS: ": its weight file was cut short, or its disk failed, while it was in use",
}


def rank_settings(profile: Profile, tp: int, rank: int, cache: Path | None) -> RankSettings:
    """What the profile says of a rank. cache: where compilers keep what they made."""
    return RankSettings(
        rank=rank,
        tp=tp,
        process_group=profile.process_group,
        device=profile.device,
        lnc=profile.lnc,
        compile_backend=profile.compile_backend,
        drain_every=profile.drain_every,
        threads=profile.rank_threads(tp),
        environment=environment.of_rank(profile, tp, rank, cache),
    )


def compile_only(folders: list[Path], profile: Profile, tp: int, cache: Path) -> None:
    """Compile programs' graphs into `cache` in a process of their own, once for every rank: graphs
    are alike on all of them. Raises RunError where it fails."""
    settings = rank_settings(profile, tp, 0, cache)
    if profile.device == "neuron":
        settings.environment["TORCH_NEURONX_COMPILE_ONLY"] = "1"
    arguments = [str(folder) for folder in folders], settings
    process = get_context("spawn").Process(target=compiled.compile_only, args=arguments)
    with environment.added(settings.environment):
        process.start()
    process.join()
    if process.exitcode:
        raise RunError(
            f"compiling {', '.join(map(str, folders))} ended with exit code {process.exitcode}; its"
            " error is above"
        )


class Ranks(ranks.Ranks):
    """The rank processes of one run, started. cache: where ranks keep what they compile.

    A rank that dies, freezes or keeps the others waiting in a collective ends the run within 10 s,
    with RankError (RankRefusal where the user can mend it), and leaves no process.
    """

    def __init__(self, profile: Profile, tp: int, cache: Path | None = None):
        self.tp, self.bytes_sent, self._cache = tp, 0, cache
        self.programs: dict[str, Manifest] = {}
        self._store = tempfile.TemporaryDirectory(prefix="ltx-neuron-")
        self._pipes: list[connection.Connection] = []
        self._processes = []
        context = get_context(profile.start_method)
        # Ranks are forked from a server that has imported torch once for all of them.
        if profile.start_method == "forkserver":
            context.set_forkserver_preload(
                ["ltx_neuron.backends.rank", "torch._export.serde.serialize"]
            )
        # gloo connects the hosts of all devices; a host name that does not resolve must not matter.
        if os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._heartbeats = context.RawArray("d", tp)
        try:
            self._start(context, profile)
            self._gather()
        except BaseException:
            self.close()
            raise

    def _start(self, context, profile: Profile) -> None:
        environment.check_ports(profile, self.tp)
        for rank in range(self.tp):
            host_end, rank_end = context.Pipe()
            settings = replace(
                rank_settings(profile, self.tp, rank, self._cache),
                store=f"{self._store.name}/store",
                timeout_seconds=TIMEOUT_SECONDS,
                compile_seconds=_COMPILE_SECONDS,
            )
            process = context.Process(
                target=serve,
                args=(rank_end, settings, self._heartbeats),
                daemon=True,
                name=f"ltx-rank{rank}",
            )
            # The first heartbeat may be late by the time that importing torch takes.
            self._heartbeats[rank] = time.monotonic() + START_SECONDS - TIMEOUT_SECONDS
            # A spawned process imports torch before `serve` can set anything.
            with environment.added(settings.environment):
                process.start()
            rank_end.close()  # or the end of the rank would not be seen on the host's end
            self._pipes.append(host_end)
            self._processes.append(process)

    def close(self) -> None:
        # The end of its pipe is what tells a rank to leave.
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            process.join(timeout=max(0, until - time.monotonic()))
        # SIGKILL ends even a process that is stopped.
        for process in self._processes:
            process.kill()
            process.join()
        self._store.cleanup()

    def load(self, weights: Path, programs: dict[str, Manifest], dtype: torch.dtype) -> None:
        self.programs |= programs
        self._call(
            op="load",
            weights=str(weights),
            wanted=ranks.weights_of(programs),
            programs={name: str(manifest.folder) for name, manifest in programs.items()},
            dtype=str(dtype).removeprefix("torch."),
        )

    def replace_weights(self, weights: Path) -> None:
        self._call(op="replace_weights", weights=str(weights))

    def unload(self) -> None:
        self.programs.clear()
        self._call(op="unload")

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        # One command for all of them: a round trip to every rank costs more than a small tensor.
        with ExitStack() as stack:
            uploads = []
            for name, tensor in tensors.items():
                like_field = like or name
                field = self.programs[program].fields[like_field]
                ranks.check_shape(program, name, field, tensor, self.tp)
                shape = tuple(tensor.shape)
                shared = stack.enter_context(SharedTensor(shape, field.dtype))
                shared.tensor.copy_(tensor)
                self.bytes_sent += shared.tensor.nbytes  # once: all ranks read the same memory
                uploads.append(
                    {"name": name, "like": like_field, "memory": shared.name, "shape": shape}
                )
            self._call(op="put", program=program, uploads=uploads)

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        self._call(op="define", program=program, sequence=sequence, runs=runs)

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        answers = self._call(op="run", program=program, sequence=sequence, numbers=numbers)
        if names := sorted({name for answer in answers for name in answer["not_finite"]}):
            raise NotFiniteError(names)
        return max(answer["milliseconds"] for answer in answers)

    def get(self, program: str, name: str) -> Tensor:
        field = self.programs[program].fields[name]
        with SharedTensor(ranks.whole_shape(field, self.tp), field.dtype) as shared:
            self._call(op="get", program=program, name=name, memory=shared.name)
            return shared.tensor.clone()

    def hashes(self, *names: str) -> list[str]:
        return [answer["hash"] for answer in self._call(op="hash", names=names)]

    def compiled_graphs(self) -> int:
        """Graphs that torch.compile made for the programs so far; every rank has as many."""
        (count,) = {answer["count"] for answer in self._call(op="compiled_graphs")}
        return count

    def check(self) -> None:
        failures = {}
        for rank, process in enumerate(self._processes):
            failure = self._frozen(rank) if process.is_alive() else self._receive(rank)
            if isinstance(failure, Failure):
                failures[rank] = failure
        if failures:
            self._fail(failures, silent=set())

    def _call(self, **command) -> list[dict]:
        """Have every rank call the method `op` of Rank; returns what each returned."""
        line = encode_command(**command)
        for pipe in self._pipes:
            try:
                pipe.send_bytes(line)
            except (BrokenPipeError, ConnectionResetError):
                break  # that rank is gone: _gather says why
            self.bytes_sent += len(line)
        return self._gather()

    def _gather(self) -> list[dict]:
        """Every rank's answer. The first failure ends all ranks: the others would wait for it for
        ever."""
        answers: dict[int, dict] = {}
        failures: dict[int, Failure] = {}
        waiting, deadline = set(range(self.tp)), inf
        while waiting and time.monotonic() < deadline:
            pipes = [self._pipes[rank] for rank in waiting]
            ends = [self._processes[rank].sentinel for rank in waiting]
            ready = connection.wait([*pipes, *ends], timeout=_POLL_SECONDS)
            for rank in sorted(waiting):
                if self._pipes[rank] in ready or self._processes[rank].sentinel in ready:
                    answer = self._receive(rank)
                else:
                    answer = self._frozen(rank)
                if isinstance(answer, Failure):
                    failures[rank] = answer
                elif answer is not None:
                    answers[rank] = answer
            waiting -= {*answers, *failures}
            # The first failure to arrive need not be the first that happened.
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            self._fail(failures, silent=waiting)
        return [answers[rank] for rank in range(self.tp)]

    def _receive(self, rank: int) -> dict | Failure:
        """A rank's answer, or how its process ended."""
        try:
            return decode_answer(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(timeout=1)  # its pipe closes before it has an exit code
            code = self._processes[rank].exitcode
            ended = f"ended with exit code {code}"
            if code and code < 0:
                killed = signal.Signals(-code)
                ended = f"was killed ({killed.name}){_KILLED_BY.get(killed, '')}"
            return Failure(f"the process {ended}", Blame.ENDED)

    def _frozen(self, rank: int) -> Failure | None:
        """What is wrong with a rank whose last heartbeat is too long ago."""
        if time.monotonic() - self._heartbeats[rank] <= TIMEOUT_SECONDS:
            return None
        text = f"the process gives no sign of life for {TIMEOUT_SECONDS} s"
        return Failure(text, Blame.FROZEN)

    def _fail(self, failures: dict[int, Failure], silent: set[int]) -> NoReturn:
        """End all ranks and raise the error of the one that failed first.

        silent  ranks that have not answered: if all failures only lost a peer, it is one of these
        """
        for process in self._processes:
            process.kill()
        rank = min(failures, key=lambda rank: (failures[rank].blame, rank))
        text, kind = failures[rank].error, RankRefusal if failures[rank].refusal else RankError
        if failures[rank].blame is Blame.LOST_PEER and silent:
            rank, kind = min(silent), RankError
            text = f"it hangs; the other ranks waited for it in a sum for {TIMEOUT_SECONDS} s"
        raise kind(f"rank {rank} of {self.tp} failed: {text}")
