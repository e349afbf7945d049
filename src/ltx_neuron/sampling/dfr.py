"""DFR (diffusion fidelity rendering): a canvas of whole segments with a generated keyframe at the
end of each, and rounds that double the frame rate in windows of segments.

Each round has keyframes in the middles of its segments too, so that the next round's segments have
the same number of frames. Frames and latents of a round are those of its clip.

Sources: ltx-pipelines 1.2.0 dfr_layout.py, dfr_pipeline.py; 1.4 dfr_stages.py, dfr_helpers/.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ltx_neuron.sampling.shapes import AUDIO_CHANNELS, MEL_BINS, TIME_SCALE, audio_latent_frames
from ltx_neuron.sampling.size import Size

SEGMENTS = 24, 32  # frames
ETA = 0.5  # of the ancestral sampler in a window
CLIPS = "temporal_video", "temporal_video_1"  # the upsampled clips of the rounds
_SEED = 1000  # times the round
_HIGHEST_RATE, TRAINED_RATE = 60.0, 30.0


class TemporalWindow(NamedTuple):
    """One window of a round. Frames of keyframes are counted from its first frame."""

    round: int
    number: int
    count: int
    order: int  # its number among the windows of all rounds
    start: int  # its first frame
    latents: int  # its number of latents
    given: tuple[int, ...]  # frames of the earlier keyframes that it is given
    generated: tuple[int, ...]  # frames of those that it generates
    shared: int  # its first latents, which the window before it has too
    # It keeps the latents of the window before it and hears stage 1's sound (1.4); otherwise it
    # makes the shared ones anew, for itself alone, without a sound
    holds: bool

    @property
    def key(self) -> str:
        """The prefix of its tensors' names."""
        return f"s{3 + self.order}"

    @property
    def title(self) -> str:
        return f"round {self.round}, window {self.number + 1} of {self.count}"

    @property
    def frames(self) -> int:
        return (self.latents - 1) * TIME_SCALE + 1

    @property
    def seed(self) -> int:
        """Added to the seed for the noise of its steps."""
        return _SEED * self.round + self.number


def segment(num_frames: int) -> int:
    """The frames of a segment: those that lengthen the clip least."""
    return min(SEGMENTS, key=lambda length: (-(num_frames - 1) % length, -length))


def canvas(num_frames: int) -> int:
    """The frames of the generated clip: whole segments after the first frame."""
    return num_frames + -(num_frames - 1) % segment(num_frames)


def keyframes(num_frames: int) -> tuple[int, ...]:
    """The frames of the keyframes of both stages: the last one of each segment."""
    length = segment(num_frames)
    return tuple(range(length, canvas(num_frames), length))


def model_rate(rate: float, holds: bool = True) -> float:
    """The frame rate of the positions that the model sees in a clip of this rate. holds: as in 1.4,
    otherwise in a window of 1.2.0."""
    if holds:
        return _HIGHEST_RATE if rate > TRAINED_RATE else rate
    return min(rate, _HIGHEST_RATE)


