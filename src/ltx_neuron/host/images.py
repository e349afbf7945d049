"""Conditioning images: files that Pillow can read, as pixels for the video encoder."""

import hashlib
import math
import os
import re
import shlex
import warnings
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps

from ltx_neuron.errors import UserError, os_reason, to_user_error
from ltx_neuron.files import check_regular, first_bytes
from ltx_neuron.host.colors import in_srgb

# The shortest and longest side that libx264 supports: one 2x2 block of colour, and 16384.
MIN_SIDE, MAX_SIDE = 2, 16384
# Of a picture, 5 GB while it is read (19 bytes each, measured), and of one that is scaled.
_MAX_PIXELS, _MAX_SCALED = MAX_SIDE**2, 89_478_485
# Formats whose frames are a video's. Those of others are pages, layers, or a photograph's preview.
_MOVING = {"GIF", "WEBP", "PNG", "AVIF", "FLI", "MPEG"}
_HEIF = re.compile(rb"....ftyp(heic|heix|mif1)", re.DOTALL)
# Beginnings of other files that are not read -> their names.
_FORMATS = {
    rb"%PDF": "a PDF",
    rb"\xff\x0a|\0\0\0\x0cJXL ": "JPEG XL",
    rb"\s*<": "SVG or a web page",
    rb"....ftyp(?!av|mif1)|\x1aE\xdf\xa3": "a video",
}


def load_image(
    path: str | Path,
    height: int,
    width: int,
    crf: int = 33,
    dtype: torch.dtype = torch.float32,
    orientation: str = "shown",  # see sampling.compat.Compat
) -> torch.Tensor:
    """The image as pixels (1, 3, 1, height, width) in [-1, 1], as
    ltx_pipelines.utils.media_io.load_image_conditioning. One H.264 round trip at `crf` gives it the
    texture of the video frames the model was trained on (0 skips it); then it is scaled to fill
    height x width and cropped around its centre. Alpha is dropped. Raises UserError when `path` is
    not a readable image, or one too small or too large to use."""
    image = decode_image(path, orientation)
    if crf != 0:
        image = _h264_round_trip(image, crf)
    check_filling(path, image.shape[:2], height, width)
    return fill(image, height, width).to(dtype)


def fill(image: np.ndarray, height: int, width: int) -> torch.Tensor:
    """A picture, uint8 (H, W, 3), scaled to fill height x width and cropped around its centre, as
    pixels (1, 3, 1, height, width) in [-1, 1], float32."""
    size = _filling_size(image.shape[:2], height, width)
    pixels = torch.tensor(image, dtype=torch.float32).permute(2, 0, 1)[None]
    pixels = torch.nn.functional.interpolate(
        pixels, size=size, mode="bilinear", align_corners=False
    )
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    pixels = pixels[:, :, None, top : top + height, left : left + width]
    return pixels / 127.5 - 1.0


def is_still(path: str | Path) -> bool:
    """Whether a file's content is one picture. Not if it moves, or cannot be read."""
    try:
        if _HEIF.match(first_bytes(Path(path), 12)):
            return True  # though Pillow may not read it; a video's reader would take one tile of it
        with _opened(path) as image:
            return not (image.format in _MOVING and getattr(image, "is_animated", True))
    except Image.DecompressionBombError:
        return True
    except (OSError, SyntaxError, ValueError):
        return False


def unreadable(path: str | Path, moves: bool = False) -> str:
    """What an unreadable picture is, and how to convert it; "" if unknown. moves: as a video."""
    begin, path = first_bytes(Path(path), 16), str(path)
    stem = Path(path).stem[:60]
    names = (f"{stem}{extra}.png" for extra in ("", *(f"-{n}" for n in range(2, 1000))))
    new = next(candidate for candidate in names if not os.path.lexists(candidate))
    if moves:
        with suppress(OSError, SyntaxError, ValueError), _opened(path) as image:
            if image.format == "WEBP":
                script = f"from PIL import Image; Image.open({path!r}).save({new!r}, save_all=True)"
                return f"it is an animated WebP.\nType: python -c {shlex.quote(script)}"
        return ""
    if _HEIF.match(begin):
        script = f"import pillow_heif as h; h.read_heif({path!r}).to_pillow().save({new!r})"
        return f"it is HEIC.\nType: pip install pillow-heif && python -c {shlex.quote(script)}"
    matching = (name for magic, name in _FORMATS.items() if re.match(magic, begin, re.DOTALL))
    name = next(matching, "")
    return name and f"it is {name}; wanted PNG, JPEG, WebP, AVIF, TIFF or GIF"


