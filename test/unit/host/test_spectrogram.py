"""Log-mel spectrograms by torchaudio's and Slaney's definitions."""

import math

import numpy as np
import pytest
import torch
from helpers import one_thread, randn, rel, tone  # noqa: F401

from ltx_neuron.host.input_files import can_resample
from ltx_neuron.host.spectrogram import MelSizes, log_mel, mel_filters, resample

SIZES = MelSizes(rate=16000, bins=64, hop=160, window=1024)
# float32 against float64: the filters' own rounding (measured 2.4e-6), and that of a sum of 1024.
RESAMPLED, SPECTRUM = 5e-6, 1e-5


@pytest.mark.parametrize("rate, samples", [(44100, 4410), (48000, 1001), (8000, 333)])
def test_resampling_is_the_windowed_sinc_of_torchaudio(rate, samples):
    """By its definition, one sample at a time and in float64."""
    divisor = math.gcd(rate, 16000)
    old, new = rate // divisor, 16000 // divisor
    cutoff, sound = 0.99 * min(old, new), randn(1, samples)
    time = torch.arange(math.ceil(new * samples / old), dtype=torch.float64)[:, None] * (old / new)  # in old samples
    t = ((torch.arange(samples, dtype=torch.float64) - time) * (cutoff / old)).clamp(-6, 6)
    kernel = torch.sinc(t) * (math.pi * t / 12).cos() ** 2 * (cutoff / old)
    assert rel(resample(sound, rate, 16000), (kernel @ sound[0].double())[None]) < RESAMPLED
    assert can_resample(rate, 16000) and not can_resample(44999, 16000)


def test_filters_are_slaneys_triangles_of_equal_area():
    filters = mel_filters(SIZES)
    assert filters.shape == (513, 64) and (filters >= 0).all()
    centres = torch.linspace(0, 8000, 513)[filters.argmax(0)]
    # 66.7 Hz apart up to 1 kHz, then each 6.4 ** (1 / 27) times the last in steps of one mel.
    mels = torch.where(centres < 1000, centres / (200 / 3), 15 + (centres / 1000).log() * 27 / math.log(6.4))
    top = 15 + 27 * math.log(8) / math.log(6.4)
    assert (mels - torch.arange(1, 65) * top / 65).abs().max() < 0.15  # a bin is 15.6 Hz wide
    wide = filters[:, 20:]  # of those that have enough bins to be summed
    assert ((wide.sum(0) * 15.625 - 1).abs() < 0.05).all()


@pytest.mark.parametrize("samples", [1600, 1601])
def test_the_spectrogram_is_of_magnitudes_around_each_hop_with_reflected_ends(samples):
    sound = randn(2, samples)
    padded = np.pad(sound.double().numpy(), ((0, 0), (512, 512)), mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1024) / 1024)
    frames = [padded[:, i : i + 1024] * window for i in range(0, samples + 1, SIZES.hop)]
    magnitudes = np.abs(np.fft.rfft(np.stack(frames, axis=1)))
    expected = np.log(np.maximum(magnitudes @ mel_filters(SIZES).double().numpy(), 1e-5))
    assert rel(log_mel(sound, SIZES)[0], torch.from_numpy(expected)) < SPECTRUM
    assert (log_mel(torch.zeros(2, 2000), SIZES) == math.log(1e-5)).all()
