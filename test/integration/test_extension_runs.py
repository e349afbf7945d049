"""A tiny video made longer by three windows: what is kept is kept bit for bit, the sound has no
seam, and an interrupted run goes on to the same bits."""

from dataclasses import replace
from pathlib import Path

import av
import pytest
import torch
from helpers import one_thread, randn, read_video, tone  # noqa: F401

from ltx_neuron.engine import Engine, RunOptions
from ltx_neuron.errors import UserError
from ltx_neuron.generate import run_identity
from ltx_neuron.host import conditions
from ltx_neuron.host.media import Sound, first_frames, pixels_of, read_sound
from ltx_neuron.host.video import write_video
from ltx_neuron.job import Job, Size
from ltx_neuron.profiles import resolve
from ltx_neuron.progress import restore_state, save_state
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditions import Retake
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.workspace import Workspace

pytestmark = pytest.mark.slow

FRAMES, WINDOW, RATE = 30, 25, 24.0


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    still = randn(1, 64, 64, 3) * 30 + 128
    pictures = [(still.roll(2 * n, 2)).clamp(0, 255).byte() for n in range(FRAMES)]
    write_video(path, pictures, RATE, lambda: tone(48000, FRAMES / RATE) * 0.5, 48000)
    return path


def longer(film, seconds: float, seed: int = 7) -> Job:
    retake = Retake(film, extend=seconds, source_frames=FRAMES)
    return Job("waves", Size(64, 64, WINDOW, RATE), seed, retake=retake)


@pytest.fixture(scope="module")
def engine(tiny, film, tmp_path_factory):
    artifacts = tmp_path_factory.mktemp("artifacts")
    workspace = Workspace(tiny.checkpoint, resolve("cpu"), artifacts, 1, "float32", tiny.gemma_root)
    job = longer(film, 1.0)
    workspace.shard_dit({()})
    workspace.compile_dit(job.buckets_to_compile)
    with Engine(workspace, Recorder(), RunOptions()) as engine:
        engine.progress = False
        streams = workspace.transformer.video, workspace.transformer.audio
        drawn = [randn(1, 1024, stream.inner, seed=3) for stream in streams]
        engine._contexts[job.prompts] = [Contexts(*drawn, torch.ones(1, 1024), None)]
        yield engine


def made(engine, job, **options):
    engine.on_stage_end = options.pop("on_stage_end", None)
    (result,) = engine.run([job], keep=True, **options)
    return result


@pytest.fixture(scope="module")
def after(engine, film):
    return made(engine, longer(film, 1.0))


def source(film) -> torch.Tensor:
    return torch.stack([torch.from_numpy(frame) for frame in first_frames(film, "")])


def test_the_files_frames_are_kept_bit_for_bit_and_new_ones_follow(film, after):
    assert len(longer(film, 1.0).stages) == 3
    assert after.frames.shape == (FRAMES + 24, 64, 64, 3)
    assert torch.equal(after.frames[:FRAMES], source(film))
    assert not torch.equal(after.frames[FRAMES], after.frames[FRAMES - 1])
    assert after.waveform.shape[1] == pytest.approx(54 / RATE * after.sample_rate, rel=0.02)


def test_below_0_they_are_made_before_the_first_one(engine, film):
    result = made(engine, longer(film, -17 / RATE))
    assert len(longer(film, -17 / RATE).stages) == 3
    assert torch.equal(result.frames[17:], source(film)) and len(result.frames) == 17 + FRAMES
    extension = result.job.extension
    audio = result.tensors["s1_audio"][:, :, extension.known_audio]
    assert torch.equal(audio, result.tensors["audio_latent"][:, :, extension.known_audio])


def test_held_latents_are_the_known_ones_and_noise_is_drawn_for_each_window(film, after):
    tensors = after.tensors
    for name, known in (("video", "known_video"), ("audio", "known_audio")):
        held = getattr(after.job.extension, known)
        joined = tensors[f"s1_{name}"]
        assert torch.equal(joined[:, :, held], tensors[f"{name}_latent"][:, :, held])
        assert tensors[f"{name}_latent"][:, :, held].abs().sum() > 0
    new = [tensors[f"window_{n}_video"][:, :, -1] for n in (1, 2, 3)]
    assert torch.equal(tensors["s1_video"][:, :, -3:], torch.stack(new, 2))
    assert not torch.equal(new[0], new[1]) and not torch.equal(new[1], new[2])
    for n in (2, 3):  # what it holds is what the window before it made
        before, window = tensors[f"window_{n - 1}_video"], tensors[f"window_{n}_video"]
        assert torch.equal(window[:, :, :-1], before[:, :, 1:])


