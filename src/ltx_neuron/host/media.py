"""Reads sound and video of users' files by the rules of upstream's pipelines.

Source: ltx_pipelines utils/media_io/decode.py. If PyAV cannot read a file, a UserError names the
file and its flag.
"""

import math
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ltx_neuron.errors import UserError, reason, refusal
from ltx_neuron.files import check_readable, check_regular
from ltx_neuron.host.images import MAX_SIDE, fill
from ltx_neuron.sampling.extension import check_source, default_window
from ltx_neuron.sampling.latents import SPACE_SCALE, TIME_SCALE
from ltx_neuron.sampling.size import Size

# Full scale of integer sample formats.
_FULL_SCALE = {"u8": 2**7, "s16": 2**15, "s32": 2**31}


class Sound(NamedTuple):
    """samples  float32 (channels, N), in [-1, 1] if the file's are
    rate     samples per second
    """

    samples: Tensor
    rate: int


@contextmanager
def _opened(path: str | Path, flag: str) -> Iterator:
    """The file as PyAV's container. PyAV's errors in the block become UserError."""
    import av
    from av.error import FFmpegError

    advice = f"pass another file with {flag}"
    try:
        check_regular(path)
        with av.open(str(path)) as container:
            yield container
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: {advice}") from None
    except PermissionError as error:
        raise refusal(error, flag) from None
    except (FFmpegError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}\n{advice}") from None


def read_sound(
    path: str | Path, flag: str, start: float = 0.0, duration: float | None = None
) -> Sound | None:
    """The file's first sound track from `start` on, for `duration` seconds or to its end. None if
    there is no sound."""
    with _opened(path, flag) as container:
        stream = next(iter(container.streams.audio), None)
        if stream is None:
            return None
        container.seek(int(start / stream.time_base), stream=stream)
        parts, first, base = [], math.nan, stream.time_base
        for frame in container.decode(stream):
            if frame.pts is None:
                continue
            begins = float(frame.pts * base)
            if begins + frame.samples / frame.sample_rate < start:
                continue
            if duration is not None and begins > start + duration:
                break
            first = first if parts else begins
            parts.append(_samples(frame))
        rate = stream.rate
    if not parts:
        return None
    samples = np.concatenate(parts, axis=1)
    # Frames have the codec's boundaries. Times before 0 (encoder delay) count as 0.
    samples = samples[:, max(0, round((start - first) * rate)) :]
    if duration is not None:
        samples = samples[:, : round(duration * rate)]
    return Sound(torch.from_numpy(np.ascontiguousarray(samples)), rate)


def _samples(frame) -> np.ndarray:
    """A frame's samples, float32 (channels, N)."""
    name = frame.format.name.removesuffix("p")
    samples = frame.to_ndarray().astype(np.float32)
    if name == "u8":  # its silence is 128
        samples -= _FULL_SCALE[name]
    if name in _FULL_SCALE:
        samples /= _FULL_SCALE[name]
    if not frame.format.is_planar:  # (1, N * channels)
        samples = samples.reshape(-1, len(frame.layout.channels)).T
    return samples


def footage(path: str | Path, flag: str, upright: bool = True) -> Size:
    """A video file's size. Frames are counted if the header has no number of frames. Raises
    UserError, with the command that fixes it, if the frame rate varies.

    upright  apply the display matrix, as for a phone's portrait video
    """
    with _opened(path, flag) as container:
        stream = _video_stream(container, path, flag)
        if not stream.average_rate:
            raise ValueError("it has no frame rate")
        context, rate = stream.codec_context, float(stream.average_rate)
        number = stream.frames or sum(1 for _ in container.decode(stream))
        height, width = context.height, context.width
    _check_constant_rate(path, flag)
    if upright:
        height, width = next(first_frames(path, flag)).shape[:2]
    return Size(height, width, number, rate)


# Allowed difference of the shortest and longest time between frames, relative to the mean.
# Containers round times, Matroska to a millisecond.
_UNEVEN = 0.1


def _check_constant_rate(path: str | Path, flag: str) -> None:
    """Raise UserError if a file's frame rate varies. Frames are read by number, so their speed
    would change."""
    with _opened(path, flag) as container:
        stream = _video_stream(container, path, flag)
        times = _packet_times(container, stream)
        base, said = float(stream.time_base), float(stream.average_rate)
        expected = max(3, stream.frames)
    if len(times) < expected:
        return  # too few to decide, or a truncated file, which decoding reports
    steps = [after - before for before, after in pairwise(sorted(times))]
    mean = sum(steps) / len(steps)
    if mean <= 0:
        return
    spread, rate = max(steps) - min(steps), 1 / mean
    if spread > _UNEVEN * mean + 2 * base or abs(rate - said) > _UNEVEN * rate:
        name = f"{Path(path).stem}-constant.mp4"
        command = shlex.join(["ffmpeg", "-i", str(path), "-vf", f"fps={round(rate, 3):g}", name])
        raise UserError(
            f"{flag} {path} has a variable frame rate: frames last {min(steps):.4g} to"
            f" {max(steps):.4g} s, {rate:.4g} per second on average, {said:.4g} by its header;"
            f" wanted a constant rate.\nType: {command}"
        )


