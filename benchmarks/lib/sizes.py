"""Sizes of videos as benchmarks take them on the command line."""

from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size


def parse_size(text: str) -> Size:
    """A size from HEIGHTxWIDTHxFRAMES. UserError where the model takes no such size."""
    try:
        height, width, frames = map(int, text.split("x"))
    except ValueError:
        raise UserError(f"--sizes {text}: wanted HEIGHTxWIDTHxFRAMES, as in 384x512x25") from None
    size = Size(height, width, frames)
    size.check()
    return size


def video_tokens(size: Size) -> int:
    """Video tokens of a one-stage generation of that size."""
    return Job.of_size(size).buckets[0].video_tokens
