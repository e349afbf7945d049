"""Environment variables of ranks, launches and compilers: cores, ports, flags and folders."""

import os
import shlex
import socket
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from ltx_neuron.backends import environment
from ltx_neuron.backends.nxd import compile as nxd_compile
from ltx_neuron.config.profiles import COMPILED_MODELS, PROFILES, resolve
from ltx_neuron.errors import UserError

TRN2, LARGE = (resolve(name, ("backend=torchdist",)) for name in ("trn2.3xlarge", "trn2.48xlarge"))
CPU = PROFILES["cpu"]


@pytest.fixture(autouse=True)
def own_environment():
    with mock.patch.dict(os.environ):
        for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_RT_ROOT_COMM_ID"):
            os.environ.pop(name, None)
        yield


# NEURON_RT_VISIBLE_CORES, profile, ranks -> the core of each rank, and the variable of one process that drives all
# ranks: by core numbers, and None for the whole machine; or what the refusal says.
CORES = [
    (None, TRN2, 4, [0, 1, 2, 3], None),
    (None, LARGE, 4, [0, 1, 2, 3], "0-3"),
    ("56,57,58-63", LARGE, 4, [56, 57, 58, 59], "56-59"),
    ("0,2", TRN2, 1, [0], "0"),
    ("2-3", TRN2, 4, "4 ranks need 4 different logical cores, of which trn2.3xlarge has 4", None),
    ("0,0,1,2", TRN2, 4, "different", None),
    ("0,2,4,6", LARGE, 4, "the runtime refuses gaps.\nType: export NEURON_RT_VISIBLE_CORES=0-3", None),
    ("all", TRN2, 4, "'all', wanted cores as in 0-3", None),
]


@pytest.mark.parametrize(("visible", "profile", "tp", "cores", "launched"), CORES)
def test_each_rank_of_a_launch_sees_one_core_and_one_process_sees_all(visible, profile, tp, cores, launched):
    os.environ |= {"NEURON_RT_VISIBLE_CORES": visible} if visible else {}
    os.environ["NEURON_RT_ROOT_COMM_ID"] = "127.0.0.1:1"  # the user's own
    if isinstance(cores, str):
        with pytest.raises(UserError, match=f"(?s)NEURON_RT_VISIBLE_CORES.*{cores}"):
            environment.of_rank(profile, tp, 0, None)
        return
    ranks = [environment.of_rank(profile, tp, rank, None) for rank in range(tp)]
    assert [rank.pop("NEURON_RT_VISIBLE_CORES") for rank in ranks] == [str(core) for core in cores]
    for name in ("RANK", "LOCAL_RANK"):
        assert [rank.pop(name) for rank in ranks] == [str(rank) for rank in range(tp)]
    assert all(variables == ranks[0] for variables in ranks)
    environment.set_launch(profile, tp)
    assert os.environ.get("NEURON_RT_VISIBLE_CORES") == launched and "NEURON_RT_NUM_CORES" not in os.environ
    assert os.environ["NEURON_RT_ROOT_COMM_ID"] == "127.0.0.1:1"