def check_image(
    path: str | Path,
    height: int = 1,
    width: int = 1,
    orientation: str = "shown",
    flag: str = "--image",
) -> None:
    """Raise UserError if `load_image(path, height, width)` would."""
    check_filling(path, decode_image(path, orientation, flag).shape[:2], height, width, flag)


def content_digest(path: str | Path) -> str:
    """SHA-256 of a file's bytes, which identifies a job's input independent of its name.
    "unreadable" if the file cannot be read; the checks of a job raise the error."""
    try:
        if os.path.isdir(path):  # of HDR's input: its files, in the order of their names
            digests = map(content_digest, sorted(Path(path).glob("*")))
            return hashlib.sha256("".join(digests).encode()).hexdigest()
        check_regular(path)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "unreadable"


def decode_image(path: str | Path, orientation: str, flag: str = "--image") -> np.ndarray:
    """Read an image file as uint8 (H, W, 3). Raises UserError for unusable images."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with _opened(path) as image:
                if orientation == "stored":
                    shown = _eight_bit(image).convert("RGB")
                else:
                    exif = image.getexif().get(ExifTags.Base.Orientation)
                    turn = orientation == "shown" or exif in (3, 6, 8)  # quarters, not mirrored
                    shown = in_srgb(_eight_bit(ImageOps.exif_transpose(image) if turn else image))
                picture = np.array(shown)
        except FileNotFoundError:
            raise UserError(
                f"there is no image {path}: pass an existing file with {flag} FILE"
            ) from None
        except PermissionError as error:
            raise to_user_error(error, flag) from None
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise UserError(
                f"{path} is too large: {error}\npass a smaller image with {flag} FILE"
            ) from None
        except (OSError, SyntaxError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read as an image: {unreadable(path) or os_reason(error)}\n"
                f"pass another with {flag} FILE"
            ) from None
    height, width = picture.shape[:2]
    if min(height, width) < MIN_SIDE or max(height, width) > MAX_SIDE:
        raise UserError(
            f"{path} has {width}x{height} pixels, wanted {MIN_SIDE} to {MAX_SIDE} on each side;"
            f" pass another with {flag} FILE"
        )
    return picture


def _opened(path: str | Path) -> Image.Image:
    check_regular(path)
    Image.MAX_IMAGE_PIXELS = _MAX_PIXELS  # Pillow's is below the largest cameras'
    return Image.open(path)


def _filling_size(size: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Height and width of a picture scaled, with its aspect ratio, to cover height x width."""
    scale = max(height / size[0], width / size[1])
    return math.ceil(size[0] * scale), math.ceil(size[1] * scale)


def check_filling(
    path: str | Path, size: tuple[int, int], height: int, width: int, flag: str = "--image"
) -> None:
    """Raise UserError for a `size` (height, width) too large when it fills height x width."""
    if math.prod(_filling_size(size, height, width)) > _MAX_SCALED:
        raise UserError(
            f"{path} is too narrow to fill {width}x{height}: got {size[1]}x{size[0]} pixels, wanted"
            f" an aspect ratio closer to the video's; crop it and pass it again with {flag} FILE"
        )


def _eight_bit(image):
    """Scale a 16-bit grey image to 8 bits, because Pillow's conversion clips it to white. Raises
    ValueError for floats, whose value of white is unknown."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, wanted 8 bits: convert it")
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))


def _h264_round_trip(image: np.ndarray, crf: int) -> np.ndarray:
    """Encode a picture, uint8 (H, W, 3), in H.264 and decode it; odd sides lose a pixel."""
    import av

    height, width = image.shape[0] // 2 * 2, image.shape[1] // 2 * 2
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(
            "libx264", rate=1, options={"crf": str(crf), "preset": "veryfast"}
        )
        stream.height, stream.width = height, width
        frame = av.VideoFrame.from_ndarray(
            np.ascontiguousarray(image[:height, :width]), format="rgb24"
        )
        container.mux(stream.encode(frame.reformat(format="yuv420p")))
        container.mux(stream.encode())
    file.seek(0)
    with av.open(file, "r") as written:
        return next(written.decode(video=0)).to_ndarray(format="rgb24")