def test_the_sound_has_no_seam_above_the_vocoders_own(engine, after):
    """It is decoded as a whole: where windows join, its spectrum changes no more than elsewhere."""
    audio, rate = after.tensors["s1_audio"], after.sample_rate
    starts = [window.audio + window.new_audio[0] for window in after.job.extension.windows]
    waveform = after.waveform
    assert torch.equal(waveform, engine.host.decode_audio(audio)[:, : waveform.shape[1]])
    ratio = seam(waveform, starts, rate)
    print(f"spectral change at joins: {ratio:.2f} of the largest elsewhere")
    assert ratio < 1


def seam(waveform: torch.Tensor, joins: list[int], rate: int) -> float:
    """The largest change of the spectrum from 10 ms to the next within 20 ms of a join, against
    the largest elsewhere."""
    hop = rate // 100
    window = torch.hann_window(2 * hop)
    spectrum = torch.stft(waveform, 2 * hop, hop, window=window, return_complex=True).abs()
    change = (spectrum + 1e-5).log().diff(dim=2).abs().mean(dim=(0, 1))
    near = torch.zeros(len(change), dtype=torch.bool)
    for join in joins:  # a latent is of 4 hops
        near[4 * join - 5 : 4 * join] = True
    return (change[near].max() / change[~near].max()).item()


def test_the_known_latents_are_of_the_frames_and_the_sound_next_to_the_new_ones(engine, film):
    tail = pixels_of(list(first_frames(film, ""))[-17:], 64, 64)
    known = conditions.encode(engine.host, longer(film, 1.0))
    assert torch.equal(known["video_latent"][:, :, :3], engine.host.encode_video(tail))
    assert known["video_latent"].shape[2] == 3 + 3 and not known["video_latent"][:, :, 3:].any()
    sound = read_sound(film, "")
    _, latent = engine.host.encode_audio(sound._replace(samples=sound.samples[:, :60000]))
    assert torch.equal(known["audio_latent"][:, :, :31], latent[:, :, :31])
    assert known["audio_latent"].shape[2] == 56 and not known["audio_latent"][:, :, 32:].any()


def test_a_film_without_sound_goes_on_from_silence(engine, film, tmp_path, capsys):
    path = tmp_path / "silent.mp4"
    with av.open(str(film)) as source, av.open(str(path), "w") as silent:
        copied = silent.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = copied
                silent.mux(packet)
    known = conditions.encode(engine.host, longer(path, -1.0))["audio_latent"]
    assert "has no sound: what is added goes on from silence" in capsys.readouterr().out
    _, silence = engine.host.encode_audio(Sound(torch.zeros(2, 48000), 16000))
    assert torch.allclose(known[:, :, 30:50], silence[:, :, 30:50], atol=1e-5)


@pytest.mark.parametrize("windows", [1, 3])
def test_an_interrupted_run_goes_on_to_the_same_bits(engine, film, after, tmp_path, windows):
    job, path = longer(film, 1.0), tmp_path / "state.safetensors"
    identity = run_identity(job, engine.workspace, engine.options)
    ended = []

    def stop(run):
        ended.append(run)
        save_state(path, run, identity)
        if len(ended) == windows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(engine, job, on_stage_end=stop)
    run = restore_state(path, job, identity, engine.workspace.dtype)
    assert [stage.window.number for stage in run.stages_left] == [1, 2, 3][windows:]
    result = made(engine, job, resume=lambda job: run)
    assert torch.equal(result.frames, after.frames)
    assert torch.equal(result.waveform, after.waveform)
    other = longer(film, 1.0, seed=8)
    with pytest.raises(UserError, match="seed"):
        restore_state(path, other, run_identity(other, engine.workspace, engine.options), run)


def test_it_is_written_as_it_is_decoded(engine, film, tmp_path):
    path = tmp_path / "longer.mp4"
    made(engine, longer(film, 1.0), write=lambda clip: clip.write_mp4(path))
    assert read_video(path)["video_seconds"] == (FRAMES + 24) / RATE


def test_a_file_that_has_fewer_frames_than_it_says_is_refused(film, engine):
    job = longer(film, 1.0)
    job = replace(job, retake=replace(job.retake, source_frames=FRAMES + 1))
    with pytest.raises(UserError, match="got 30 frames, wanted 31"):
        conditions.check(job)
