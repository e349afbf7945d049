"""Rank processes that compile their graphs: the same results, three graphs for the DiT, and no
second compile, ever."""

import copy
import dataclasses
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from graphs import block_graph
from helpers import one_thread, randn, random_value, rel  # noqa: F401
from toy import EQUAL, TP, make_toy, upload, wanted

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends import environment
from ltx_neuron.backends.export import fake_process_group
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.nxd import compile as nxd_compile
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.backends.torchdist import compiled
from ltx_neuron.backends.torchdist.host import TorchDistRanks, compile_only, rank_settings
from ltx_neuron.backends.torchdist.rank import Rank
from ltx_neuron.config.profiles import COMPILED_MODELS, PROFILES, resolve
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.models.attention import sdpa

BUCKET = Bucket(video_tokens=6, audio_tokens=4, timesteps=1, max_steps=2)
# aot_eager is what TorchNeuron does before its own compiler: Dynamo, AOTAutograd, functional
# collectives.
TRACED = resolve("cpu", ("compile_backend=aot_eager", "drain_every=2"))

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


def run_toy(ranks, toy, step: int):
    upload(ranks, toy)
    ranks.run("toy", step=step)
    return ranks.get("toy", "y")


@pytest.fixture(scope="module")
def dit(tiny, artifacts):
    """The folder of the tiny DiT's graphs, a block per graph."""
    cpu = resolve("cpu", ("blocks_per_graph=1",))
    workspace = Workspace(tiny.checkpoint, cpu, artifacts, TP, "float32", tiny.gemma_root)
    (graphs,) = build.make(workspace, workspace.dit_graphs([BUCKET]))
    return graphs


def test_a_compiled_graph_runs_on_new_inputs_steps_and_weights(toy):
    with TorchDistRanks(TRACED, TP) as ranks:
        ranks.load(toy.folders[1], toy.programs, torch.float32)
        assert rel(run_toy(ranks, toy, 3), wanted(toy, 3)) < EQUAL
        assert rel(run_toy(ranks, toy, 5), wanted(toy, 5)) < EQUAL
        ranks.replace_weights(toy.folders[2])
        assert rel(run_toy(ranks, toy, 7), wanted(toy, 7, seed=2)) < EQUAL
        ranks.unload()  # as for another prompt, which the other model encodes
        ranks.load(toy.folders[1], toy.programs, torch.float32)
        assert rel(run_toy(ranks, toy, 9), wanted(toy, 9)) < EQUAL


def test_on_neuron_what_does_not_compile_without_a_device_is_left_to_the_ranks(toy, tmp_path, capfd):
    """Here TorchNeuron is absent, so the process that compiles does fail."""
    folders = [manifest.folder for manifest in toy.programs.values()]
    compile_only(folders, TRN2, TP, tmp_path)
    message = capfd.readouterr().err
    assert "ended with exit code 1; its errors are above. The ranks compile at" in message
    with pytest.raises(RunError, match="ended with exit code 1"):
        compile_only([tmp_path / "absent"], PROFILES["cpu"], TP, tmp_path)


def test_a_compile_step_that_does_not_end_is_stopped_and_left_to_the_ranks(tmp_path, capfd, monkeypatch):
    """As where a loaded graph waits for ranks that nobody starts."""
    monkeypatch.setattr(compiled, "compile_only", wait_for_ever)
    start = time.monotonic()
    compile_only([tmp_path], replace(TRN2, first_run_seconds=1), TP, tmp_path)
    assert time.monotonic() - start < 60
    assert "did not end within 1 s and was stopped. The ranks compile" in capfd.readouterr().err


def wait_for_ever(*_) -> None:
    time.sleep(600)


