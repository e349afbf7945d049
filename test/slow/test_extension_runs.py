"""A tiny video made longer by three windows, guided and decoded on the ranks, whose rank is killed."""

from contextlib import ExitStack

import longer_film
import pytest
import torch
from engines import opened_engine
from helpers import one_thread, rel  # noqa: F401
from jobs import replace
from longer_film import FRAMES, longer, made, source

from ltx_neuron.artifacts import build
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.denoise import StageRun
from ltx_neuron.engine.outputs import run_identity
from ltx_neuron.engine.resume import restore_state, save_state
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance

film, prepared = longer_film.film, longer_film.prepared  # fixtures

FP32 = 1e-5  # sums in another order, over ranks and over many steps
FRAME_COUNTS = 1  # frames are cut to whole numbers
GUIDANCE = Guidance(StreamGuidance(cfg_scale=2.5), StreamGuidance(cfg_scale=4.0))


@pytest.fixture
def engine_of(tiny, prepared):
    """engine_of(tp, job): one on whose ranks pictures and sound are decoded."""
    with ExitStack() as opened:

        def engine(tp: int, job):
            workspace = prepared(tp)
            workspace.profile = replace(workspace.profile, sound_on_ranks=True)
            build.make(workspace, workspace.weight_sets("vae"))
            build.make(workspace, workspace.dit_graphs(job.buckets_to_compile))
            build.make(workspace, workspace.decoder_graphs(job.latent_shape))
            build.make(workspace, workspace.sound_graphs(job.extension.audio_latents, job.size))
            return opened.enter_context(opened_engine(workspace, tiny, neuron_vae=True))

        yield engine


def test_a_guided_one_on_two_ranks_is_one_ranks_within_rounding_and_goes_on_to_the_same_bits(
    engine_of, film, tmp_path, monkeypatch
):
    """A rank is killed in its second window. What is kept of the film is kept bit for bit."""
    job = replace(longer(film, 1.0), recipe="dev", guidance=GUIDANCE, num_inference_steps=2)
    one, engine = made(engine_of(1, job), job), engine_of(2, job)
    two, known = made(engine, job), job.extension
    for stream, kept in (("video", known.known_video), ("audio", known.known_audio)):
        ours, theirs = (result.tensors[f"s1_{stream}"] for result in (two, one))
        assert torch.equal(ours[:, :, kept], theirs[:, :, kept]) and 0 < rel(ours, theirs) <= FP32
    for result in (one, two):
        assert torch.equal(result.frames[:FRAMES], source(film)) and len(result.frames) == FRAMES + 24
    assert (one.frames.int() - two.frames.int()).abs().max() <= FRAME_COUNTS

    path, identity, step = tmp_path / "state", run_identity(job, engine.workspace, engine.options), StageRun.step

    def kill(stage_run, number):
        if stage_run.stage.title == "window 2 of 3" and number == 1:
            stage_run.ranks._processes[1].kill()
        return step(stage_run, number)

    with monkeypatch.context() as patch, pytest.raises(RankError, match="rank 1 of 2 failed"):
        patch.setattr(StageRun, "step", kill)
        made(engine, job, on_stage_end=lambda run: save_state(path, run, identity))
    run = restore_state(path, job, identity, torch.float32)
    assert run.left == "windows 2 to 3 of 3 are left" and len(run.contexts) == 2
    resumed = made(engine, job, resume=lambda job: run)
    assert torch.equal(resumed.frames, two.frames) and torch.equal(resumed.waveform, two.waveform)
