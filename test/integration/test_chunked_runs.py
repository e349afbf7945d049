"""Tiny clips of several windows, chunked ones and films made longer: what their windows share, what is kept bit for
bit, and how they go on when they were killed. The memory of a chunked clip: test/slow/test_golden.py."""

import golden_runs
import pytest
import torch
from engines import drawn_contexts
from golden_runs import by_ltx_core, clip
from helpers import made_film, one_thread, picture_frames, read_video, rel, write_film  # noqa: F401
from jobs import make_job, replace

from ltx_neuron.engine.outputs import restore_state, run_identity, save_state, state_files
from ltx_neuron.errors import UserError
from ltx_neuron.host import encode_inputs, input_files
from ltx_neuron.host.input_files import Sound, first_frames, pixels_of, read_sound
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import Retake

runs = golden_runs.runs  # a fixture
FP32 = 1e-6  # the same model by other sums, over eleven steps of two windows
FRAMES, RATE = 30, 24.0  # of a film that is made longer, in windows of 25 frames


class Killed(Exception):
    pass


def killing(title: str):
    """What an engine calls after a step, to die in the stage of this title."""

    def kill(stage, number):
        if stage.title == title:
            raise Killed

    return kill


# --- a chunked clip -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(runs):
    return runs.made(clip(prompt="", prompts=("waves", "a storm")))


def test_two_windows_are_ltx_cores_with_their_prompts_and_one_generator(two, tiny, runs):
    config = runs.engine().workspace.transformer
    wanted = by_ltx_core(tiny, two.job, lambda prompt: drawn_contexts(config, prompt))
    for name in [f"w{n}_s{s}_{stream}" for n in (0, 1) for s in (1, 2) for stream in ("video", "audio")]:
        assert rel(two.tensors[name], wanted[name]) < FP32, name
    assert torch.equal(two.tensors["w1_s2_video"][:, :, :3], two.tensors["w0_s2_video"][:, :, -3:])
    assert two.frames.shape == (33, 64, 64, 3)