def test_every_graph_is_compiled_where_a_compiled_graph_cannot_run(dit, tmp_path, monkeypatch):
    """By TorchNeuron's source loading a graph with collectives fails without a process group."""
    compiled_graphs = []

    def compile_and_refuse_to_run(graph, _examples, **_):
        compiled_graphs.append(graph)

        def run(*_):
            raise RuntimeError("no process group")

        return run

    monkeypatch.setitem(compiled.OPTIONS, "refuses", {})
    torch._dynamo.register_backend(compile_and_refuse_to_run, name="refuses")
    settings = rank_settings(replace(TRACED, compile_backend="refuses"), TP, 0, tmp_path)
    with pytest.raises(SystemExit, match="1"):
        compiled.compile_only([dit], settings)
    assert len(compiled_graphs) == len(Manifest(dit).graphs) == 3


def test_torch_loads_a_device_backend_in_ranks_also_where_the_host_is_told_not_to(tmp_path, monkeypatch):
    """torch reads the variable when it is imported, and in the function that is asked here."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert not torch._is_device_backend_autoload_enabled()
    with environment.added(environment.of_rank(TRN2, 4, 0, tmp_path)):
        assert torch._is_device_backend_autoload_enabled()


def test_what_would_be_compiled_once_more_is_an_error():
    double = compiled.Compiled(lambda x: (x * 2,), "aot_eager")
    assert torch.equal(double(torch.ones(3))[0], torch.full((3,), 2.0))
    assert torch.equal(double(torch.zeros(3))[0], torch.zeros(3))
    for other in (torch.ones(4), torch.ones(3, dtype=torch.bfloat16), torch.ones(6)[::2]):
        with pytest.raises(RuntimeError, match="recompile"):
            double(other)
    assert torch.equal(double(torch.ones(3))[0], torch.full((3,), 2.0))
    another = compiled.Compiled(lambda x: (x + 1,), "aot_eager")  # a graph of its own may still be
    assert torch.equal(another(torch.ones(3))[0], torch.full((3,), 2.0))


def test_a_graph_that_breaks_is_an_error_and_not_run_op_by_op():
    with pytest.raises(Exception, match="Data-dependent|data-dependent"):
        compiled.Compiled(lambda x: (x + 1,) if x.sum() > 0 else (x,), "aot_eager")(torch.ones(3))


class WrappedKernel:
    """What torch_neuronx.wrap_nki returns (torch_neuronx/nki_hop.py, NKIHOPCaller, early 2026): a
    launch needs a grid, which is iterated."""

    def __init__(self, kernel, grid=()):
        self.kernel, self.grid = kernel, grid

    def __getitem__(self, grid):
        return WrappedKernel(self.kernel, tuple(map(int, grid)))

    def __call__(self, **arguments):
        return self.kernel(self.grid, **arguments)


def nki_op(name, mutates_args):
    """torch_neuronx.nki_op, of the same file: a torch.library.custom_op, whose fake is the function
    itself."""

    def register(function):
        operation = torch.library.custom_op(name, function, mutates_args=mutates_args)
        operation.register_fake(function)
        return operation

    return register


def test_a_device_puts_its_own_kernel_in_the_place_of_the_operation(monkeypatch):
    """On TorchNeuron, with PyTorch's kernel instead of nkilib's, compiled as its backend is without
    its compiler."""
    launches = []

    def attention_cte(grid, q, k, v, scale, causal_mask, tp_q, tp_k, tp_out):
        launches.append((grid, scale * q.shape[-1] ** 0.5))
        return sdpa(q[None], k[None], v[None], scale)[0].contiguous()

    # Decorated, as nki.jit does: no plain function.
    kernels = SimpleNamespace(attention_cte=partial(attention_cte))
    torch_neuronx = SimpleNamespace(nki_op=nki_op, wrap_nki=WrappedKernel)
    monkeypatch.setitem(sys.modules, "torch_neuronx", torch_neuronx)
    monkeypatch.setitem(sys.modules, "nkilib.core.attention.attention_cte", kernels)
    module = copy.deepcopy(block_graph("nki").graph_module)
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [randn(*value.shape, seed=i).to(value.dtype) / 4 for i, value in enumerate(values)]
    with fake_process_group(2), torch.no_grad():
        before = module(*inputs)
        settings = SimpleNamespace(profile=replace(TRN2, compile_backend="aot_eager"))
        run = compiled.ready(module, settings, {})
        run(*inputs)
        launches.clear()
        after = run(*inputs)
    assert launches == [((2,), pytest.approx(1))] * 6  # the kernel scales, in fp32
    assert all(rel(one, two) < 1e-2 for one, two in zip(after, before, strict=True))  # bf16


def test_no_kernel_is_made_for_a_graph_without_the_operation():
    def absent():
        raise ImportError("no nkilib")

    compiled.replace_attention(copy.deepcopy(block_graph("matmul").graph_module), absent)
    with pytest.raises(ImportError, match="no nkilib"):
        compiled.replace_attention(copy.deepcopy(block_graph("nki").graph_module), absent)


def test_a_rank_without_its_device_says_so():
    with pytest.raises(RankError, match=r"rank 0 of 1 failed"), TorchDistRanks(resolve("cuda"), 1):
        pass


TRN2, LARGE = (resolve("trn2.3xlarge", ("backend=torchdist",)), resolve("trn2.48xlarge", ("backend=torchdist",)))

# NEURON_RT_VISIBLE_CORES, profile, ranks -> the core of each rank, or what the refusal says
CORES = [
    (None, TRN2, 4, [0, 1, 2, 3]),
    ("0-3", TRN2, 4, [0, 1, 2, 3]),
    ("4-7", LARGE, 4, [4, 5, 6, 7]),
    ("60,61,62-63", LARGE, 4, [60, 61, 62, 63]),
    ("0-15", LARGE, 4, [0, 1, 2, 3]),
    ("2-3", TRN2, 4, "4 ranks need 4 different logical cores, of which trn2.3xlarge has 4"),
    ("4-7", TRN2, 4, "4 ranks need 4 different logical cores"),
    ("0,0,1,2", TRN2, 4, "different"),
    ("0,2", TRN2, 1, [0]),
    ("0,2,4,6", LARGE, 4, "the runtime refuses gaps.\nType: export NEURON_RT_VISIBLE_CORES=0-3"),
    ("all", TRN2, 4, "'all', wanted cores as in 0-3"),
]


@pytest.mark.parametrize(("visible", "profile", "tp", "cores"), CORES)
def test_each_rank_of_a_neuron_launch_sees_one_core_of_its_own(monkeypatch, visible, profile, tp, cores):
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    if visible is not None:
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", visible)
    if isinstance(cores, str):
        with pytest.raises(UserError, match="NEURON_RT_VISIBLE_CORES") as error:
            environment.of_rank(profile, tp, 0, None)
        assert cores in str(error.value)
        return
    launched = [environment.of_rank(profile, tp, rank, None) for rank in range(tp)]
    assert [variables["NEURON_RT_VISIBLE_CORES"] for variables in launched] == [str(core) for core in cores]
    assert [variables["RANK"] for variables in launched] == [str(rank) for rank in range(tp)]
    own = ("NEURON_RT_VISIBLE_CORES", "RANK", "LOCAL_RANK")
    shared = [{name: value for name, value in variables.items() if name not in own} for variables in launched]
    assert all(variables == shared[0] for variables in shared)
    assert launched[0]["NEURON_RT_ROOT_COMM_ID"] == f"127.0.0.1:{61234 + cores[0]}"


def test_a_neuron_rank_is_told_its_core_size_its_flags_and_where_to_keep_what_it_compiles(tmp_path):
    variables = environment.of_rank(TRN2, 4, 1, tmp_path)
    assert variables.items() >= dict(TRN2.environment).items()
    assert variables["NEURON_LOGICAL_NC_CONFIG"] == "2" and "NEURON_CC_FLAGS" not in variables
    kept = {name: value for name, value in variables.items() if name.endswith("_DIR")}
    assert len(kept) == 4 and all(value.startswith(str(tmp_path)) for value in kept.values())
    on_cpu = environment.of_rank(PROFILES["cpu"], 4, 1, tmp_path)
    assert not [name for name in on_cpu if "NEURON" in name]


def test_a_user_may_give_a_slow_first_run_more_time(monkeypatch):
    """As the message of a run that did not end in time says; the profile's 600 s otherwise."""
    monkeypatch.delenv("NEURON_RT_EXEC_TIMEOUT", raising=False)
    assert environment.of_rank(TRN2, 4, 0, None)["NEURON_RT_EXEC_TIMEOUT"] == "600"
    monkeypatch.setenv("NEURON_RT_EXEC_TIMEOUT", "1800")
    assert environment.of_rank(TRN2, 4, 0, None)["NEURON_RT_EXEC_TIMEOUT"] == "1800"
    assert "NEURON_RT_EXEC_TIMEOUT" not in environment.of_rank(PROFILES["cpu"], 4, 0, None)


