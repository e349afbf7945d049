"""The five scripts, run as a user runs them, and engines, against records of ltx-pipelines (records.py). Other
degrees, sizes and models, dubbing, voices and bfloat16: test/slow/test_golden.py."""

import wave

import golden_runs
import pytest
import torch
from golden_jobs import FP32, JOBS
from golden_runs import assert_has_the_size_of_the_job, assert_is_recorded, assert_tail_is_cut
from helpers import STREAMS, one_thread, rel  # noqa: F401
from jobs import replace
from records import FOLDER
from safetensors import safe_open

from ltx_neuron.artifacts import build
from ltx_neuron.engine.outputs import restore_state, save_state
from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.report.latency import PHASES, Recorder
from ltx_neuron.sampling.compat import FOLLOWED

runs, text_to_video = golden_runs.runs, golden_runs.text_to_video  # fixtures

# Records that one test alone reads.
OF_ONE_TEST = {"diffusion_decoder": "1.2.0", "duration_head": "1.2.0", "ltx25_stage_1": "1.2.0"}
OF_ONE_TEST |= {"diffusion_keyframes": FOLLOWED}
DIVIDED = dict(tp=2, blocks=2, settings=("sequence_parallel=true",))


def test_records_are_of_the_release_that_the_project_follows_or_of_the_one_in_their_name():
    """After a change of FOLLOWED: python -m golden."""
    named = {name: name.partition("_of_")[2].replace("_", ".") or FOLLOWED for name in JOBS}
    releases = {path.stem: safe_open(path, "pt").metadata()["release"] for path in FOLDER.iterdir()}
    assert releases == named | OF_ONE_TEST


def test_text_to_video_by_the_scripts_on_four_ranks_equals_ltx_pipelines(text_to_video, runs):
    """A warm step sends nothing, and the report names every phase with its memory."""
    assert_is_recorded("text_to_video", text_to_video.tensors)
    assert_has_the_size_of_the_job(text_to_video.video, runs.job("text_to_video"))
    perf = text_to_video.perf
    assert perf["bytes_to_device_per_step"] == 0
    absent = {"warmup", "encode_inputs", "load_vae", "write_wav", "denoise_stage_3"}
    assert {phase["name"] for phase in perf["phases"]} == {*PHASES} - absent
    assert all(phase["peak_rss_bytes"] > 0 for phase in perf["phases"])
    assert {stage: len(steps) for stage, steps in perf["denoise_steps_ms"].items()} == {"stage_1": 8, "stage_2": 3}


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
    result = runs.made(job, engine, encoded=True)
    assert_is_recorded("single_frame", result.tensors)
    result.clip().write(tmp_path / "one.mp4")
    assert_has_the_size_of_the_job(tmp_path / "one.mp4", job)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *[(name, {}) for name in ("guided", "guided_by_fewer_terms", "skipped_steps", "upscaled", "lora_and_images")],
        *[(name, {}) for name in ("hq", "nag")],
        ("guided", DIVIDED),
    ],
    ids=lambda value: ("two ranks" if value else "one rank") if isinstance(value, dict) else value,
)
def test_a_recipe_equals_ltx_pipelines(runs, name, ranks):
    """Of a guided stage every pass of the first step, too."""
    assert_is_recorded(name, runs.generate(name, **ranks))
    if ranks:
        runs.engine("four", **ranks).close()


@pytest.mark.parametrize(
    "name",
    [
        *("audio_to_video", "audio_to_video_images", "audio_to_video_guided"),
        *("retake", "retake_video", "retake_audio", "retake_video_of_1_2_0", "retake_audio_of_1_2_0"),
        *("retake_short_sound", "retake_without_sound", "extend"),
        *("ic_lora", "ic_lora_scaled", "keyframe_interpolation", "voice", "sound_alone"),
    ],
)
def test_a_job_equals_ltx_pipelines(runs, name):
    got = runs.generate(name)
    assert_is_recorded(name, got)
    if name.startswith("audio_to_video"):  # the input is kept in every stage
        assert all(torch.equal(got[stage], got["audio_latent"]) for stage in {"s1_audio", "s2_audio"} & got.keys())
    assert ("s1_video" in got) == (name != "sound_alone")


# --- what a record does not show ------------------------------------------------------------------


def test_a_retake_keeps_what_is_outside_its_seconds_and_makes_a_sound_where_there_is_none(runs):
    got = runs.generate("retake")
    kept = {"video": [0, 2], "audio": [*range(3), *range(6, 21)]}  # sound is 40 ms each, from -30 ms on
    for stream, frames in kept.items():
        same = (got[f"s1_{stream}"] == got[f"{stream}_latent"]).movedim(2, 0).flatten(1).all(1)
        assert same.nonzero().flatten().tolist() == frames
    # Zeros are kept behind a sound that ends early.
    assert (runs.generate("retake_short_sound")["audio_latent"][:, :, -1] == 0).all()
    assert "audio_latent" not in runs.generate("retake_without_sound")


