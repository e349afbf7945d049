"""Writes masters: HLG in HEVC of 10 bits, and ProRes 4444 with alpha. Neither has sound; equal
pictures give equal bytes. Source of the first: ltx-core 1.4 color/hlg.py."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ltx_neuron.files import whole_file
from ltx_neuron.host.background import check_cancelled
from ltx_neuron.host.hdr import hlg_signal
from ltx_neuron.host.video import BT709, LIMITED_RANGE, exact_frame_rate


class _Codec(NamedTuple):
    name: str
    container: str
    pixels: str  # PyAV's format of encoded frames
    colors: tuple[int, int, int]  # AVColorSpace, AVColorPrimaries, AVColorTransferCharacteristic
    options: dict[str, str]


# The muxer refuses packets of clips of one block if frames are encoded at once.
_X265 = "repeat-headers=1:info=0:log-level=error:frame-threads=1:bframes=0"
_HLG = _Codec(  # the colours are BT.2020's without constant luminance, and HLG
    *("libx265", "mp4", "yuv420p10le", (9, 9, 18)),
    {"crf": "12", "preset": "ultrafast", "x265-params": _X265},
)
_PRORES = _Codec(
    *("prores_ks", "mov", "yuva444p10le", (BT709, BT709, BT709)),
    {"profile": "4444", "alpha_bits": "16", "vendor": "apl0"},
)
_RED, _BLUE = 0.2627, 0.0593  # shares of BT.2020's luma


def write_hlg(path: str | Path, chunks: Iterable[torch.Tensor], frame_rate: float) -> None:
    """Write ACEScct frames, float (N, H, W, 3) in [0, 1], H and W even, as an MP4."""
    _write(path, (_yuv420p10(hlg_signal(codes)) for codes in _pictures(chunks)), frame_rate, _HLG)


def write_prores(path: str | Path, chunks: Iterable[torch.Tensor], frame_rate: float) -> None:
    """Write frames, uint8 (N, H, W, 4) with straight alpha, as a MOV."""
    import av

    frames = (
        av.VideoFrame.from_ndarray(picture, format="rgba").reformat(
            format=_PRORES.pixels, dst_colorspace=BT709
        )
        for picture in _pictures(chunks)
    )
    _write(path, frames, frame_rate, _PRORES)


def _yuv420p10(signal: np.ndarray):
    """A signal (H, W, 3) in [0, 1] as a frame in BT.2020 of limited range, whose colours are the
    means of 2x2 pixels (ITU-R BT.2100). swscale's codes are 3 too large."""
    import av

    red, green, blue = np.moveaxis(signal, -1, 0)
    luma = _RED * red + (1 - _RED - _BLUE) * green + _BLUE * blue
    differences = (blue - luma) / (2 - 2 * _BLUE), (red - luma) / (2 - 2 * _RED)
    height, width = luma.shape
    means = (x.reshape(height // 2, 2, width // 2, 2).mean((1, 3)) for x in differences)
    planes = 4 * (219 * luma + 16), *(4 * (224 * mean + 128) for mean in means)
    codes = np.concatenate([plane.round().astype(np.uint16).ravel() for plane in planes])
    return av.VideoFrame.from_ndarray(codes.reshape(-1, width), format=_HLG.pixels)


def _write(path: str | Path, frames: Iterator[Any], frame_rate: float, codec: _Codec) -> None:
    """The file appears under its name when it is complete."""
    import av

    options, stream = {"movflags": "+faststart"}, None
    with (
        whole_file(path) as partial,
        av.open(str(partial), "w", format=codec.container, options=options) as container,
    ):
        for frame in frames:
            if stream is None:
                rate = exact_frame_rate(frame_rate)
                stream: Any = container.add_stream(codec.name, rate=rate, options=codec.options)
                stream.height, stream.width, stream.pix_fmt = (
                    frame.height,
                    frame.width,
                    codec.pixels,
                )
                context = stream.codec_context
                context.colorspace, context.color_primaries, context.color_trc = codec.colors
                context.color_range = LIMITED_RANGE
                if codec is _HLG:
                    stream.codec_tag = "hvc1"  # players of Apple know no other
            container.mux(stream.encode(frame))
        assert stream  # a clip has a frame
        container.mux(stream.encode())


def _pictures(chunks: Iterable[torch.Tensor]) -> Iterator[np.ndarray]:
    for chunk in chunks:
        for picture in chunk.numpy():
            check_cancelled()
            yield picture
        del chunk, picture  # not kept while the next one is made
