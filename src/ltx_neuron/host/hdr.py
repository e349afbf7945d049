"""Pictures of high dynamic range, arrays (..., 3): their colours, and EXR files. The model sees
ACEScct. Sources: ltx-core 1.4 hdr.py, color/hlg.py; Academy S-2016-001 (ACEScct); ITU-R BT.2100."""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ltx_neuron import files
from ltx_neuron.errors import UserError, os_reason

# Other names of colour spaces in OpenColorIO's built-in config. srgb_linear is srgb as output.
_SPACES = {"srgb_gamma": "srgb_tx", "rec2020": "lin_rec2020"}
_SPACES |= dict.fromkeys(("srgb", "srgb_linear"), "lin_rec709_srgb")
_CONFIG = "cg-config-v2.1.0_aces-v1.3_ocio-v2.3"
_BLACK = 0.0729055341958355  # ACEScct of light 0
# Of HLG's curve, and its signal for diffuse white (light 1).
_A, _B, _C, _WHITE_SIGNAL = 0.17883277, 0.28466892, 0.55991073, 0.75
# An EXR's colorSpace, and the chromaticities of its red, green, blue and white.
_AP1 = 0.713, 0.293, 0.165, 0.83, 0.128, 0.044, 0.32168, 0.33767
_TAGS: dict[str, tuple] = {"acescg": ("ACEScg", _AP1), "acescct": ("ACEScct", _AP1)}
_TAGS["srgb_linear"] = "sRGB", (0.64, 0.33, 0.3, 0.6, 0.15, 0.06, 0.3127, 0.329)


def package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        text = f'HDR needs the package {name}\nType: pip install "ltx-neuron[hdr]"'
        raise UserError(text) from None


@cache
def _converter(source: str, target: str) -> Any:
    ocio = package("PyOpenColorIO")
    config = ocio.Config.CreateFromBuiltinConfig(_CONFIG)
    processor = config.getProcessor(*(_SPACES.get(name, name) for name in (source, target)))
    # The default optimizations approximate powers and logarithms.
    return processor.getOptimizedCPUProcessor(ocio.OPTIMIZATION_LOSSLESS)


def converted(pixels: np.ndarray, source: str, target: str) -> np.ndarray:
    """Pixels of a colour space in another one, float32."""
    pixels = np.array(pixels, np.float32, order="C")  # a copy, which is converted in place
    if source != target:
        _converter(source, target).applyRGB(pixels)
    return pixels


def to_acescct(pixels: np.ndarray, space: str) -> np.ndarray:
    """Pixels of a colour space as ACEScct in [0, 1], whose 1 is light of 222.9. Negative light is
    0."""
    least = 0.0 if space == "acescct" else _BLACK
    return converted(pixels, space, "acescct").clip(least, 1.0)


def from_acescct(codes: np.ndarray, space: str) -> np.ndarray:
    """ACEScct in a colour space: light from 0 on, or ACEScct itself in [0, 1]."""
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


def exr_folder(video: Path, space: str) -> Path:
    return video.with_name(f"{video.stem}_{space}_exr")


def exr_frames(folder: str | Path) -> list[Path]:
    """The EXR files of a folder, in the order of their names."""
    return sorted(path for path in Path(folder).iterdir() if path.suffix.lower() == ".exr")


def read_exr(path: str | Path, flag: str) -> np.ndarray:
    """An EXR picture as float32 (H, W, 3); alpha is dropped, and a grey one has three equal
    channels. Raises UserError."""
    try:
        files.check_regular(path)
        channels = package("OpenEXR").File(str(path)).channels()
        (name,) = channels.keys() & {"RGB", "RGBA", "Y"}
    except ValueError:
        got = ", ".join(sorted(channels))
        raise UserError(f"{flag} {path} has the channels {got}; wanted R, G and B, or Y") from None
    except (OSError, RuntimeError, TypeError) as error:
        raise UserError(f"{flag} {path} cannot be read as EXR: {os_reason(error)}") from None
    pixels = channels[name].pixels.astype(np.float32)
    return np.ascontiguousarray(pixels[..., :3] if pixels.ndim == 3 else np.stack([pixels] * 3, -1))


def write_exr(path: str | Path, codes: np.ndarray, space: str) -> None:
    """Write ACEScct (H, W, 3) as an EXR of half floats in one of _TAGS."""
    OpenEXR = package("OpenEXR")
    header = dict(zip(("colorSpace", "chromaticities"), _TAGS[space], strict=True))
    header |= {"compression": OpenEXR.ZIP_COMPRESSION, "software": files.MARK}
    pixels = np.ascontiguousarray(from_acescct(codes, space), np.float16)
    OpenEXR.File(header, {"RGB": pixels}).write(str(path))
