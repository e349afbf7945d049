"""Ranks that compile their graphs: the same results, and no second compile, ever."""

import copy
import os
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from graphs import block_graph
from helpers import one_thread, randn, rel, within  # noqa: F401
from toy import EQUAL, TP, make_toy, ready, upload, wanted

from ltx_neuron.backends.export import fake_process_group
from ltx_neuron.backends.torchdist import compiled
from ltx_neuron.backends.torchdist.host import compile_only, rank_settings
from ltx_neuron.backends.torchdist.rank import Rank
from ltx_neuron.config.profiles import PROFILES, resolve
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.models.attention import sdpa

# aot_eager is what TorchNeuron does before its own compiler: Dynamo, AOTAutograd, functional collectives.
TRACED = resolve("cpu", ("compile_backend=aot_eager", "drain_every=2"))
TRN2 = resolve("trn2.3xlarge", ("backend=torchdist",))

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


def test_a_compiled_graph_runs_on_new_inputs_steps_and_weights(toy):
    with ready(toy, TRACED) as ranks:
        for step, seed in ((3, 1), (5, 1), (7, 2), (9, 1)):
            if step == 7:
                ranks.replace_weights(toy.folders[2])
            elif step == 9:  # as for another prompt, which the other model encodes
                ranks.unload()
                ranks.load(toy.folders[1], toy.programs, torch.float32)
            upload(ranks, toy)
            ranks.run("toy", step=step)
            assert rel(ranks.get("toy", "y"), wanted(toy, step, seed)) < EQUAL


def wait_for_ever(*_) -> None:
    time.sleep(600)


def refuse(*_) -> None:
    sys.exit(2)  # as where TorchNeuron does not know the layout's groups


def test_a_compile_step_that_fails_or_hangs_without_a_device_is_left_to_the_ranks(toy, tmp_path, capfd, monkeypatch):
    """Here TorchNeuron is absent, so it fails; it hangs where a loaded graph waits for ranks that nobody starts."""
    compile_only([toy.programs["toy"].folder], TRN2, TP, tmp_path)
    assert "ended with exit code 1; its errors are above. The ranks compile at" in capfd.readouterr().err
    with pytest.raises(RunError, match="ended with exit code 1"):
        compile_only([tmp_path / "absent"], PROFILES["cpu"], TP, tmp_path)
    monkeypatch.setattr(compiled, "compile_only", refuse)
    with pytest.raises(UserError, match="cannot be compiled; the reason is above"):
        compile_only([tmp_path], TRN2, TP, tmp_path)
    monkeypatch.setattr(compiled, "compile_only", wait_for_ever)
    with within(60):
        compile_only([tmp_path], replace(TRN2, first_run_seconds=1), TP, tmp_path)
    assert "did not end within 1 s and was stopped. The ranks compile" in capfd.readouterr().err


