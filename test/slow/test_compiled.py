"""Ranks whose graphs are compiled: the whole DiT's results, a rank that is late, and what inductor
keeps on the disk."""

import time
from pathlib import Path

import pytest
import torch
from helpers import allowed, one_thread, random_value, rel  # noqa: F401
from toy import EQUAL, TP, make_toy, upload, wanted

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.torchdist.host import TorchDistRanks, compile_only
from ltx_neuron.config.profiles import PROFILES, resolve
from ltx_neuron.config.transformer import Bucket

BUCKET = Bucket(video_tokens=6, audio_tokens=4, timesteps=1, max_steps=2)
# aot_eager is what TorchNeuron does before its own compiler: Dynamo, AOTAutograd, functional
# collectives.
TRACED, INDUCTOR = (resolve("cpu", (f"compile_backend={name}", "drain_every=2")) for name in ("aot_eager", "inductor"))

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


class Slow:
    """A pipe through which commands come late, as to a rank that compiles longer than the
    others."""

    def __init__(self, pipe, seconds: float):
        self._pipe, self._seconds = pipe, seconds

    def send_bytes(self, line: bytes) -> None:
        time.sleep(self._seconds)
        self._pipe.send_bytes(line)

    def __getattr__(self, name):
        return getattr(self._pipe, name)


def test_a_rank_may_be_late_while_it_compiles(toy):
    with TorchDistRanks(TRACED, TP) as ranks:
        ranks.load(toy.folders[1], toy.programs, torch.float32)
        upload(ranks, toy)
        ranks._pipes[1] = Slow(ranks._pipes[1], seconds=3.0)
        ranks.run("toy", step=3)
        ranks._pipes[1] = ranks._pipes[1]._pipe
        assert rel(ranks.get("toy", "y"), wanted(toy, 3)) < EQUAL


def sources(cache: Path) -> set[str]:
    return {str(path.relative_to(cache)) for path in cache.rglob("*.so")}


def test_what_was_compiled_without_ranks_is_not_compiled_again_in_them(toy, tmp_path):
    compile_only([manifest.folder for manifest in toy.programs.values()], INDUCTOR, TP, tmp_path)
    before = sources(tmp_path)
    assert before
    with TorchDistRanks(INDUCTOR, TP, tmp_path) as ranks:
        ranks.load(toy.folders[1], toy.programs, torch.float32)
        upload(ranks, toy)
        ranks.run("toy", step=3)
        assert rel(ranks.get("toy", "y"), wanted(toy, 3)) < EQUAL
    assert before < sources(tmp_path)  # the ranks compile their first sum of ones besides
    again = sources(tmp_path)
    with TorchDistRanks(INDUCTOR, TP, tmp_path):
        assert sources(tmp_path) == again


@pytest.fixture(scope="module")
def dit(tiny, artifacts):
    """Rank files and graphs of the tiny DiT, a block per graph; and random inputs."""
    cpu = resolve("cpu", ("blocks_per_graph=1",))
    workspace = Workspace(tiny.checkpoint, cpu, artifacts, TP, "float32", tiny.gemma_root)
    (weights,), (graphs,) = (
        build.make(workspace, workspace.weight_sets("dit")),
        build.make(workspace, workspace.dit_graphs([BUCKET])),
    )
    return weights, {BUCKET.name: Manifest(graphs)}


def a_step(ranks, dit, seed: int) -> dict:
    """The latents after a step from random latents, on random contexts, tables and schedule."""
    ((name, manifest),) = dit[1].items()
    returned = {output for graph in manifest.graphs.values() for output in graph["outputs"]}
    taken = {field for graph in manifest.graphs.values() for field in graph["inputs"]} - {"step"}
    inputs = {field for field in taken if field not in returned or field.endswith("_latent")}
    values = {field: random_value(manifest.fields[field], TP, seed + i) for i, field in enumerate(sorted(inputs))}
    values["sigmas"] = torch.tensor([[1.0, 0.7], [0.7, 0.1 * seed]])[:, None].expand(-1, 2, 2)
    values["step_numbers"] = torch.arange(BUCKET.max_steps, dtype=torch.int32)
    ranks.put(name, **values)
    ranks.put_numbers(name, "step", BUCKET.max_steps)
    ranks.run(name, step=seed % 2)
    return {stream: ranks.get(name, stream) for stream in ("video_latent", "audio_latent")}


def test_a_compiled_dit_has_the_interpreters_results_for_every_prompt_seed_and_schedule(dit):
    latents = {}
    for profile in (PROFILES["cpu"], TRACED):
        with TorchDistRanks(profile, TP) as ranks:
            ranks.load(dit[0], dit[1], torch.float32)
            latents[profile.compile_backend] = []
            for seed in (1, 2, 3):
                latents[profile.compile_backend].append(a_step(ranks, dit, seed))
                assert len(set(ranks.hashes("video_latent", "audio_latent"))) == 1
        (manifest,) = dit[1].values()
        assert [name for name, _ in manifest.runs["main"]] == ["head", "blocks", "blocks", "tail"]
    for interpreted, traced in zip(*latents.values(), strict=True):
        assert all(rel(traced[name], interpreted[name]) < EQUAL for name in interpreted)
    assert rel(latents["export"][0]["video_latent"], latents["export"][1]["video_latent"]) > 0.1
