"""Log-mel spectrograms by torchaudio's and Slaney's definitions."""

import math

import pytest
import torch
from helpers import one_thread, randn, rel, tone  # noqa: F401

from ltx_neuron.host.spectrogram import MelSizes, can_resample, resample

pytestmark = pytest.mark.usefixtures("one_thread")

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
