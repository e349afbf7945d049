"""Auto duration: a video's length from the seconds that the duration head predicts."""

from typing import Annotated, NamedTuple

from pydantic import Field

from ltx_neuron.errors import FieldError
from ltx_neuron.sampling.latents import TIME_SCALE

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