def test_each_model_has_compiler_flags_of_its_own_in_the_form_that_torchneuron_takes():
    """It splits them at white space and adds --model-type, --auto-cast and --lnc itself."""
    described = {model: environment.of_compiler(TRN2, model) for model in COMPILED_MODELS}
    assert described["dit"] == {
        "NEURON_COMPILER_OPT_LEVEL": "-O1",
        "NEURON_CC_FLAGS": "--tensorizer-options=--enable-ccop-compute-overlap",
    }
    assert described["gemma3"]["NEURON_CC_FLAGS"].split() == [
        f"--tensorizer-options={option}"
        for option in (
            "--enable-ccop-compute-overlap",
            "--cc-pipeline-tiling-factor=1",
            "--vectorize-strided-dma",
            "--enable-scalar-dge-vectorization",
        )
    ]
    assert described["connectors"]["NEURON_CC_FLAGS"] == ""
    assert environment.of_compiler(PROFILES["cpu"], "dit") == {}
    level = dataclasses.replace(TRN2, compiler_flags=(("dit", "-O2"),))
    assert environment.of_compiler(level, "dit")["NEURON_COMPILER_OPT_LEVEL"] == "-O2"
    torn = dataclasses.replace(TRN2, compiler_flags=(("dit", "--dump='a folder'"),))
    with pytest.raises(UserError, match="--dump=a folder.* has a space in it"):
        environment.of_compiler(torn, "dit")