@pytest.mark.parametrize(("stream", "other"), [STREAMS, STREAMS[::-1]])
def test_a_retake_of_one_stream_keeps_the_other(runs, stream, other):
    """It begins clean by default, as in 1.0.0, and as noise in 1.1.0 to 1.2.0, where it ends within
    rounding."""
    got, as_noise = runs.generate(f"retake_{stream}"), runs.generate(f"retake_{stream}_of_1_2_0")
    assert torch.equal(got[f"s1_{other}"], got[f"{other}_latent"])
    assert rel(as_noise[f"s1_{other}"], got[f"{other}_latent"]) < FP32


def test_a_scaled_reference_has_fewer_tokens_and_a_tile_over_the_canvas_changes_no_bit(runs):
    got, job = runs.generate("ic_lora_scaled"), runs.job("ic_lora_scaled")
    assert got["reference_latent"].shape == (1, 128, 2, 1, 1) and "s2_video" not in got
    tiled = runs.run(runs.engine(), replace(job, tile=True, tile_height=64, tile_width=64))
    assert all(torch.equal(tiled[name], tensor) for name, tensor in got.items())


def test_what_a_tail_leaves_is_the_beginning_of_the_longer_video(runs):
    """Of masked references behind a guide in the last kept frame, in two stages."""
    assert_tail_is_cut(runs, runs.engine(), runs.job("ic_lora"))


def test_guidance_of_other_terms_runs_on_the_same_graphs_and_its_defaults_are_the_model_versions(runs):
    workspace = runs.engine("four").workspace
    one, other = (workspace.dit_graphs(runs.job(name).buckets) for name in ("guided", "guided_by_fewer_terms"))
    assert build.make(workspace, one) == build.make(workspace, other)
    with pytest.raises(UserError, match="28: this model has blocks 0..3"):  # its STG block, of 48
        runs.run(runs.engine("four"), replace(runs.job("guided"), guidance=None))


def test_two_guidance_groups_make_the_bits_of_one_and_go_on_as_one(runs, capfd):
    """Of each pass, too, whose predictions the groups send each other."""
    alone, two = runs.generate("guided"), runs.engine("four", settings=("guidance_parallel=2",))
    for dies in (True, False):
        got = runs.run(two, runs.job("guided"), passes=True)
        assert {name for name in alone if not torch.equal(got[name], alone[name])} == set()
        if dies:
            two.residency.ranks.groups[2]._processes[0].kill()
    assert "group 2 lost after stage 1 (rank 0 of 1 failed: the process" in capfd.readouterr().err
    two.close()


# --- sound alone ----------------------------------------------------------------------------------


def test_a_sound_beside_a_video_in_a_batch_is_its_single_run_bit_for_bit(runs):
    alone, engine = runs.job("sound_alone"), runs.engine()
    video = replace(alone, size=Size(64, 64, 9), sound_only=False)
    single = {True: runs.generate("sound_alone"), False: runs.made(video, decode=False).tensors}
    engine.close()
    for jobs in ([alone], [video, alone], [alone, video]):  # a part of the weights, then all
        for result in engine.run(jobs, keep=True, decode=False):
            got, wanted = (
                {name: x for name, x in tensors.items() if name.startswith("s1_")}
                for tensors in (result.tensors, single[result.job.sound_only])
            )
            assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in got)


def test_a_sound_is_resumed_to_the_same_wav_and_the_python_api_gives_its_waveform(runs, tmp_path):
    job, engine, state = runs.job("sound_alone"), runs.engine(), tmp_path / "out.resume.safetensors"
    first, second = tmp_path / "first.wav", tmp_path / "second.wav"
    runs.made(job, on_stage_end=lambda run: save_state(state, run, {}), write=lambda clip: clip.write(first))
    run = restore_state(state, job, {}, torch.float32)
    assert run.left == "the decoding is left"
    engine.recorder = engine.residency.recorder = Recorder()
    runs.made(job, resume=lambda job: run, write=lambda clip: clip.write(second))
    assert first.read_bytes() == second.read_bytes()
    names = [phase["name"] for phase in engine.recorder.report({}, "cpu", 1, {}, {})["phases"]]
    assert names == ["decode_audio"]

    pipe, size = LTXPipeline(engine, "dev"), dict(num_frames=job.size.num_frames, frame_rate=job.size.frame_rate)
    call = size | dict(prompt=job.prompt, seed=job.seed, num_inference_steps=job.num_inference_steps)
    call |= dict(guidance=job.guidance, negative_prompt=job.negative_prompt, sound_only=True)
    output, latent = pipe(**call), pipe(**call, output_type="latent")
    assert output.frames is latent.video_latent is None
    assert torch.equal(latent.audio_latent, runs.generate("sound_alone")["s1_audio"])
    assert torch.equal(output.audio[0], engine.host.decode_audio(latent.audio_latent))
    assert pipe(**call, output_type="wav", output_path=tmp_path / "out.wav").path.read_bytes() == first.read_bytes()
    with wave.open(str(first)) as file:
        assert file.getnframes() == output.audio.shape[2]
        assert file.getnframes() / file.getframerate() == pytest.approx(1.0, abs=0.05)
    with pytest.raises(UserError, match="output_type: unknown 'mp4'; known: pil, np, pt, latent, wav"):
        pipe(**call, output_type="mp4", output_path=tmp_path / "out.mp4")
