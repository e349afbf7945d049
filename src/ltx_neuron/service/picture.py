"""An uploaded picture, decoded in a process of its own: what comes back is a PNG that we wrote.

python -m ltx_neuron.service.picture IN OUT PIXELS
"""

import sys
from pathlib import Path

from ltx_neuron.service import sandbox

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 2**25
_SECONDS = 20


def decode(source: Path, target: Path, max_pixels: int = MAX_PIXELS) -> None:
    """Write the picture of a file as PNG. sandbox.BadFile where it is none that is taken."""
    module = "ltx_neuron.service.picture"
    sandbox.run(module, source, target, max_pixels, seconds=_SECONDS)
    if not target.is_file():
        raise sandbox.BadFile("it cannot be decoded")


def _convert(source: str, target: str, max_pixels: int) -> None:
    """Decode the first picture of a file, and write it with the same pixels as PNG."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # ours is checked before anything is decoded
    try:
        with Image.open(source, formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                sandbox.refuse(f"it has {width}x{height} pixels, {max_pixels} in all at most")
            # PNG has no CMYK; what ltx-neuron generate makes of one is RGB as well.
            plain = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else None
            # The orientation travels on: who reads the PNG applies it.
            exif = {"exif": image.getexif()} if image.getexif() else {}
            (plain or image.convert("RGB")).save(target, format="PNG", compress_level=1, **exif)
    except (OSError, SyntaxError, ValueError, MemoryError):
        sandbox.refuse(f"it is no picture that can be read; wanted {', '.join(FORMATS)}")


if __name__ == "__main__":
    sandbox.limit(_SECONDS)
    _convert(sys.argv[1], sys.argv[2], int(sys.argv[3]))
