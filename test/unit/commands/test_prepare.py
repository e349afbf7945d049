"""prepare: what a generation needs, and what is said of it. What it makes: test/slow/test_prepare.py."""

import time
from unittest.mock import Mock

import pytest
from engines import opened_workspace
from helpers import picture_frames, write_film
from jobs import make_job, replace
from typed import ended

from ltx_neuron import files, invocation
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.commands.prepare import ArtifactGroup, Preparation, parts_of
from ltx_neuron.config.profiles import resolve
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size
from ltx_neuron.report.progress import times_file
from ltx_neuron.sampling.conditions import Retake, SoundCondition
from ltx_neuron.weights.lora import Lora

SMALL, SMALL_FLAGS = Size(64, 64, 9), ["--height", "64", "--width", "64", "--num-frames", "9"]


@pytest.fixture
def job_flags(tiny, tmp_path) -> list[str]:
    words = f"--checkpoint-path {tiny.checkpoint} --gemma-root {tiny.gemma_root} --artifacts-dir {tmp_path}/artifacts"
    return [*f"{words} --profile cpu --tp-degree 1 --dtype float32 --recipe distilled".split(), *SMALL_FLAGS]


def titles(workspace: Workspace, *jobs: Job, **options) -> list[str]:
    return [part.title for part in parts_of(workspace, [*jobs], RunOptions(**options))]


def test_a_job_needs_its_weight_sets_its_graphs_and_what_runs_on_the_ranks(tiny, tmp_path):
    workspace = opened_workspace(tiny, tmp_path)
    assert titles(workspace, make_job("", SMALL)) == ["DiT weights", "DiT graphs, 64x64, 9 frames"]
    refined = make_job("", replace(SMALL, two_stage=True), recipe="dev", stage_2_loras=(Lora(tiny.lora, 0.5),))
    assert titles(workspace, refined, neuron_gemma=True, neuron_vae=True) == [
        *("DiT weights", "DiT weights, lora.safetensors 0.5", "DiT graphs, 64x64, 9 frames, two stages"),
        *("Gemma weights", "Gemma graphs", "VAE weights", "video decoder graphs, 2x2x2 latents"),
    ]


def test_jobs_share_what_is_the_same_and_a_given_sound_is_not_decoded(tiny, tmp_path):
    workspace, sound = opened_workspace(tiny, tmp_path, settings=["sound_on_ranks=true"]), SoundCondition("song.wav")
    jobs = (make_job("a", SMALL), make_job("b", SMALL, seed=4), make_job("c", Size(64, 96, 9), sound=sound))
    assert titles(workspace, *jobs, neuron_vae=True) == [
        *("DiT weights", "DiT graphs, 64x64, 9 frames", "DiT graphs, 64x96, 9 frames", "VAE weights"),
        *("video decoder graphs, 2x2x2 latents", "video decoder graphs, 2x2x3 latents"),
        "sound decoder graphs, 9 latents",
    ]
    assert titles(workspace, jobs[2], neuron_vae=True)[-1] == "video decoder graphs, 2x2x3 latents"


def test_a_video_needs_the_encoder_where_it_may_stay_beside_the_transformer(tiny, tmp_path):
    job = make_job("a", Size(64, 64, 97), retake=Retake("film.mp4", 0, 1))
    graphs, of_form = "video encoder graphs, 73x64x64, 49x64x64", {}
    for resident, form in (("true", "conv2d"), ("false", "conv2d"), ("true", "conv3d")):
        settings = [f"resident={resident}", f"vae_convolution={form}"]
        workspace = opened_workspace(tiny, tmp_path, settings=settings)
        assert (graphs in titles(workspace, job, neuron_vae=True)) == (resident == "true")
        assert graphs not in titles(workspace, job)
        needs = workspace.decoder_graphs(job.latent_shape), workspace.encoder_graphs(job)
        of_form.setdefault(form, [[need.identity for need in kind] for kind in needs])
    for two, three in zip(*of_form.values(), strict=True):  # each form has graphs of its own
        assert two and all(graph not in three for graph in two)
    with pytest.raises(UserError, match=r"compile vae .* --profile-set vae_convolution=conv3d"):
        workspace.programs(workspace.decoder_graphs(job.latent_shape))


def shown(preparation: Preparation, title: str) -> str:
    return next(line for line in preparation.table().splitlines() if line.startswith(title))


