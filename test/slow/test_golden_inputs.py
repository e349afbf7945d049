"""Jobs with other inputs against records of ltx-pipelines (records.py): more of the dev recipe, tiles,
normalized attention guidance, dubbing, voices, ranks that share tokens, and bfloat16."""

import golden_runs
import pytest
import torch
from engines import sharing
from golden_jobs import audio_to_video, guidance, lora
from golden_runs import assert_is_recorded, assert_tail_is_cut, draw_contexts
from helpers import one_thread  # noqa: F401
from records import Record

from ltx_neuron.engine.resume import restore_state, save_state
from ltx_neuron.models.programs import may_divide
from ltx_neuron.sampling.guidance import StreamGuidance

runs = golden_runs.runs  # a fixture


@pytest.mark.parametrize(
    "name",
    [
        *("audio_to_video_guided_in_one_stage", "retake_guided", "extend_guided"),
        *("ic_lora_guided", "ic_lora_still", "ic_lora_tiled"),
        *("nag_audio_to_video", "nag_retake", "nag_ic_lora"),
        *("dubbing", "voice", "voice_distilled", "voice_without_identity", "voice_hq", "sound_alone"),
    ],
)
def test_a_job_equals_ltx_pipelines(runs, name):
    assert_is_recorded(name, runs.generate(name))


@pytest.mark.parametrize(
    "name", ["audio_to_video_guided_in_one_stage", "retake", "ic_lora_guided", "dubbing", "voice", "sound_alone"]
)
def test_bfloat16_is_as_near_to_the_truth_as_ltx_pipelines_own(runs, name):
    """ltx-pipelines in fp32 is the truth; ours in bf16 may be twice as far from it as theirs is."""
    got = runs.generate(name, dtype="bfloat16")
    Record(name).assert_as_near_as_upstreams_bfloat16(got)
    assert got["s1_audio"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["ic_lora", "voice"])
@pytest.mark.parametrize("ranks", [(2, "sequence_parallel=true"), (1, "context_parallel=4")], ids=str)
def test_ranks_that_share_the_videos_tokens_equal_ltx_pipelines(runs, name, ranks):
    tp, setting = ranks
    job, engine = runs.job(name), runs.engine(tp=tp, settings=(setting,))
    if engine.workspace.profile.context_parallel == 1:  # which pads no tokens
        assert all(may_divide(bucket, 2) for bucket in job.buckets)
    assert_is_recorded(name, runs.run(engine, job))
    engine.close()


def test_a_tiled_stage_has_four_tiles(runs):
    job = runs.job("ic_lora_tiled")
    assert len(job.stage_tiles(job.stages[0])) == 4


@pytest.mark.parametrize(("name", "reference", "clip"), [("dubbing", 26, 21), ("voice", 16, 8)])
def test_a_reference_sound_is_longer_than_the_clips_and_stage_2_keeps_stage_1s(runs, name, reference, clip):
    got = runs.generate(name)
    assert (got["audio_reference"].shape[2], got["s1_audio"].shape[2]) == (reference, clip)
    # What is heard needs no tensor of its own.
    assert torch.equal(got["s2_audio"], got["s1_audio"])


def test_sound_alone_has_no_video(runs):
    assert "s1_video" not in runs.generate("sound_alone")


def test_what_a_tail_leaves_is_the_beginning_of_the_longer_video(runs, tiny, media):
    guided = guidance(audio=StreamGuidance()) | {"stage_2_loras": lora(tiny)}
    job = audio_to_video(media, 8, longest=None, num_frames=17, **guided)
    assert_tail_is_cut(runs.engine(), job)


def test_a_dubbed_clip_resumed_after_stage_1_ends_with_the_same_bits(runs, tmp_path):
    whole, engine, job = runs.generate("dubbing"), sharing(runs.engine()), runs.job("dubbing")
    state = tmp_path / "state.safetensors"
    engine.on_stage_end = lambda run: state.exists() or save_state(state, run, {})
    draw_contexts(engine, job)
    [*engine.run([job], keep=True, decode=False)]

    def resume(job):
        run = restore_state(state, job, {}, torch.float32)
        assert [stage.name for stage in run.stages_left] == ["stage_2"]
        return run

    (result,) = engine.run([job], keep=True, decode=False, resume=resume)
    for name in ("s1_audio", "s2_reference_latent", "s2_video", "s2_audio"):
        assert torch.equal(result.tensors[name], whole[name])
