"""The five scripts, run as a user runs them, and engines, against ltx-core itself (test/oracle.py)
on a tiny checkpoint. Other degrees, sizes and images: test/slow/test_golden.py."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import generations
import oracle
import pytest
import torch
from engines import opened_engine, opened_workspace, sharing
from generations import FP32, PUPPY_JOB, assert_equals_the_oracle, assert_has_what_was_asked_for, told, with_images
from helpers import one_thread, rel  # noqa: F401

from ltx_neuron.artifacts import build
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.denoise import StageRun
from ltx_neuron.report.recorder import PHASES
from ltx_neuron.sampling.compat import COMPAT

text_to_video = generations.text_to_video  # a fixture


@pytest.fixture(scope="module")
def wanted():
    """oracle.generate, once for the same arguments."""
    return functools.cache(oracle.generate)


# --- by the scripts, on four ranks ----------------------------------------------------------------


def test_text_to_video_equals_ltx_core(text_to_video, tiny, wanted):
    assert_equals_the_oracle(tiny, text_to_video.tensors, wanted(tiny, PUPPY_JOB))


def test_a_warm_step_sends_nothing_to_the_device(text_to_video):
    assert text_to_video.perf["bytes_to_device_per_step"] == 0


def test_the_report_names_every_phase_with_its_memory(text_to_video):
    perf = text_to_video.perf
    assert {phase["name"] for phase in perf["phases"]} == {*PHASES} - {
        *("warmup", "encode_inputs", "load_vae", "write_wav", "denoise_stage_3")
    }
    assert all(phase["peak_rss_bytes"] > 0 for phase in perf["phases"])
    assert {stage: len(steps) for stage, steps in perf["denoise_steps_ms"].items()} == {"stage_1": 8, "stage_2": 3}


def test_the_video_has_the_size_rate_and_length_that_were_asked_for(text_to_video):
    assert_has_what_was_asked_for(text_to_video.video, PUPPY_JOB)


# --- by engines, on two ranks ---------------------------------------------------------------------


def test_a_partly_held_image_and_text_encoded_on_the_host_equal_ltx_core_of_each_release(tiny, artifacts, wanted):
    """On graphs that take a timestep more than the job has, as those that were compiled for more
    images do."""
    job, workspace = with_images(tiny, (0, 0.7)), opened_workspace(tiny, artifacts, 1, tp=2)
    build.make(workspace, workspace.weight_sets("dit"))
    build.make(workspace, workspace.dit_graphs([told(job).bucket(stage, timesteps=3) for stage in told(job).stages]))
    with opened_engine(workspace, tiny) as later:
        (ours,) = later.run([told(job)], keep=True)
        (as_published,) = sharing(later, compat="ltx-core-1.0.0").run([told(job)], keep=True)
    assert_equals_the_oracle(tiny, ours.tensors, wanted(tiny, job))
    first_release = wanted(tiny, job, as_published=True)
    assert_equals_the_oracle(tiny, as_published.tensors, first_release)
    assert rel(first_release["s2_video"], wanted(tiny, job)["s2_video"]) > 100 * FP32


def test_a_single_frame_equals_ltx_core_and_is_a_file_of_one_picture_with_sound(tiny, artifacts, wanted, tmp_path):
    job, workspace = (replace(PUPPY_JOB, num_frames=1, two_stage=False), opened_workspace(tiny, artifacts))
    build.make(workspace, workspace.weight_sets("dit"))
    build.make(workspace, workspace.dit_graphs([*told(job).buckets]))
    with opened_engine(workspace, tiny) as engine:
        (ours,) = engine.run([told(job)])
    assert_equals_the_oracle(tiny, ours.tensors, wanted(tiny, job))
    ours.clip().write(tmp_path / "one.mp4")
    assert_has_what_was_asked_for(tmp_path / "one.mp4", job)


def test_ranks_that_end_with_different_latents_are_an_error():
    ranks = SimpleNamespace(hashes=lambda *names: ["a", "a", "b", "a"], get=lambda *_: torch.zeros(1, 1, 128))
    compiled = SimpleNamespace(bucket=Bucket(1, 1, timesteps=1, max_steps=1))
    run = StageRun(ranks, compiled, None, torch.float32, None, COMPAT[None])
    run.latent_shape, run.audio_frames, run.video, run.audio = (1, 1, 1), 1, None, None
    with pytest.raises(RuntimeError, match="different latents"):
        run.result()
    ranks.hashes = lambda *names: ["a"] * 4
    run.result()
