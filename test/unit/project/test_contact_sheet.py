"""The contact sheet shows a clip's frames and the spectrum of its sound."""

import contact_sheet
import numpy as np
import pytest

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
