"""Commands in messages: ltx-neuron, as this process's environment starts it."""

import shlex
import shutil
import sys
from pathlib import Path

_PROGRAM = "ltx-neuron"


def command(verb: str, *words: object) -> str:
    """The command to type for a verb of ltx-neuron, such as "shard transformer", and its flags."""
    return shlex.join(map(str, [*_program(), *verb.split(), *words]))


def _program() -> list[str | Path]:
    """ltx-neuron; its path if PATH has another one or none; python -m ltx_neuron if this Python has
    no such program, as in a checkout that is not installed."""
    path = Path(sys.argv[0])
    if path.name != _PROGRAM:
        path = Path(sys.executable).with_name(_PROGRAM)
    if not path.is_file():
        on_path = shutil.which("python") == sys.executable
        return ["python" if on_path else _from_here(Path(sys.executable)), "-m", "ltx_neuron"]
    program = shutil.which(_PROGRAM)
    return [_PROGRAM if program and path.samefile(program) else _from_here(path)]


def _from_here(path: Path) -> Path:
    """A path relative to this folder if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
