"""The environment of processes that drive ranks: set before they import torch, because runtimes and
compilers read it then.

Of the Neuron variables, none was tried on hardware by us; they are those of published runs
(profiles.py says which).
"""

import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ltx_neuron.errors import UserError
from ltx_neuron.profiles import Profile

# Plus the first core, so that engines on other cores of the machine have other ports.
_ROOT_PORT = 61234
_MASTER_PORT = 62234
# What TorchNeuron's call of the compiler has by itself.
_TORCHNEURONS_OWN = ("--model-type", "--auto-cast", "--lnc")
_SEVERAL = "--tensorizer-options"  # the flag that takes options of its own
_USERS_OWN = "NEURON_RT_EXEC_TIMEOUT"  # what a user is told to raise: the profile's is the default


def of_rank(profile: Profile, tp: int, rank: int, cache: Path | None) -> dict[str, str]:
    """What a rank adds to the host's environment. cache: where compilers keep what they made."""
    variables = dict(profile.environment)
    if _USERS_OWN in variables:
        variables[_USERS_OWN] = os.environ.get(_USERS_OWN, variables[_USERS_OWN])
    # gloo connects ranks on one machine: neither a host name that does not resolve nor another
    # interface that the user's environment names matters.
    if os.path.exists("/sys/class/net/lo"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if cache is not None and profile.compile_backend != "export":
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache).absolute() / "inductor")
    if profile.device == "neuron":
        variables |= _neuron(profile, tp, rank, cache)
    return variables


def _neuron(profile: Profile, tp: int, rank: int, cache: Path | None) -> dict[str, str]:
    launch_cores = cores(profile, tp)
    first = launch_cores[0]
    variables = {
        "PATH": path(),
        "NEURON_RT_VISIBLE_CORES": str(launch_cores[rank]),  # one logical core a process
        "NEURON_LOGICAL_NC_CONFIG": str(profile.lnc),
        # Without it rank 0 looks for a free port and lets go of it, and another engine may take
        # it: then the others hang.
        "NEURON_RT_ROOT_COMM_ID": _root_comm_id(first),
        # A rank's torch loads TorchNeuron, also where the shell keeps it out of the host's process
        # (docs/trainium.md).
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_MASTER_PORT + first),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(tp),
        "LOCAL_WORLD_SIZE": str(tp),
    }
    if cache is not None:
        folder = Path(cache).absolute() / "neuron"
        variables |= {
            "TORCH_NEURONX_NEFF_CACHE_DIR": str(folder / "neff"),
            "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(folder / "locks"),
            "TORCH_NEURONX_HLO_CACHE_DIR": str(folder / "hlo"),
        }
    return variables


def of_compiler(profile: Profile, model: str) -> dict[str, str]:
    """TorchNeuron's compiler settings for a model, one of profiles.MODELS: read at each launch of a
    graph, and part of the key by which it finds what it has compiled.

    It adds NEURON_CC_FLAGS to flags of its own and splits all of them at white space, with no
    shell; the level has a variable of its own (TorchNeuron's CompilableKernelExecution.cpp, early
    2026: GetXLAAdditionalArgs, GetXLAOptimizationLevel). One of its own is --model-type
    transformer, for the video decoder too. Raises UserError for a flag with white space in it.
    """
    if profile.device != "neuron":
        return {}
    level, words = "-O1", []
    for word in shlex.split(profile.flags(model)):
        flag, _, value = word.partition("=")
        if word.startswith("-O"):
            level = word
        elif flag == _SEVERAL:  # once for each of its options
            words += [f"{flag}={option}" for option in value.split()]
        elif flag not in _TORCHNEURONS_OWN:
            words.append(word)
    if torn := [word for word in words if word.split() != [word]]:
        raise UserError(
            f"profile {profile.name}: compiler flag {torn[0]!r} of {model} has a space in it, at"
            " which TorchNeuron would split it; leave the space out"
        )
    return {"NEURON_COMPILER_OPT_LEVEL": level, "NEURON_CC_FLAGS": " ".join(words)}


