"""The five scripts, run as a user runs them, and engines, against records of ltx-pipelines (records.py):
text, images, guidance, LoRAs, upscaling and HQ. Other degrees, sizes and models: test/slow/test_golden.py;
other inputs: test_golden_inputs.py."""

from types import SimpleNamespace

import golden_runs
import pytest
import torch
from golden_jobs import JOBS
from golden_runs import assert_has_the_size_of_the_job, assert_is_recorded
from helpers import one_thread  # noqa: F401
from jobs import replace
from records import FOLDER
from safetensors import safe_open

from ltx_neuron.artifacts import build
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.denoise import StageRun
from ltx_neuron.errors import UserError
from ltx_neuron.report.recorder import PHASES
from ltx_neuron.sampling.compat import COMPAT, FOLLOWED

runs, text_to_video = golden_runs.runs, golden_runs.text_to_video  # fixtures


# --- the records ----------------------------------------------------------------------------------


# Records that one test alone reads
OF_ONE_TEST = {"diffusion_decoder": "1.2.0", "duration_head": "1.2.0", "ltx25_stage_1": "1.2.0"}
OF_ONE_TEST |= {"diffusion_keyframes": FOLLOWED}


def test_records_are_of_the_release_that_the_project_follows_or_of_the_one_in_their_name():
    """After a change of FOLLOWED: python -m golden."""
    named = {name: name.partition("_of_")[2].replace("_", ".") or FOLLOWED for name in JOBS}
    releases = {}
    for path in FOLDER.iterdir():
        with safe_open(path, "pt") as file:
            releases[path.stem] = file.metadata()["release"]
    assert releases == named | OF_ONE_TEST


# --- by the scripts, on four ranks ----------------------------------------------------------------


def test_text_to_video_equals_ltx_pipelines(text_to_video):
    assert_is_recorded("text_to_video", text_to_video.tensors)


def test_a_warm_step_sends_nothing_and_the_report_names_every_phase_with_its_memory(text_to_video):
    perf = text_to_video.perf
    assert perf["bytes_to_device_per_step"] == 0
    assert {phase["name"] for phase in perf["phases"]} == {*PHASES} - {
        *("warmup", "encode_inputs", "load_vae", "write_wav", "denoise_stage_3")
    }
    assert all(phase["peak_rss_bytes"] > 0 for phase in perf["phases"])
    assert {stage: len(steps) for stage, steps in perf["denoise_steps_ms"].items()} == {"stage_1": 8, "stage_2": 3}


def test_the_video_has_the_size_rate_and_length_of_the_job(text_to_video, runs):
    assert_has_the_size_of_the_job(text_to_video.video, runs.job("text_to_video"))


# --- by engines -----------------------------------------------------------------------------------


def test_an_image_held_in_part_equals_ltx_pipelines_of_each_release(runs):
    """On two ranks, by graphs with a timestep more than the job has, as those for more images have; the
    host encodes the prompt."""
    job, workspace = runs.job("image"), runs.engine(tp=2).workspace
    build.make(workspace, workspace.dit_graphs([job.bucket(stage, timesteps=3) for stage in job.stages]))
    for name in ("image", "image_of_1_0_0"):
        assert_is_recorded(name, runs.generate(name, tp=2))
    runs.engine(tp=2).close()


def test_a_single_frame_equals_ltx_pipelines_and_is_a_file_of_one_picture_with_sound(runs, tmp_path):
    job, engine = runs.job("single_frame"), runs.engine(blocks=None)
    build.make(engine.workspace, engine.workspace.weight_sets("dit"))
    build.make(engine.workspace, engine.workspace.dit_graphs(job.buckets))
    (result,) = engine.run([job])
    assert_is_recorded("single_frame", result.tensors)
    result.clip().write(tmp_path / "one.mp4")
    assert_has_the_size_of_the_job(tmp_path / "one.mp4", job)


ONE, DIVIDED = {}, dict(tp=2, blocks=2, settings=("sequence_parallel=true",))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("guided", ONE),
        ("guided", DIVIDED),
        ("guided_by_fewer_terms", ONE),
        ("upscaled", ONE),
        ("lora_and_images", ONE),
        ("hq", ONE),
        ("nag", ONE),
    ],
    ids=lambda value: ("two ranks" if value else "one rank") if isinstance(value, dict) else value,
)
def test_a_recipe_equals_ltx_pipelines(runs, name, ranks):
    """Of a guided stage every pass of the first step, too."""
    assert_is_recorded(name, runs.run(runs.engine("four", **ranks), runs.job(name), passes=JOBS[name].passes))
    if ranks:
        runs.engine("four", **ranks).close()


def test_guidance_of_other_terms_runs_on_the_same_graphs(runs):
    workspace = runs.engine("four").workspace
    one, other = (workspace.dit_graphs(runs.job(name).buckets) for name in ("guided", "guided_by_fewer_terms"))
    assert build.make(workspace, one) == build.make(workspace, other)


def test_two_guidance_groups_make_the_bits_of_one_and_go_on_as_one(runs, capfd):
    """Of each pass, too, whose predictions the groups send each other."""
    job, two = runs.job("guided"), runs.engine("four", settings=("guidance_parallel=2",))
    alone = runs.run(runs.engine("four"), job, passes=True)
    for dies in (True, False):
        got = runs.run(two, job, passes=True)
        assert {name for name in alone if not torch.equal(got[name], alone[name])} == set()
        if dies:
            two.residency.ranks.groups[2]._processes[0].kill()
    assert "group 2 lost after stage 1 (rank 0 of 1 failed: the process" in capfd.readouterr().err
    two.close()


def test_the_default_guidance_is_that_of_the_model_version(runs):
    job = replace(runs.job("guided"), guidance=None)
    with pytest.raises(UserError, match="28: this model has blocks 0..3"):  # its STG block, of 48
        runs.run(runs.engine("four"), job)


def test_ranks_that_end_with_different_latents_are_an_error():
    ranks = SimpleNamespace(hashes=lambda *names: ["a", "a", "b", "a"], get=lambda *_: torch.zeros(1, 1, 128))
    compiled = SimpleNamespace(bucket=Bucket(1, 1, timesteps=1, max_steps=1))
    run = StageRun(ranks, compiled, None, torch.float32, None, COMPAT[None])
    run.latent_shape, run.audio_frames, run.video, run.audio = (1, 1, 1), 1, None, None
    with pytest.raises(RuntimeError, match="different latents"):
        run.result()
    ranks.hashes = lambda *names: ["a"] * 4
    run.result()
