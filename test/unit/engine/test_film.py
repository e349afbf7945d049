"""Where windows of a chunked clip meet: pictures are blended and sounds cross, and both stay at their times."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from clips import first_loud
from helpers import one_thread, tone  # noqa: F401

from ltx_neuron.engine.decode import Decoder
from ltx_neuron.engine.film import Film, JoinedSound, blended
from ltx_neuron.engine.outputs import JobRun
from ltx_neuron.job import Job
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.chunks import layout

RATE, SOUND = 24.0, 48000
MEL, HOP = 4, SOUND // 100  # a latent has four rows of the spectrogram but the first, with one


def test_frames_of_the_carry_are_mixed_into_the_end_of_the_window_before():
    windows = layout(73, 41, 17, 3)
    values = (0.0, 0.8, 0.4)

    def shown(windows, size: int) -> list[int]:
        parts = ((w, torch.full((w.frames, 1, 2, 3), x).split(size)) for w, x in zip(windows, values, strict=True))
        return torch.cat([*blended(parts)])[:, 0, 0, 0].tolist()

    for size in (1, 5, 41):  # frames decoded at a time
        mixed = [(a + (b - a) * k / 4) * 255 for a, b in ((0.0, 0.8), (0.8, 0.4)) for k in (1, 2, 3)]
        wanted = [0] * 38 + mixed[:3] + [204] * 21 + mixed[3:] + [102] * 8
        assert shown(windows, size) == pytest.approx(wanted, abs=1)
    assert shown(layout(73, 41, 17, 0), 5) == [0] * 41 + [204] * 24 + [102] * 8


def test_sounds_cross_in_40_ms_without_a_step_and_as_many_samples_are_taken_as_will_not_change():
    windows, whole = layout(73, 41, 17, 17), JoinedSound(SOUND, RATE)
    parts = JoinedSound(SOUND, RATE)
    sound, taken = tone(SOUND, 73 / RATE), []
    for window in windows:
        first = round(window.start / RATE * SOUND)
        piece = sound[:, first : first + round(window.frames / RATE * SOUND)]
        whole.add(window, piece)
        parts.add(window, piece)
        taken.append(parts.take(sum(x.shape[1] for x in taken), 10**9))
    assert torch.equal(torch.cat(taken, 1), whole.samples) and parts.samples.shape[1] == 0
    # cos and sin of one sound: at most its square root of two, and the same one everywhere else
    assert whole.samples.shape == sound.shape
    crossed = slice(round(41 / RATE * SOUND) - 1920, round(41 / RATE * SOUND))
    assert torch.equal(whole.samples[:, : crossed.start], sound[:, : crossed.start])
    assert (whole.samples[:, crossed] - sound[:, crossed]).abs().max() < 0.25


# Whether the sound is a file's, windows are decoded ahead, and all are shown at the end
@pytest.mark.parametrize(("given", "ahead", "late"), [(False, False, False), (True, True, False), (False, False, True)])
def test_flash_and_click_of_every_second_stay_within_a_frame_over_the_whole_clip(given, ahead, late, tmp_path):
    """The windows' decoders are stand-ins that show a flash and sound a click at each second of the clip."""
    import av

    fields = {"chunk_pixel_frames": 41, "chunk_carry_frames": 17} | ({"audio_path": "song.wav"} if given else {})
    job = Job.validated({"prompt": "a storm", "height": 64, "width": 64, "num_frames": 41 + 24 * 7, **fields})
    chunks = [window.chunk for window in job.windows]

    def clicks(start: float, seconds: float) -> torch.Tensor:
        sound = torch.zeros(2, round(seconds * SOUND))
        for second in range(1, 9):
            at = round((second - start) * SOUND)
            if 0 <= at < sound.shape[1]:
                sound[:, at : at + 300] = 0.8
        return sound

    def pictures(latent, seed, keyframes, exact):
        chunk = chunks[seed - job.seed]
        times = torch.arange(chunk.start, chunk.start + chunk.frames)
        yield (times % 24 == 0)[:, None, None, None].float().expand(-1, 64, 64, 3).clone()

    def sound(latent):  # as long as the vocoder's: less than the window
        chunk, rows = chunks[int(latent)], MEL * round(41 / RATE * 25) - 3
        return clicks(chunk.start / RATE, rows * HOP / SOUND)

    host = SimpleNamespace(sample_rate=SOUND)
    decoder, run = Decoder(host, Recorder(), ahead, pictures, sound), JobRun(job)
    path, heard = tmp_path / "storm.mp4", []
    whole = {"waveform": clicks(0, 9), "waveform_rate": torch.tensor(SOUND)}
    with Film(decoder, run, lambda clip: clip.write(path), True, not ahead, late, lambda: None) as film:
        for chunk in chunks:
            run.window = chunk.number
            run.tensors = {"s1_video": torch.zeros(1), "s1_audio": torch.tensor(chunk.number)} | whole
            film.add_window()
        film.result()
    with av.open(str(path)) as file:
        seen = [frame.time for frame in file.decode(video=0) if frame.to_ndarray(format="gray").mean() > 100]
    with av.open(str(path)) as file:
        samples = np.concatenate([frame.to_ndarray() for frame in file.decode(audio=0)], 1)
    while (at := first_loud(samples[:, (skipped := int(heard[-1] * SOUND) + 4800 if heard else 0) :])) is not None:
        heard.append((skipped + at) / SOUND)
    assert len(seen) == len(heard) + 1 == 9 and seen[0] == 0  # the first picture is a flash too
    assert max(abs(a - b) for a, b in zip(seen[1:], heard, strict=True)) < 1 / RATE