def path() -> str:
    """PATH with the folder of this Python in front: torch_neuronx starts neuronx-cc and
    libneuronpjrt-path by name, also where the environment was not activated."""
    own, known = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    return known if own in known.split(os.pathsep) else os.pathsep.join([own, known])


def cores(profile: Profile, tp: int) -> list[int]:
    """The logical cores of a launch, one a rank: the first ones of NEURON_RT_VISIBLE_CORES (as in
    4-7), else of the machine. Raises UserError where they are not tp cores of the profile, or have
    gaps, which the runtime refuses (Neuron runtime's developer guide)."""
    value = os.environ.get("NEURON_RT_VISIBLE_CORES", "")
    visible = []
    try:
        for part in value.split(",") if value else ():
            first, dash, last = part.strip().partition("-")
            visible += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise UserError(
            f"NEURON_RT_VISIBLE_CORES is {value!r}, wanted cores as in 0-3 or 4,5,6,7"
        ) from None
    visible = visible or list(range(tp))
    different = len(set(visible)) == len(visible) >= tp
    if not different or (profile.cores and max(visible) >= profile.cores):
        raise UserError(
            f"NEURON_RT_VISIBLE_CORES is {value!r}; {tp} ranks need {tp} different logical cores,"
            f" of which {profile.name} has {profile.cores}.\nType: unset NEURON_RT_VISIBLE_CORES"
        )
    launch = sorted(visible)[:tp]
    if launch != list(range(launch[0], launch[0] + tp)):
        raise UserError(
            f"NEURON_RT_VISIBLE_CORES is {value!r}: the cores of a run follow each other, the"
            " runtime refuses gaps.\nType: export NEURON_RT_VISIBLE_CORES="
            f"{launch[0]}-{launch[0] + tp - 1}"
        )
    return launch


def check_ports(profile: Profile, tp: int) -> None:
    """Raise UserError where another process has a port of this launch: its ranks would wait for
    ever."""
    if profile.device == "neuron":
        first = cores(profile, tp)[0]
        for port in (_ROOT_PORT, _MASTER_PORT):
            _check_port(port + first, first)


def set_launch(profile: Profile, tp: int) -> None:
    """Show the runtime of this process the cores of its launch, where the machine has more (all of
    them it takes by itself), and name a communicator that replicas on other cores do not share.
    The user's own stays. Raises UserError where another process has its port.

    NEURON_RT_NUM_CORES is never set. libnrt takes one core or a multiple of 8 of it, and runtime
    2.30 refused 4 with LNC=2, which 2.34 takes (observed by Difflet on trn2.3xlarge).
    """
    launch = cores(profile, tp)
    if "NEURON_RT_ROOT_COMM_ID" not in os.environ:
        _check_port(_ROOT_PORT + launch[0], launch[0])
        os.environ["NEURON_RT_ROOT_COMM_ID"] = _root_comm_id(launch[0])
    if len(launch) != profile.cores:
        span = f"{launch[0]}-{launch[-1]}" if tp > 1 else str(launch[0])
        os.environ["NEURON_RT_VISIBLE_CORES"] = span


def _root_comm_id(first_core: int) -> str:
    return f"127.0.0.1:{_ROOT_PORT + first_core}"


def _check_port(port: int, first_core: int) -> None:
    # Bound and let go: the ranks bind it themselves right after.
    with socket.socket() as listener:
        # As the runtime does: for 60 s after a run its port is in TIME_WAIT, which is not taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            raise UserError(
                f"port {port} is taken: another run holds core {first_core}.\nWait for it, or"
                " choose other cores, as in NEURON_RT_VISIBLE_CORES=4-7"
            ) from None


@contextmanager
def added(variables: dict[str, str]) -> Iterator[None]:
    """This process's environment with more variables, for the children that are started
    meanwhile."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