def test_a_rank_has_a_core_size_flags_an_address_and_folders_of_what_it_compiles(tmp_path):
    os.environ |= {"NEURON_RT_VISIBLE_CORES": "4-7", "PATH": "/usr/bin:/bin", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    # A user may give a slow first run more time, as the message of a run that did not end in time says.
    with mock.patch.dict(os.environ, {"NEURON_RT_EXEC_TIMEOUT": "1800"}):
        assert environment.of_rank(LARGE, 4, 1, tmp_path)["NEURON_RT_EXEC_TIMEOUT"] == "1800"
    variables = environment.of_rank(LARGE, 4, 1, tmp_path)
    assert variables.items() >= dict(LARGE.environment).items() and variables["NEURON_RT_EXEC_TIMEOUT"] == "600"
    assert variables["NEURON_LOGICAL_NC_CONFIG"] == "2" and "NEURON_CC_FLAGS" not in variables
    assert variables["NEURON_RT_ROOT_COMM_ID"] == "127.0.0.1:61238"
    folders = [value for name, value in variables.items() if name.endswith("_DIR")]
    assert len(folders) == 4 and all(value.startswith(str(tmp_path)) for value in folders)
    # The compiler is found where the environment was not activated.
    own = str(Path(sys.executable).parent)
    assert variables["PATH"] == f"{own}:/usr/bin:/bin"
    nxd_compile.set_environment(resolve("trn2.3xlarge"))
    assert environment.path() == f"{own}:/usr/bin:/bin"  # once
    # torch reads the variable when it is imported, and in the function that is asked here.
    assert not torch._is_device_backend_autoload_enabled()
    with environment.added(variables):
        assert torch._is_device_backend_autoload_enabled()
    assert not [name for name in environment.of_rank(CPU, 4, 1, tmp_path) if "NEURON" in name]


def test_each_model_has_compiler_flags_of_its_own_in_the_form_that_torchneuron_takes():
    """TorchNeuron splits its command at white space and calls execvp (CompilableKernelExecution.cpp of its sources,
    early 2026), and adds --model-type, --auto-cast and --lnc itself; NxD's goes through a shell."""

    def options(words: list[str]) -> set[str]:  # whether a flag's come together or one by one
        return {*" ".join(words).replace("--tensorizer-options=", "").replace("=", " ").split()}

    described = {model: environment.of_compiler(TRN2, model) for model in COMPILED_MODELS}
    assert described["dit"] == {
        "NEURON_COMPILER_OPT_LEVEL": "-O1",
        "NEURON_CC_FLAGS": "--tensorizer-options=--enable-ccop-compute-overlap",
    }
    assert all(word.startswith("--tensorizer-options=--") for word in described["gemma3"]["NEURON_CC_FLAGS"].split())
    for model, variables in described.items():
        words = ["--model-type", "transformer", "--auto-cast=none", "--lnc", "2"]
        words += [*variables["NEURON_CC_FLAGS"].split(), variables["NEURON_COMPILER_OPT_LEVEL"]]
        # It names the type itself, the same one for every model.
        assert options(words) == options(shlex.split(TRN2.flags(model))) - {"unet-inference"} | {"transformer"}
    assert environment.of_compiler(CPU, "dit") == {}
    level, torn = (replace(TRN2, compiler_flags=(("dit", flags),)) for flags in ("-O2", "--dump='a folder'"))
    assert environment.of_compiler(level, "dit")["NEURON_COMPILER_OPT_LEVEL"] == "-O2"
    with pytest.raises(UserError, match="--dump=a folder.* has a space in it"):
        environment.of_compiler(torn, "dit")


def test_a_port_that_another_run_holds_is_refused_and_one_just_left_is_not():
    os.environ["NEURON_RT_VISIBLE_CORES"] = "40-43"
    environment.check_ports(LARGE, 4)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 61234 + 40))
        other.listen()
        taken = r"(?s)port 61274 is taken: another run holds core 40.*NEURON_RT_VISIBLE_CORES=4-7"
        for check in (environment.check_ports, environment.set_launch):
            with pytest.raises(UserError, match=taken):
                check(LARGE, 4)
        environment.check_ports(CPU, 4)  # needs none
        # For 60 s its connections are in TIME_WAIT, where the side that closed first had it.
        client = socket.create_connection(("127.0.0.1", 61234 + 40))
        served, _ = other.accept()
        served.close()
        assert client.recv(1) == b""
        client.close()
    environment.check_ports(LARGE, 4)
    environment.set_launch(LARGE, 4)  # replicas on other cores have communicators of their own
    assert os.environ["NEURON_RT_ROOT_COMM_ID"] == "127.0.0.1:61274"


def test_a_number_of_ranks_that_the_neuron_runtime_refuses_is_refused():
    for tp in (2, 6):
        with pytest.raises(UserError, match=f"is {tp}: .* 1 or a multiple of 4 .*\nType --tp-degree 4"):
            LARGE.check_degree(tp)
        CPU.check_degree(tp)