@pytest.fixture(scope="module")
def undisturbed(runs, two, tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("undisturbed") / "clip.mp4"
    runs.made(two.job, write=lambda clip: clip.write(path))
    return path.read_bytes()


@pytest.mark.parametrize("phase", ["window 2 of 2, stage 1", "upsample", "window 2 of 2, stage 2", "decode_video"])
def test_it_goes_on_from_every_phase_of_a_window_to_the_same_bytes(
    runs, two, undisturbed, tmp_path, monkeypatch, phase
):
    engine, job, path = runs.engine(), two.job, tmp_path / "clip.resume.safetensors"
    identity = run_identity(job, engine.workspace, engine.options)
    write = {"write": lambda clip: clip.write(tmp_path / "clip.mp4")}
    method, calls = getattr(HostModels, phase, None), []

    def kill_in_the_second_window(*args, **options):
        calls.append(phase)
        if len(calls) == 2:
            raise Killed
        return method(*args, **options)

    if method:
        monkeypatch.setattr(HostModels, phase, kill_in_the_second_window)
    monkeypatch.setattr(engine, "on_step_end", killing(phase))
    with pytest.raises(Killed):
        runs.made(job, on_stage_end=lambda run: save_state(path, run, identity), **write)
    monkeypatch.undo()
    assert not (tmp_path / "clip.mp4").exists()
    runs.made(job, resume=lambda job: restore_state(path, job, identity, torch.float32), **write)
    assert (tmp_path / "clip.mp4").read_bytes() == undisturbed
    assert len(state_files(path)) == 2 + (phase == "decode_video")


# --- a film made longer by three windows ----------------------------------------------------------


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    return made_film(tmp_path_factory.mktemp("film") / "film.mp4", FRAMES, 64, 64)


def frames_of(film) -> torch.Tensor:
    return torch.stack([torch.from_numpy(frame) for frame in first_frames(film, "")])


def longer(film, seconds: float) -> Job:
    return make_job("waves", Size(64, 64, 25, RATE), 7, retake=Retake(film, extend=seconds, source_frames=FRAMES))


@pytest.fixture(scope="module")
def after(runs, film):
    return runs.made(longer(film, 1.0))


def test_the_files_frames_are_kept_bit_for_bit_new_ones_follow_and_the_sound_is_decoded_as_a_whole(
    runs, film, after, tmp_path
):
    assert after.frames.shape == (FRAMES + 24, 64, 64, 3) and len(after.job.stages) == 3
    assert torch.equal(after.frames[:FRAMES], frames_of(film))
    assert not torch.equal(after.frames[FRAMES], after.frames[FRAMES - 1])
    waveform, host = after.waveform, runs.engine().host
    assert waveform.shape[1] == pytest.approx(54 / RATE * after.sample_rate, rel=0.02)
    assert torch.equal(waveform, host.decode_audio(after.tensors["s1_audio"])[:, : waveform.shape[1]])
    runs.made(after.job, write=lambda clip: clip.write(tmp_path / "longer.mp4"))
    assert read_video(tmp_path / "longer.mp4")["video_seconds"] == (FRAMES + 24) / RATE


def test_one_that_is_killed_in_its_second_window_goes_on_to_the_same_bits(runs, after, tmp_path, monkeypatch):
    job, path, engine = after.job, tmp_path / "state", runs.engine()
    identity = run_identity(job, engine.workspace, engine.options)
    monkeypatch.setattr(engine, "on_step_end", killing("window 2 of 3"))
    with pytest.raises(Killed):
        runs.made(job, on_stage_end=lambda run: save_state(path, run, identity))
    monkeypatch.undo()
    run = restore_state(path, job, identity, torch.float32)
    assert run.left == "windows 2 to 3 of 3 are left"
    resumed = runs.made(job, resume=lambda job: run)
    assert torch.equal(resumed.frames, after.frames) and torch.equal(resumed.waveform, after.waveform)


def test_below_0_they_are_made_before_the_first_one(runs, film):
    result = runs.made(longer(film, -17 / RATE))
    assert len(result.job.stages) == 3
    assert torch.equal(result.frames[17:], frames_of(film)) and len(result.frames) == 17 + FRAMES
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


def test_the_known_latents_are_of_the_frames_and_the_sound_next_to_the_new_ones(runs, film, after):
    host, tensors = runs.engine().host, after.tensors
    video, audio = tensors["video_latent"], tensors["audio_latent"]
    assert torch.equal(video[:, :, :3], host.encode_video(pixels_of(list(first_frames(film, ""))[-17:], 64, 64)))
    assert video.shape[2] == 3 + 3 and not video[:, :, 3:].any()
    sound = read_sound(film, "")
    _, latent = host.encode_audio(sound._replace(samples=sound.samples[:, :60000]))
    assert torch.equal(audio[:, :, :31], latent[:, :, :31])
    assert audio.shape[2] == 56 and not audio[:, :, 32:].any()


def test_a_film_without_sound_goes_on_from_silence_and_one_with_fewer_frames_is_refused(
    runs, film, after, tmp_path, capsys
):
    mute, host = write_film(tmp_path / "mute.mp4", picture_frames(FRAMES, 64, 64, 0)), runs.engine().host
    known = encode_inputs.encode(host, longer(mute, -1.0))["audio_latent"]
    assert "has no sound: the new part continues from silence" in capsys.readouterr().out
    _, silence = host.encode_audio(Sound(torch.zeros(2, 48000), 16000))
    assert torch.allclose(known[:, :, 30:50], silence[:, :, 30:50], atol=1e-5)
    job = replace(after.job, retake=replace(after.job.retake, source_frames=FRAMES + 1))
    with pytest.raises(UserError, match="got 30 frames, wanted 31"):
        input_files.check(job)
