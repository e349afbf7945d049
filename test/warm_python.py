"""Scripts in processes of their own that have torch already: each is forked off a server that
imported it once. Importing it takes seconds, and a test session runs hundreds of scripts."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

# What every script imports sooner or later. Nothing of it starts a thread, so it may be forked.
MODULES = ["torch", "torch.export", "safetensors.torch", "numpy", "transformers", "av", "PIL.Image"]

# Held where a process is asked after, and where one is started, which asks after all: of two
# threads that ask at once, one gets the exit code and the other 255.
_ASKING = threading.Lock()


@cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context


def run(command: list[str], cwd: Path, timeout: float) -> subprocess.CompletedProcess:
    """What subprocess.run of a script gives, with its output as text; `command` has no interpreter.

    Raises subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = [multiprocessing.reduction.DupFd(file.fileno()) for file in (out, err)]
        process = _context().Process(target=_script, args=(command, cwd, dict(os.environ), *files))
        with _ASKING:
            process.start()
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
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
