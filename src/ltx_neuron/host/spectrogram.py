"""Samples of sound to the audio encoder's input: resampling, then a log-mel spectrogram.

Source: ltx-core model/audio_vae/ops.py (AudioProcessor), which uses torchaudio. These functions
give the same numbers without torchaudio, which has no build for every torch.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_ZERO_CROSSINGS, _ROLLOFF = 6, 0.99  # torchaudio.functional.resample's defaults
_FLOOR = 1e-5  # of a magnitude, before the logarithm
# Slaney's scale, of his Auditory Toolbox: linear up to 1 kHz, a logarithm above.
_HERTZ_A_MEL, _KNEE_HERTZ = 200 / 3, 1000.0
_KNEE_MELS, _LOG_STEP = _KNEE_HERTZ / _HERTZ_A_MEL, math.log(6.4) / 27


class MelSizes(NamedTuple):
    """Sizes of an audio encoder's spectrogram."""

    rate: int  # samples per second
    bins: int  # mel filters, from 0 to half the rate
    hop: int  # samples from a frame to the next
    window: int  # samples of a frame


def mel_sizes(config: Mapping[str, Any]) -> MelSizes:
    """The sizes in a checkpoint's config (as ltx-core's AudioEncoderConfigurator reads them)."""
    audio = config["audio_vae"]
    parameters, stft = audio["model"]["params"], audio["preprocessing"]["stft"]
    return MelSizes(
        parameters["sampling_rate"],
        parameters["ddconfig"]["mel_bins"],
        stft["hop_length"],
        stft["filter_length"],
    )


def resample(sound: Tensor, rate: int, new_rate: int) -> Tensor:
    """Samples (channels, N) at `rate` per second -> (channels, ceil(N * wanted / rate)) float32, by
    a windowed sinc, as torchaudio.functional.resample."""
    divisor = math.gcd(rate, new_rate)
    old, new = rate // divisor, new_rate // divisor
    if old == new:
        return sound.float()
    filters, reach = _sinc_filters(old, new)
    padded = F.pad(sound.float(), (reach, reach + old))
    phases = F.conv1d(padded[:, None], filters, stride=old)  # (channels, new, blocks)
    samples = phases.transpose(1, 2).flatten(1)
    return samples[:, : -(-new * sound.shape[1] // old)]


@cache
def _sinc_filters(old: int, new: int) -> tuple[Tensor, int]:
    """Filters (new, 1, taps) float32, one per sample of an output block, and the number
    of samples that they reach back."""
    cutoff = _ROLLOFF * min(old, new)
    reach = math.ceil(_ZERO_CROSSINGS * old / cutoff)
    # In float32 and in this order, for torchaudio's bits. float64 differs by 2e-6.
    t = torch.arange(-reach, reach + old) / old
    t = torch.arange(0, -new, -1)[:, None] / new + t
    t = (t * cutoff).clamp(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
    window = torch.cos(t * math.pi / _ZERO_CROSSINGS / 2) ** 2
    t = t * math.pi
    filters = torch.where(t == 0, 1.0, t.sin() / t) * (window * (cutoff / old))
    return filters[:, None], reach


def log_mel(sound: Tensor, sizes: MelSizes) -> Tensor:
    """Samples (channels, N) at the sizes' rate -> (1, channels, 1 + N // hop, bins), float32."""
    window, size = torch.hann_window(sizes.window), (sizes.window, sizes.hop)
    # (channels, frequencies, frames), of samples reflected at both ends
    spectrum = torch.stft(sound.float(), *size, window=window, return_complex=True)
    mel = spectrum.abs().transpose(1, 2) @ mel_filters(sizes)
    return mel.clamp(min=_FLOOR).log()[None]


@cache
def mel_filters(sizes: MelSizes) -> Tensor:
    """Triangular filters (window // 2 + 1, bins): equal widths in mels, areas in hertz."""
    frequencies = torch.linspace(0, sizes.rate // 2, sizes.window // 2 + 1)
    corners = _hertz(torch.linspace(0, _mels(sizes.rate / 2), sizes.bins + 2))
    widths = corners.diff()
    distances = corners - frequencies[:, None]  # (frequencies, bins + 2)
    falling, rising = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    return torch.minimum(falling, rising).clamp(min=0) * (2 / (corners[2:] - corners[:-2]))


def _mels(hertz: float) -> float:
    if hertz < _KNEE_HERTZ:
        return hertz / _HERTZ_A_MEL
    return _KNEE_MELS + math.log(hertz / _KNEE_HERTZ) / _LOG_STEP


def _hertz(mels: Tensor) -> Tensor:
    above = _KNEE_HERTZ * torch.exp(_LOG_STEP * (mels - _KNEE_MELS))
    return torch.where(mels < _KNEE_MELS, mels * _HERTZ_A_MEL, above)