def windows(num_frames: int, rounds: int, holds: bool) -> tuple[TemporalWindow, ...]:
    """The windows of all rounds, in their order. Each has some of the round's segments, which are
    dealt out evenly, and frames before them: to the last keyframe, or a segment (1.2.0)."""
    windows: list[TemporalWindow] = []
    half = segment(num_frames)  # of a segment of any round, whose middle is a keyframe
    length = 2 * half
    for number in range(1, rounds + 1):
        segments = (canvas(num_frames) - 1) * 2**number // length
        count, seam = min(2**number, segments), 0
        for index in range(count):
            end = seam + length * (segments // count + (index < segments % count))
            start = seam - (half if holds else length) if index else 0
            first = seam if holds else start  # of the segments with new keyframes
            window = TemporalWindow(
                number,
                index,
                count,
                len(windows),
                start,
                (end - start) // TIME_SCALE + 1,
                tuple(range(max(length, first + length * holds) - start, end - start + 1, length)),
                tuple(range(first + half - start, end - start, length)),
                (seam - start) // TIME_SCALE + 1 if index else 0,
                holds,
            )
            windows.append(window)
            seam = end
    return tuple(windows)


@dataclass(frozen=True)
class Rendering:
    """The clips, keyframes and windows of a job. size: of the job, before the rounds."""

    size: Size
    rounds: int
    holds: bool

    @property
    def windows(self) -> tuple[TemporalWindow, ...]:
        return windows(self.size.num_frames, self.rounds, self.holds)

    @property
    def frames(self) -> int:
        return (self.size.num_frames - 1) * 2**self.rounds + 1

    def fields_of(self, images: Iterable[Any], window: TemporalWindow | None) -> dict[str, Any]:
        """The fields of a Job for a stage, or for a window, which sees the images in it."""
        size, rate = self.size, self.size.frame_rate
        if window is None:  # the sound has the length of the clip that is played
            speed = rate / model_rate(rate) if self.holds else 1.0
            size = replace(size, num_frames=canvas(size.num_frames))
            return {"size": size, "image": tuple(images), "motion_speed": speed}
        placed = []
        times = 2**window.round if self.holds else 1  # 1.2.0 leaves them where they were
        for image in images:
            frame = image.frame_index * times - window.start
            first = 1 if self.holds and window.shared else 0  # what it has already
            if first <= frame < window.frames or not (self.holds or window.start):
                placed.append(replace(image, frame_index=frame))
        rate = model_rate(rate * 2**window.round, self.holds)
        size = replace(size, num_frames=window.frames, frame_rate=rate)
        return {"size": size, "image": tuple(placed), "temporal": window}

    def clip(self, tensors: dict[str, Tensor], number: int) -> Tensor:
        """The latents (1, 128, F, h, w) after a round; after 0, stage 2's. tensors: of the job, by
        their --save-tensors names."""
        if not number:
            return tensors["s2_video"]
        of_round = [window for window in self.windows if window.round == number]
        return torch.cat([tensors[f"{x.key}_video"][:, :, x.shared :] for x in of_round], dim=2)

    def final(self, tensors: dict[str, Tensor]) -> Tensor:
        """The latents of the result, without those that fill the last segment."""
        return self.clip(tensors, self.rounds)[:, :, : (self.frames - 1) // TIME_SCALE + 1].clone()

    def planes(self, tensors: dict[str, Tensor], number: int) -> dict[int, Tensor]:
        """The keyframes (1, 128, 1, h, w) by their frames of a round's clip: the earlier ones, and
        those of the round's finished windows. Of one made twice, the first."""
        if not number:
            latents = tensors["s2_generated_keyframes"].split(1, dim=2)
            return dict(zip(keyframes(self.size.num_frames), latents, strict=True))
        planes = {2 * at: plane for at, plane in self.planes(tensors, number - 1).items()}
        for window in self.windows:
            latents = tensors.get(f"{window.key}_generated_keyframes")
            if window.round == number and latents is not None:
                for frame, plane in zip(window.generated, latents.split(1, dim=2), strict=True):
                    planes.setdefault(window.start + frame, plane)
        return planes

    def start(self, window: TemporalWindow, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A window's video and audio (1, 8, Ta, 16), which may be empty, its given_keyframes, and
        the initial latents of those that it generates, as upsampled_keyframes. tensors: also has
        the round's upsampled clip."""
        first, planes = window.start // TIME_SCALE, self.planes(tensors, window.round)
        video = tensors[CLIPS[window.round - 1]][:, :, first : first + window.latents].clone()
        # Python's rounding: half to even.
        nearest = [round(frame / TIME_SCALE) for frame in window.generated]
        first_latents = video[:, :, nearest]
        anchors = [planes[window.start + frame] for frame in window.given]
        if window.holds and window.shared:
            before = self.windows[window.order - 1]
            taken = first + 1 - before.start // TIME_SCALE
            video[:, :, :1] = planes[window.start]
            shared = tensors[f"{before.key}_video"][:, :, taken : taken + window.shared - 1]
            video[:, :, 1 : window.shared] = shared
        return {
            "video": video.contiguous(),
            "audio": self._sound(window, tensors["s1_audio"]),
            "given_keyframes": torch.cat(anchors, dim=2) if anchors else video[:, :, :0],
            "upsampled_keyframes": first_latents,
        }

    def _sound(self, window: TemporalWindow, audio: Tensor) -> Tensor:
        """Stage 1's sound during a window, with as many latents as a clip of the window's frames
        has at the model's rate."""
        if not window.holds:
            return audio.new_zeros(1, AUDIO_CHANNELS, 0, MEL_BINS)
        rate = self.size.frame_rate * 2**window.round
        seconds = canvas(self.size.num_frames) / self.size.frame_rate
        bounds = window.start, window.start + window.frames
        start, end = (frame / rate / seconds * audio.shape[2] for frame in bounds)
        return resampled(audio, start, end, audio_latent_frames(window.frames, model_rate(rate)))


def resampled(audio: Tensor, start: float, end: float, count: int) -> Tensor:
    """`count` latents (1, 8, count, 16) of a sound, at equal distances from latent `start` on, each
    between its two neighbours."""
    last = audio.shape[2] - 1
    at = (start + (end - start) / count * torch.arange(count, dtype=torch.float32)).clamp(0, last)
    left = at.floor().long()
    weight = (at - left).to(audio.dtype)[:, None]
    right = audio[:, :, (left + 1).clamp(max=last)]
    return audio[:, :, left] * (1 - weight) + right * weight
