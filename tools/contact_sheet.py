"""Show clips on one picture: python tools/contact_sheet.py --output sheet.png CLIP.mp4 ...

A row for each clip: frames, evenly spaced in time from the first to the last, and beside them the
spectrogram of its sound, from 0 to 2 kHz over the same time.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from ltx_neuron import errors
from ltx_neuron.host.input_files import first_frames, read_sound

FRAMES = 7
HIGHEST = 2000.0  # Hz
RANGE = 60.0  # dB below the loudest that is black
WINDOW, STEP = 0.064, 0.008  # seconds of the spectrogram
GAP = 4  # pixels


def read(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Frames (F, H, W, 3) uint8, the sound's mean channel (samples,) and its rate in Hz; an empty
    sound where the file has none."""
    frames = np.stack(list(first_frames(path, "CLIP")))
    sound = read_sound(path, "CLIP")
    if sound is None:
        return frames, np.zeros(0), 1
    return frames, sound.samples.mean(0).numpy(), sound.rate


def spectrogram(sound: np.ndarray, rate: int, height: int, width: int) -> np.ndarray:
    """The loudness (height, width) uint8 of frequencies up to HIGHEST, which is at the top."""
    window, step = round(WINDOW * rate), round(STEP * rate)
    if not sound.any():
        return np.zeros((height, width), np.uint8)
    padded = np.pad(sound, window // 2)
    pieces = np.lib.stride_tricks.sliding_window_view(padded, window)[::step]
    power = np.abs(np.fft.rfft(pieces * np.hanning(window), 4 * window)) ** 2
    power = power[:, : round(HIGHEST / rate * 4 * window)]
    loudness = 10 * np.log10(power / power.max() + 1e-12)
    grey = np.clip(255 * (1 + loudness / RANGE), 0, 255).astype(np.uint8)
    return np.asarray(Image.fromarray(grey.T[::-1]).resize((width, height), Image.BILINEAR))


def row(frames: np.ndarray, sound: np.ndarray, rate: int) -> np.ndarray:
    """One clip's frames and spectrogram (H, W, 3), side by side."""
    chosen = frames[np.linspace(0, len(frames) - 1, FRAMES).round().astype(int)]
    height, width = chosen.shape[1:3]
    gap = np.full((height, GAP, 3), 255, np.uint8)
    heard = spectrogram(sound, rate, height, 2 * width)[..., None].repeat(3, -1)
    return np.concatenate([part for shown in (*chosen, heard) for part in (shown, gap)], 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clips", nargs="+", type=Path, metavar="CLIP.mp4", help="of one size")
    parser.add_argument("--output", type=Path, required=True, metavar="PICTURE")
    args = parser.parse_args()
    rows = [row(*read(clip)) for clip in args.clips]
    if len({each.shape for each in rows}) > 1:
        parser.error("the clips differ in size; give clips of one height and width")
    gap = np.full((GAP, *rows[0].shape[1:]), 255, np.uint8)
    Image.fromarray(np.concatenate([part for each in rows for part in (each, gap)])).save(
        args.output
    )
    print(args.output)


if __name__ == "__main__":
    errors.run(main)
