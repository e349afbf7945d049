"""A second call of LTXPipeline repeats nothing that the first one did: no graph is exported, no
file hashed, no weight loaded."""

import math
import time
from contextlib import nullcontext

import pytest
import torch
from batches import SIZE, opened, prepared
from jobs import make_job, replace

from ltx_neuron.backends import manifest
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.config.profiles import TRAINIUM2
from ltx_neuron.denoise import StageRun
from ltx_neuron.engine.preflight import compiled_memory
from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.plan import CoreMemory, compiled_activations

# The profile of a trn2.3xlarge, against whose memory every call is checked, on this CPU.
PROFILE = "trn2.3xlarge"
ON_A_CPU = ("backend=torchdist", "device=cpu", "compile_backend=export", "attention=sdpa")
# Milliseconds on an idle machine (benchmarks/second_call.md). Exporting head, block and tail, as
# every call once did, takes more even at this size.
SECONDS_TO_FIRST_STEP = 0.5


@pytest.fixture(scope="module")
def pipe(scripts, tiny):
    setup, threads = prepared(scripts, tiny), torch.get_num_threads()
    with opened(setup, tiny, profile=PROFILE, profile_set=ON_A_CPU) as pipe:
        yield pipe
    torch.set_num_threads(threads)


@pytest.fixture
def counted(monkeypatch):
    """How often each of these was called."""
    counts = {"export": 0, "hash a file": 0, "load on the ranks": 0}

    def count(owner, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counting(*args, **kwargs):
            counts[what] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    # Compiling, in this process, has hashed the files already; a user's call comes later.
    monkeypatch.setattr(manifest, "_digests", {})
    count(torch.export, "export", "export")
    count(manifest.hashlib, "file_digest", "hash a file")
    count(TorchDistRanks, "load", "load on the ranks")
    return counts


def test_a_second_call_exports_hashes_and_loads_nothing(pipe, counted, monkeypatch):
    began, step = [], StageRun.step

    def noting(self, number):
        began.append(time.perf_counter())
        return step(self, number)

    monkeypatch.setattr(StageRun, "step", noting)
    first = pipe(prompt="rain", **SIZE, output_type="latent")
    assert counted["load on the ranks"] == 2 and counted["hash a file"] > 0  # the counters count
    assert counted["export"] == 0
    counted.update(dict.fromkeys(counted, 0))
    began.clear()
    called = time.perf_counter()
    second = pipe(prompt="rain", **SIZE, output_type="latent")
    assert counted == dict.fromkeys(counted, 0)
    assert began[0] - called < SECONDS_TO_FIRST_STEP
    assert torch.equal(first.video_latent, second.video_latent)


def test_a_device_too_small_is_refused_from_the_manifests_alone(pipe, counted, monkeypatch):
    """What is compared is what was counted when compiling; the plan, which exports graphs, is
    asked only then, for a size that fits."""
    workspace = pipe.engine.workspace
    job = make_job("rain", Size(**SIZE))
    compiled = pipe.engine.preflight.check([job])
    manifests = [step.manifest for step in compiled.values()]
    stages = [[manifest] for manifest in manifests]
    memory = compiled_memory(workspace, stages, [], job, pipe.engine.options)
    needed = CoreMemory(
        4 * sum(map(math.prod, manifests[0].weights().values())),
        (workspace.weights("gemma3") / "rank0.safetensors").stat().st_size,
        compiled_activations(stages),
    ).in_turn
    for limit, exports in ((needed, False), (needed - 1, True)):
        chip = replace(TRAINIUM2, memory_bytes=4 * limit)
        profile = replace(workspace.profile, chip=chip)
        monkeypatch.setattr(workspace, "profile", profile)
        with pytest.raises(UserError, match="needs .* GB a core") if exports else nullcontext():
            pipe.engine.preflight._check_fits(memory, job)
        assert bool(counted["export"]) == exports
