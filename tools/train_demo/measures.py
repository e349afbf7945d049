"""What is seen and heard in a clip of the demo's world, found without knowing what was asked."""

from typing import NamedTuple

import torch
import world
from torch import Tensor

GROUND_DISTANCE = 0.2  # in RGB of 0..1: what differs more from its row's median is the shape
LEAST_PART = 0.004  # of the frame; a shape covers 0.04 of it
PITCH_RANGE = (150.0, 1200.0)  # Hz


class Seen(NamedTuple):
    """colour, shape, ground  names, by the majority of frames; None where no shape is seen
    direction, bounces      of the motion; None and [] where there is none
    """

    colour: str | None
    shape: str | None
    ground: str | None
    direction: str | None
    bounces: list[float]


class Heard(NamedTuple):
    """pitch of the loudest tone in Hz, and onsets of the pulses in seconds; None and [] where it is
    silent."""

    pitch: float | None
    onsets: list[float]


def see(frames: Tensor, frame_rate: float = 24.0) -> Seen:
    """Look at frames (F, H, W, 3) in 0..1."""
    grounds = frames.median(2, keepdim=True).values
    masks = (frames - grounds).norm(dim=-1) > GROUND_DISTANCE
    visible = masks.flatten(1).float().mean(1) > LEAST_PART
    ground = _nearest(grounds.mean((0, 1, 2)), world.GROUNDS)
    if not visible.float().mean() > 0.5:
        return Seen(None, None, ground, None, [])
    colours = [
        _inside(f, m).median(0).values for f, m in zip(frames, masks, strict=True) if m.any()
    ]
    shapes = [_shape(mask) for mask in masks[visible][::4]]
    direction, bounces = motion(_centres(masks), visible, frame_rate)
    colour = _nearest(torch.stack(colours).median(0).values, world.COLOURS)
    return Seen(colour, max(world.SHAPES, key=shapes.count), ground, direction, bounces)


def _nearest(colour: Tensor, names: dict[str, tuple[int, int, int]]) -> str:
    return min(names, key=lambda name: float((colour - torch.tensor(names[name]) / 255).norm()))


def _inside(frame: Tensor, mask: Tensor) -> Tensor:
    """Pixels (N, 3) of the mask, without its rim where it is thick enough."""
    eroded = -torch.nn.functional.max_pool2d(-mask[None].float(), 5, 1, 2)[0] > 0
    return frame[eroded if eroded.any() else mask]


def _centres(masks: Tensor) -> Tensor:
    """The middles (F, 2) of the masks' bounding boxes as x, y in frame heights; rows and columns of
    one pixel alone do not count."""
    height = masks.shape[1]
    centres = []
    for axis in (1, 2):  # x: columns; y: rows
        taken = masks.sum(axis) >= 2
        first = taken.float().argmax(1)
        last = taken.shape[1] - 1 - taken.flip(1).float().argmax(1)
        centres.append((first + last + 1) / 2 / height)
    return torch.stack(centres, 1)


def _shape(mask: Tensor) -> str:
    """The shape whose silhouette, stretched over the mask's bounding box, has most in common with
    it."""
    rows, columns = (torch.nonzero(mask.sum(axis) >= 2).flatten() for axis in (1, 0))
    if len(rows) < 4 or len(columns) < 4:
        return ""
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    common = {}
    for shape, (left, top, right, bottom) in _EXTENTS.items():
        y, x = (
            low + (high - low) * (torch.arange(count) + 0.5) / count
            for low, high, count in ((top, bottom, box.shape[0]), (left, right, box.shape[1]))
        )
        points = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)
        silhouette = world.distance(shape, points) < 0
        common[shape] = float((silhouette & box).sum() / (silhouette | box).sum())
    return max(common, key=common.get)


def _extents(shape: str) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a shape's outline."""
    place = torch.linspace(-1, 1, 401)
    points = torch.stack(torch.meshgrid(place, place, indexing="xy"), -1)
    inside = world.distance(shape, points) < 0
    x, y = points[inside].unbind(-1)
    return float(x.min()), float(y.min()), float(x.max()), float(y.max())


_EXTENTS = {shape: _extents(shape) for shape in world.SHAPES}


def motion(centres: Tensor, visible: Tensor, frame_rate: float) -> tuple[str | None, list[float]]:
    """The direction at the start, and the times at which it turns round."""
    spread = (centres[visible].amax(0) - centres[visible].amin(0)).tolist()
    if max(spread) < 0.1:
        return None, []
    axis = spread.index(max(spread))
    way = centres[:, axis]
    smooth = torch.nn.functional.avg_pool1d(
        torch.nn.functional.pad(way[None, None], (1, 1), "replicate"), 3, 1
    )[0, 0]
    # By then the first bounce has not come.
    early = float(smooth[7] - smooth[1])
    names = ("right", "left") if axis == 0 else ("down", "up")
    direction = names[early < 0] if abs(early) > 0.02 else None
    return direction, _turns(smooth, frame_rate)


