"""Guidance groups of two ranks make the bits of one group, also when groups die in a pass, or between two steps."""

import os
import signal
import threading
from functools import partial

import golden_runs
import pytest
import torch
from engines import assert_same, opened_workspace
from golden_jobs import StreamGuidance, guidance, guided, ic_lora
from helpers import ended, randn, rel
from jobs import make_job, replace
from rank_decoding import CLIPS, decoding, frames_of
from rank_decoding import opened as opened_for_tiles

from ltx_neuron.artifacts import build
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.backends.torchdist import host
from ltx_neuron.engine.residency import Residency
from ltx_neuron.errors import UserError
from ltx_neuron.host import tiles as host_tiles
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Size
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.conditions import Retake

runs = golden_runs.runs  # a fixture

TWO, GUIDED = ("guidance_parallel=2",), guided()


def latents(runs, engine, job, on_step_end=None) -> dict[int, dict[str, torch.Tensor]]:
    engine.on_step_end = on_step_end
    return {job.seed: runs.made(job, engine, decode=False).tensors}


def groups_of(engine) -> list[host.TorchDistRanks]:
    return [*engine.residency.ranks.groups.values()]


def kill_in(patch: pytest.MonkeyPatch, group: int, sequence: str, step: int) -> None:
    """Have the last rank of a group stop before that sequence, and die when the other rank waits for it, or is done."""
    run = host.TorchDistRanks.run

    def killed(ranks, program, name="main", **numbers):
        if (ranks.group, name, numbers.get("step")) == (group, sequence, step):
            pid = ranks._processes[-1].pid
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        return run(ranks, program, name, **numbers)

    patch.setattr(host.TorchDistRanks, "run", killed)


def test_two_groups_share_tiles_and_one_makes_all_when_the_other_dies(runs, tiny, media, monkeypatch, capfd):
    job = replace(ic_lora(tiny, media, height=192, skip_stage_2=True), tile=True, tile_height=64, tile_width=64)
    want, two = latents(runs, runs.engine("tiny", 2), job), runs.engine("tiny", 2, settings=TWO)
    put, held = host.TorchDistRanks.put, {0: set(), 1: set()}

    def recorded(ranks, *program, **tensors):
        held[ranks.group] |= {name for name in tensors if name.startswith("denoise_mask@")}
        put(ranks, *program, **tensors)

    monkeypatch.setattr(host.TorchDistRanks, "put", recorded)
    assert_same(latents(runs, two, job), want)
    tiles = {0: (0, 2), 1: (1, 3)}  # of each group, which gets the inputs of no others
    assert held == {group: {f"denoise_mask@{n}" for n in numbers} for group, numbers in tiles.items()}
    first, second = (group.launches for group in groups_of(two))
    assert first == second > 0  # two tiles each
    kill_in(monkeypatch, 1, "main", 3)
    assert_same(latents(runs, two, job), want)
    assert "guidance group 2 lost at step 4 of stage 1" in capfd.readouterr().err


def test_three_of_four_groups_die_one_after_the_other_and_the_clips_are_the_same(runs, monkeypatch, capfd):
    """Among them the one that results are read from: in a pass, in a combination, between steps."""
    want, four = latents(runs, runs.engine("four", 2), GUIDED), runs.engine("four", 2, settings=["guidance_parallel=4"])
    assert_same(latents(runs, four, GUIDED), want)
    groups = groups_of(four)

    def kill_after(at: int, stage, step: int) -> None:
        if step == at:
            groups_of(four)[0]._processes[-1].kill()

    with monkeypatch.context() as patch:
        kill_in(patch, 1, "guided@1", 0)
        kill_in(patch, 0, "guided@4", 1)
        assert_same(latents(runs, four, GUIDED, partial(kill_after, 1)), want)
    assert groups_of(four) == [groups[3]]
    lost = four.recorder.report({}, "cpu", 2, {}, {})["guidance_groups"]["lost"]
    assert capfd.readouterr().err.count("guidance group") == len(lost) == 3
    for line, (group, step, since) in zip(lost, ((2, 1, 3), (1, 2, 2), (3, 3, 1)), strict=True):
        reason = "rank 1 of 2 failed: the process was killed"
        assert line.startswith(f"guidance group {group} lost at step {step} of stage 1 ({reason}")
        assert f", {since} group" in line
    assert_same(latents(runs, four, GUIDED), want)  # the next clip, on the group that is left
    with pytest.raises(RankError, match="rank 1 of 2 failed: the process was killed"):
        latents(runs, four, GUIDED, partial(kill_after, 0))
    assert ended([process.pid for group in groups for process in group._processes])
    with pytest.raises(UserError, match="guidance_parallel=2$"):  # more groups than passes
        latents(runs, four, guided(**guidance(*[StreamGuidance(cfg_scale=3.5)] * 2)))
    assert four.residency.ranks is None


