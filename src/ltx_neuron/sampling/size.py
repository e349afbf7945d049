"""The size of a video: pixels, frames and frames per second, also by a predicted length."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, NamedTuple, Self

from pydantic import Field

from ltx_neuron.errors import FieldError
from ltx_neuron.sampling.shapes import SPACE_SCALE, TIME_SCALE, audio_latent_frames

FRAME_RATES = 1, 1000  # minimum and maximum
NO_PICTURE = 0, 0  # height and width of sound alone


def exact_frame_rate(frame_rate: float) -> Fraction:
    """The rate as a fraction of frames per second. Rounded broadcast rates become exact: 29.97 is
    30000/1001; 23.976 and 23.98 are 24000/1001."""
    if float(frame_rate).is_integer():
        return Fraction(int(frame_rate))
    broadcast = Fraction(math.ceil(frame_rate) * 1000, 1001)
    # Two decimals of a broadcast rate have an error of 1.7e-4; the next integer is 1e-3 off.
    if abs(frame_rate / broadcast - 1) < 2e-4:
        return broadcast
    return Fraction(frame_rate).limit_denominator(1001)


@dataclass(frozen=True)
class Size:
    """Height, width (pixels; NO_PICTURE for sound alone), frames and frames per second of the
    result, and whether it has two stages."""

    height: int = 512
    width: int = 768
    num_frames: int = 121
    frame_rate: float = 24.0
    two_stage: bool = False
    # Ratio of stage 2's sides to stage 1's, 2 or 1.5; the upsampler's file determines it
    spatial_scale: float = 2.0

    @property
    def first(self) -> Self:
        if not self.two_stage:
            return self
        up, down = Fraction(self.spatial_scale).as_integer_ratio()
        height, width = (side * down // up for side in self.sides)
        return type(self)(height, width, self.num_frames, self.frame_rate)

    @property
    def unit(self) -> int:
        """Pixels of which the sides must be multiples, so that each stage has whole latents. The
        upsampler of 1.5 makes 3 latents of 2."""
        return SPACE_SCALE * (Fraction(self.spatial_scale).numerator if self.two_stage else 1)

    @property
    def sides(self) -> tuple[int, int]:
        return self.height, self.width

    def __str__(self) -> str:
        picture = "sound alone" if self.sides == NO_PICTURE else f"{self.height}x{self.width}"
        return f"{picture}, {self.num_frames} frames"

    @property
    def seconds(self) -> float:
        return self.num_frames / self.frame_rate

    @property
    def audio_frames(self) -> int:
        return audio_latent_frames(self.num_frames, self.frame_rate)

    def check(self) -> None:
        """Raise FieldError, with the nearest valid size, for a size that the model cannot have."""
        if self.sides != NO_PICTURE:  # sound has a latent for any number of frames
            self._check_picture()
        least, most = FRAME_RATES
        if not least <= self.frame_rate <= most:  # NaN is refused as well
            raise FieldError(
                f"{{frame_rate}}: got {self.frame_rate:g}, wanted {least} to {most}; type for"
                " example {frame_rate} 24 or, if {video_path} has this rate, pass another file"
            )
        if self.audio_frames < 1:
            raise FieldError(
                f"{self.num_frames} frames at {{frame_rate}} {self.frame_rate:g} are too short for"
                " sound; lower the frame rate or raise {num_frames}"
            )

    def _check_picture(self) -> None:
        unit, stages = self.unit, " (two stages)" if self.two_stage else ""
        if self.spatial_scale != 2:
            stages = f" (two stages, the second {self.spatial_scale:g} times the first)"
        for name in ("height", "width"):
            value = getattr(self, name)
            if value <= 0 or value % unit:
                below = max(unit, value // unit * unit)
                nearest = [below] if below >= value else [below, below + unit]
                raise FieldError(
                    f"{{{name}}} {value} is not a multiple of"
                    f" {unit}{stages}; nearest valid: {' or '.join(map(str, nearest))}"
                )
        if self.num_frames < 1 or self.num_frames % TIME_SCALE != 1:
            below = max(1, (self.num_frames - 1) // TIME_SCALE * TIME_SCALE + 1)
            raise FieldError(
                f"{{num_frames}} {self.num_frames} is not of the form 8k+1; nearest valid:"
                f" {below} or {below + TIME_SCALE}"
            )


_Seconds = Annotated[float, Field(gt=0, le=3600)]


class AutoDuration(NamedTuple):
    """MIN_SECONDS MAX_SECONDS: the limits of a predicted length (ltx-pipelines 1.2.0
    utils/types.py)."""

    min_seconds: _Seconds = 1.0
    max_seconds: _Seconds = 20.0

    def check(self) -> None:
        """Raise FieldError for limits in the wrong order."""
        if self.min_seconds > self.max_seconds:
            raise FieldError(
                f"{{auto_duration}} {self.min_seconds:g} {self.max_seconds:g}: wanted MIN_SECONDS"
                " MAX_SECONDS, the smaller number first"
            )

    def num_frames(self, seconds: float, frame_rate: float) -> int:
        """The frames, 8k+1, for a predicted length: the next lower number, or the next higher one
        if that is below the minimum (ltx-pipelines 1.2.0 seconds_to_clamped_num_frames)."""
        shortest, longest = (max(1, round(limit * frame_rate)) for limit in self)
        frames = max(shortest, min(round(seconds * frame_rate), longest))
        below = (frames - 1) // TIME_SCALE * TIME_SCALE + 1
        above = below + TIME_SCALE
        return above if below < shortest and above <= longest else below
