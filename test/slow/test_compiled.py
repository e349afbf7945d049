"""Ranks whose graphs are compiled: the whole DiT's results, and what inductor keeps on the disk."""

import pytest
import torch
from helpers import one_thread, random_value, rel  # noqa: F401
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


def test_what_was_compiled_without_ranks_is_not_compiled_again_in_them(tmp_path):
    toy, cache = make_toy(tmp_path), tmp_path / "cache"

    def compiled() -> set:
        return {*cache.rglob("*.so")}

    compile_only([manifest.folder for manifest in toy.programs.values()], INDUCTOR, TP, cache)
    before = compiled()
    with TorchDistRanks(INDUCTOR, TP, cache) as ranks:
        ranks.load(toy.folders[1], toy.programs, torch.float32)
        upload(ranks, toy)
        ranks.run("toy", step=3)
        assert rel(ranks.get("toy", "y"), wanted(toy, 3)) < EQUAL
    after = compiled()
    assert before and before < after  # the ranks compile their first sum of ones besides
    with TorchDistRanks(INDUCTOR, TP, cache):
        assert compiled() == after


def test_a_compiled_dit_has_the_interpreters_results_for_every_prompt_seed_and_schedule(tiny, artifacts):
    cpu, latents, streams = resolve("cpu", ("blocks_per_graph=1",)), {}, ("video_latent", "audio_latent")
    workspace = Workspace(tiny.checkpoint, cpu, artifacts, TP, "float32", tiny.gemma_root)
    (weights,) = build.make(workspace, workspace.weight_sets("dit"))
    (graphs,) = build.make(workspace, workspace.dit_graphs([BUCKET]))
    manifest, name = Manifest(graphs), BUCKET.name
    assert [graph for graph, _ in manifest.runs["main"]] == ["head", "blocks", "blocks", "tail"]
    returned = {output for graph in manifest.graphs.values() for output in graph["outputs"]}
    fields = {field for graph in manifest.graphs.values() for field in graph["inputs"]} - {"step"}
    inputs = sorted(field for field in fields if field not in returned or field in streams)
    for profile in (PROFILES["cpu"], TRACED):
        results = latents[profile.compile_backend] = []
        with TorchDistRanks(profile, TP) as ranks:
            ranks.load(weights, {name: manifest}, torch.float32)
            for seed in (1, 2, 3):
                values = {field: random_value(manifest.fields[field], TP, seed + i) for i, field in enumerate(inputs)}
                sigmas = torch.tensor([[1.0, 0.7], [0.7, 0.1 * seed]])
                values["sigmas"] = sigmas[:, None].expand(-1, 2, 2)
                values["step_numbers"] = torch.arange(BUCKET.max_steps, dtype=torch.int32)
                ranks.put(name, **values)
                ranks.put_numbers(name, "step", BUCKET.max_steps)
                ranks.run(name, step=seed % 2)
                results.append([ranks.get(name, stream) for stream in streams])
                assert len(set(ranks.hashes(*streams))) == 1
    interpreted, traced = latents.values()
    for ours, theirs in zip(traced, interpreted, strict=True):
        assert all(rel(one, other) < EQUAL for one, other in zip(ours, theirs, strict=True))
    assert rel(interpreted[0][0], interpreted[1][0]) > 0.1