def test_prompts_on_two_groups_have_the_contexts_of_one(tiny, artifacts, monkeypatch):
    """Whether or not one group encodes them in one pass."""
    short, long = [[7, 8, 9], [5] * 20], [[11] * 700, [12] * 500]
    results, run, ran_on = [], host.TorchDistRanks.run, {0: set(), 1: set()}

    def recorded(ranks, program, *sequence, **numbers):
        ran_on[ranks.group].add(program)
        return run(ranks, program, *sequence, **numbers)

    monkeypatch.setattr(host.TorchDistRanks, "run", recorded)
    for settings in ((), TWO):
        workspace = opened_workspace(tiny, artifacts, tp=2, settings=settings)
        build.make(workspace, workspace.weight_sets("gemma3"))
        build.make(workspace, workspace.text_graphs())
        residency = Residency(workspace, Recorder())
        ran_on[0].clear()
        with residency.text_encoder([short, long]) as encoder:
            results.append([context for prompts in (short, long) for context in encoder.encode(prompts)])
        residency.close()
    for ran in ran_on.values():
        # Buckets of 20 tokens and of 500, or of 3 and of 700.
        assert ran & {"gemma3-512", "gemma3-1024"} and {"gemma3-128", "connectors"} <= ran
    for one, two in zip(*results, strict=True):
        for ours, wanted in zip(two, one, strict=True):
            assert ours is wanted is None or torch.equal(ours, wanted)


# The ranks that decode a tile each, of two in a group.
TILED = {(): 2, ("guidance_parallel=3",): 6, ("guidance_parallel=2", "context_parallel=2"): 8}


def test_tiles_of_a_clip_are_encoded_and_decoded_on_the_ranks_of_all_groups_as_on_one(tiny, artifacts, monkeypatch):
    # Upstream's tiles are larger than a test's clips. Of these, no layout has a group without tiles.
    for axis in ("TIME", "SPACE"):
        monkeypatch.setattr(host_tiles, f"{axis}_TILE", 2)
        monkeypatch.setattr(host_tiles, f"{axis}_OVERLAP", 1)
    job = make_job("", Size(32, 224, 17), retake=Retake("film.mkv", 0, 1))
    clip, _ = CLIPS["borders in rows, columns and time"]
    latent, pixels, encoded, decoded = randn(1, 128, *clip), randn(1, 3, 17, 32, 224).clip(-1, 1), [], []
    for layout, ranks in TILED.items():
        workspace = opened_for_tiles(tiny, artifacts, 2, "float32", "resident=true", *layout)
        with decoding(workspace, clip) as decoder:
            decoded.append(frames_of(decoder.host.decode_video(latent, decoder.tiles)))
            assert all(group.launches for group in getattr(decoder.tiles.ranks, "groups", {}).values())
        assert decoder.tiles.at_once == ranks
        build.make(workspace, workspace.encoder_graphs(job))
        assert workspace.encoder_tiles(job) == [(9, 32, 64), (17, 32, 64)]
        residency = Residency(workspace, Recorder())
        on_ranks = residency.video_encoder({"encoder": workspace.programs(workspace.encoder_graphs(job))})
        models = HostModels(workspace.checkpoint_path, workspace.config, torch.float32)
        encoded.append(models.encode_video(pixels, rank_tiles=on_ranks))
        assert all(group.launches for group in getattr(on_ranks.ranks, "groups", {}).values())
        residency.close()
        assert "video_encoder" not in vars(models)
        assert torch.equal(encoded[-1], encoded[0]) and torch.equal(decoded[-1], decoded[0]), layout
    assert 0 < rel(encoded[0], models.encode_video(pixels)) < 1e-5  # convolutions and norms sum in another order
