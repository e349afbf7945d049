"""Extends a video at its end or before its beginning, in windows: the held and new latents of each
window, and their joining.

All windows have the same number of frames, so they share one graph. They are parts of one clip of
latents, in which known latents are next to new ones. A window holds latents that are known or were
generated before it, and generates the rest. Positions are the clip's times, so that picture and
sound stay synchronous in every window; attention depends only on time differences.

The clip's video has the known part of the file that windows hold, and the new part. Its sound is
the file's whole sound and the new part, and is decoded as a whole.
"""

import math
from typing import NamedTuple

from torch import Tensor

from ltx_neuron.errors import FieldError
from ltx_neuron.sampling.latents import audio_seconds
from ltx_neuron.sampling.shapes import TIME_SCALE, audio_latent_frames

# Latents of the previous window that a window keeps, so that motion and voices continue: 24 frames,
# a second at 24 fps. More overlap needs more windows.
OVERLAP = 3
WINDOW_FRAMES = 121  # without --num-frames
LEAST_SOURCE = TIME_SCALE + 1  # frames of the file
_MOST_SECONDS = 3600.0


class Window(NamedTuple):
    """One window. Latents are counted from the clip's first, of the new ones from the window's."""

    number: int
    count: int  # of windows
    video: int  # its first latent
    audio: int
    new_video: tuple[int, int]  # the range of latents that it generates
    new_audio: tuple[int, int]
    sound_offset: float  # seconds from the sound's beginning to the video's

    @property
    def key(self) -> str:
        """The prefix of its tensors' names."""
        return f"window_{self.number}"

    @property
    def title(self) -> str:
        return f"window {self.number} of {self.count}"


class Extension:
    """The kept and the new part of an extended video. A clip's first latent has one frame, the
    others have eight.

    seconds        to generate; below 0: before the beginning
    source_frames  of the file
    window_frames  8k+1 frames of each window
    """

    def __init__(self, seconds: float, source_frames: int, window_frames: int, frame_rate: float):
        self.seconds, self.frame_rate = seconds, frame_rate
        self.source_frames, self.window_frames = source_frames, window_frames
        self.before = before = seconds < 0
        self.new_frames = round(abs(seconds) * frame_rate)
        self.num_frames = source_frames + self.new_frames  # of the result
        self.new_latents = math.ceil((self.new_frames - before) / TIME_SCALE) + before
        # Frames of the new latents: up to 7 more than needed.
        self.made_frames = TIME_SCALE * self.new_latents - (TIME_SCALE - 1) * before
        # Latents of the file's frames.
        self._available = (source_frames - (not before)) // TIME_SCALE + (not before)
        self.window_latents = (window_frames - 1) // TIME_SCALE + 1
        # The overlap of windows, or for few new latents as many as fill a window.
        overlap = max(OVERLAP, self.window_latents - self.new_latents)
        self.known_latents = min(self._available, overlap)
        self.video_latents = self.known_latents + self.new_latents
        # The known ones among the clip's video latents.
        self.known_video = slice(self.new_latents, None) if before else slice(self.known_latents)
        # Frames of the file, next to the new ones, that windows hold.
        self.known_frames = TIME_SCALE * self.known_latents - (TIME_SCALE - 1) * (not before)
        # Frames of the file before the clip of latents, whose sound is in the clip.
        self._unseen = 0 if before else source_frames - self.known_frames
        # The new ones among the decoded frames.
        first = self.made_frames - self.new_frames if before else self.known_frames
        self.decoded = slice(first, first + self.new_frames)
        # New seconds before the file's sound begins.
        self.silence = self.made_frames / frame_rate if before else 0.0
        self.source_seconds = source_frames / frame_rate
        self.audio_latents = audio_latent_frames(source_frames + self.made_frames, frame_rate)

    def heard(self, waveform: Tensor, rate: int) -> Tensor:
        """The part of the decoded sound (2, samples) that belongs to the result."""
        first = self.decoded.start if self.before else 0
        start, stop = (
            round(count / self.frame_rate * rate) for count in (first, first + self.num_frames)
        )
        return waveform[:, start:stop]

    @property
    def known_audio(self) -> slice:
        """The clip's audio latents that contain only the file's sound."""
        bounds = audio_seconds(self.audio_latents).double()
        if self.before:
            return slice(int((bounds[:-1] < self.silence - 1e-6).sum()), None)
        return slice(int((bounds[1:] <= self.source_seconds + 1e-6).sum()))

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows in their order: from the known part outwards. Raises FieldError for a window
        that is not longer than its overlap and would never reach the end. Only the clip's first
        latent has one frame, so later windows have 7 frames more than their sound. Frames without
        sound are held ones; at the new end both end together."""
        self.check()
        length, total = self.window_latents, self.video_latents
        sound_length = audio_latent_frames(self.window_frames, self.frame_rate)
        most = self.audio_latents - sound_length
        # These are counted from the known part.
        starts, video_end = [0], self.known_latents
        audio_end = len(range(self.audio_latents)[self.known_audio])
        while starts[-1] + length < total:
            starts.append(min(starts[-1] + length - OVERLAP, total - length))
        windows = []
        for number, start in enumerate(starts, 1):
            video = total - length - start if self.before else start
            border = video if self.before else video + length
            frames = max(0, TIME_SCALE * (border - 1) + 1) + self._unseen
            near = audio_latent_frames(frames, self.frame_rate)
            near = most - near if self.before else near - sound_length
            sound_start = min(max(near, 0), audio_end, most)
            audio = most - sound_start if self.before else sound_start
            new_video = self._new(length, start + length - video_end)
            new_audio = self._new(sound_length, sound_start + sound_length - audio_end)
            video_end, audio_end = start + length, sound_start + sound_length
            seconds = self._unseen / self.frame_rate
            windows.append(Window(number, len(starts), video, audio, new_video, new_audio, seconds))
        return tuple(windows)

    def _new(self, length: int, count: int) -> tuple[int, int]:
        """The range of a window's `count` new latents."""
        return (0, count) if self.before else (length - count, length)

    @property
    def window_range(self) -> tuple[int, int]:
        most = TIME_SCALE * (self._available + self.new_latents - 1) + 1
        return min(most, TIME_SCALE * OVERLAP + 1), most

    def check(self, window: bool = True) -> None:
        """Raise FieldError for an unsuitable file or number of seconds and, if `window`, for an
        impossible window."""
        if not 0 < abs(self.seconds) <= _MOST_SECONDS or self.new_frames < 1:
            raise FieldError(
                f"{{extend}} {self.seconds:g}: wanted seconds of a frame or more and at most"
                f" {_MOST_SECONDS:g}, as in {{extend}} 2, or {{extend}} -2 before the beginning"
            )
        check_source(self.source_frames)
        least, most = self.window_range
        if window and not least <= self.window_frames <= most:
            raise FieldError(
                f"{{num_frames}} {self.window_frames}: with {{extend}} it is a window's length,"
                f" {least} to {most} frames here: {OVERLAP} latents overlap, and the video has"
                f" {self.source_frames} known and {self.new_frames} new frames. Type {{num_frames}}"
                f" {min(WINDOW_FRAMES, most)}"
            )


