"""Decodes an uploaded picture in a separate process and writes it anew as PNG.

python -m ltx_neuron.service.picture IN OUT PIXELS
"""

import re
import sys
from pathlib import Path

from ltx_neuron.service import sandbox

FORMATS = ("PNG", "JPEG", "WEBP")
_BEGINNING = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF....WEBP", re.DOTALL)
MAX_PIXELS = 2**25
_SECONDS = 20


def is_picture(start: bytes) -> bool:
    """Whether a file's first 12 bytes are those of a picture of FORMATS."""
    return bool(_BEGINNING.match(start))


def decode(source: Path, target: Path, max_pixels: int = MAX_PIXELS) -> None:
    """Write a file's picture as PNG. Raises sandbox.BadFile for an unreadable or large picture."""
    sandbox.run("ltx_neuron.service.picture", source, target, max_pixels, seconds=_SECONDS)
    if not target.is_file():
        raise sandbox.BadFile("it cannot be decoded")


def _convert(source: str, target: str, max_pixels: int) -> None:
    from PIL import Image

    from ltx_neuron.host.colors import in_srgb

    Image.MAX_IMAGE_PIXELS = None  # max_pixels is checked before decoding
    try:
        with Image.open(source, formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                sandbox.refuse(f"it has {width}x{height} pixels, wanted at most {max_pixels}")
            # PNG has no CMYK: it becomes sRGB, as in ltx-neuron generate.
            plain = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else None
            # Readers of the PNG apply the orientation in its EXIF data.
            exif = {"exif": image.getexif()} if image.getexif() else {}
            (plain or in_srgb(image)).save(target, format="PNG", compress_level=1, **exif)
    except (OSError, SyntaxError, ValueError, MemoryError):
        sandbox.refuse(f"it is not a readable picture; wanted {', '.join(FORMATS)}")


if __name__ == "__main__":
    sandbox.limit(_SECONDS)
    _convert(sys.argv[1], sys.argv[2], int(sys.argv[3]))
