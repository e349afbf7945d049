"""Long clips: windows of a clip of any length. Each but the first begins with the end of the one
before, its carry, and generates the rest.

Frames are counted from the clip's first, latents from the window's. The carry's first latent has
eight frames in the window before, and one in the window that begins with it, as upstream.

Source: ltx-pipelines 1.4, chunks/layout.py and planner.py.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ltx_neuron.errors import FieldError
from ltx_neuron.sampling.latents import between_keyframes
from ltx_neuron.sampling.shapes import TIME_SCALE, audio_latent_frames

_LEAST_CARRY, _MOST = 17, 100_001  # frames
CARRIED = "carried_"  # prefix of what a window has of the one before, by its --save-tensors name


class Chunk(NamedTuple):
    """One window. Frames of keyframes are counted from its first frame."""

    number: int
    count: int  # of windows
    start: int  # its first frame
    frames: int
    taken: int  # frames that it has of the window before, and
    given: int  # that the next window has of it: 0 at the clip's ends
    blend: int  # its last frames that are blended with the next window's
    generated: tuple[int, ...]  # frames of the keyframes that it generates
    held: tuple[int, ...]  # frames of those that it has of the window before

    @property
    def title(self) -> str:
        return f"window {self.number + 1} of {self.count}"

    @property
    def carried(self) -> tuple[int, ...]:
        """The numbers of its keyframes that the next window has too."""
        first = self.frames - self.given
        return tuple(n for n, frame in enumerate(self.generated) if frame >= first)

    def share(self, count: int) -> int:
        """Which of `count` things, dealt out evenly to the windows, is this window's."""
        return self.number * count // self.count

    def sound(self, frame_rate: float) -> tuple[int, int]:
        """Its first audio latent among the clip's, and how many it has."""
        first = audio_latent_frames(self.start, frame_rate)
        return first, audio_latent_frames(self.frames, frame_rate)


def latents_of(frames: int) -> int:
    """The latents of 8k+1 frames, or of none."""
    return (frames + TIME_SCALE - 1) // TIME_SCALE


def taken_sound(frames: int, frame_rate: float) -> int:
    """The audio latents of a carry of so many frames."""
    return max(1, audio_latent_frames(frames, frame_rate)) if frames else 0


def carry(
    before: Chunk, names: Iterable[str], frame_rate: float, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What a window begins with: of each stage the last latents of picture and sound, and the
    keyframes among them. names: JobInputs.carried_names. tensors: of the window before."""
    ends = {
        "video": slice(-latents_of(before.given), None),
        "audio": slice(-taken_sound(before.given, frame_rate), None),
        "keyframes": list(before.carried),
    }
    return {
        name: tensors[name.removeprefix(CARRIED)][:, :, ends[name.rpartition("_")[2]]].clone()
        for name in names
    }


def sounds_of(chunk: Chunk, frame_rate: float, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The window's part of the clip's input sounds (1, 8, Ta, 16): of the sound that is given,
    after its end zeros, and of that of a clip to dub."""
    first, count = chunk.sound(frame_rate)
    names = [name for name in ("audio_latent", "audio_reference") if name in tensors]
    parts = {name: tensors[name][:, :, first : first + count] for name in names}
    if "audio_latent" in parts:
        missing = count - parts["audio_latent"].shape[2]
        parts["audio_latent"] = F.pad(parts["audio_latent"], (0, 0, 0, missing)).contiguous()
    return parts


def layout(
    num_frames: int, window: int, taken: int, blend: int, keyframes: int = 0
) -> tuple[Chunk, ...]:
    """The windows of a clip; none if it fits one. All frames but `blend` are 8k+1. keyframes: of
    each window. Raises FieldError for impossible lengths."""
    _check(window, taken, blend, keyframes)
    total, length, overlap = map(latents_of, (num_frames, window, taken))
    if total <= length:
        return ()
    whole, rest = divmod(total - length, length - overlap)
    lengths = [length] * (1 + whole) + [overlap + rest] * bool(rest)
    windows: list[Chunk] = []
    end = 0
    for number, latents in enumerate(lengths):
        before, last = windows[-1] if windows else None, number + 1 == len(lengths)
        frames, carried = TIME_SCALE * (latents - 1) + 1, taken if before else 0
        given, new = (0 if last else taken), frames - carried
        between = between_keyframes(max(0, keyframes - (not last)), new)
        slots = [carried + frame for frame in (*between, *[new - 1] * (not last))]
        shift = before.frames - carried if before else 0
        held = [before.generated[n] - shift for n in before.carried] if before else []
        slots, start = sorted({*slots} if keyframes else ()), end - carried
        more = 0 if last else blend, tuple(slots), tuple(held)
        windows.append(Chunk(number, len(lengths), start, frames, carried, given, *more))
        end += new
    return tuple(windows)


def _check(window: int, taken: int, blend: int, keyframes: int) -> None:
    new = window - taken
    for name, value, least, most, unit in (
        ("chunk_carry_frames", taken, _LEAST_CARRY, _MOST, TIME_SCALE),
        ("chunk_pixel_frames", window, taken + TIME_SCALE, _MOST, TIME_SCALE),
        ("chunk_blend_frames", blend, 0, min(taken, new - 1), 1),
        ("num_generated_keyframes", keyframes, 0, new - 2, 1),
    ):
        nearest = min(max(-(-(value - 1) // unit) * unit + 1, least), most)
        if value != nearest:
            raise FieldError(
                f"{{{name}}} {value}: wanted {'8k+1, ' * (unit > 1)}{least} to {most} for windows"
                f" of {window} frames with a carry of {taken}; type {{{name}}} {nearest}"
            )