def test_every_graph_is_compiled_where_a_compiled_graph_cannot_run(toy, tmp_path, monkeypatch):
    """By TorchNeuron's source loading a graph with collectives fails without a process group."""
    compile_graph = Mock(return_value=lambda *_: 1 // 0)
    monkeypatch.setitem(compiled.OPTIONS, "refuses", {})
    torch._dynamo.register_backend(lambda graph, examples, **_: compile_graph(), name="refuses")
    settings = rank_settings(replace(TRACED, compile_backend="refuses"), TP, 0, tmp_path)
    with pytest.raises(SystemExit, match="1"):
        compiled.compile_only([toy.programs["toy"].folder] * 2, settings)
    assert compile_graph.call_count == 2


def test_what_would_be_compiled_once_more_or_broken_in_parts_is_an_error():
    double, x = compiled.Compiled(lambda x: (x * 2,), "aot_eager"), torch.ones(3)
    assert torch.equal(double(x)[0], 2 * x) and torch.equal(double(0 * x)[0], 0 * x)
    for other in (torch.ones(4), x.bfloat16(), torch.ones(6)[::2]):
        with pytest.raises(RuntimeError, match="recompile"):
            double(other)
    assert torch.equal(double(x)[0], 2 * x)
    assert torch.equal(compiled.Compiled(lambda x: (x + 3,), "aot_eager")(x)[0], x + 3)  # a graph of its own
    with pytest.raises(Exception, match="Data-dependent|data-dependent"):
        compiled.Compiled(lambda x: (x + 1,) if x.sum() > 0 else (x,), "aot_eager")(x)


class WrappedKernel:
    """What torch_neuronx.wrap_nki returns (torch_neuronx/nki_hop.py, NKIHOPCaller, early 2026): a launch needs a grid,
    which is iterated."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return partial(self.kernel, tuple(map(int, grid)))


def test_a_device_puts_its_own_kernel_in_the_place_of_the_operation(monkeypatch):
    """On TorchNeuron, with PyTorch's kernel instead of nkilib's, compiled as its backend is without its compiler."""
    launches = []

    def attention_cte(grid, q, k, v, scale, causal_mask, tp_q, tp_k, tp_out):
        launches.append((grid, scale * q.shape[-1] ** 0.5))
        return sdpa(q[None], k[None], v[None], scale)[0].contiguous()

    def nki_op(name, mutates_args):
        """torch_neuronx.nki_op: a torch.library.custom_op, whose fake is the function itself."""

        def register(function):
            operation = torch.library.custom_op(name, function, mutates_args=mutates_args)
            operation.register_fake(function)
            return operation

        return register

    kernels = SimpleNamespace(attention_cte=partial(attention_cte))  # nki.jit's result is no plain function either
    monkeypatch.setitem(sys.modules, "torch_neuronx", SimpleNamespace(nki_op=nki_op, wrap_nki=WrappedKernel))
    monkeypatch.setitem(sys.modules, "nkilib.core.attention.attention_cte", kernels)
    module = copy.deepcopy(block_graph("nki").graph_module)
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [randn(*value.shape, seed=i).to(value.dtype) / 4 for i, value in enumerate(values)]
    with fake_process_group(2), torch.no_grad():
        before = module(*inputs)
        run = compiled.ready(module, SimpleNamespace(profile=replace(TRN2, compile_backend="aot_eager")), {})
        run(*inputs)
        launches.clear()
        after = run(*inputs)
    assert launches == [((2,), pytest.approx(1))] * 6  # the kernel scales, in fp32
    assert all(rel(one, two) < 1e-2 for one, two in zip(after, before, strict=True))  # bf16
    # A graph without the operation needs no kernel.
    compiled.replace_attention(torch.fx.symbolic_trace(lambda x: x + 1), lambda: pytest.fail("made"))


def test_a_launch_finds_the_flags_of_its_own_model_and_waits_before_the_queue_of_63_is_full(monkeypatch):
    """What a process of TorchNeuron reads when a graph is launched, and what its device takes."""
    monkeypatch.setenv("LTX_TEST_FLAGS", "")
    seen, rank = [], Rank.__new__(Rank)
    compilers = {model: {"LTX_TEST_FLAGS": model} for model in ("dit", "gemma3")}
    rank.settings = replace(rank_settings(PROFILES["cpu"], 1, 0, None), compilers=compilers)
    rank._synchronize = Mock()
    rank._clear()
    graphs, runs = {"graph": {"inputs": [], "outputs": []}}, {"main": [("graph", 0)]}
    for model in ("dit", "gemma3", "dit"):
        rank.programs[model] = SimpleNamespace(identity={"model": model}, runs=runs, graphs=graphs, fields={})
        rank.bound[model, "graph", 0] = lambda: seen.append(os.environ["LTX_TEST_FLAGS"]) or (), []
        rank.run(model, "main", {})
    assert seen == ["dit", "gemma3", "dit"]
    rank.settings, rank._synchronize = SimpleNamespace(profile=TRN2), Mock()
    for number in range(1, 4 * 50 + 1):  # a guided step of four passes with one block in a graph
        rank._after_launch(number, first_time=False)
    assert rank._synchronize.call_count == 200 // TRN2.drain_every == 3 and TRN2.drain_every < 63