def _turns(way: Tensor, frame_rate: float) -> list[float]:
    """When a way (F,) turns round: where it is furthest before it goes back by a twentieth of the
    frame's height. A level top counts by its middle."""
    turns, furthest, sign = [], 0, 0
    for frame in range(len(way)):
        ahead = float(way[frame] - way[furthest])
        if sign == 0:
            if abs(ahead) > 0.05:
                sign, furthest = (1 if ahead > 0 else -1), frame
        elif sign * ahead > 0:
            furthest = frame
        elif sign * ahead < -0.05:
            level = (way[:frame] - way[furthest]).abs() < 0.008
            near = torch.nonzero(level).flatten()
            near = near[(near - furthest).abs() <= 3]
            turns.append(float(near.float().mean()) / frame_rate)
            sign, furthest = -sign, frame
    return turns


def hear(waveform: Tensor, rate: int) -> Heard:
    """Listen to a sound (channels, samples) in -1..1."""
    mono = waveform.double().mean(0)
    block = rate // 200
    envelope = mono[: len(mono) // block * block].unflatten(0, (-1, block)).square().mean(1).sqrt()
    if float(envelope.max()) < 0.01:
        return Heard(None, [])
    spectrum = torch.fft.rfft(mono * torch.hann_window(len(mono), dtype=mono.dtype), 8 * len(mono))
    hertz = torch.arange(len(spectrum)) * rate / (8 * len(mono))
    power = spectrum.abs() * ((hertz > PITCH_RANGE[0]) & (hertz < PITCH_RANGE[1]))
    return Heard(float(hertz[power.argmax()]), _onsets(envelope, block / rate))


def _onsets(envelope: Tensor, seconds: float) -> list[float]:
    """Where the envelope rises to a third of its largest, three times as loud as 60 ms before."""
    loud, onsets = float(envelope.max()) / 3, []
    back = round(0.06 / seconds)
    for place in range(len(envelope)):
        before = float(envelope[max(0, place - back)]) if place else 0.0
        rises = envelope[place] > loud and envelope[place] > 2 * before
        if rises and (not onsets or place * seconds - onsets[-1] > 0.2):
            onsets.append(place * seconds)
    return onsets


def semitones(pitch: float, wanted: float) -> float:
    """How far a pitch is from another."""
    return float(12 * torch.log2(torch.tensor(pitch / wanted)).abs())


def offset(onsets: list[float], bounces: list[float], end: float) -> float | None:
    """The largest distance in seconds of a bounce to the nearest onset; bounces in the last tenth
    of a second do not count. None where there is no onset, or no bounce."""
    counted = [bounce for bounce in bounces if bounce < end - 0.1]
    if not counted or not onsets:
        return None
    return max(min(abs(onset - bounce) for onset in onsets) for bounce in counted)


class Score(NamedTuple):
    """Whether each part of a clip is as asked for."""

    colour: bool
    shape: bool
    ground: bool
    direction: bool
    pitch: bool
    together: bool


def score(
    scene: world.Scene, frames: Tensor, waveform: Tensor, rate: int, frame_rate: float = 24.0
) -> Score:
    """Compare a clip with the scene that was asked for. Together: sound and what is seen, within a
    latent frame, wherever the shape began."""
    seen, heard = see(frames, frame_rate), hear(waveform, rate)
    apart = offset(heard.onsets, seen.bounces, len(frames) / frame_rate)
    return Score(
        seen.colour == scene.colour,
        seen.shape == scene.shape,
        seen.ground == scene.ground,
        seen.direction == scene.direction,
        heard.pitch is not None and semitones(heard.pitch, world.PITCHES[scene.shape]) < 1,
        apart is not None and apart < 8 / frame_rate,
    )


class Nearest(NamedTuple):
    """How near a clip comes to what is asked for, on whichever course it comes nearest.

    psnr   of all frames, in dB
    sound  the cosine between magnitudes of the clip's spectrum over time and the scene's; 1: alike
    """

    scene: world.Scene
    psnr: float
    sound: float


def nearest(
    scene: world.Scene, frames: Tensor, waveform: Tensor, rate: int, frame_rate: float = 24.0
) -> Nearest:
    """Compare frames (F, H, W, 3) in 0..1 and a sound (2, samples) with the scene's words on each
    of its courses. The sound is that of the course which the picture takes."""

    def psnr(course: world.Scene) -> float:
        drawn = course.frames(*frames.shape[1:3], len(frames), frame_rate)
        return float(-10 * (drawn - frames).square().mean().log10())

    found = max(scene.courses(), key=psnr)
    wanted = spectrum(found.waveform(rate, waveform.shape[1] / rate))
    heard = spectrum(waveform)
    length = min(heard.shape[1], wanted.shape[1])
    sound = torch.nn.functional.cosine_similarity(
        heard[:, :length].flatten(), wanted[:, :length].flatten(), dim=0
    )
    return Nearest(found, psnr(found), float(sound))


def spectrum(waveform: Tensor) -> Tensor:
    """Magnitudes (frequencies, times) of a sound's mean channel, 2048 samples at a time."""
    window = torch.hann_window(2048)
    mono = waveform.float().mean(0)
    return torch.stft(mono, 2048, 512, window=window, return_complex=True).abs()


def print_scores(names: list[str], scores: list[Score]) -> None:
    """A line for each clip with what is wrong in it, and how many are right in all."""
    for name, score in zip(names, scores, strict=True):
        wrong = [part for part, right in score._asdict().items() if not right]
        print(f"{name}: {', '.join(wrong) or 'right'}")
    right = zip(Score._fields, map(sum, zip(*scores, strict=True)), strict=True)
    print(f"right of {len(scores)}: {', '.join(f'{name} {count}' for name, count in right)}")
