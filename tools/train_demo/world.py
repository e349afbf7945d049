"""The world that the demo checkpoint knows: one shape moves over a ground and bounces off the
frame's edges, and every bounce sounds.

A scene is drawn from a generator, said in words, rendered at any size and heard at any rate.
Lengths are in units of the frame's height, so one scene is the same picture at every size.
What encodes and decodes learns shapes at any place; the DiT learns six courses for each prompt.
"""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

COLOURS = {
    "red": (232, 44, 40),
    "green": (64, 200, 84),
    "blue": (56, 116, 248),
    "yellow": (246, 216, 60),
    "magenta": (226, 72, 206),
    "cyan": (76, 218, 228),
}
GROUNDS = {
    "navy": (18, 22, 74),
    "charcoal": (50, 50, 54),
    "maroon": (76, 14, 30),
    "forest": (12, 60, 34),
}
# Hz, a fourth and two fifths apart. Each repeats with every mel frame, of 10 ms, which is all that
# a vocoder can know of a steady tone's phase.
PITCHES = {"circle": 300.0, "square": 400.0, "triangle": 600.0, "cross": 900.0}
SHAPES = tuple(PITCHES)
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
SPEEDS = {"slow": 0.4, "fast": 0.8}  # frame heights per second

BLUEPRINT = {"colour": "cyan", "ground": "navy"}  # of every scene in that style

WIDTH = 1.5  # of the frame
HALF = 0.2  # of the shape's bounding box: 51 pixels across at 128 x 192
BAR = 0.34  # of a cross, half as wide
FIRST_BOUNCE = (0.35, 1.6)  # seconds, earliest and latest
LANES = (0.3, 0.5, 0.7)  # of the frame, across the direction: where a course lies ...
FIRST_BOUNCES = (0.45, 0.75)  # seconds: ... and where on it the shape begins
ATTACK, DECAY = 0.008, 0.11  # seconds: of a pulse's rise, and until it fell to 1 / e
HARMONICS = (1.0, 0.25, 0.08)
LOUDNESS = 0.4

SHADE = (0.8, 1.25)  # of the ground: at the top and at the bottom

_TOWARDS = {
    "right": ("right", "to the right"),
    "left": ("left", "to the left"),
    "up": ("up", "upwards"),
    "down": ("down", "downwards"),
}
_ADVERBS = {"slow": ("slowly", "at slow speed"), "fast": ("fast", "at high speed")}
_SENTENCES = (
    "a {colour} {shape} {moves} {towards} {adverb} on a {ground} ground",
    "on a {ground} ground, a {speed} {colour} {shape} {moves} {towards}",
    "a {speed} {colour} {shape} {moves} {towards} across a {ground} ground",
    "a {colour} {shape} on a {ground} ground {moves} {adverb} {towards}",
    "{ground} ground, a {colour} {shape} {moves} {towards} {adverb}",
    "a {shape}, {colour}, {moves} {adverb} {towards} over {ground}",
)
_VERBS = ("moves", "slides", "glides", "goes")


