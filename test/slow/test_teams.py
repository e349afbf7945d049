"""Guidance groups of two ranks make the bits of one group, whatever the guidance, and when groups
die in a pass, in the combination of the passes, or between two steps."""

import os
import signal
import threading
from functools import partial

import golden_runs
import pytest
import torch
from engines import drawn, give_contexts, opened_engine, opened_workspace, sharing
from golden_jobs import SKIPPING, StreamGuidance, guidance, guided, ic_lora, voiced
from helpers import ended, randn, rel
from jobs import make_job, replace
from rank_decoding import CLIPS, decoding, frames_of
from rank_decoding import opened as opened_for_tiles

from ltx_neuron.artifacts import build
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.backends.torchdist import host
from ltx_neuron.engine.residency import Residency
from ltx_neuron.errors import UserError
from ltx_neuron.host import encoding
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Size
from ltx_neuron.report import table
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditions import Retake

runs = golden_runs.runs  # a fixture

TWO, FOUR = ("guidance_parallel=2",), ("guidance_parallel=4",)
CFG = StreamGuidance(cfg_scale=3.5)
GUIDED = guided()
JOBS = {
    "all passes": GUIDED,
    "cfg alone": guided(**guidance(CFG, CFG)),
    "skipped steps": guided(**guidance(*SKIPPING, steps=5)),
}


@pytest.fixture(scope="module")
def opened(runs):
    """opened(tp, blocks, settings): an engine on four blocks."""
    return partial(runs.engine, "four")


def latents(engine, job, on_step_end=None) -> dict[str, torch.Tensor]:
    build.make(engine.workspace, engine.workspace.weight_sets("dit", {stage.loras for stage in job.stages}))
    build.make(engine.workspace, engine.workspace.dit_graphs(job.buckets))
    give_contexts(engine, job, lambda prompt: drawn(engine.workspace, len(prompt)))
    engine.on_step_end = on_step_end
    (result,) = engine.run([job], keep=True, decode=False)
    return result.tensors


