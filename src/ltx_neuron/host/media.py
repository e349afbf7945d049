"""Reads sound and video of users' files.

Frames are read by number. Time 0 is the first frame's, so sound and picture have one clock: where a
track has no sound there is silence, and sound before the picture is left out. A file without a
picture begins with its sound. For files whose tracks begin at 0 these are the rules of upstream's
pipelines (ltx_pipelines utils/media_io/decode.py).

A UserError names the file and its flag: PyAV cannot read it, or the model cannot take it. It then
has the ffmpeg command that makes a file that the model can take.
"""

import math
import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ltx_neuron.errors import UserError, os_reason, to_user_error
from ltx_neuron.files import check_readable, check_regular
from ltx_neuron.host.images import MAX_SIDE, fill, unreadable
from ltx_neuron.host.video import exact_frame_rate
from ltx_neuron.sampling.extension import check_source
from ltx_neuron.sampling.latents import SPACE_SCALE, TIME_SCALE
from ltx_neuron.sampling.size import Size

# Full scale of integer sample formats.
_FULL_SCALE = {"u8": 2**7, "s16": 2**15, "s32": 2**31}


class Sound(NamedTuple):
    samples: Tensor  # float32 (channels, N), in [-1, 1] if the file's are
    rate: int  # samples per second


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
        raise to_user_error(error, flag) from None
    except (FFmpegError, OSError, ValueError) as error:
        why = unreadable(path, moves=True) or os_reason(error)
        raise UserError(f"{flag} {path} cannot be read: {why}\n{advice}") from None


def read_sound(
    path: str | Path, flag: str, start: float = 0.0, duration: float | None = None
) -> Sound | None:
    """The file's first sound track from `start` on, for `duration` seconds or to its end, with
    silence where the track has none. None if there is no sound in that time."""
    parts, end, rate = [], 0, 0
    for at, frame in _placed(path, flag, start, duration):
        if at + frame.samples < 0:
            continue
        samples, rate = _samples(frame), frame.sample_rate
        parts.append(np.zeros((len(samples), max(0, at - end)), np.float32))
        parts.append(samples[:, max(0, end - at) :])
        end = max(end, at + frame.samples)
    if not parts:
        return None
    samples = np.concatenate(parts, axis=1)
    if duration is not None:
        samples = samples[:, : round(duration * rate)]
    return Sound(torch.from_numpy(np.ascontiguousarray(samples)), rate)


def hearing(
    path: str | Path, flag: str, start: float, duration: float | None
) -> tuple[float, float, float] | None:
    """When the sound of `read_sound` begins (below 0: before it is read), when it ends, and how
    long it is missing between, in seconds."""
    begins, end, missing, rate = None, 0, 0, 0
    for at, frame in _placed(path, flag, start, duration):
        if begins is None:
            begins = at
        elif at > end:
            missing += at - end
        end, rate = max(end, at + frame.samples), frame.sample_rate
    return None if begins is None else (begins / rate, end / rate, missing / rate)


# Frames' times are rounded, and jitter in recordings of screens. Less than this is no gap: a lost
# packet is longer (Opus 20 ms, AAC 21 ms). A longer gap than the other is a damaged time.
_JITTER, _MOST_SILENCE = 0.015, 3600


def _placed(
    path: str | Path, flag: str, start: float, duration: float | None
) -> Iterator[tuple[int, Any]]:
    """The sound's frames in the time that is read and some before it, each with the sample after
    `start` at which it begins."""
    from av.error import FFmpegError

    zero = _zero(path, flag)
    with _opened(path, flag) as container:
        stream = next(iter(container.streams.audio), None)
        if stream is None:
            return
        base, end = stream.time_base, -(2**62)
        with suppress(FFmpegError):  # there is nothing that early: it is read from its beginning
            container.seek(int((start + min(0.0, zero)) / base), stream=stream)
        for frame in container.decode(stream):
            rate, at = frame.sample_rate, max(end, 0)
            if frame.pts is not None:
                begins = float(frame.pts * base) - zero
                if duration is not None and begins > start + duration:
                    return
                at = round((begins - start) * rate)
            if abs(at - end) <= _JITTER * rate:
                at = end if end >= 0 else min(at, 0)
            if at - max(end, 0) > _MOST_SILENCE * rate:
                raise ValueError(f"its sound pauses for more than {_MOST_SILENCE} s")
            end = at + frame.samples
            yield at, frame


def _zero(path: str | Path, flag: str) -> float:
    """Seconds of the file's time at which its picture, or without one its sound, begins."""
    with _opened(path, flag) as container:
        stream = _picture(container) or next(iter(container.streams.audio), None)
        if stream is None:
            return 0.0
        first = next(container.decode(stream), None)
        return first.time or 0.0 if first else 0.0


