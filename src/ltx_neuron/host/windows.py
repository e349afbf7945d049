"""A long sound in windows of time, so that its vocoder's memory is that of a window."""

import torch
from torch import Tensor, nn

WINDOW = 512  # frames of the mel spectrogram: 5.1 s, so that a clip of 121 frames is one window
# Frames before and after it that are decoded as well: more than the 43 that its samples depend on,
# with the released vocoder's filters.
MARGIN = 64


def vocode(vocoder: nn.Module, mel: Tensor) -> Tensor:
    """The waveform (1, 2, samples) of a mel spectrogram (1, 2, T, bins): to rounding what
    ltx-core's vocoder makes of the whole."""
    frames = mel.shape[2]
    windows = []
    for start in range(0, frames, WINDOW):
        begin, stop = max(0, start - MARGIN), min(start + WINDOW, frames)
        samples = vocoder(mel[:, :, begin : stop + MARGIN])
        each = samples.shape[2] // (min(stop + MARGIN, frames) - begin)
        # A copy: the rest of the samples is not kept.
        windows.append(samples[:, :, (start - begin) * each : (stop - begin) * each].clone())
    return torch.cat(windows, dim=2)