def test_times_are_those_of_the_last_preparation_or_measured_and_sizes_are_known_before(tiny, tmp_path):
    workspace, graphs = opened_workspace(tiny, tmp_path), "DiT graphs, 64x64, 9 frames"
    parts = parts_of(workspace, [make_job("", SMALL)], RunOptions())
    preparation = Preparation(workspace, parts, "prepare")
    assert "(of a copied sample)" in preparation.table()
    assert "not known yet  missing" in shown(preparation, graphs)
    large = parts[0]._replace(make=lambda: time.sleep(0.1), size=10**9)
    Preparation(workspace, [large, parts[1]._replace(make=lambda: time.sleep(0.1))], "prepare").run()
    again = Preparation(workspace, [large, parts[1]], "prepare")
    assert "(as last time)" in again.table() and 10**9 < again.took["rate"] < 10**10
    assert "about 0 s" in shown(again, graphs)
    parts[1].folders[0].mkdir(parents=True)
    assert "partial" in shown(again, graphs)
    assert (weights := parts[0]).bytes_there == 0
    weights.make()
    assert sum(path.stat().st_size for path in weights.folders[0].glob("*.safetensors")) == weights.size
    assert weights.bytes_there > weights.size  # and a manifest


def test_damaged_records_stop_nothing_and_on_neuron_the_time_of_compiling_is_not_measured(tiny, tmp_path):
    workspace = Workspace(tiny.checkpoint, resolve("trn2.3xlarge"), tmp_path, 4, "bfloat16")
    part, file = ArtifactGroup("DiT graphs", [], [], print), times_file(tmp_path, "preparation")
    file.parent.mkdir(parents=True)
    file.write_text("{")
    preparation = Preparation(workspace, [part], "prepare")
    preparation.missing = [part]
    assert preparation.took["rate"] is None and "not measured" in shown(preparation, "DiT graphs")


def test_graphs_that_the_ranks_compile_are_there_when_these_have_compiled_them(tiny, tmp_path, monkeypatch):
    workspace = opened_workspace(tiny, tmp_path, settings=["compile_backend=inductor"])
    part = parts_of(workspace, [make_job("", SMALL)], RunOptions())[1]._replace(make=lambda: None)
    # Their manifests are whole.
    monkeypatch.setattr(workspace, "is_made", lambda need: True)
    monkeypatch.setattr(workspace, "find", lambda *_: None)
    first = Preparation(workspace, [part], "prepare")
    assert first.missing
    first.run()
    assert not Preparation(workspace, [part], "prepare").missing


def test_a_dry_run_writes_nothing_and_takes_flags_of_generate_and_the_lines_of_a_file(job_flags, tmp_path, capsys):
    film = write_film(tmp_path / "film.mkv", picture_frames(9, 64, 64, 3))
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a"}\n{"prompt": "b", "width": 96}\n')
    for words, missing, width in (
        ([*job_flags, "--neuron-gemma", "--prompt", "rain", "--seed", "4", "--output-path", "a.mp4"], 4, 64),
        ([*job_flags, "--prompts-file", lines], 3, 96),
        # Without saying which seconds are made anew.
        ([*job_flags[: -len(SMALL_FLAGS)], "--video-path", film], 2, 64),
    ):
        assert ended("prepare", *words, "--dry-run") == 0
        printed = capsys.readouterr().out
        assert printed.count("missing") == missing and f"DiT graphs, 64x{width}, 9 frames" in printed
    assert not (tmp_path / "artifacts").exists()


def test_what_cannot_be_generated_has_no_room_or_is_stopped_says_what_to_type(job_flags, tmp_path, monkeypatch, capsys):
    for flags, message in (
        (["--recipe", "dev", "--two-stage"], "needs --distilled-lora"),
        (["--num-workers", "0"], "wanted 1 or more"),
    ):
        assert ended("prepare", *job_flags, *flags) == 2
        assert message in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(files, "free_bytes", lambda folder: 1000)
        assert ended("prepare", *job_flags) == 2
    printed = capsys.readouterr().err
    assert "the weights need" in printed and "1.0 kB free" in printed and not (tmp_path / "artifacts").exists()
    monkeypatch.setattr(build, "shard_weights", Mock(side_effect=KeyboardInterrupt))
    assert ended("prepare", *job_flags) == 130
    assert f"to continue, type: {invocation.command('prepare', *job_flags)}" in capsys.readouterr().err
