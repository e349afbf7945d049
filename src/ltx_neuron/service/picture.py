"""An uploaded picture, decoded in a process of its own that may die: what comes back is a PNG that
we wrote.

    python -m ltx_neuron.service.picture IN OUT PIXELS

Decoders are C code that reads what strangers send. The process has little memory and time, inherits
no secrets, and a crash of it is a refused picture.
"""

import resource
import subprocess
import sys
import threading
from pathlib import Path

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 2**25
SECONDS = 20
_MEMORY_BYTES = 3 * 2**30  # address space; a decoded picture has up to 8 bytes a pixel, twice
_REFUSED = 3
_at_once = threading.BoundedSemaphore(2)  # each may take all of _MEMORY_BYTES


class BadPicture(Exception):
    """A file that is no picture, or one too large; the text is for its sender."""


def decode(source: Path, target: Path, max_pixels: int = MAX_PIXELS) -> None:
    """Write the picture of a file as PNG. BadPicture where it is none that is taken."""
    command = [sys.executable, "-m", "ltx_neuron.service.picture", source, target, max_pixels]
    search = {"PYTHONPATH": str(Path(__file__).parents[2])}
    try:
        with _at_once:
            process = subprocess.run(
                list(map(str, command)),
                capture_output=True,
                timeout=SECONDS,
                env=search,
                stdin=subprocess.DEVNULL,
            )
    except subprocess.TimeoutExpired:
        raise BadPicture(f"it took longer than {SECONDS} s to decode") from None
    if process.returncode == _REFUSED:
        raise BadPicture(process.stdout.decode(errors="replace").strip())
    if process.returncode or not target.is_file():
        raise BadPicture("it cannot be decoded")


def _limit() -> None:
    """Bound what this process may take."""
    for what, limit in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (limit, hard))


def _convert(source: str, target: str, max_pixels: int) -> None:
    """Decode the first picture of a file, and write it with the same pixels as PNG."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # ours is checked before anything is decoded
    try:
        with Image.open(source, formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                _refuse(f"it has {width}x{height} pixels, {max_pixels} in all at most")
            # PNG has no CMYK; what ltx-neuron generate makes of one is RGB as well.
            plain = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else None
            # The orientation travels on: who reads the PNG applies it.
            exif = {"exif": image.getexif()} if image.getexif() else {}
            (plain or image.convert("RGB")).save(target, format="PNG", compress_level=1, **exif)
    except (OSError, SyntaxError, ValueError, MemoryError):
        _refuse(f"it is no picture that can be read; wanted {', '.join(FORMATS)}")


def _refuse(why: str) -> None:
    print(why, flush=True)
    sys.exit(_REFUSED)


if __name__ == "__main__":
    _limit()
    _convert(sys.argv[1], sys.argv[2], int(sys.argv[3]))