def _quarter_turns(frame, path: str | Path) -> int:
    """The quarter turns, counterclockwise, of a decoded frame's display matrix. Raises UserError
    for a matrix that mirrors or turns by another angle."""
    from av.sidedata.sidedata import Type

    data = frame.side_data.get(Type.DISPLAYMATRIX)
    if data is None:
        return 0
    a, b, _, c, d = np.frombuffer(bytes(data), dtype=np.int32)[:5].astype(np.int64)
    upright = {(1, 0, 0, 1): 0, (0, -1, 1, 0): 1, (-1, 0, 0, -1): 2, (0, 1, -1, 0): 3}
    signs = tuple(np.sign([a, b, c, d]).tolist())
    if signs not in upright:
        name = f"{Path(path).stem}-upright.mp4"
        command = shlex.join(["ffmpeg", "-i", str(path), "-c:a", "copy", name])
        raise UserError(
            f"{path} is displayed mirrored or at an odd angle; wanted an upright video.\n"
            f"Type: {command}"
        )
    return upright[signs]


def timed_frames(path: str | Path, flag: str, seconds: float) -> int | None:
    """The number of frames of `frames_until`, from the file's packets; None if they have no
    times."""
    with _opened(path, flag) as container:
        stream = _video_stream(container, path, flag)
        times = _packet_times(container, stream)
    if not times:
        return None
    return sum(0 <= time < seconds for time in times)


def _packet_times(container, stream) -> list[float]:
    """Start times of a video's frames in seconds, from its packets; empty if one has no time."""
    times = [packet.pts for packet in container.demux(stream) if packet.size]
    return [] if None in times else [float(time * stream.time_base) for time in times]


def video_size(
    path: str | Path,
    flag: str,
    extend: float | None = None,
    window_frames: int | None = None,
    upright: bool = True,
) -> Size:
    """The size of a retake's file, or of each window of an extended one. Raises UserError, with the
    command that cuts and scales the file, for a size that the model cannot have."""
    check_readable(path, flag, f"; pass a video as {flag} FILE")
    size = footage(path, flag, upright)
    frames = size.num_frames
    if extend is None:
        frames = max(1, (frames - 1) // TIME_SCALE * TIME_SCALE + 1)
    else:
        check_source(frames)
    sides = tuple(max(SPACE_SCALE, side // SPACE_SCALE * SPACE_SCALE) for side in size.sides)
    if (size.num_frames, size.sides) != (frames, sides):
        name = f"{Path(path).stem}-{sides[0]}x{sides[1]}x{frames}.mp4"
        scaled = ("ffmpeg", "-i", path, "-vf", f"scale={sides[1]}:{sides[0]}")
        command = shlex.join(map(str, (*scaled, "-frames:v", frames, name)))
        counted = "8k+1 frames and " if extend is None else ""
        raise UserError(
            f"{flag} {path} has {size.num_frames} frames of {size.height}x{size.width}; wanted"
            f" {counted}sides that are multiples of {SPACE_SCALE}.\nType: {command}"
        )
    if extend is None:
        return size
    window = default_window(extend, frames, size.frame_rate)
    return replace(size, num_frames=window if window_frames is None else window_frames)


def frames_until(
    path: str | Path, flag: str, seconds: float, upright: bool = True
) -> Iterator[np.ndarray]:
    """Frames, uint8 (H, W, 3), with times from 0 to before `seconds`; by number if the file has no
    times. upright: as displayed, not as stored."""
    with _opened(path, flag) as container:
        stream = _video_stream(container, path, flag)
        for frame in container.decode(stream):
            if frame.pts is None:
                break
            time = float(frame.pts * stream.time_base)
            if time >= seconds:
                return
            if time >= 0:
                yield _rgb(frame, path, upright)
        else:
            return
        rate = float(stream.average_rate)
    yield from islice(first_frames(path, flag, upright), round(seconds * rate))


def first_frames(path: str | Path, flag: str, upright: bool = True) -> Iterator[np.ndarray]:
    """All frames, uint8 (H, W, 3), independent of their times. upright: as displayed, not as
    stored."""
    with _opened(path, flag) as container:
        for frame in container.decode(_video_stream(container, path, flag)):
            yield _rgb(frame, path, upright)


def pixels_of(frames: Iterable[np.ndarray], height: int, width: int) -> Tensor:
    """Frames, scaled to fill height x width and cropped around their centre, as pixels
    (1, 3, F, height, width) in [-1, 1]."""
    return torch.cat([fill(frame, height, width) for frame in frames], dim=2)


def _video_stream(container, path: str | Path, flag: str):
    stream = next(iter(container.streams.video), None)
    if stream is None:
        raise UserError(f"{path} has no video: pass a video file with {flag}")
    if max(stream.codec_context.height, stream.codec_context.width) > MAX_SIDE:
        raise ValueError(f"its frames have more than {MAX_SIDE} pixels on a side")
    stream.thread_type = "AUTO"
    return stream


def _rgb(frame, path: str | Path, upright: bool) -> np.ndarray:
    pixels = frame.to_rgb().to_ndarray()
    turns = _quarter_turns(frame, path) if upright else 0
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels
