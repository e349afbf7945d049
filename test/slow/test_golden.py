"""The five scripts and engines against records of ltx-pipelines (records.py): another size of model and
another compiler than the first tier has, skipped steps, keyframes, two prompts in one process, bfloat16."""

import os

import conftest
import golden_runs
import pytest
import torch
from engines import opened_engine, opened_workspace, sharing
from golden_jobs import PUPPY, WAVES, assets_of
from golden_runs import assert_has_the_size_of_the_job, assert_is_recorded, assert_tail_is_cut, by_scripts
from helpers import rel
from jobs import make_job, replace
from records import Record

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.resume import restore_state, save_state
from ltx_neuron.engine.run import Engine
from ltx_neuron.job import Size
from ltx_neuron.report.recorder import Recorder

runs, text_to_video = golden_runs.runs, golden_runs.text_to_video  # fixtures

OTHER = 0.1  # how far apart the videos of two prompts are at least

# --- by the scripts -------------------------------------------------------------------------------


@pytest.mark.skipif(
    "LTX_NEURON_INDUCTOR" not in os.environ, reason="compiles C++ for minutes: set LTX_NEURON_INDUCTOR=1"
)
@pytest.mark.timeout(1800)
def test_ranks_that_compile_with_inductor_equal_ltx_pipelines(scripts, tiny, runs, monkeypatch):
    """The four ranks through torch.compile; the prompt's encoder is compiled when it is loaded."""
    monkeypatch.setattr(conftest, "SCRIPT_SECONDS", 900)
    generated = by_scripts(scripts, tiny, runs.job("text_to_video"), profile_set=("compile_backend=inductor",))
    assert_is_recorded("text_to_video", generated.tensors)


def test_odd_sizes_equal_ltx_pipelines(scripts, runs, shared):
    job = runs.job("odd_sizes")
    generated = by_scripts(scripts, assets_of("odd", shared), job, tp=2)
    assert_is_recorded("odd_sizes", generated.tensors)
    assert_has_the_size_of_the_job(generated.video, job)


def test_the_dev_recipe_in_two_stages_equals_ltx_pipelines(scripts, tiny, runs):
    job = runs.job("dev_two_stages_of_1_2_0")
    size = dict(height=64, width=128, num_frames=9, frame_rate=30.0, two_stage=True, recipe="dev")
    setup = scripts(tiny, 4)  # on 1 or 2, other tests' services would offer this size
    setup.prepare(**size)
    loras = dict(distilled_lora=tuple((lora.path, lora.strength) for lora in job.stage_2_loras))
    setup.run("shards/shard_backbone_weights.py", gemma=False, **loras)
    flags = dict(prompt=job.prompt, negative_prompt=job.negative_prompt, seed=job.seed, neuron_gemma=True)
    flags |= dict(num_inference_steps=job.steps, compat=job.compat)
    for stream, other, guidance in zip(("video", "audio"), ("a2v", "v2a"), job.guidance.streams, strict=True):
        flags |= {
            f"{stream}_cfg_guidance_scale": guidance.cfg_scale,
            f"{stream}_stg_guidance_scale": guidance.stg_scale,
            f"{stream}_stg_blocks": (guidance.stg_blocks,),
            f"{stream}_rescale_scale": guidance.rescale_scale,
            f"{other}_guidance_scale": guidance.modality_scale,
        }
    assert_is_recorded("dev_two_stages_of_1_2_0", setup.generate(**size, **flags, **loras).tensors)