def check_source(frames: int) -> None:
    """Raise FieldError for a file with too few frames."""
    if frames < LEAST_SOURCE:
        raise FieldError(
            f"{{extend}} needs a video of {LEAST_SOURCE} frames or more, and {{video_path}} has"
            f" {frames}; pass a longer one"
        )


def default_window(seconds: float, source_frames: int, frame_rate: float) -> int:
    """A window's frames without --num-frames: WINDOW_FRAMES, or fewer for a short result."""
    extension = Extension(seconds, source_frames, WINDOW_FRAMES, frame_rate)
    extension.check(window=False)
    return min(WINDOW_FRAMES, extension.window_range[1])


def joined(extension: Extension, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The clip's latents (1, 128, F, h, w) and (1, 8, Ta, 16). tensors: the known ones as
    video_latent and audio_latent, and those of finished windows."""
    video, audio = tensors["video_latent"].clone(), tensors["audio_latent"].clone()
    for window in extension.windows:
        if f"{window.key}_video" not in tensors:
            continue
        for clip, start, new, latents in (
            (video, window.video, window.new_video, tensors[f"{window.key}_video"]),
            (audio, window.audio, window.new_audio, tensors[f"{window.key}_audio"]),
        ):
            clip[:, :, start + new[0] : start + new[1]] = latents[:, :, slice(*new)]
    return video, audio


def start_of(
    extension: Extension, window: Window, tensors: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """A window's initial latents, in its own shape: known ones, and zeros."""
    video, audio = joined(extension, tensors)
    sound_length = audio_latent_frames(extension.window_frames, extension.frame_rate)
    return (
        video[:, :, window.video : window.video + extension.window_latents].contiguous(),
        audio[:, :, window.audio : window.audio + sound_length].contiguous(),
    )