def _samples(frame) -> np.ndarray:
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
    UserError, with the command that mends it, for a file whose frames cannot be read by number.
    upright: apply the display matrix, as for a phone's portrait video."""
    video = _inspected(path, flag, upright)
    if video.wrong:
        raise video.refusal(path, flag)
    return video.size


class _Footage(NamedTuple):
    size: Size
    wrong: list[str]  # why the file is refused, if it is
    filters: list[str]  # of ffmpeg, that mend it
    before: list[str]  # ffmpeg's options of the file

    def refusal(self, path: str | Path, flag: str, name: str = "even.mp4", *cut: Any) -> UserError:
        """With the command. cut: ffmpeg's options that end the new file."""
        filters = ["-vf", ",".join(self.filters)] if self.filters else []
        options = *_PICTURE, *filters, "-crf", "16", *_sound_options(path, flag), *cut
        command = ffmpeg(path, name, *options, before=self.before)
        return UserError(f"{flag} {path} {'; it '.join(self.wrong)}.\nType: {command}")


# Allowed difference of the shortest and longest time between frames, relative to the mean.
# Containers round times, Matroska to a millisecond.
_UNEVEN = 0.1
# The tracks that are read; ffmpeg would choose the largest. V: no cover.
_PICTURE, _TRACK = ("-map", "0:V:0"), ("-map", "0:a:0")
# An encoder joins what a gap divides.
_FILLED = "-af", "aresample=async=1:min_hard_comp=0.01"


def _sound_options(path: str | Path, flag: str) -> list[str]:
    """ffmpeg's options of a sound that the encoder supports, at most stereo; none without sound."""
    with _opened(path, flag) as container:
        if not (streams := container.streams.audio):
            return []
        mixed = ["-ac", "2"] if streams[0].codec_context.layout.nb_channels > 2 else []
    return [*_TRACK, *_FILLED, *mixed, "-ar", "48000", "-b:a", "256k"]


def _inspected(path: str | Path, flag: str, upright: bool) -> _Footage:
    """A video file's size, and what is wrong with it: its frames last unequal times, are mirrored,
    or are fewer than its header says. Where one may get lost in mending, the size has one less."""
    with _opened(path, flag) as container:
        stream = _video_stream(container, path, flag)
        if not stream.average_rate:
            raise ValueError("it has no frame rate")
        header_rate, base = float(stream.average_rate), float(stream.time_base)
        packets = [
            (packet.pts, packet.is_discard) for packet in container.demux(stream) if packet.size
        ]
        counted, begins = stream.frames, (container.start_time or 0) / 1e6
    with _opened(path, flag) as container:
        frames = container.decode(_video_stream(container, path, flag))
        if (frame := next(frames, None)) is None:
            raise ValueError("no frame can be decoded")
        signs, zero = _display(frame) if upright else "1 0 0 1", frame.time or 0.0
        height, width = (frame.height, frame.width)[:: -1 if signs[0] == "0" else 1]
        number = counted or 1 + sum(1 for _ in frames)
    shown, wrong, filters = [pts for pts, discard in packets if not discard], [], []
    if counted:
        number -= len(packets) - len(shown)  # an edit list leaves them out
        if (got := len(packets)) < counted:
            wrong.append(f"is cut off: got {got} frames, wanted the {counted} of its header")
            number = len(shown) - 1
    times = [] if None in shown else sorted(shown)
    steps = [(after - before) * base for before, after in pairwise(times)]
    if len(steps) > 1 and (mean := sum(steps) / len(steps)) > 0:
        least, most, rate = min(steps), max(steps), 1 / mean
        if most - least > _UNEVEN * mean + 2 * base or abs(rate - header_rate) > _UNEVEN * rate:
            wrong.append(
                f"has a variable frame rate: frames last {least:.4g} to {most:.4g} s, {rate:.4g}"
                f" per second on average, {header_rate:.4g} by its header; wanted a constant rate"
            )
            header_rate, number = rate, number - 1
            filters.append(f"fps={exact_frame_rate(round(rate, 3))}")
    if signs not in _TURNS:
        wrong.append("is displayed mirrored or at an odd angle; wanted an upright video")
    before = [] if upright else ["-noautorotate"]
    if zero > begins:  # cut by our clock
        before += ["-ss", f"{math.floor((zero - begins) * 1000) / 1000:.3f}"]
    return _Footage(Size(height, width, number, header_rate), wrong, filters, before)


