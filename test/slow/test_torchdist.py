"""Rank processes in tests that take seconds: paused ones, the doctor's probe of groups, compiled graphs, and the
diffusion decoder, which gives the host's frames."""

import os
import re
import signal
import threading
import time

import diffusion_vae
import pytest
import torch
from helpers import one_thread, random_value, rel, save_weights  # noqa: F401
from toy import EQUAL, STEPS, TP, make_toy, pids_of, ready, upload, wanted

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends.export import compile_program, fake_process_group
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.tiles import RankSpans
from ltx_neuron.backends.torchdist.host import TorchDistRanks, compile_only
from ltx_neuron.config.diffusion import shortest
from ltx_neuron.config.profiles import PROFILES, resolve
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.doctor import groups
from ltx_neuron.models.programs import diffusion_program, program_name

BUCKET = Bucket(video_tokens=6, audio_tokens=4, timesteps=1, max_steps=2)
# aot_eager is what TorchNeuron does before its own compiler: Dynamo, AOTAutograd, functional collectives.
TRACED, INDUCTOR = (resolve("cpu", (f"compile_backend={name}", "drain_every=2")) for name in ("aot_eager", "inductor"))

pytestmark = pytest.mark.timeout(300)


def test_ranks_that_are_paused_and_continued_go_on(tmp_path):
    """Ctrl-Z and fg, a paused container, a stalled machine: in the middle of a run, and between two."""
    with ready(make_toy(tmp_path)) as ranks:
        pids = pids_of(ranks)

        def signal_all(kind: int) -> None:
            for pid in pids:
                os.kill(pid, kind)

        signal_all(signal.SIGSTOP)
        timer, began = threading.Timer(3.0, signal_all, [signal.SIGCONT]), time.monotonic()
        timer.start()
        ranks.run("toy", step=1)
        assert time.monotonic() - began > 2.9
        timer.join()
        for step in range(STEPS):
            ranks.run("toy", step=step)
            ranks.check()


def test_the_doctor_probes_the_groups_of_a_layout_and_a_rank_that_dies_in_it_is_a_finding(monkeypatch):
    profile = resolve("cpu", ("context_parallel=2",))
    (finding,) = groups.probe(profile, 1)
    assert (finding.check, finding.state) == ("group cp", "ok")
    assert re.fullmatch(r"1 group of 2 ranks: gathered, summed in \d+\.\d\d ms", finding.text)

    def refuse(ranks, name, partition):  # as one whose runtime does not route its group
        os.kill(pids_of(ranks)[1], signal.SIGKILL)
        ranks.run(name)

    monkeypatch.setattr(groups, "_probed", refuse)
    (finding,) = groups.probe(profile, 1)
    assert (finding.check, finding.state) == ("group cp", "blocks")
    assert "rank 1 of 2 failed" in finding.text and "context_parallel=N" in finding.fix


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
    fields = {field for graph in manifest.graphs.values() for field in graph["inputs"]} - {"step"}
    inputs = sorted(field for field in fields if field not in manifest.outputs or field in streams)
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


def test_frames_equal_the_hosts_and_what_spans_have_in_common_is_uploaded_once_a_clip(tmp_path):
    """Also if the last group of spans leaves a rank idle, and for a longer clip on the same graphs."""
    config, clips = diffusion_vae.config_of(), ((4, 3, 3), (5, 3, 3))
    clip = shortest(config, clips[0])
    with fake_process_group(TP):
        program = diffusion_program(config, clip, torch.float32)
        compile_program(program, tmp_path / "graphs", {}, torch.float32)
    programs = {program_name("vae", *clip): Manifest(tmp_path / "graphs")}
    weights = save_weights(tmp_path / "weights", *[diffusion_vae.weights(config)] * TP)
    with TorchDistRanks(PROFILES["cpu"], TP) as ranks:
        ranks.load(weights, programs, torch.float32)
        decoder, put, puts = RankSpans(ranks, config, torch.float32), ranks.put, []
        ranks.put = lambda name, like, **tensors: puts.extend(tensors.items()) or put(name, like, **tensors)
        for shape in clips:
            puts.clear()
            sent, wanted_frames = ranks.bytes_sent, diffusion_vae.pixels(diffusion_vae.spans(), shape)
            assert rel(diffusion_vae.pixels(decoder, shape), wanted_frames) < 2e-6  # sums in another order
            # RoPE, the biases of rows and columns, the timestep.
            constants = [name for name, _ in puts if program.fields[name].split is None]
            assert len(constants) == len({*constants}) == 5 * len(config.channels) + 1
            assert ranks.bytes_sent - sent == sum(tensor.nbytes for _, tensor in puts)
