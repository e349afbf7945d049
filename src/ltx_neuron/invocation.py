"""Commands in messages, spelled as the user started this process.

A clone has scripts (shards/, compile/, src/generate_ltx23.py). An installed package has only the
program ltx-neuron.
"""

import shlex
import shutil
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]  # of a clone
# Verb -> the clone's script for it.
SCRIPTS = {
    "shard transformer": "shards/shard_backbone_weights.py",
    "shard gemma3": "shards/shard_gemma3_weights.py",
    "shard vae": "shards/shard_vae_weights.py",
    "compile transformer": "compile/compile_transformer.py",
    "compile gemma3": "compile/compile_gemma3.py",
    "compile vae": "compile/compile_vae.py",
    "generate": "src/generate_ltx23.py",
}
_PROGRAM = "ltx-neuron"


def by_script() -> bool:
    """Whether the user started one of a clone's scripts."""
    return Path(sys.argv[0]).resolve() in {_ROOT / script for script in SCRIPTS.values()}


def command(verb: str, *words: object) -> str:
    """The command to type for a verb of ltx-neuron, such as "shard transformer", and its flags."""
    if not by_script():
        typed = [*_program(), *verb.split()]
    elif verb in SCRIPTS:
        typed = [_python(), _from_here(_ROOT / SCRIPTS[verb])]
    else:
        typed = [_python(), "-m", "ltx_neuron", *verb.split()]
    return shlex.join(map(str, [*typed, *words]))


def _program() -> list[str | Path]:
    """ltx-neuron; its path if PATH has another one or none; python -m ltx_neuron if this Python has
    no such program, as in a checkout that is not installed."""
    path = Path(sys.argv[0])
    if path.name != _PROGRAM:
        path = Path(sys.executable).with_name(_PROGRAM)
    if not path.is_file():
        return [_python(), "-m", "ltx_neuron"]
    found = shutil.which(_PROGRAM)
    return [_PROGRAM if found and path.samefile(found) else _from_here(path)]


def _python() -> str | Path:
    on_path = shutil.which("python") == sys.executable
    return "python" if on_path else _from_here(Path(sys.executable))


def _from_here(path: Path) -> Path:
    """A path relative to this folder if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