def ffmpeg(path: str | Path, name: str, *options: Any, before: Iterable[Any] = ()) -> str:
    """The command that makes a new file in the current folder, for errors. name: the end of the new
    file's name, after that of the file. before: options of the file."""
    stem = Path(path).stem[:60]
    names = (f"{stem}-{extra}{name}" for extra in ("", *(f"{n}-" for n in range(2, 1000))))
    new = next(candidate for candidate in names if not os.path.lexists(candidate))
    # A dash would begin an option, and a colon end a protocol.
    path, new = (
        f"./{file}" if file[0] == "-" or ":" in file else file for file in (str(path), new)
    )
    return shlex.join(map(str, ("ffmpeg", *before, "-i", path, *options, new)))


def converted_sound(path: str | Path, flag: str) -> str:
    """The command that makes a sound that the encoder supports, beside the file's picture."""
    options, picture = _sound_options(path, flag), (*_PICTURE, "-c:v", "copy", "-c:a", "aac")
    with _opened(path, flag) as container:
        if not _picture(container):
            return ffmpeg(path, "sound.wav", *options[:-2])
        kind = "mov" if "mov" in container.format.name else "mkv"
    return ffmpeg(path, f"sound.{kind}", *picture, *options)


# Signs of a display matrix -> quarter turns, counterclockwise. Others mirror or turn else.
_TURNS = {"1 0 0 1": 0, "0 -1 1 0": 1, "-1 0 0 -1": 2, "0 1 -1 0": 3}


def _display(frame) -> str:
    """The signs of the first four numbers of a decoded frame's display matrix."""
    from av.sidedata.sidedata import Type

    if (data := frame.side_data.get(Type.DISPLAYMATRIX)) is None:
        return "1 0 0 1"
    return " ".join(map(str, np.sign(np.frombuffer(bytes(data), np.int32)[[0, 1, 3, 4]])))


def video_size(path: str | Path, flag: str, extends: bool = False, upright: bool = True) -> Size:
    """The size of a retake's file, or of one that is extended. Raises UserError, with the command
    that cuts the file, for a size that the model cannot have."""
    check_readable(path, flag, f"; pass a video as {flag} FILE")
    video = _inspected(path, flag, upright)
    size, frames = video.size, video.size.num_frames
    if not extends:
        frames = max(1, (frames - 1) // TIME_SCALE * TIME_SCALE + 1)
    else:
        check_source(frames)
    height, width = (max(SPACE_SCALE, side // SPACE_SCALE * SPACE_SCALE) for side in size.sides)
    if (size.num_frames, size.sides) != (frames, (height, width)):
        counted = "8k+1 frames and " if not extends else ""
        video.wrong.append(
            f"has {size.num_frames} frames of {size.height}x{size.width}; wanted {counted}sides"
            f" that are multiples of {SPACE_SCALE}"
        )
        fill = f"scale={width}:{height}:force_original_aspect_ratio=increase,crop={width}:{height}"
        video.filters.append(fill)
    if video.wrong:
        rate = exact_frame_rate(size.frame_rate)
        cut = "-frames:v", frames, "-t", f"{float(frames / rate):.3f}"
        name = f"{height}x{width}x{frames}.mp4"
        raise video.refusal(path, flag, name, *(() if extends else cut))
    return size


def first_frames(path: str | Path, flag: str, upright: bool = True) -> Iterator[np.ndarray]:
    """All frames, uint8 (H, W, 3), whatever their times. upright: as displayed, not stored."""
    with _opened(path, flag) as container:
        for frame in container.decode(_video_stream(container, path, flag)):
            pixels = frame.to_rgb().to_ndarray()
            if (turns := _TURNS.get(_display(frame)) if upright else 0) is None:
                raise ValueError("it is displayed mirrored or at an odd angle")
            yield np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def pixels_of(frames: Iterable[np.ndarray], height: int, width: int) -> Tensor:
    """Frames, scaled to fill height x width and cropped around their centre, as pixels
    (1, 3, F, height, width) in [-1, 1]."""
    return torch.cat([fill(frame, height, width) for frame in frames], dim=2)


def _picture(container):
    """The container's first video stream that is no cover, or None. One of a single frame, such as
    that of an animated AVIF for readers of stills, only if there is no other."""
    from av.stream import Disposition

    cover, streams = Disposition.attached_pic, container.streams.video
    shown = (stream for stream in streams if not stream.disposition & cover)
    return max(shown, key=lambda stream: stream.frames != 1, default=None)


def _video_stream(container, path: str | Path, flag: str):
    stream = _picture(container)
    if stream is None:
        raise UserError(f"{path} has no video: pass a video file with {flag}")
    if max(stream.codec_context.height, stream.codec_context.width) > MAX_SIDE:
        raise ValueError(f"its frames have more than {MAX_SIDE} pixels on a side")
    stream.thread_type = "AUTO"
    return stream
