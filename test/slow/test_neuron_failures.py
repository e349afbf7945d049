"""What the Neuron runtime and compiler say when they fail reaches the user as what to do: the
scripts, on a stand-in for NxD.

The stand-in loads anything and fails where it is told to, with texts as the runtime and the
compiler are documented to say.
"""

import re
import runpy
import signal
import sys
from importlib import invalidate_caches

import pytest
from conftest import ROOT
from helpers import one_thread  # noqa: F401
from jobs import make_job
from tiny import TinySizes, make_tiny

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends.nxd import runtime
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.preflight import Preflight
from ltx_neuron.job import Size

SIZE = Size(height=64, width=64, num_frames=9)
SETTINGS = "backend=nxd", "text_buckets=1024", "attention=matmul"
STAND_IN = """
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

fails = {}  # where -> what is said there


def _may_fail(where):
    if where in fails:
        raise RuntimeError(fails[where])


def NxDParallelState(**sizes):
    return nullcontext()


class ModelBuilder:
    world_size = 4

    def __init__(self, model):
        self.model, self.trace_artifacts_collection = model, {}

    def trace(self, kwargs, tag):
        names = dict.fromkeys(name for name, _ in self.model.named_parameters())
        self.trace_artifacts_collection[tag] = SimpleNamespace(
            weight_name_to_idx=names,
            hlo=SimpleNamespace(computations=()),
            flattener=SimpleNamespace(exclude=None),  # every input is used
            provided_args=[
                SimpleNamespace(param_name=name, tensor=tensor) for name, tensor in kwargs.items()
            ],
        )
        return self

    def compile(self, compiler_workdir, compiler_args):
        Path(compiler_workdir).mkdir()
        _may_fail("compile")
        return SimpleNamespace(
            save=lambda path: Path(path).write_text("graph"), reserved_example_inputs={}
        )


class Routes:  # every graph takes the inputs
    def __contains__(self, tag):
        return True


class NxDModel:
    world_size = local_ranks_size = 4

    def __init__(self):
        self.flattener_map = defaultdict(lambda: list)
        self.spmd_models = defaultdict(lambda: SimpleNamespace(forward_ranked=self.run))

    @classmethod
    def load(cls, path):
        _may_fail("load")
        return cls()

    def set_weights(self, weights):
        self.weights = weights

    def to_neuron(self):
        _may_fail("to_neuron")

    def convert_dict_to_ordered_list(self, inputs, positional):
        return [*inputs.values()], [*inputs]

    def router(self, inputs, names):
        return Routes()

    def run(self, inputs):
        _may_fail("run")
        raise AssertionError("this stand-in computes nothing")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The stand-in, installed as neuronx-distributed 0.19 in this process."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "neuronx_distributed").mkdir()
    (folder / "neuronx_distributed/__init__.py").write_text(STAND_IN)
    (folder / "neuronx_distributed-0.19.dist-info").mkdir()
    (folder / "neuronx_distributed-0.19.dist-info/METADATA").write_text(
        "Name: neuronx-distributed\nVersion: 0.19.28492\n"
    )
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    patch.setattr(runtime, "to_core", lambda tensor, rank: tensor.clone())
    for name, _ in (
        *resolve("trn2.3xlarge").environment,
        ("NEURON_LOGICAL_NC_CONFIG", ""),
        ("NEURON_RT_NUM_CORES", ""),
    ):
        # Put back afterwards.
        patch.setenv(name, "2" if name == "NEURON_LOGICAL_NC_CONFIG" else "4")
    invalidate_caches()
    sys.modules.pop("neuronx_distributed", None)
    import neuronx_distributed

    yield neuronx_distributed
    sys.modules.pop("neuronx_distributed")
    patch.undo()
    runtime.NxdRanks._started = None


@pytest.fixture(scope="module")
def workspace(library, tmp_path_factory):
    """One block, sharded and "compiled" for trn2.3xlarge."""
    folder = tmp_path_factory.mktemp("trn2")
    assets = make_tiny(folder / "assets", TinySizes(layers=1, connector_layers=1, gemma_layers=2))
    profile = resolve("trn2.3xlarge", SETTINGS)
    workspace = Workspace(assets.checkpoint, profile, folder / "artifacts", 4, "bfloat16", assets.gemma_root)
    build.make(workspace, workspace.weight_sets("dit"))
    build.make(workspace, workspace.weight_sets("gemma3"))
    build.make(workspace, workspace.text_graphs())
    build.make(workspace, workspace.dit_graphs(make_job("", SIZE).buckets))
    return workspace


@pytest.fixture
def script(workspace, monkeypatch, capsys):
    """script(path, *flags) -> (exit code, what it said on stderr), run in this process as `python
    path` runs it."""

    def run(path: str, *flags: object) -> tuple[int, str]:
        flags += "--checkpoint-path", workspace.checkpoint_path
        flags += "--artifacts-dir", workspace.artifacts, "--profile", "trn2.3xlarge"
        flags += tuple(word for setting in SETTINGS for word in ("--profile-set", setting))
        flags += "--height", 64, "--width", 64, "--num-frames", 9
        monkeypatch.setattr(sys, "argv", [path, *map(str, flags)])
        # Plans with real graphs: 2 s.
        monkeypatch.setattr(Preflight, "_check_fits", lambda *_: None)
        before, code = signal.getsignal(signal.SIGTERM), 0
        try:
            runpy.run_path(str(ROOT / path), run_name="__main__")
        except SystemExit as leaving:
            code = leaving.code
        finally:
            signal.signal(signal.SIGTERM, before)
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def generated(script, workspace, tmp_path):
    """generate_ltx23.py, run as `script` runs it."""
    words = "--neuron-gemma", "--gemma-root", workspace.gemma_root, "--prompt", "a fox"
    output = "--output-path", tmp_path / "fox.mp4"
    return lambda: script("src/generate_ltx23.py", *words, *output)


# where it fails, what the runtime says -> what the user is told happened, and to do
FAILURES = {
    "load error": (
        "load",
        "Could not load the model status=2 message=Invalid",
        "the runtime refused the graph",
        "delete the graph",
    ),
    "core busy": (
        "to_neuron",
        "Logical Neuron Core(s) not available - Requested:4 Available:0 status=1",
        "another process holds the cores",
        "see which: neuron-ls",
    ),
    "out of device memory": (
        "to_neuron",
        "Failed to allocate 134217728 bytes (usage: tensors) status=4 Allocation Failure",
        "device's memory is full",
        "plan says which fit",
    ),
    "timeout": ("run", "nrt_execute status=5 message=Timeout", "a run did not end in time", "NEURON_RT_EXEC_TIMEOUT"),
}


@pytest.mark.parametrize(("where", "text", "meaning", "advice"), FAILURES.values(), ids=FAILURES)
def test_generate_says_what_failed_and_what_to_do(
    generated, library, monkeypatch, tmp_path, where, text, meaning, advice
):
    monkeypatch.setitem(library.fails, where, text)
    code, stderr = generated()
    assert code == 1 and "Traceback" not in stderr
    assert re.search(rf"error: .*{re.escape(meaning)}", stderr) and re.search(
        rf"What to do: .*{re.escape(advice)}", stderr
    ), stderr
    assert text.split(" status")[0] in stderr
    (log,) = tmp_path.iterdir()
    assert log.name == "fox.failure.log" and meaning in log.read_text()


def test_a_graph_that_is_too_large_for_the_compiler_is_told_with_what_to_do(script, library, monkeypatch, tmp_path):
    monkeypatch.setitem(
        library.fails, "compile", "neuronx-cc failed: [NCC_EVRF007] Instruction count exceeds the limit"
    )
    code, stderr = script("compile/compile_transformer.py", "--artifacts-dir", tmp_path, "--frame-rate", 25)
    assert code == 1 and "Traceback" not in stderr
    assert "more instructions than the compiler allows" in stderr and "What to do: use smaller" in stderr
    assert not list(tmp_path.rglob("manifest.json"))


def test_an_error_that_nobody_knows_keeps_its_traceback(generated, library, monkeypatch):
    monkeypatch.setitem(library.fails, "load", "something of its own")
    with pytest.raises(RuntimeError, match="something of its own"):
        generated()
