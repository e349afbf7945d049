"""The limits of a service, and the flags of serve that set them."""

import argparse
from dataclasses import dataclass, field, fields
from typing import Any

from ltx_neuron.command_line import advanced
from ltx_neuron.errors import UserError, flag_of
from ltx_neuron.service.picture import MAX_PIXELS


def _limit(default: float | None, value: str, help: str) -> Any:
    """A limit with a flag. value: the name of the flag's value in its help."""
    if default is not None:
        help += f" (default: {default:.9g})"
    return field(default=default, metadata={"metavar": value, "help": help})


@dataclass(frozen=True)
class Limits:
    """Limits of requests, and of the time and space of results."""

    max_queue: int = _limit(1000, "N", "number of waiting jobs")
    max_queue_per_token: int | None = _limit(
        None, "N", "number of waiting jobs of one token (default: as --max-queue)"
    )
    rate: float = _limit(600.0, "N", "new jobs a minute of one token")
    max_queue_gb: float = _limit(50.0, "GB", "size of the files of all waiting jobs, in GB")
    max_body_mb: float = _limit(256.0, "MIB", "size of a request, with its files, in MiB")
    max_image_pixels: int = _limit(MAX_PIXELS, "N", "pixels of a decoded image")
    max_audio_mb: float = _limit(64.0, "MIB", "size of an uploaded sound, in MiB")
    max_video_mb: float = _limit(200.0, "MIB", "size of an uploaded video, in MiB")
    max_video_pixels: int = _limit(4096 * 2304, "N", "pixels of a frame of an uploaded video")
    max_media_seconds: float = _limit(60.0, "S", "length of an uploaded sound or video, in seconds")
    keep_days: float = _limit(7.0, "DAYS", "days after which a finished job is deleted")
    keep_gb: float = _limit(
        50.0, "GB", "size of all finished jobs, in GB; the oldest are deleted first"
    )
    max_image_mb: float = 32.0  # without a flag

    def bytes_of(self, kind: str) -> int:
        """The maximum size of a file. kind: "body", "image", "audio" or "video"."""
        return int(getattr(self, f"max_{kind}_mb") * 2**20)


_WITH_FLAG = [limit for limit in fields(Limits) if limit.metadata]


def add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits", Limits.__doc__)
    for limit in _WITH_FLAG:
        kind = float if isinstance(limit.default, float) else int
        options: Any = {"type": kind, "default": limit.default, **limit.metadata}
        advanced(group.add_argument(flag_of(limit.name), **options))


def limits_of(args: argparse.Namespace) -> Limits:
    """The limits of the parsed flags. Raises UserError for a number that is not above 0."""
    values = {limit.name: getattr(args, limit.name) for limit in _WITH_FLAG}
    for name, value in values.items():
        if name != "max_queue_per_token" and not 0 < value < float("inf"):
            raise UserError(f"{flag_of(name)}: wanted a number above 0")
    return Limits(**values)
