"""The contact sheet shows a clip's frames and the spectrum of its sound."""

import contact_sheet
import numpy as np
import pytest
import torch

from ltx_neuron.host.video import write_video

RATE = 48000


def tone(hertz: float, start: float, stop: float, seconds: float = 2.0) -> np.ndarray:
    times = np.arange(round(seconds * RATE)) / RATE
    return np.sin(2 * np.pi * hertz * times) * ((times >= start) & (times < stop))


def test_a_tone_is_bright_at_its_pitch_and_time_alone():
    image = contact_sheet.spectrogram(tone(500, 1.0, 1.5), RATE, 100, 200)
    y, x = np.unravel_index(image.argmax(), image.shape)
    assert y == pytest.approx(75, abs=2) and 100 <= x < 150  # 500 of 2000 Hz, from the bottom
    assert image[75, 50] == 0 and image[20, 125] < 100
    assert not contact_sheet.spectrogram(np.zeros(0), RATE, 10, 20).any()


def test_a_written_clip_is_read_back_with_its_sound(tmp_path):
    frames = np.zeros((25, 64, 96, 3), np.uint8)
    frames[12:] = 200
    sound = torch.from_numpy(tone(700, 0.5, 0.8, 25 / 24)).float().expand(2, -1)
    path = tmp_path / "clip.mp4"
    write_video(path, [torch.from_numpy(frames)], 24.0, lambda: sound, RATE)
    read, heard, rate = contact_sheet.read(path)
    assert read.shape == frames.shape and rate == RATE
    assert read[3].mean() < 20 and read[20].mean() > 180
    quiet, loud = (np.abs(heard[round(t * rate) :][:2400]).max() for t in (0.2, 0.6))
    assert loud > 0.5 > 0.05 > quiet