def assert_same(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    assert {name for name, tensor in want.items() if not torch.equal(got[name], tensor)} == set()


def groups_of(engine) -> list[host.TorchDistRanks]:
    return [*engine.residency.ranks.groups.values()]


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_groups_make_the_latents_of_one(opened, name):
    job, one = JOBS[name], opened(2, 1)
    want = latents(one, job)
    assert_same(latents(opened(2, 1, TWO), job), want)
    if len(job.passes) == 4:
        assert_same(latents(opened(2, 1, FOUR), job), want)


def test_groups_make_the_latents_of_one_as_the_first_release_did(opened):
    """Whose negative pass computes a stream that its step skips."""
    job = JOBS["skipped steps"]
    one, two = (sharing(opened(2, 1, settings), compat="ltx-core-1.0.0") for settings in ((), TWO))
    want = latents(one, job)
    assert_same(latents(two, job), want)
    later = latents(opened(2, 1), job)
    assert not torch.equal(want["s1_video"], later["s1_video"])


def test_identity_guidance_is_a_fifth_pass(tiny, artifacts, media):
    job = voiced(tiny, media, two_stage=False)
    assert len(job.passes) == 5
    made = []
    for settings in ((), ("guidance_parallel=3",)):
        workspace = opened_workspace(tiny, artifacts, 1, tp=2, settings=settings)
        with opened_engine(workspace, tiny) as engine:
            made.append(latents(engine, job))
    assert_same(made[1], made[0])


def test_two_groups_share_the_tiles_of_a_step_and_one_makes_all_when_the_other_dies(
    tiny, artifacts, media, monkeypatch, capfd
):
    job = ic_lora(tiny, media, height=192, skip_stage_2=True)
    job = replace(job, tile=True, tile_height=64, tile_width=64)
    alone, two = (opened_workspace(tiny, artifacts, 1, tp=2, settings=each) for each in ((), TWO))
    with opened_engine(alone, tiny) as engine:
        want = latents(engine, job)
    with opened_engine(two, tiny) as engine:
        assert_same(latents(engine, job), want)
        made = [group.launches for group in groups_of(engine)]
        assert made[0] == made[1] > 0  # two tiles each
        kill_in(monkeypatch, 1, "main", 3)
        assert_same(latents(engine, job), want)
    assert "guidance group 2 lost at step 4 of stage 1" in capfd.readouterr().err


def test_hq_on_two_groups_is_that_of_one_though_the_group_of_stage_2_dies(opened, runs, monkeypatch, capfd):
    job, two = runs.job("hq"), opened(2, 1, TWO)
    want = latents(opened(2, 1), job)
    with monkeypatch.context() as patch:
        kill_in(patch, 0, "main", 3)
        assert_same(latents(two, job), want)
    said = capfd.readouterr()
    assert "stage 2 has one pass a step: 1 of 2 guidance groups wait" in said.out
    assert "guidance group 1 lost at step 2 of stage 2 (rank 1 of 2 failed:" in said.err
    two.close()


# --- groups that die ------------------------------------------------------------------------------


def kill_in(patch: pytest.MonkeyPatch, group: int, sequence: str, step: int) -> None:
    """Have the last rank of a group be killed while that sequence runs: it stops before, and dies
    when the other rank waits for it, or is done."""
    run = host.TorchDistRanks.run

    def killed(ranks, program, name="main", **numbers):
        if (ranks.group, name, numbers.get("step")) == (group, sequence, step):
            pid = ranks._processes[-1].pid
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        return run(ranks, program, name, **numbers)

    patch.setattr(host.TorchDistRanks, "run", killed)


def kill_after(engine, group: int, step: int):
    """An on_step_end that kills the last rank of a group between two steps."""

    def kill(stage, number):
        if number == step:
            groups_of(engine)[group]._processes[-1].kill()

    return kill


WHEN = {"in a pass": ("guided@2", 1), "in guide": ("guided@4", 1), "between": None}


@pytest.mark.parametrize("when", WHEN)
def test_a_group_of_two_dies_and_the_clip_is_the_same(opened, monkeypatch, capfd, when):
    """The group that the results are read from."""
    job, two = GUIDED, opened(2, 1, TWO)
    want = latents(opened(2, 1), job)
    assert_same(latents(two, job), want)
    dying, living = groups_of(two)
    with monkeypatch.context() as patch:
        if WHEN[when]:
            kill_in(patch, 0, *WHEN[when])
        assert_same(latents(two, job, None if WHEN[when] else kill_after(two, 0, 0)), want)
    assert groups_of(two) == [living]
    assert ended([process.pid for process in dying._processes])
    said = capfd.readouterr().err
    line = "guidance group 1 lost at step 2 of stage 1 (rank 1 of 2 failed: the process was killed"
    assert said.count("guidance group") == said.count(line) == 1 and "1 group since" in said
    report = two.recorder.report({}, "cpu", 2, {}, {})
    *_, lost = report["guidance_groups"]["lost"]
    assert lost.startswith(line) and lost in " ".join(table.table(report).splitlines())
    # The next clip, on the group that is left.
    assert_same(latents(two, job), want)
    two.close()


def test_three_of_four_groups_die_one_after_the_other(opened, monkeypatch, capfd):
    job, four = GUIDED, opened(2, 1, FOUR)
    want = latents(opened(2, 1), job)
    assert_same(latents(four, job), want)
    groups = groups_of(four)
    with monkeypatch.context() as patch:
        kill_in(patch, 1, "guided@1", 0)
        kill_in(patch, 2, "guided@4", 1)
        assert_same(latents(four, job, kill_after(four, 1, 1)), want)
    assert groups_of(four) == [groups[0]]
    said = capfd.readouterr().err
    for line, since in (("2 lost at step 1", 3), ("3 lost at step 2", 2), ("4 lost at step 3", 1)):
        assert f"guidance group {line}" in said and f", {since} group" in said
    monkeypatch.undo()
    kill = kill_after(four, 0, 0)
    with pytest.raises(RankError, match="rank 1 of 2 failed: the process was killed"):
        latents(four, job, kill)
    assert ended([process.pid for group in groups for process in group._processes])


def test_more_groups_than_passes_are_refused_before_anything_starts(opened):
    engine = opened(2, 1, FOUR)
    with pytest.raises(UserError, match="guidance_parallel=2$"):
        latents(engine, JOBS["cfg alone"])
    assert engine.residency.ranks is None


# --- prompts and tiles ----------------------------------------------------------------------------


def test_prompts_on_two_groups_have_the_contexts_of_one(tiny, artifacts, monkeypatch):
    """Whether or not one group encodes them in one pass."""
    short, long = [[7, 8, 9], [5] * 20], [[11] * 700, [12] * 500]
    made, run, ran_on = [], host.TorchDistRanks.run, {0: set(), 1: set()}

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
            made.append([context for prompts in (short, long) for context in encoder.encode(prompts)])
        residency.close()
    for ran in ran_on.values():
        # Buckets of 20 tokens and of 500, or of 3 and of 700.
        assert ran & {"gemma3-512", "gemma3-1024"} and {"gemma3-128", "connectors"} <= ran
    for one, two in zip(*made, strict=True):
        for ours, wanted in zip(two, one, strict=True):
            assert ours is wanted is None or torch.equal(ours, wanted)


ENCODED = 1e-5  # convolutions and norms sum in another order
# The ranks that decode a tile each, of two in a group.
TILED = {
    (): 2,
    ("guidance_parallel=3",): 6,
    ("context_parallel=2",): 4,
    ("guidance_parallel=2", "context_parallel=2"): 8,
}


def test_tiles_of_a_clip_are_encoded_on_the_ranks_of_all_groups_as_the_host_does(tiny, artifacts, monkeypatch):
    # Upstream's tiles are larger than a test's clips. These are two in time and six in width, so
    # that no layout has a group without tiles.
    for axis in ("TIME", "SPACE"):
        monkeypatch.setattr(encoding, f"{axis}_TILE", 2)
        monkeypatch.setattr(encoding, f"{axis}_OVERLAP", 1)
    job = make_job("", Size(32, 224, 17), retake=Retake("film.mkv", 0, 1))
    pixels, made = randn(1, 3, 17, 32, 224).clip(-1, 1), []
    for layout in TILED:
        workspace = opened_for_tiles(tiny, artifacts, 2, "float32", "resident=true", *layout)
        build.make(workspace, workspace.weight_sets("vae"))
        build.make(workspace, workspace.encoder_graphs(job))
        assert workspace.encoder_tiles(job) == [(9, 32, 64), (17, 32, 64)]
        residency = Residency(workspace, Recorder())
        tiles = residency.video_encoder({"encoder": workspace.programs(workspace.encoder_graphs(job))})
        host = HostModels(workspace.checkpoint_path, workspace.config, torch.float32)
        made.append(host.encode_video(pixels, rank_tiles=tiles))
        groups = getattr(tiles.ranks, "groups", {}).values()
        assert all(group.launches for group in groups)
        residency.close()
        assert "video_encoder" not in vars(host)
        assert torch.equal(made[-1], made[0]), layout
    assert 0 < rel(made[0], host.encode_video(pixels)) < ENCODED


def test_tiles_on_the_ranks_of_all_groups_have_the_frames_of_one(tiny, artifacts):
    clip, tiles = CLIPS["borders in rows, columns and time"]
    latent, made = randn(1, 128, *clip), []
    for layout, ranks in TILED.items():
        workspace = opened_for_tiles(tiny, artifacts, 2, "float32", *layout)
        with decoding(workspace, clip) as decoder:
            made.append(frames_of(decoder.host.decode_video(latent, decoder.tiles)))
            groups = getattr(decoder.tiles.ranks, "groups", {}).values()
            assert all(group.launches for group in groups)
        assert decoder.tiles.at_once == ranks
        assert torch.equal(made[-1], made[0]), layout
    assert tiles == 8