def test_a_compiler_that_is_started_without_a_shell_gets_what_a_shell_would_give_it(tmp_path):
    """TorchNeuron splits its command at white space and calls execvp (CompilableKernelExecution.cpp
    of its sources, early 2026); NxD's goes through a shell."""
    stub = tmp_path / "neuronx-cc"
    stub.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    stub.chmod(0o755)
    for model in COMPILED_MODELS:
        described = environment.of_compiler(TRN2, model)
        ours = "--model-type transformer --auto-cast=none --lnc 2 "
        line = f"{stub} {ours}{described['NEURON_CC_FLAGS']} {described['NEURON_COMPILER_OPT_LEVEL']}"
        split, shell = (
            subprocess.run(command, shell=by_shell, capture_output=True, text=True, check=True)
            for command, by_shell in ((line.split(), False), (f"{stub} {TRN2.flags(model)}", True))
        )
        # TorchNeuron names the type itself, the same one for every model.
        wanted = message(shell.stdout) - {"unet-inference"} | {"transformer"}
        assert message(split.stdout) == wanted


def message(printed: str) -> set[str]:
    """What a compiler's words say, whether a flag's options came together or one by one."""
    return {*printed.replace("--tensorizer-options=", "").replace("=", " ").split()}


def test_a_launch_finds_the_flags_of_its_own_model(monkeypatch):
    """What a process of TorchNeuron reads when a graph is launched."""
    monkeypatch.delenv("LTX_TEST_FLAGS", raising=False)
    seen = []

    def rank_with(model: str) -> Rank:
        settings = rank_settings(PROFILES["cpu"], 1, 0, None)
        settings = dataclasses.replace(settings, compilers={model: {"LTX_TEST_FLAGS": model}})
        rank = Rank.__new__(Rank)
        rank.settings, rank._synchronize, rank._launched = settings, lambda: None, lambda: None
        rank._clear()
        rank.programs["program"] = SimpleNamespace(
            identity={"model": model},
            runs={"main": [("graph", 0)]},
            graphs={"graph": {"inputs": [], "outputs": []}},
            fields={},
        )
        rank.bound["program", "graph", 0] = see, []
        return rank

    def see() -> tuple:
        seen.append(os.environ["LTX_TEST_FLAGS"])
        return ()

    for model in ("dit", "gemma3", "dit"):
        rank_with(model).run("program", "main", {})
    assert seen == ["dit", "gemma3", "dit"]
    del os.environ["LTX_TEST_FLAGS"]


