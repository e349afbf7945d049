"""One process per rank, controlled by `TorchDistRanks`. rank.py is the rank's side, protocol.py has
the messages.

Commands have a few dozen bytes, and tensors pass through shared memory; both are counted. A program
runs only on tensors that the ranks hold, so a denoising step costs the host one command with the
step's number.
"""

import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from multiprocessing import connection, forkserver, get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from ltx_neuron.backends import environment, ranks
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.ranks import NotFiniteError, RankError, RankRefusal
from ltx_neuron.backends.torchdist import compiled
from ltx_neuron.backends.torchdist.protocol import (
    FailureCause,
    RankFailure,
    RankSettings,
    SharedTensor,
)
from ltx_neuron.backends.torchdist.rank import serve
from ltx_neuron.config.profiles import COMPILED_MODELS, Profile
from ltx_neuron.errors import RunError, UserError

_GRACE_SECONDS = 1.0  # after the first failure: time for the others to report theirs
_PEERS_SECONDS = 10.0  # the same, if that rank only lost another one: all but the cause do
_LEAVE_SECONDS = 2.0  # time for ranks to end by themselves
_ENDED_SECONDS = 5.0  # time for an ended process to have an exit code
_KILLED_BY = {
    signal.SIGKILL: ": by somebody, or by the system because memory ran out (dmesg says so)",
    signal.SIGBUS: ": its weight file was cut short, or its disk failed, while it was in use",
}
_starting = threading.Lock()  # the environment that a child inherits is the whole process's


def rank_settings(
    profile: Profile, tp: int, rank: int, cache: Path | None, store: str = "", group: int = 0
) -> RankSettings:
    variables = environment.of_rank(profile, tp, rank, cache, group)
    compilers = {model: environment.of_compiler(profile, model) for model in COMPILED_MODELS}
    place = group * profile.world_size(tp) + rank
    return RankSettings(profile, rank, tp, variables, compilers, store, place)


def compile_only(folders: list[Path], profile: Profile, tp: int, cache: Path) -> None:
    """Compile programs' graphs into `cache` in a separate process, once for all ranks. Raises
    RunError if it fails or takes longer than the profile allows. On Neuron, where this was not
    tested, a failure prints a message, and ranks compile missing graphs at their first run. Raises
    UserError if the compiler does not know the layout's groups."""
    settings = rank_settings(profile, tp, 0, cache)
    if profile.device == "neuron":
        settings.environment["TORCH_NEURONX_COMPILE_ONLY"] = "1"
    arguments = folders, settings
    process = get_context("spawn").Process(target=compiled.compile_only, args=arguments)
    with _inherited(settings.environment):
        process.start()
    names, seconds = ", ".join(map(str, folders)), profile.first_run_seconds
    process.join(seconds)
    if process.exitcode == 0:
        return
    if process.exitcode == 2:
        raise UserError(f"{names} cannot be compiled; the reason is above")
    if process.exitcode is None:  # on Neuron it may wait for ranks that do not exist
        for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
            victim.kill()
        process.join()
        what = f"compiling {names} did not end within {seconds} s and was stopped"
    else:
        what = f"compiling {names} ended with exit code {process.exitcode}; its errors are above"
    if profile.device != "neuron":
        raise RunError(what)
    print(f"{what}. The ranks compile at their first run instead.", file=sys.stderr)


def start_server(profile: Profile, tp: int, cache: Path | None) -> None:
    """Start the server whose forks are the ranks of a CPU, if it does not run yet. Returns at once:
    the server then imports what every rank needs while the host reads files and prompts. Does
    nothing for other devices. A forked child cannot use a Neuron or CUDA runtime, and TorchNeuron
    reads a rank's variables, such as its core, while it is imported."""
    if profile.device == "cpu":
        forkserver.set_forkserver_preload([serve.__module__, "torch._export.serde.serialize"])
        with _inherited(rank_settings(profile, tp, 0, cache).environment):
            forkserver.ensure_running()