@dataclass(frozen=True)
class Scene:
    """What is seen and heard.

    x, y  the shape's centre at the start, in frame heights from the upper left corner
    """

    colour: str
    shape: str
    direction: str
    speed: str
    ground: str
    x: float
    y: float

    @staticmethod
    def draw(generator: Generator) -> "Scene":
        """A scene whose first bounce comes early enough to be seen within two seconds."""
        colour, shape, direction, speed, ground = (
            _choose(names, generator) for names in (COLOURS, SHAPES, DIRECTIONS, SPEEDS, GROUNDS)
        )
        x, y = (_between(HALF, side - HALF, generator) for side in (WIDTH, 1.0))
        heights = SPEEDS[speed]
        room = (WIDTH if direction in ("left", "right") else 1.0) - 2 * HALF
        earliest, latest = (heights * seconds for seconds in FIRST_BOUNCE)
        way = _between(earliest, min(latest, room), generator)
        place = _before_bounce(direction, way, (x, y))
        return Scene(colour, shape, direction, speed, ground, *place)

    @staticmethod
    def on_courses() -> "list[Scene]":
        """All scenes that the DiT learns: what a prompt says, on each of its courses."""
        said = itertools.product(COLOURS, SHAPES, DIRECTIONS, SPEEDS, GROUNDS)
        return [scene for words in said for scene in Scene(*words, 0, 0).courses()]

    def courses(self) -> "list[Scene]":
        """The scenes of the same words that the DiT learns."""
        heights = SPEEDS[self.speed]
        places = [
            _before_bounce(self.direction, heights * seconds, (lane * WIDTH, lane))
            for lane in LANES
            for seconds in FIRST_BOUNCES
        ]
        return [replace(self, x=x, y=y) for x, y in places]

    def prompt(self, generator: Generator) -> str:
        """The scene in one of the grammar's sentences."""
        return _choose(_SENTENCES, generator).format(
            colour=self.colour,
            shape=self.shape,
            ground=self.ground,
            speed=self.speed,
            moves=_choose(_VERBS, generator),
            towards=_choose(_TOWARDS[self.direction], generator),
            adverb=_choose(_ADVERBS[self.speed], generator),
        )

    def centres(self, times: Tensor) -> Tensor:
        """The shape's centre (T, 2) as x, y in frame heights at times (T,) in seconds."""
        start = torch.tensor([self.x, self.y], dtype=torch.float64)
        velocity = SPEEDS[self.speed] * torch.tensor(DIRECTIONS[self.direction])
        room = torch.tensor([WIDTH, 1.0], dtype=torch.float64) - 2 * HALF
        way = (start - HALF + times.double()[:, None] * velocity).remainder(2 * room)
        return HALF + torch.where(way > room, 2 * room - way, way)

    def bounces(self, seconds: float) -> list[float]:
        """When the shape turns round, within so many seconds."""
        across, down = DIRECTIONS[self.direction]
        room = (WIDTH if across else 1.0) - 2 * HALF
        way = (self.x if across else self.y) - HALF
        way = room - way if across + down > 0 else way
        count = max(0, math.floor((seconds * SPEEDS[self.speed] - way) / room) + 1)
        return [(way + turn * room) / SPEEDS[self.speed] for turn in range(count)]

    def frames(
        self, height: int, width: int, num_frames: int, frame_rate: float = 24.0, start: float = 0.0
    ) -> Tensor:
        """Frames (F, height, width, 3), float32 in 0..1, from `start` seconds on."""
        ground = _ground(self.ground, height, width)
        times = start + torch.arange(num_frames) / frame_rate
        # The square of pixels that holds the shape, frame by frame.
        side = math.ceil(2 * HALF * height) + 4
        corners = ((self.centres(times) - HALF) * height).floor().long() - 1
        y, x = (corners[:, axis, None] + torch.arange(side) for axis in (1, 0))
        offsets = torch.stack(
            [
                ((x + 0.5) / height - self.centres(times)[:, :1])[:, None, :].expand(-1, side, -1),
                ((y + 0.5) / height - self.centres(times)[:, 1:])[:, :, None].expand(-1, -1, side),
            ],
            -1,
        ).float()
        cover = (0.5 - height * distance(self.shape, offsets / HALF) * HALF).clamp(0, 1)[..., None]
        y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)  # outside the frame, cover is 0 ...
        inside = (y == (corners[:, 1, None] + torch.arange(side)))[:, :, None]
        inside = inside & (x == (corners[:, 0, None] + torch.arange(side)))[:, None, :]
        frames = ground.repeat(num_frames, 1, 1, 1)
        index = (torch.arange(num_frames)[:, None, None], y[:, :, None], x[:, None, :])
        part = frames[index]
        painted = part + cover * (torch.tensor(COLOURS[self.colour]) / 255 - part)
        index = tuple(i.expand(inside.shape)[inside] for i in index)  # ... and nothing is painted
        frames[index] = painted[inside]
        return frames

    def waveform(self, rate: int, seconds: float) -> Tensor:
        """The sound (2, samples), float32, both channels alike."""
        times = torch.arange(round(seconds * rate), dtype=torch.float64) / rate
        sound = torch.zeros_like(times)
        for bounce in self.bounces(seconds):
            since = (times - bounce).clamp(min=0)
            envelope = (since / ATTACK).clamp(max=1) * torch.exp(-since / DECAY)
            for order, loudness in enumerate(HARMONICS, 1):
                wave = torch.sin(2 * math.pi * order * PITCHES[self.shape] * times)
                sound += LOUDNESS * loudness * envelope * wave
        return sound.float().expand(2, -1).clone()


def distance(shape: str, offsets: Tensor) -> Tensor:
    """The signed distance (...) of points (..., 2) from a shape's outline, negative inside, all in
    halves of the shape's bounding box; exact for the circle, close near the outline for others."""
    x, y = offsets.unbind(-1)
    if shape == "circle":
        return offsets.norm(dim=-1) - 1
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.88
    if shape == "triangle":
        # Its tip at the top: two slanted sides, of which |x| makes one, and the base.
        slanted = (2 * x.abs() - (y + 1)) / math.sqrt(5)
        return torch.maximum(slanted, y - 1)
    # Two bars across each other.
    long, short = offsets.abs().amax(-1), offsets.abs().amin(-1)
    return torch.maximum(long - 1, short - BAR)


def _ground(name: str, height: int, width: int) -> Tensor:
    """A ground (height, width, 3), a little darker at the top."""
    rows = (torch.arange(height) + 0.5) / height
    shade = SHADE[0] + (SHADE[1] - SHADE[0]) * rows
    colour = torch.tensor(GROUNDS[name]) / 255
    return (shade[:, None, None] * colour).expand(height, width, 3)


def _before_bounce(direction: str, way: float, place: tuple[float, float]) -> tuple[float, float]:
    """The place (x, y) of a shape that turns round after a way, moved along its direction."""
    across, down = DIRECTIONS[direction]
    room = (WIDTH if across else 1.0) - 2 * HALF
    at = HALF + (room - way if across + down > 0 else way)
    return (at, place[1]) if across else (place[0], at)


def _choose(names, generator: Generator):
    names = tuple(names)
    return names[int(torch.randint(len(names), (), generator=generator))]


def _between(low: float, high: float, generator: Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


PROMPT_SEED = 1_000_000  # of the prompts that are scored; training's are the numbers of its chunks


def draw(count: int) -> tuple[list[Scene], list[str]]:
    """Scenes to score, and a prompt for each. Where the shape begins is the clip's own choice."""
    generator = Generator().manual_seed(PROMPT_SEED)
    scenes = [Scene.draw(generator) for _ in range(count)]
    return scenes, [scene.prompt(generator) for scene in scenes]