def test_a_port_that_another_run_holds_is_refused_before_any_rank_starts(monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "40-43")
    environment.check_ports(LARGE, 4)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 61234 + 40))
        with pytest.raises(
            UserError, match=(r"(?s)port 61274 is taken: another run holds core 40.*NEURON_RT_VISIBLE_CORES=4-7")
        ):
            environment.check_ports(LARGE, 4)
        environment.check_ports(PROFILES["cpu"], 4)  # needs none


def test_a_port_that_the_last_run_has_just_left_is_not_taken():
    """For 60 s its connections are in TIME_WAIT, where the side that closed first had it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 61234))
        listener.listen()
        client = socket.create_connection(("127.0.0.1", 61234))
        served, _ = listener.accept()
        served.close()
        assert client.recv(1) == b""
        client.close()
    environment.check_ports(TRN2, 4)


def test_the_compiler_is_found_where_the_environment_was_not_activated(monkeypatch):
    own = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert environment.of_rank(TRN2, 4, 0, None)["PATH"] == f"{own}:/usr/bin:/bin"
    nxd_compile.set_environment(resolve("trn2.3xlarge"))
    assert environment.path() == f"{own}:/usr/bin:/bin"  # once


@pytest.mark.parametrize("tp", [2, 3, 6])
def test_a_number_of_ranks_that_the_neuron_runtime_refuses_is_refused(tp):
    with pytest.raises(UserError, match=f"is {tp}: .* 1 or a multiple of 4 .*\nType --tp-degree 4"):
        LARGE.check_degree(tp)
    PROFILES["cpu"].check_degree(tp)


@pytest.mark.parametrize(
    ("profile", "tp", "visible", "wanted"),
    [
        (TRN2, 4, None, None),  # the whole machine: the runtime takes all by itself
        (TRN2, 4, "0-3", "0-3"),
        (TRN2, 1, None, "0"),
        (LARGE, 4, None, "0-3"),
        (LARGE, 4, "8-15", "8-11"),
        (LARGE, 64, None, None),
    ],
)
def test_one_process_that_drives_all_ranks_is_shown_a_part_of_the_machine_by_core_numbers(
    profile, tp, visible, wanted, monkeypatch
):
    monkeypatch.delenv("NEURON_RT_NUM_CORES", raising=False)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", visible or "")
    if visible is None:
        monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "127.0.0.1:1")  # the user's own
    environment.set_launch(profile, tp)
    assert os.environ.get("NEURON_RT_VISIBLE_CORES") == wanted
    assert "NEURON_RT_NUM_CORES" not in os.environ


@pytest.mark.parametrize(("launches", "waits"), [(14, 0), (60, 1), (4 * 26 + 1, 1), (4 * 50, 3)])
def test_a_neuron_rank_waits_for_its_device_before_the_queue_of_63_launches_is_full(launches, waits):
    """A guided step of four passes with two blocks, or one, in a graph."""
    rank = Rank.__new__(Rank)
    rank.settings, waited = SimpleNamespace(profile=TRN2), []
    rank._launched, rank._synchronize = (lambda: None), (lambda: waited.append(True))
    for number in range(1, launches + 1):
        rank._after_launch(number, first_time=False)
    assert len(waited) == waits and TRN2.drain_every < 63