@contextmanager
def _inherited(variables: dict[str, str]) -> Iterator[None]:
    """While the block runs, child processes get additional variables, and do not import the user's
    script, which would run again without `if __name__ == "__main__":`."""
    main = sys.modules["__main__"]
    named = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    with _starting, environment.added(variables):
        vars(main).pop("__file__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            vars(main).update(named)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


class TorchDistRanks(ranks.Ranks):
    """The started rank processes of one run. cache: the ranks' folder of compiled graphs.

    A rank that dies ends the run within 10 s with RankError (RankRefusal if the user can correct
    it), and leaves no process. A rank that is stopped or hangs ends it when others have waited for
    it for the profile's first_run_seconds, in a collective or with their answers.

    group          number of the guidance group, for messages and cores
    command_bytes  bytes of all commands so far, counted per rank
    """

    def __init__(self, profile: Profile, tp: int, cache: Path | None = None, group: int = 0):
        super().__init__(tp, profile.context_parallel)
        self.group = group
        self.command_bytes = 0
        self._longest_wait = float(profile.first_run_seconds)
        self._folder = tempfile.mkdtemp(prefix="ltx-neuron-")
        self._remove_folder = weakref.finalize(self, _remove, self._folder, os.getpid())
        self._pipes: list[connection.Connection] = []
        self._processes = []
        self._failed: RankError | None = None  # the error that ended the ranks
        start_server(profile, tp, cache)
        context = get_context("forkserver" if profile.device == "cpu" else "spawn")
        try:
            self._start(context, profile, cache)
            self._gather()
        except BaseException:
            self.close()
            raise

    def _start(self, context, profile: Profile, cache: Path | None) -> None:
        environment.check_ports(profile, self.tp, self.group)
        for rank in range(self.size):
            host_end, rank_end = context.Pipe()
            store = f"{self._folder}/store"
            settings = rank_settings(profile, self.tp, rank, cache, store, self.group)
            process = context.Process(
                target=serve, args=(rank_end, settings), daemon=True, name=f"ltx-rank{rank}"
            )
            self._pipes.append(host_end)
            try:
                # A spawned process imports torch before `serve` can set anything.
                with _inherited(settings.environment):
                    process.start()
            except (OSError, EOFError) as error:  # the fork server ended
                raise RankError(
                    f"rank {rank} of {self.size} could not be started: {type(error).__name__}"
                    f" {error}\nSomebody killed the process that starts ranks, or memory ran out"
                    " (dmesg says so); run the command again"
                ) from None
            finally:
                rank_end.close()  # otherwise the host would not see the rank's end
            self._processes.append(process)

    def close(self) -> None:
        # A rank ends when its pipe is closed.
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            process.join(timeout=max(0, until - time.monotonic()))
        # SIGKILL ends even a process that is stopped.
        for process in self._processes:
            process.kill()
            process.join()
        self._remove_folder()

    def load(self, weights: Path, programs: dict[str, Manifest], dtype: torch.dtype) -> None:
        self.programs |= programs
        self._call(
            "load",
            weights=weights,
            shapes=ranks.weights_of(programs),
            programs={name: manifest.folder for name, manifest in programs.items()},
            dtype=dtype,
        )

    def replace_weights(self, weights: Path) -> None:
        self._call("replace_weights", weights=weights)

    def unload(self) -> None:
        self.programs.clear()
        self._call("unload")

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        # One command for all tensors: a round trip to every rank costs more than a small tensor.
        with ExitStack() as stack:
            uploads = []
            for name, tensor in tensors.items():
                like_field = like or name
                field = self.programs[program].fields[like_field]
                ranks.check_shape(program, name, field, tensor, self.tp, self.cp)
                shape = tuple(tensor.shape)
                shared = stack.enter_context(SharedTensor(shape, field.dtype))
                shared.tensor.copy_(tensor)
                self.bytes_sent += shared.tensor.nbytes  # once: all ranks read the same memory
                uploads.append((name, like_field, shape, shared.name))
            self._call("put", program=program, uploads=uploads)

    def define(self, program: str, sequence: str, runs: list[tuple[str, dict, dict]]) -> None:
        self._call("define", program=program, sequence=sequence, runs=runs)

    def run(self, program: str, sequence: str = "main", **numbers: int) -> float:
        answers = self._call("run", program=program, sequence=sequence, numbers=numbers)
        if names := sorted({name for answer in answers for name in answer["not_finite"]}):
            raise NotFiniteError(names)
        self.launches += answers[0]["launches"]
        self.launch_ms += max(answer["launch_ms"] for answer in answers)
        return max(answer["milliseconds"] for answer in answers)

    def get(self, program: str, name: str) -> Tensor:
        field = self.programs[program].fields[name]
        with SharedTensor(ranks.whole_shape(field, self.tp, self.cp), field.dtype) as shared:
            self._call("get", program=program, name=name, memory=shared.name)
            return shared.tensor.clone()

    def hashes(self, *names: str) -> list[str]:
        return self._call("hash", names=names)

    def check(self) -> None:
        ended = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
        self._raise_failure({rank: self._receive(rank) for rank in ended})

    def _call(self, method: str, **arguments) -> list:
        if self._failed:  # in a call of another thread, whose error is the cause
            raise self._failed
        command = pickle.dumps((method, arguments))
        for pipe in self._pipes:
            try:
                pipe.send_bytes(command)
            except (BrokenPipeError, ConnectionResetError):
                break  # that rank ended: _gather finds the cause
            self.command_bytes += len(command)
        return self._gather()

    def _gather(self) -> list:
        answers, deadline, causes = {}, inf, set()
        while len(answers) < self.size:
            waiting = {*range(self.size)} - {*answers}
            ends: dict[Any, int] = {self._pipes[rank]: rank for rank in waiting}
            ends |= {self._processes[rank].sentinel: rank for rank in waiting}
            left = None if deadline == inf else max(0, deadline - time.monotonic())
            if not (ready := connection.wait([*ends], timeout=left)):
                break
            answers |= {rank: self._receive(rank) for rank in {ends[end] for end in ready}}
            # Failures may arrive in another order than they happened.
            failed = {
                answer.cause for answer in answers.values() if isinstance(answer, RankFailure)
            }
            causes = failed - {FailureCause.LOST_PEER}
            lost = _PEERS_SECONDS if failed else self._longest_wait
            deadline = min(deadline, time.monotonic() + (_GRACE_SECONDS if causes else lost))
        if not causes:
            silent = {*range(self.size)} - {*answers}
            text = (
                "it is stopped (SIGSTOP) or hangs: it did not answer while others waited for it for"
                f" {self._longest_wait:g} s (first_run_seconds)"
            )
            answers |= dict.fromkeys(silent, RankFailure(text, FailureCause.SILENT))
        self._raise_failure(answers)
        return [answers[rank] for rank in range(self.size)]

    def _receive(self, rank: int) -> object:
        """A rank's answer, or a RankFailure if its process ended."""
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            # Its pipe closes before it has an exit code, long before on a busy machine.
            self._processes[rank].join(timeout=_ENDED_SECONDS)
            code = self._processes[rank].exitcode
            ended = f"ended with exit code {code}"
            if code and code < 0:
                killed = signal.Signals(-code)
                ended = f"was killed ({killed.name}){_KILLED_BY.get(killed, '')}"
            return RankFailure(f"the process {ended}", FailureCause.ENDED)

    def _raise_failure(self, answers: dict[int, object]) -> None:
        """After a failure, end all ranks and raise the error of the first rank that failed."""
        failures = {
            rank: answer for rank, answer in answers.items() if isinstance(answer, RankFailure)
        }
        if not failures:
            return
        for process in self._processes:
            process.kill()
        rank = min(failures, key=lambda rank: (failures[rank].cause, rank))
        kind = RankRefusal if failures[rank].refusal else RankError
        error = kind(f"rank {rank} of {self.size} failed: {failures[rank].error}")
        error.details = "\n".join(
            f"rank {other} failed as well: {failure.error}"
            for other, failure in failures.items()
            if other != rank
        )
        self._failed = error
        raise error
