"""Scripts in processes of their own that have torch already, which takes seconds to import: each is forked off a server
that imported it once, and so is the server of the script's ranks."""

import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver, util
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO
from unittest import mock

# What scripts and their ranks import. Nothing of it starts a thread, so it may be forked.
MODULES = [
    *("torch", "torch.export", "torch._export.serde.serialize", "safetensors.torch", "numpy"),
    *("transformers.models.auto.tokenization_auto", "av", "PIL.Image"),
    *("ltx_neuron.backends.torchdist.rank", "ltx_neuron.commands.generate"),
]

# Held where a process is asked after, and where one is started, which asks after all: of two threads that ask at once,
# one gets the exit code and the other 255.
_ASKING = threading.Lock()


@cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context


def begun(command: list[str], cwd: Path, out: IO, err: IO) -> ForkServerProcess:
    """A script's process, which has been started; `command` has no interpreter, and its output goes to two files."""
    files = [multiprocessing.reduction.DupFd(file.fileno()) for file in (out, err)]
    process = _context().Process(target=_script, args=(command, cwd, dict(os.environ), *files))
    with _ASKING:
        process.start()
    return process


def run(command: list[str], cwd: Path, timeout: float) -> subprocess.CompletedProcess:
    """What subprocess.run of a script gives, with its output as text; `command` has no interpreter."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = begun(command, cwd, out, err)
        ended = wait([process.sentinel], timeout)
        with _ASKING:
            if not ended:
                process.kill()
                process.join()
                raise subprocess.TimeoutExpired(command, timeout)
            exit_code = process.exitcode
        said = [file.seek(0) or file.read() for file in (out, err)]
    return subprocess.CompletedProcess(command, exit_code, *said)


def _script(command: list[str], cwd: Path, environment: dict, out, err) -> None:
    for file, number in ((out, 1), (err, 2)):
        os.dup2(file.detach(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    gc.freeze()  # as conftest does
    gc.set_threshold(50_000, 20, 50)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    with mock.patch.object(util, "spawnv_passfds", _fork_passing):
        forkserver.ensure_running()  # before anything starts a thread
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _fork_passing(path: str, words: list[str], passed: list[int]) -> int:
    """The pid of a fork of this process, with these open files alone, that runs the program behind -c, for which
    multiprocessing's own starts a new Python."""
    if child := os.fork():
        return child
    try:
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in passed:
                with suppress(OSError):  # that which listed them
                    os.close(number)
        exec(words[-1], {})
    finally:
        os._exit(0)
