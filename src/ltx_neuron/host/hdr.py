"""Pictures of high dynamic range: their colours, and EXR files.

The model sees ACEScct, in [0, 1] as other pictures. Arrays are of numpy, (..., rows, columns, 3).
Sources: ltx-core 1.4 hdr.py, color/hlg.py and ltx-pipelines 1.4 media_io/exr.py; Academy S-2016-001
(ACEScct); ITU-R BT.2100 (HLG).
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ltx_neuron import files
from ltx_neuron.errors import UserError, as_user_errors

# The colour spaces of input and output -> their names in OpenColorIO's built-in config.
SPACES = {
    "srgb_gamma": "sRGB - Texture",
    "srgb": "Linear Rec.709 (sRGB)",
    "srgb_linear": "Linear Rec.709 (sRGB)",  # upstream's name of srgb as output
    "acescg": "ACEScg",
    "acescct": "ACEScct",
    "rec2020": "Linear Rec.2020",
}
_CONFIG = "cg-config-v1.0.0_aces-v1.3_ocio-v2.1"
_BLACK = 0.0729055341958355  # ACEScct of light 0
# Of HLG's curve, and its signal for diffuse white (light 1).
_A, _B, _C = 0.17883277, 0.28466892, 0.55991073
_WHITE_SIGNAL = 0.75
# An EXR's colorSpace, and the chromaticities of its red, green, blue and white.
_AP1 = 0.713, 0.293, 0.165, 0.83, 0.128, 0.044, 0.32168, 0.33767
_TAGS: dict[str, tuple[str, tuple[float, ...]]] = {
    "srgb_linear": ("sRGB", (0.64, 0.33, 0.3, 0.6, 0.15, 0.06, 0.3127, 0.329)),
    "acescg": ("ACEScg", _AP1),
    "acescct": ("ACEScct", _AP1),
}


def _package(name: str) -> Any:
    """A package of the extra "hdr"."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"HDR needs a package that is missing ({error.name})\n"
            'Type: pip install "ltx-neuron[hdr]"'
        ) from None


# --- colours --------------------------------------------------------------------------------------


@cache
def _converter(source: str, target: str) -> Any:
    ocio = _package("PyOpenColorIO")
    config = ocio.Config.CreateFromBuiltinConfig(_CONFIG)
    processor = config.getProcessor(SPACES[source], SPACES[target])
    # The default optimizations approximate powers and logarithms.
    return processor.getOptimizedCPUProcessor(ocio.OPTIMIZATION_NONE)


def converted(pixels: np.ndarray, source: str, target: str) -> np.ndarray:
    """Pixels of one of SPACES in another one, float32."""
    pixels = np.array(pixels, np.float32, order="C")  # a copy, which is converted in place
    if SPACES[source] != SPACES[target]:
        _converter(source, target).applyRGB(pixels)
    return pixels


def to_acescct(pixels: np.ndarray, space: str) -> np.ndarray:
    """Pixels of one of SPACES as ACEScct in [0, 1], whose 1 is light of 222.9. Negative light is
    0."""
    least = 0.0 if space == "acescct" else _BLACK
    return converted(pixels, space, "acescct").clip(least, 1.0)


def from_acescct(codes: np.ndarray, space: str) -> np.ndarray:
    """ACEScct in one of SPACES: light from 0 on, or ACEScct itself in [0, 1]."""
    codes = codes.clip(0.0, 1.0)
    return codes if space == "acescct" else converted(codes, "acescct", space).clip(0.0)


def hlg_signal(codes: np.ndarray) -> np.ndarray:
    """ACEScct as the signal of HLG in [0, 1], with BT.2020's primaries. Diffuse white is 0.75, and
    brighter light approaches 1."""
    light = converted(from_acescct(codes, "srgb"), "srgb", "rec2020").clip(0.0)
    white = (np.exp((_WHITE_SIGNAL - _C) / _A) + _B) / 12
    bright = 1 - (1 - white) * np.exp(-white / (1 - white) * (light - 1))
    scene = np.where(light <= 1, light * white, bright)
    curve = _A * np.log(np.maximum(12 * scene - _B, 1e-12)) + _C
    return np.where(scene <= 1 / 12, np.sqrt(3 * scene), curve).clip(0.0, 1.0)


# --- EXR ------------------------------------------------------------------------------------------


def exr_frames(folder: str | Path) -> list[Path]:
    """The EXR files of a folder, in the order of their names."""
    return sorted(path for path in Path(folder).iterdir() if path.suffix.lower() == ".exr")


def read_exr(path: str | Path, flag: str) -> np.ndarray:
    """An EXR picture as float32 (H, W, 3); alpha is dropped, and a grey one has three equal
    channels. Raises UserError."""
    OpenEXR = _package("OpenEXR")
    with as_user_errors(flag):
        files.check_regular(path)
    try:
        channels = OpenEXR.File(str(path)).channels()
    except Exception as error:  # the bindings raise several kinds
        raise UserError(f"{flag} {path} cannot be read as EXR: {error}") from None
    name = next((name for name in ("RGB", "RGBA", "Y") if name in channels), None)
    if name is None:
        raise UserError(
            f"{flag} {path} has the channels {', '.join(sorted(channels))}; wanted R, G and B, or Y"
        )
    pixels = channels[name].pixels.astype(np.float32)
    return np.ascontiguousarray(pixels[..., :3] if pixels.ndim == 3 else np.stack([pixels] * 3, -1))


def write_exr(path: str | Path, codes: np.ndarray, space: str) -> None:
    """Write ACEScct (H, W, 3) as an EXR of half floats in one of _TAGS."""
    OpenEXR = _package("OpenEXR")
    name, chromaticities = _TAGS[space]
    header = {
        "compression": OpenEXR.ZIP_COMPRESSION,
        "type": OpenEXR.scanlineimage,
        "chromaticities": chromaticities,
        "colorSpace": name,
        "software": files.MARK,
    }
    pixels = np.ascontiguousarray(from_acescct(codes, space), np.float16)
    OpenEXR.File(header, {"RGB": pixels}).write(str(path))
