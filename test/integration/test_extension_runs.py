"""A tiny video made longer by three windows: what is kept is kept bit for bit, and the sound has no
seam; and it goes on to the same bits in the window in which it was killed."""

from pathlib import Path

import av
import pytest
import torch
from engines import drawn, give_contexts, opened_engine, opened_workspace
from helpers import one_thread, randn, read_video, tone  # noqa: F401
from jobs import make_job, replace

from ltx_neuron.artifacts import build
from ltx_neuron.backends.ranks import RankError
from ltx_neuron.denoise import StageRun
from ltx_neuron.engine.outputs import run_identity
from ltx_neuron.engine.resume import restore_state, save_state
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.host import encode_inputs
from ltx_neuron.host.media import Sound, first_frames, pixels_of, read_sound
from ltx_neuron.host.video import write_video
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import Retake

FRAMES, WINDOW, RATE = 30, 25, 24.0


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> Path:
    path, still = tmp_path_factory.mktemp("film") / "film.mp4", randn(1, 64, 64, 3) * 30 + 128
    pictures = [still.roll(2 * n, 2).clamp(0, 255).byte() for n in range(FRAMES)]
    write_video(path, pictures, RATE, lambda: tone(48000, FRAMES / RATE) * 0.5, 48000)
    return path


def source(film) -> torch.Tensor:
    return torch.stack([torch.from_numpy(frame) for frame in first_frames(film, "")])


def longer(film, seconds: float) -> Job:
    retake = Retake(film, extend=seconds, source_frames=FRAMES)
    return make_job("waves", Size(64, 64, WINDOW, RATE), 7, retake=retake)


@pytest.fixture(scope="module")
def engine(tiny, film, artifacts):
    workspace = opened_workspace(tiny, artifacts, 1)
    build.make(workspace, workspace.weight_sets("dit", {()}))
    build.make(workspace, workspace.dit_graphs(longer(film, 1.0).buckets_to_compile))
    with opened_engine(workspace, tiny) as engine:
        yield engine


def made(engine: Engine, job: Job, on_stage_end=None, **options):
    """The result of a job, whose contexts are drawn."""
    engine.on_stage_end = on_stage_end
    give_contexts(engine, job, lambda prompt: drawn(engine.workspace, seed=len(prompt)))
    (result,) = engine.run([job], keep=True, **options)
    return result


@pytest.fixture(scope="module")
def after(engine, film):
    return made(engine, longer(film, 1.0))


def test_the_files_frames_are_kept_bit_for_bit_new_ones_follow_and_the_sound_is_decoded_as_a_whole(
    engine, film, after, tmp_path
):
    assert len(longer(film, 1.0).stages) == 3
    assert after.frames.shape == (FRAMES + 24, 64, 64, 3)
    assert torch.equal(after.frames[:FRAMES], source(film))
    assert not torch.equal(after.frames[FRAMES], after.frames[FRAMES - 1])
    waveform = after.waveform
    assert waveform.shape[1] == pytest.approx(54 / RATE * after.sample_rate, rel=0.02)
    assert torch.equal(waveform, engine.host.decode_audio(after.tensors["s1_audio"])[:, : waveform.shape[1]])
    made(engine, longer(film, 1.0), write=lambda clip: clip.write(tmp_path / "longer.mp4"))
    assert read_video(tmp_path / "longer.mp4")["video_seconds"] == (FRAMES + 24) / RATE


def test_one_that_is_killed_in_its_second_window_goes_on_to_the_same_bits(engine, film, after, tmp_path, monkeypatch):
    job, path, step = longer(film, 1.0), tmp_path / "state", StageRun.step
    identity = run_identity(job, engine.workspace, engine.options)

    def kill(stage_run, number):
        if stage_run.stage.title == "window 2 of 3" and number == 1:
            raise RankError("killed")
        return step(stage_run, number)

    with monkeypatch.context() as patch, pytest.raises(RankError):
        patch.setattr(StageRun, "step", kill)
        made(engine, job, on_stage_end=lambda run: save_state(path, run, identity))
    run = restore_state(path, job, identity, torch.float32)
    assert run.left == "windows 2 to 3 of 3 are left"
    resumed = made(engine, job, resume=lambda job: run)
    assert torch.equal(resumed.frames, after.frames) and torch.equal(resumed.waveform, after.waveform)


def test_below_0_they_are_made_before_the_first_one(engine, film):
    result = made(engine, longer(film, -17 / RATE))
    assert len(longer(film, -17 / RATE).stages) == 3
    assert torch.equal(result.frames[17:], source(film)) and len(result.frames) == 17 + FRAMES
    known = result.job.extension.known_audio
    assert torch.equal(result.tensors["s1_audio"][:, :, known], result.tensors["audio_latent"][:, :, known])


def test_held_latents_are_the_known_ones_and_noise_is_drawn_for_each_window(after):
    tensors = after.tensors
    for name, known in (("video", "known_video"), ("audio", "known_audio")):
        held, given = getattr(after.job.extension, known), tensors[f"{name}_latent"]
        assert torch.equal(tensors[f"s1_{name}"][:, :, held], given[:, :, held])
        assert given[:, :, held].abs().sum() > 0
    windows = [tensors[f"window_{n}_video"] for n in (1, 2, 3)]
    new = [window[:, :, -1] for window in windows]
    assert torch.equal(tensors["s1_video"][:, :, -3:], torch.stack(new, 2))
    assert not torch.equal(new[0], new[1]) and not torch.equal(new[1], new[2])
    for before, window in zip(windows, windows[1:], strict=False):  # what it holds is what the one before it made
        assert torch.equal(window[:, :, :-1], before[:, :, 1:])


def test_the_known_latents_are_of_the_frames_and_the_sound_next_to_the_new_ones(engine, film):
    tail = pixels_of(list(first_frames(film, ""))[-17:], 64, 64)
    known = encode_inputs.encode(engine.host, longer(film, 1.0))
    video, audio = known["video_latent"], known["audio_latent"]
    assert torch.equal(video[:, :, :3], engine.host.encode_video(tail))
    assert video.shape[2] == 3 + 3 and not video[:, :, 3:].any()
    sound = read_sound(film, "")
    _, latent = engine.host.encode_audio(sound._replace(samples=sound.samples[:, :60000]))
    assert torch.equal(audio[:, :, :31], latent[:, :, :31])
    assert audio.shape[2] == 56 and not audio[:, :, 32:].any()


def test_a_film_without_sound_goes_on_from_silence_and_one_with_fewer_frames_is_refused(engine, film, tmp_path, capsys):
    path = tmp_path / "silent.mp4"
    with av.open(str(film)) as source, av.open(str(path), "w") as silent:
        copied = silent.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = copied
                silent.mux(packet)
    known = encode_inputs.encode(engine.host, longer(path, -1.0))["audio_latent"]
    assert "has no sound: the new part continues from silence" in capsys.readouterr().out
    _, silence = engine.host.encode_audio(Sound(torch.zeros(2, 48000), 16000))
    assert torch.allclose(known[:, :, 30:50], silence[:, :, 30:50], atol=1e-5)
    job = longer(film, 1.0)
    job = replace(job, retake=replace(job.retake, source_frames=FRAMES + 1))
    with pytest.raises(UserError, match="got 30 frames, wanted 31"):
        encode_inputs.check(job)
