"""Checks an uploaded sound or video: a separate process decodes it once before it is used.

    python -m ltx_neuron.service.media FILE audio|video SECONDS PIXELS

The container must be one of FORMATS: others, such as playlists, can refer to further files.
"""

import sys
from pathlib import Path

from ltx_neuron.service import sandbox
from ltx_neuron.service.settings import Limits

FORMATS = {
    "audio": "WAV, MP3, FLAC, Ogg, MP4, WebM or Matroska",
    "video": "MP4, MOV, WebM or Matroska",
}
_CONTAINERS = "wav,mp3,flac,ogg,mov,matroska"  # FFmpeg's names; mov is MP4 too, matroska WebM
_CPU_SECONDS = 120


def check(source: Path, kind: str, limits: Limits) -> None:
    """Raise sandbox.BadFile unless a file is a sound or a video within the limits. kind: "audio" or
    "video"; a video's sound is decoded too."""
    arguments = source, kind, limits.max_media_seconds, limits.max_video_pixels
    sandbox.run("ltx_neuron.service.media", *arguments, seconds=_CPU_SECONDS)


def _decode(path: str, kind: str, max_seconds: float, max_pixels: int) -> None:
    """Decode a whole file; refuse it at the first problem."""
    import av
    from av.error import FFmpegError

    decoded = 0
    try:
        with av.open(path, options={"format_whitelist": _CONTAINERS}) as container:
            tracks = {stream.type: stream for stream in reversed(container.streams)}  # the first
            if kind not in tracks:
                sandbox.refuse(f"it has no {'sound' if kind == 'audio' else 'video'}")
            if kind == "audio":
                tracks = {"audio": tracks["audio"]}
            tracks = [tracks[name] for name in ("video", "audio") if name in tracks]
            for frame in container.decode(tracks):
                assert isinstance(frame, av.AudioFrame | av.VideoFrame)  # tracks has no others
                if frame.time is not None and frame.time > max_seconds:
                    sandbox.refuse(f"it is longer than {max_seconds:g} s")
                if isinstance(frame, av.VideoFrame) and frame.width * frame.height > max_pixels:
                    size = f"{frame.width}x{frame.height}"
                    sandbox.refuse(f"its frames have {size} pixels, wanted at most {max_pixels}")
                decoded += 1
    except (FFmpegError, OSError, ValueError, MemoryError):
        decoded = 0
    if not decoded:
        what = "sound" if kind == "audio" else "video"
        sandbox.refuse(f"it is not a readable {what}; wanted {FORMATS[kind]}")


if __name__ == "__main__":
    sandbox.limit(_CPU_SECONDS)
    _decode(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
