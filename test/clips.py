"""Clips with a flash and a click at one time, as recorders and editors write them; what is seen and heard in a file."""

import os
import shlex
import struct
import subprocess
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np

FLASH = 16  # the number of the white frame
RATE = 24
BOX, LEFT = 12, 14  # a grey square in the dark frames: its sides, and how far from the left
MIRROR = (-1, 0, 0, 1)


def noise_with_click(rate: int, seconds: float, click: float, channels: int = 2) -> np.ndarray:
    """A loud click in soft noise, float32 (channels, samples)."""
    sound = 0.003 * np.random.default_rng(0).standard_normal((channels, round(rate * seconds)))
    first = round(rate * click)
    sound[:, first : first + rate // 100] = 0.8
    return sound.astype(np.float32)


def write_clip(
    path: Path,
    frames: int = 33,
    sides: tuple[int, int] = (64, 96),
    times: Callable[[int], float] = lambda number: number / RATE,
    moved: Callable[[float], float | None] = lambda time: time,
    codec: str | None = "aac",
    rate: int = 48000,
    layout: str = "stereo",
    sound_at: float = 0.0,
    seconds: float = 33 / RATE,
    container: dict[str, str] | None = None,
) -> Path:
    """A clip. Its click is at the white frame's time, whatever is moved. times: of the frames, in seconds; moved: a
    sound packet's time in the file, or None to drop it; codec: of the sound, if any; sound_at: where it begins."""
    top = (sides[0] - BOX) // 2
    with av.open(str(path), "w", options=container or {}) as file:
        video = file.add_stream("libx264", rate=RATE, options={"crf": "5", "bf": "0"})
        video.height, video.width, video.pix_fmt = *sides, "yuv420p"
        video.codec_context.time_base = Fraction(1, 12000)
        if codec:
            audio = file.add_stream(codec, rate=rate, layout=layout)
        for number in range(frames):
            picture = np.full((*sides, 3), 235 if number == FLASH else 16, np.uint8)
            picture[top : top + BOX, LEFT : LEFT + BOX] = 235 if number == FLASH else 120
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = round(times(number) * 12000), Fraction(1, 12000)
            file.mux(video.encode(frame))
        file.mux(video.encode())
        if not codec:
            return path
        sound = noise_with_click(rate, seconds, times(FLASH) - sound_at, audio.codec_context.layout.nb_channels)
        for packet in encoded(audio, sound, rate, layout):
            if (time := moved(float(packet.pts * packet.time_base) + sound_at)) is not None:
                packet.pts = packet.dts = round(time / packet.time_base)
                file.mux(packet)
    return path


def encoded(stream, sound: np.ndarray, rate: int, layout: str) -> list:
    """The packets of a sound, float32 (channels, samples)."""
    resampler, packets = av.AudioResampler(stream.codec_context.format.name, layout, rate), []
    for first in range(0, sound.shape[1], 1024):
        samples = np.ascontiguousarray(sound[:, first : first + 1024])
        frame = av.AudioFrame.from_ndarray(samples, "fltp", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, first, Fraction(1, rate)
        packets += [each for some in resampler.resample(frame) for each in stream.encode(some)]
    return [*packets, *stream.encode()]


def turned(path: Path, matrix: tuple[int, int, int, int]) -> Path:
    """The MP4 with another display matrix in its picture's header."""
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 4 + 40  # version 0: 40 bytes before the matrix
    a, b, c, d = (number << 16 for number in matrix)
    content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    return path


def first_loud(samples: np.ndarray) -> int | None:
    """The first sample of (channels, N) that belongs to a click."""
    loud = np.nonzero(np.abs(samples).max(0) > 0.3)[0]
    return int(loud[0]) if len(loud) else None


class Seen(NamedTuple):
    """What a player shows: seconds of flash and click in the file's own time, the number of frames, the height and
    width of the box, and whether it is on the left."""

    flash: float | None
    click: float | None
    frames: int
    box: tuple[float, ...]
    left: bool


def seen(path: Path) -> Seen:
    """Read by PyAV alone: by the times of the file, without ltx_neuron."""
    flash = click = None
    frames, dark = 0, np.zeros((2, 2, 3))
    with av.open(str(path)) as file, suppress(av.error.FFmpegError):  # of a file that is cut off
        for frame in file.decode(video=0):
            pixels, frames = frame.to_ndarray(format="rgb24"), frames + 1
            if pixels.mean() <= 150:
                dark = pixels
            elif flash is None:
                flash = frame.time
    with av.open(str(path)) as file:
        for frame in file.decode(audio=0) if file.streams.audio else ():
            samples = frame.to_ndarray().astype(np.float32)
            samples = samples / (1 if frame.format.name.startswith("flt") else 2**15)
            if not frame.format.is_planar:
                samples = samples.reshape(-1, len(frame.layout.channels)).T
            if click is None and (at := first_loud(samples)) is not None:
                click = frame.time + at / frame.sample_rate
    grey = dark[..., 1]
    rows, columns = (np.nonzero((grey > 60).any(axis))[0] for axis in (1, 0))
    middle = grey[int(rows.mean())], grey[:, int(columns.mean())]
    box = tuple(float((line - 16.0).sum() / 104) for line in reversed(middle))  # also of blurred edges
    return Seen(flash, click, frames, box, bool(columns.mean() < dark.shape[1] / 2))


def run_printed(message: str, folder: Path) -> Path:
    """Run the command of a message as a user would, in a folder; return the new file."""
    import imageio_ffmpeg

    (bin := folder / "bin").mkdir(exist_ok=True)
    (bin / "ffmpeg").exists() or (bin / "ffmpeg").symlink_to(imageio_ffmpeg.get_ffmpeg_exe())
    command, before = message.partition("Type: ")[2], {each: each.stat().st_mtime_ns for each in folder.iterdir()}
    # ffmpeg would ask whether it may replace a file.
    how = dict(shell=True, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    done = subprocess.run(command, env=os.environ | {"PATH": f"{bin}:{os.environ['PATH']}"}, **how)
    assert done.returncode == 0, (command, done.stderr)
    made = folder / shlex.split(command)[-1]
    assert made not in before, "an older file was replaced"
    assert {each: each.stat().st_mtime_ns for each in before} == before
    return made
