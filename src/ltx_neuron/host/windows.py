"""A long sound in windows of time, so that its decoding needs the memory of a window."""

import torch
from torch import Tensor, nn

# Latents of a sound: 5.1 s, so that a clip of 121 frames is one window; and those before it that
# are decoded as well: more than the 33 that its spectrogram depends on, in the released decoder.
# On those after it nothing depends.
LATENTS, LATENTS_BEFORE = 128, 40
STEP = 4  # frames of the mel spectrogram for a latent; the first one makes one
WINDOW = 512  # frames of the mel spectrogram: 5.1 s
# Frames before and after it that are decoded as well: more than the 43 that its samples depend on,
# with the released vocoder's filters.
MARGIN = 64


def spectrogram(decoder: nn.Module, latent: Tensor) -> Tensor:
    """The mel spectrogram (1, 2, 4T - 3, bins) of a sound's latents (1, 8, T, 16): to rounding what
    ltx-core's decoder makes of the whole."""
    if not _looks_back(decoder):
        return decoder(latent)
    windows = []
    for start in range(0, latent.shape[2], LATENTS):
        begin = max(0, start - LATENTS_BEFORE)
        mel = decoder(latent[:, :, begin : start + LATENTS])
        # Of each latent the STEP frames that end with its own; the first of all has only that one.
        windows.append(mel[:, :, max(0, (start - begin) * STEP - (STEP - 1)) :].clone())
    return torch.cat(windows, dim=2)


def _looks_back(decoder: nn.Module) -> bool:
    """Whether the spectrogram depends on a few latents before its own, as in the released decoder:
    not on later ones, nor on all of them by attention or a norm."""
    causal = getattr(decoder, "causality_axis", None)
    everywhere = {"AttnBlock", "GroupNorm"}
    return getattr(causal, "value", "") == "height" and not any(
        type(module).__name__ in everywhere for module in decoder.modules()
    )


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
