"""A video made longer, at its end or before its beginning, in windows: which latents each of them
holds, which it makes, and how they become one clip.

All windows have the same number of frames, so one graph makes them. They are cut out of one clip
of latents, the known ones next to the new ones; a window holds what is known or was made before it
and makes the rest. Times are the clip's, so that picture and sound stay together wherever a window
begins; attention sees differences of times alone.

The clip's video is what the windows see of the file, then what they make; or the other way round.
Its sound is all of the file's, with what is made: it is decoded as a whole.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ltx_neuron.errors import FieldError
from ltx_neuron.sampling.latents import TIME_SCALE, audio_latent_frames, audio_seconds

# Latents that a window holds of the one before it: 24 frames, a second at 24 fps, from which motion
# and voices can go on. More of them are more windows for the same seconds.
OVERLAP = 3
WINDOW_FRAMES = 121  # where --num-frames is left out: as every other clip's
LEAST_SOURCE = TIME_SCALE + 1  # frames of the file
_MOST_SECONDS = 3600.0


class Window(NamedTuple):
    """One window. Latents are counted from the clip's first, of the new ones from the window's.

    number, count         which one of how many
    video, audio          its first latents
    new_video, new_audio  from which latent to before which it makes them
    sound_offset          seconds from the sound's beginning to the video's
    """

    number: int
    count: int
    video: int
    audio: int
    new_video: tuple[int, int]
    new_audio: tuple[int, int]
    sound_offset: float

    @property
    def key(self) -> str:
        """What the names of its tensors begin with."""
        return f"window_{self.number}"

    @property
    def title(self) -> str:
        return f"window {self.number} of {self.count}"


@dataclass(frozen=True)
class Extension:
    """What is kept of a file and what is made.

    seconds        how much is made; below 0: before the beginning
    source_frames  of the file
    window_frames  8k+1 frames of each window
    """

    seconds: float
    source_frames: int
    window_frames: int
    frame_rate: float

    # --- frames -----------------------------------------------------------------------------------

    @property
    def before(self) -> bool:
        return self.seconds < 0

    @property
    def new_frames(self) -> int:
        return round(abs(self.seconds) * self.frame_rate)

    @property
    def num_frames(self) -> int:
        """Of the video that comes out."""
        return self.source_frames + self.new_frames

    @property
    def made_frames(self) -> int:
        """Frames of the new latents: up to 7 more than are wanted."""
        return TIME_SCALE * self.new_latents - (TIME_SCALE - 1) * self.before

    @property
    def known_frames(self) -> int:
        """Those next to the new ones that the windows see."""
        return TIME_SCALE * self.known_latents - (TIME_SCALE - 1) * (not self.before)

    @property
    def _unseen(self) -> int:
        """Frames of the file before the clip of latents begins; their sound is in it."""
        return 0 if self.before else self.source_frames - self.known_frames

    @property
    def decoded(self) -> slice:
        """Which of the decoded frames are the new ones."""
        first = self.made_frames - self.new_frames if self.before else self.known_frames
        return slice(first, first + self.new_frames)

    def heard(self, waveform: Tensor, rate: int) -> Tensor:
        """What is heard of the decoded sound (2, samples)."""
        first = self.decoded.start if self.before else 0
        start, stop = (
            round(count / self.frame_rate * rate) for count in (first, first + self.num_frames)
        )
        return waveform[:, start:stop]

    # --- latents ----------------------------------------------------------------------------------

    @property
    def new_latents(self) -> int:
        """A clip's first latent is of one frame, the others are of eight."""
        first = int(self.before)
        return math.ceil((self.new_frames - first) / TIME_SCALE) + first

    @property
    def _available(self) -> int:
        """Latents of the file's frames."""
        return (self.source_frames - (not self.before)) // TIME_SCALE + (not self.before)

    @property
    def window_latents(self) -> int:
        return (self.window_frames - 1) // TIME_SCALE + 1

    @property
    def known_latents(self) -> int:
        """As many as a window holds of the one before it; of few new ones, what fills a window."""
        return min(self._available, max(OVERLAP, self.window_latents - self.new_latents))

    @property
    def video_latents(self) -> int:
        return self.known_latents + self.new_latents

    @property
    def known_video(self) -> slice:
        """Which of the clip's video latents are known."""
        return slice(self.new_latents, None) if self.before else slice(self.known_latents)

    @property
    def silence(self) -> float:
        """Seconds that are made before the file's sound begins."""
        return self.made_frames / self.frame_rate if self.before else 0.0

    @property
    def source_seconds(self) -> float:
        return self.source_frames / self.frame_rate

    @property
    def audio_latents(self) -> int:
        return audio_latent_frames(self.source_frames + self.made_frames, self.frame_rate)

    @property
    def known_audio(self) -> slice:
        """Which of the clip's audio latents are of the file's sound alone."""
        bounds = audio_seconds(self.audio_latents).double()
        if self.before:
            return slice(int((bounds[:-1] < self.silence - 1e-6).sum()), None)
        return slice(int((bounds[1:] <= self.source_seconds + 1e-6).sum()))

    # --- windows ----------------------------------------------------------------------------------

    @property
    def windows(self) -> tuple[Window, ...]:
        """In the order in which they are made: away from what is known. Raises FieldError for what
        cannot be made: a window as short as its overlap would never reach the end."""
        self.check()
        length, total = self.window_latents, self.video_latents
        starts = [0]  # seen from what is known
        while starts[-1] + length < total:
            starts.append(min(starts[-1] + length - OVERLAP, total - length))
        if self.before:
            starts = [total - length - start for start in starts]
        sound_length = audio_latent_frames(self.window_frames, self.frame_rate)
        known_audio = self.known_audio
        video_end = self.new_latents if self.before else self.known_latents
        audio_end = known_audio.start if self.before else known_audio.stop
        windows = []
        for number, start in enumerate(starts, 1):
            sound = self._sound_start(start, sound_length, audio_end)
            if self.before:
                new_video, new_audio = (0, video_end - start), (0, audio_end - sound)
                video_end, audio_end = start, sound
            else:
                new_video, new_audio = (
                    (video_end - start, length),
                    (audio_end - sound, sound_length),
                )
                video_end, audio_end = start + length, sound + sound_length
            seconds = self._unseen / self.frame_rate
            windows.append(Window(number, len(starts), start, sound, new_video, new_audio, seconds))
        return tuple(windows)

    def _sound_start(self, video: int, length: int, made_to: int) -> int:
        """A window's first audio latent, from its first video one.

        Only the clip's first latent is of one frame: a window behind it holds 7 frames more than
        its sound lasts. Those without sound are held ones: on the new side both end together.
        """
        border = video if self.before else video + self.window_latents
        frames = max(0, TIME_SCALE * (border - 1) + 1) + self._unseen
        near, most = audio_latent_frames(frames, self.frame_rate), self.audio_latents - length
        if self.before:
            return min(max(near, made_to - length), most)
        return min(max(near - length, 0), made_to, most)

    @property
    def window_range(self) -> tuple[int, int]:
        """The least and the most frames that a window can have."""
        most = TIME_SCALE * (self._available + self.new_latents - 1) + 1
        return min(most, TIME_SCALE * OVERLAP + 1), most

    def check_source(self) -> None:
        """Raise FieldError for a file or for seconds that nothing can be made of."""
        if not 0 < abs(self.seconds) <= _MOST_SECONDS or self.new_frames < 1:
            raise FieldError(
                f"{{extend}} {self.seconds:g}: wanted seconds of a frame or more and at most"
                f" {_MOST_SECONDS:g}, as in {{extend}} 2, or {{extend}} -2 before the beginning"
            )
        check_source(self.source_frames)

    def check(self) -> None:
        """Raise FieldError for what cannot be made."""
        self.check_source()
        least, most = self.window_range
        if not least <= self.window_frames <= most:
            raise FieldError(
                f"{{num_frames}} {self.window_frames} with {{extend}} is the length of a window,"
                f" which can have {least} to {most} frames here: {OVERLAP} latents of it are held,"
                f" and there are {self.source_frames} known and {self.new_frames} new frames. Type"
                f" {{num_frames}} {min(WINDOW_FRAMES, most)}"
            )


