"""Environment variables of processes that drive ranks. They are set before the import of torch,
because runtimes and compilers read them then.

We did not test the Neuron variables on hardware; they are those of published runs (see
profiles.py).
"""

import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ltx_neuron.config.profiles import Profile
from ltx_neuron.errors import UserError

# Plus the first core, so that engines on other cores of the machine have other ports.
_ROOT_PORT = 61234
_MASTER_PORT = 62234
# Options that TorchNeuron passes to the compiler by itself.
_TORCHNEURONS_OWN = ("--model-type", "--auto-cast", "--lnc")
_SEVERAL = "--tensorizer-options"  # the flag that takes options of its own
_USERS_OWN = "NEURON_RT_EXEC_TIMEOUT"  # messages ask users to raise it: the profile has the default


def of_rank(
    profile: Profile, tp: int, rank: int, cache: Path | None, group: int = 0
) -> dict[str, str]:
    """A rank's environment variables. cache: of the compilers; group: its guidance group."""
    variables = dict(profile.environment)
    if _USERS_OWN in variables:
        variables[_USERS_OWN] = os.environ.get(_USERS_OWN, variables[_USERS_OWN])
    # gloo connects one machine's ranks, whatever its host name or the user's interface.
    if os.path.exists("/sys/class/net/lo"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if cache is not None and profile.compile_backend != "export":
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache).absolute() / "inductor")
    if profile.device == "neuron":
        variables |= _neuron(profile, tp, rank, cache, group)
    return variables


def _neuron(profile: Profile, tp: int, rank: int, cache: Path | None, group: int) -> dict[str, str]:
    launch_cores = cores(profile, tp, group)
    size = profile.world_size(tp)
    first = launch_cores[0]
    variables = {
        "PATH": path(),
        "NEURON_RT_VISIBLE_CORES": str(launch_cores[rank]),  # one logical core a process
        "NEURON_LOGICAL_NC_CONFIG": str(profile.lnc),
        # Without it rank 0 releases a free port, which another engine may bind: ranks hang.
        "NEURON_RT_ROOT_COMM_ID": _root_comm_id(first),
        # A rank loads TorchNeuron even if the user disables that for the host's process.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_MASTER_PORT + first),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
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
    """TorchNeuron's compiler settings for a model, one of profiles.MODELS. TorchNeuron reads them
    at each launch of a graph and uses them as part of its cache key.

    It appends NEURON_CC_FLAGS to flags of its own and splits all of them at white space without a
    shell. The optimization level has a separate variable (TorchNeuron's
    CompilableKernelExecution.cpp, early 2026: GetXLAAdditionalArgs, GetXLAOptimizationLevel). Its
    own flags include --model-type transformer, for the video decoder too. Raises UserError for a
    flag with white space in it.
    """
    if profile.device != "neuron":
        return {}
    level, words = "-O1", []
    for word in shlex.split(profile.flags(model)):
        flag, _, value = word.partition("=")
        if word.startswith("-O"):
            level = word
        elif flag == _SEVERAL:  # repeated for each of its options
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
    libneuronpjrt-path by name, even if the environment is not activated."""
    bin_folder, known = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    return known if bin_folder in known.split(os.pathsep) else os.pathsep.join([bin_folder, known])


def visible_cores(value: str) -> list[int]:
    """The cores of NEURON_RT_VISIBLE_CORES, such as 0-3,8. ValueError for another text."""
    visible = []
    for part in value.split(",") if value else ():
        first, dash, last = part.strip().partition("-")
        visible += range(int(first), int(last if dash else first) + 1)
    return visible


def cores(profile: Profile, tp: int, group: int | None = None) -> list[int]:
    """The logical cores of a launch, one per rank: the first ones of NEURON_RT_VISIBLE_CORES (such
    as 4-7), otherwise of the machine; of one guidance group, or of all. Raises UserError if they
    are too few cores of the profile, have gaps, which the runtime refuses (Neuron runtime's
    developer guide), or begin where the links between chips do not connect them."""
    needed, size = profile.cores_needed(tp), profile.world_size(tp)
    value = os.environ.get("NEURON_RT_VISIBLE_CORES", "")
    try:
        visible = visible_cores(value)
    except ValueError:
        raise UserError(
            f"NEURON_RT_VISIBLE_CORES is {value!r}, wanted cores as in 0-3 or 4,5,6,7"
        ) from None
    visible = visible or list(range(needed))
    different = len(set(visible)) == len(visible) >= needed
    if not different or (profile.cores and max(visible) >= profile.cores):
        raise UserError(
            f"NEURON_RT_VISIBLE_CORES is {value!r}; {needed} ranks need {needed} different logical"
            f" cores, of which {profile.name} has {profile.cores}.\nType: unset"
            " NEURON_RT_VISIBLE_CORES"
        )
    launch = sorted(visible)[:needed]
    if launch != list(range(launch[0], launch[0] + needed)):
        raise UserError(
            f"NEURON_RT_VISIBLE_CORES is {value!r}: the cores of a run follow each other, the"
            " runtime refuses gaps.\nType: export NEURON_RT_VISIBLE_CORES="
            f"{launch[0]}-{launch[0] + needed - 1}"
        )
    # Rows begin at chips 0, 4, 8 and 12: 0's neighbours are 1, 3, 4 and 12 (AWS on neuron-ls).
    unit = min(size, profile.torus_row or profile.cores_per_chip)
    if past := launch[0] % unit:
        first = launch[0] - past
        raise UserError(
            f"NEURON_RT_VISIBLE_CORES is {value!r}: {size} ranks begin at a multiple of {unit}"
            " cores, to have whole chips that links connect.\nType: export NEURON_RT_VISIBLE_CORES="
            f"{first}-{first + needed - 1}"
        )
    return launch if group is None else launch[group * size : (group + 1) * size]


def check_ports(profile: Profile, tp: int, group: int = 0) -> None:
    """Raise UserError if another process uses a guidance group's port: its ranks would wait."""
    if profile.device == "neuron":
        first = cores(profile, tp, group)[0]
        for port in (_ROOT_PORT, _MASTER_PORT):
            _check_port(port + first, first)


def set_launch(profile: Profile, tp: int) -> None:
    """Restrict this process's Neuron runtime to the cores of its launch, if the machine has more,
    and set a communicator of its own, apart from replicas on other cores. Values of the user are
    kept. Raises UserError if another process uses the port. NEURON_RT_NUM_CORES is never set.
    libnrt accepts one core or a multiple of 8 there, and runtime 2.30 refused 4 with LNC=2, which
    2.34 accepts (observed by Difflet on trn2.3xlarge)."""
    launch = cores(profile, tp)
    if "NEURON_RT_ROOT_COMM_ID" not in os.environ:
        _check_port(_ROOT_PORT + launch[0], launch[0])
        os.environ["NEURON_RT_ROOT_COMM_ID"] = _root_comm_id(launch[0])
    if len(launch) != profile.cores:
        span = f"{launch[0]}-{launch[-1]}" if len(launch) > 1 else str(launch[0])
        os.environ["NEURON_RT_VISIBLE_CORES"] = span


def _root_comm_id(first_core: int) -> str:
    return f"127.0.0.1:{_ROOT_PORT + first_core}"


def _check_port(port: int, first_core: int) -> None:
    # Bound and released: the ranks bind it right after.
    with socket.socket() as listener:
        # As the runtime does: for 60 s after a run its port is in TIME_WAIT, which counts as free.
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
    """Add environment variables to this process while the block runs, for its child processes."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