def test_a_prompt_after_another_in_one_process_gives_what_it_gives_alone(scripts, tiny, text_to_video, monkeypatch):
    alone, compared, hashes = text_to_video.tensors, [], TorchDistRanks.hashes

    def spy(ranks, *names):
        compared.append((names, digests := hashes(ranks, *names)))
        return digests

    monkeypatch.setattr(TorchDistRanks, "hashes", spy)
    size = Size(height=128, width=192, num_frames=17, frame_rate=24.0, two_stage=True)
    jobs = [make_job(prompt, size, seed) for prompt, seed in ((WAVES, 11), (PUPPY, 10))]
    setup, threads = scripts(tiny), torch.get_num_threads()
    profile, kind = resolve("cpu"), (setup.tp, setup.dtype, tiny.gemma_root)
    workspace = Workspace(tiny.checkpoint, profile, setup.artifacts, *kind)
    options = RunOptions(neuron_gemma=True, spatial_upsampler_path=tiny.spatial_upsampler)
    try:
        with Engine(workspace, Recorder(), options) as engine:
            first, second = (result.tensors for result in engine.run(jobs))
    finally:
        torch.set_num_threads(threads)
    assert second.keys() == alone.keys()
    assert [name for name in alone if not torch.equal(second[name], alone[name])] == []
    assert rel(first["s2_video"], second["s2_video"]) > OTHER
    # two jobs of two stages
    assert [names for names, _ in compared] == [("video_latent", "audio_latent")] * 4
    assert all(len(digests) == 4 and len(set(digests)) == 1 for _, digests in compared)


# --- by engines -----------------------------------------------------------------------------------


def test_bfloat16_is_as_near_to_the_truth_as_ltx_cores_own(runs, tiny, artifacts):
    # One graph for prompts of every length.
    how = dict(dtype="bfloat16", tp=2, settings=("text_buckets=1024",))
    job, workspace = runs.job("text_to_video"), opened_workspace(tiny, artifacts, 1, **how)
    build.make(workspace, workspace.weight_sets("dit"))
    build.make(workspace, workspace.weight_sets("gemma3"))
    build.make(workspace, workspace.text_graphs())
    build.make(workspace, workspace.dit_graphs(job.buckets))
    with opened_engine(workspace, tiny, neuron_gemma=True) as engine:
        (result,) = engine.run([job])
    Record("text_to_video").assert_as_near_as_upstreams_bfloat16(result.tensors)
    assert result.tensors["s2_video"].dtype == torch.bfloat16


TWO_RANKS = dict(tp=2)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("skipped_steps", {}),
        ("skipped_steps_of_1_0_0", {}),
        ("keyframes", TWO_RANKS),
        ("keyframes_of_1_0_0", TWO_RANKS),
        ("image_crf", TWO_RANKS),
        ("nag_in_one_stage", dict(tp=2, blocks=2, settings=("sequence_parallel=true",))),
        ("nag_in_one_stage", dict(tp=2, blocks=2, settings=("context_parallel=2",))),
    ],
    ids=str,
)
def test_a_recipe_equals_ltx_pipelines(runs, name, ranks):
    assert_is_recorded(name, runs.run(runs.engine("four", **ranks), runs.job(name)))


def test_twice_the_frames_are_shown_twice_as_fast(runs):
    job = runs.job("upscaled_in_time")
    got = runs.run(runs.engine("four"), job, decode=True)
    assert_is_recorded("upscaled_in_time", got)
    assert (len(got["frames"]), job.output_frame_rate) == (17, 60.0)


@pytest.mark.parametrize("name", ["upscaled", "hq"])
def test_what_a_tail_leaves_is_the_beginning_of_the_longer_video(runs, name):
    job = runs.job(name)
    assert_tail_is_cut(runs.engine("four"), replace(job, size=replace(job.size, num_frames=17)))


def test_hq_resumed_after_stage_1_and_a_warm_up_ends_with_the_same_bits(runs, tmp_path):
    engine, job = runs.engine("four"), runs.job("hq")
    whole = runs.run(engine, job, decode=True)
    assert torch.equal(whole["waveform"], engine.host.decode_audio(whole["s1_audio"]))
    states = iter(tmp_path / name for name in ("first", "second"))
    engine.on_step_end, engine.on_stage_end = None, lambda run: save_state(next(states), run, {})
    [*engine.run([job], keep=True, decode=False)]
    engine.on_stage_end = None

    def resume(job):
        return restore_state(tmp_path / "first", job, {}, torch.float32)

    assert [stage.name for stage in resume(job).stages_left] == ["stage_2"]
    (result,) = sharing(engine, warmup=True).run([job], keep=True, decode=False, resume=resume)
    for name in ("s1_audio", "s2_video", "s2_audio", "final_audio"):
        assert torch.equal(result.tensors[name], whole[name]), name