def check_source(frames: int) -> None:
    """Raise FieldError for a file of too few frames."""
    if frames < LEAST_SOURCE:
        raise FieldError(
            f"{{extend}} goes on from a video of {LEAST_SOURCE} frames or more, and"
            f" {{video_path}} has {frames}; pass a longer one"
        )


def default_window(seconds: float, source_frames: int, frame_rate: float) -> int:
    """A window's frames where none are typed: as many as every clip has, or all that there are."""
    extension = Extension(seconds, source_frames, WINDOW_FRAMES, frame_rate)
    extension.check_source()
    return min(WINDOW_FRAMES, extension.window_range[1])


def joined(extension: Extension, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The clip's latents (1, 128, F, h, w) and (1, 8, Ta, 16): those that are known, in `tensors`
    as video_latent and audio_latent, and those of the windows that are made."""
    video, audio = tensors["video_latent"].clone(), tensors["audio_latent"].clone()
    for window in extension.windows:
        if f"{window.key}_video" not in tensors:
            continue
        for clip, start, new, made in (
            (video, window.video, window.new_video, tensors[f"{window.key}_video"]),
            (audio, window.audio, window.new_audio, tensors[f"{window.key}_audio"]),
        ):
            clip[:, :, start + new[0] : start + new[1]] = made[:, :, slice(*new)]
    return video, audio


def start_of(
    extension: Extension, window: Window, tensors: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """What a window begins with, of its own shape: what is known by now, zeros elsewhere."""
    video, audio = joined(extension, tensors)
    sound_length = audio_latent_frames(extension.window_frames, extension.frame_rate)
    return (
        video[:, :, window.video : window.video + extension.window_latents].contiguous(),
        audio[:, :, window.audio : window.audio + sound_length].contiguous(),
    )
