"""A tiny video made longer by three windows: what is kept is kept bit for bit, and the sound has no
seam. Interrupted, killed, guided, and on more ranks: test/slow/test_extension_runs.py."""

import av
import longer_film
import pytest
import torch
import torch.nn.functional as F
from engines import opened_workspace
from helpers import one_thread, read_video, tone  # noqa: F401
from jobs import replace
from longer_film import FRAMES, RATE, joins, longer, made, source

from ltx_neuron.demo import ASSETS
from ltx_neuron.errors import UserError
from ltx_neuron.host import encode_inputs
from ltx_neuron.host.media import Sound, first_frames, pixels_of, read_sound
from ltx_neuron.host.models import HostModels
from ltx_neuron.sampling.extension import joined

film, prepared, engine = longer_film.film, longer_film.prepared, longer_film.engine  # fixtures
after = longer_film.after


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


def test_the_sound_is_decoded_as_a_whole(engine, after):
    audio, waveform = after.tensors["s1_audio"], after.waveform
    assert torch.equal(waveform, engine.host.decode_audio(audio)[:, : waveform.shape[1]])


def test_a_tone_that_windows_are_cut_from_has_no_seam_where_they_join(after, artifacts):
    """The demo's encoder and vocoder are trained: a steady tone stays steady. At joins its spectrum
    changes by 1.3 of the usual change; decoded window by window by 181, and by 9 where a window is
    a tenth quieter (measured)."""
    config = opened_workspace(ASSETS, artifacts).checkpoint.config
    demo, extension = HostModels(ASSETS.checkpoint, config, torch.float32), after.job.extension
    count, at = extension.audio_latents, joins(after.job)
    clip = demo.encode_audio(Sound(tone(48000, count / 25 + 0.02) * 0.5, 48000))[1][:, :, :count]
    tensors, length = dict(after.tensors), after.tensors["window_1_audio"].shape[2]
    tensors["audio_latent"] = torch.zeros_like(clip)
    tensors["audio_latent"][:, :, extension.known_audio] = clip[:, :, extension.known_audio]
    for window in extension.windows:
        tensors[f"{window.key}_audio"] = clip[:, :, window.audio : window.audio + length]
    _, audio = joined(extension, tensors)
    quieter = torch.cat([clip[:, :, : at[1]], clip[:, :, at[1] :] * 0.9], dim=2)
    apart = [
        F.pad(sound := demo.decode_audio(part), (0, 1920 * part.shape[2] - sound.shape[1]))
        for part in clip.tensor_split(at, dim=2)
    ]
    sounds = demo.decode_audio(audio), demo.decode_audio(quieter), torch.cat(apart, dim=1)
    whole, stepped, cut = (seam(sound, at, demo.sample_rate) for sound in sounds)
    print(f"at joins: {whole:.1f}; a window a tenth quieter: {stepped:.1f}; cut: {cut:.0f}")
    assert torch.equal(audio, clip) and whole < 3 and stepped > 6 and cut > 60


def seam(waveform: torch.Tensor, joins: list[int], rate: int) -> float:
    """The largest change of the spectrum from 10 ms to the next within 20 ms of a join, against
    the median elsewhere."""
    hop = rate // 100
    window = torch.hann_window(2 * hop)
    spectrum = torch.stft(waveform, 2 * hop, hop, window=window, return_complex=True).abs()
    change = (spectrum + 1e-3 * spectrum.max()).log().diff(dim=2).abs().mean(dim=(0, 1))
    near = torch.zeros(len(change), dtype=torch.bool)
    for join in joins:  # a latent is of 4 hops
        near[4 * join - 5 : 4 * join + 1] = True
    return (change[near].max() / change[~near].median()).item()


def test_the_known_latents_are_of_the_frames_and_the_sound_next_to_the_new_ones(engine, film):
    tail = pixels_of(list(first_frames(film, ""))[-17:], 64, 64)
    known = encode_inputs.encode(engine.host, longer(film, 1.0))
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
    known = encode_inputs.encode(engine.host, longer(path, -1.0))["audio_latent"]
    assert "has no sound: the new part continues from silence" in capsys.readouterr().out
    _, silence = engine.host.encode_audio(Sound(torch.zeros(2, 48000), 16000))
    assert torch.allclose(known[:, :, 30:50], silence[:, :, 30:50], atol=1e-5)


def test_it_is_written_as_it_is_decoded(engine, film, tmp_path):
    path = tmp_path / "longer.mp4"
    made(engine, longer(film, 1.0), write=lambda clip: clip.write(path))
    assert read_video(path)["video_seconds"] == (FRAMES + 24) / RATE


def test_a_file_that_has_fewer_frames_than_it_says_is_refused(film, engine):
    job = longer(film, 1.0)
    job = replace(job, retake=replace(job.retake, source_frames=FRAMES + 1))
    with pytest.raises(UserError, match="got 30 frames, wanted 31"):
        encode_inputs.check(job)
