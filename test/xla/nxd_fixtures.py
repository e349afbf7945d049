"""Fixtures of the tests of NxD: its real source drives backends/nxd/runtime.py on a CPU. One process traces graphs for
four ranks, and runs them on four XLA:CPU devices.

Stand-ins replace the closed packages (nxd_stubs.py); compiler, runtime and hardware are not tested. To run the tests:

    test/xla/make_xla_venv.sh DIR
    export LTX_NEURON_NXD_SOURCE=<checkout of aws-neuron/neuronx-distributed>
    DIR/bin/python -m pytest test/xla
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import nxd_stubs
import pytest
import torch
from helpers import randn, rel
from jobs import make_job
from tiny import TinySizes, make_tiny
from torch import Tensor

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.nxd import runtime
from ltx_neuron.config import profiles
from ltx_neuron.config.profiles import Profile, resolve
from ltx_neuron.engine.run import Engine
from ltx_neuron.job import Job, Size
from ltx_neuron.report.latency import Recorder
from ltx_neuron.text.encoders import Contexts

MISSING = nxd_stubs.missing()
SKIP = f"THE NXD BACKEND WAS NOT CHECKED: {MISSING}"
TP = 4
# fp32 by other kernels and in another order of sums: about 1e-6 is seen. A rank's part in a wrong place leaves 1e-1.
FP32 = 1e-4
SHOWS = 1e-3  # the least effect of a mistake on one rank
PROMPT = "waves crash on the shore"
SIZE = Size(height=64, width=64, num_frames=9, frame_rate=24, two_stage=True)
SHAPE = make_job("", SIZE)
CUT, WHOLE = "blocks_per_graph=1", "blocks_per_graph=0"
PER_BLOCK = 7  # grouped sums of a block, each of which is one all-reduce of several tensors
LATENTS = ("s1_video", "s1_audio", "s2_video", "s2_audio")


@pytest.fixture(scope="session")
def nxd_source(tmp_path_factory):
    """NxD in this process, with cores that are this host's memory."""
    library = nxd_stubs.install(Path(os.environ[nxd_stubs.SOURCE]), tmp_path_factory.mktemp("packages"))
    logging.getLogger("Neuron").setLevel(logging.ERROR)
    # The one place that names a device.
    with mock.patch.object(runtime, "to_core", lambda tensor, rank: tensor.clone()):
        yield
    library._destroy()


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"), TinySizes(layers=2))


def open_workspace(assets, folder: Path, *settings: str, tp: int = TP, **files) -> Workspace:
    machine = "trn2.48xlarge" if "context_parallel" in " ".join(settings) else "trn2.3xlarge"
    profile = resolve(machine, ("text_buckets=128,1024", *settings))
    return Workspace(assets.checkpoint, profile, folder, tp, "float32", assets.gemma_root, **files)


@pytest.fixture(scope="session")
def workspace(nxd_source, assets, tmp_path_factory) -> Workspace:
    """Sharded, and compiled for a two-stage job: two buckets of the DiT, whose graph of one block serves both of its
    blocks, two of Gemma 3, and the connectors."""
    workspace = open_workspace(assets, tmp_path_factory.mktemp("artifacts"), CUT)
    for model in ("dit", "gemma3"):
        build.make(workspace, workspace.weight_sets(model))
    build.make(workspace, workspace.text_graphs())
    build.make(workspace, workspace.dit_graphs(SHAPE.buckets))
    return workspace


@contextmanager
def two_stages(workspace: Workspace, assets, gemma: bool = False) -> Iterator[SimpleNamespace]:
    """The two-stage job, run: its tensors, the counters and the uploads of its steps, and what stays on the ranks."""
    build.make(workspace, workspace.dit_graphs(SHAPE.buckets))
    options = RunOptions(neuron_gemma=gemma, spatial_upsampler_path=assets.spatial_upsampler)
    with Engine(workspace, Recorder(), options) as engine:
        sent = []  # after every step
        engine.on_step_end = lambda *_: sent.append(engine.residency.ranks.bytes_sent)
        (result,) = engine.run([make_job(prompt=PROMPT, size=SIZE)], keep=True, decode=False)
        ranks = engine.residency.ranks
        yield SimpleNamespace(tensors=result.tensors, ranks=ranks, counters=engine.recorder.counters, sent=sent)


@pytest.fixture(scope="module")
def generated(workspace, assets):
    with two_stages(workspace, assets, gemma=True) as generated:
        yield generated


def manifests_of(workspace: Workspace) -> dict[str, Manifest]:
    return workspace.programs(workspace.dit_graphs(SHAPE.buckets))


@contextmanager
def loaded(workspace: Workspace, model: str, graphs: list) -> Iterator[runtime.NxdRanks]:
    build.make(workspace, workspace.weight_sets(model))
    build.make(workspace, graphs)
    with runtime.NxdRanks(workspace.profile, workspace.tp) as ranks:
        ranks.load(workspace.weights(model), workspace.programs(graphs), torch.float32)
        yield ranks


def dit_loaded(workspace: Workspace):
    return loaded(workspace, "dit", workspace.dit_graphs(SHAPE.buckets))


def latents_of(job: Job, workspace: Workspace) -> dict[str, Tensor]:
    build.make(workspace, workspace.weight_sets("dit", {job.stages[0].loras}))
    build.make(workspace, workspace.dit_graphs(job.buckets))
    with Engine(workspace, Recorder()) as engine:
        set_contexts(engine, job)
        (result,) = engine.run([job], decode=False)
    return {name: result.tensors[name] for name in LATENTS[:2] if name in result.tensors}


def set_contexts(engine: Engine, job: Job) -> None:
    streams = engine.workspace.transformer.video, engine.workspace.transformer.audio
    engine._contexts[engine.workspace.text_loras(job), job.texts] = [
        Contexts(*(randn(1, 1024, s.inner, seed=seed) for s in streams), None, None) for seed, _ in enumerate(job.texts)
    ]


def assert_close(tensors: dict[str, Tensor], expected: dict[str, Tensor], names=None, bound: float = FP32) -> None:
    distances = {name: rel(tensors[name], expected[name]) for name in names or expected}
    assert max(distances.values()) < bound, distances


def inside_nxd():
    from neuronx_distributed import NxDParallelState

    return NxDParallelState(world_size=TP, tensor_model_parallel_size=TP, lnc_size=2)


# --- two kinds of groups: eight ranks -------------------------------------------------------------------------------

LAYOUTS = {
    "2 groups of 4 ranks": (4, (CUT, "context_parallel=2")),
    "2 groups of 4 ranks that divide the stream too": (4, (WHOLE, "context_parallel=2", "sequence_parallel=true")),
    "4 groups of 2 ranks": (2, (CUT, "context_parallel=4")),
}


@pytest.fixture
def eight_ranks(monkeypatch):
    """A process drives one number of ranks, and its launch stays in the environment. Profiles of Trainium refuse
    groups of two ranks."""
    monkeypatch.setattr(runtime.NxdRanks, "_started", None)
    for check in ("check_degree", "check_cores"):
        monkeypatch.setattr(Profile, check, lambda profile, tp: None)
    monkeypatch.setattr(profiles, "_check", lambda profile: None)
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID"):
        monkeypatch.setenv(name, "")  # restored to what it was
        monkeypatch.delenv(name)
