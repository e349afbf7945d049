"""Writes masters: HLG in HEVC of 10 bits, and ProRes 4444 with alpha. Neither has sound; equal
pictures give equal bytes. Source of the first: ltx-core 1.4 color/hlg.py."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ltx_neuron.files import whole_file
from ltx_neuron.host.background import check_cancelled
from ltx_neuron.host.hdr import hlg_signal
from ltx_neuron.host.video import BT709, LIMITED_RANGE
from ltx_neuron.sampling.size import exact_frame_rate

# The muxer refuses packets of clips of one block if frames are encoded at once.
_X265 = "info=0:log-level=error:frame-threads=1:bframes=0"
_HLG = {"crf": "12", "preset": "ultrafast", "x265-params": _X265}
_PRORES = {"profile": "4444", "alpha_bits": "16", "vendor": "apl0"}
_RED, _BLUE = 0.2627, 0.0593  # shares of BT.2020's luma


def write_hlg(path: Path, chunks: Iterable[torch.Tensor], frame_rate: float) -> None:
    """Write ACEScct frames, float (N, H, W, 3) in [0, 1], H and W even, as an MP4."""
    frames = (_yuv420p10(hlg_signal(codes)) for codes in _pictures(chunks))
    # BT.2020 without constant luminance, its primaries, and HLG.
    _write(path, frames, frame_rate, "libx265", _HLG, (9, 9, 18))


def write_prores(path: Path, chunks: Iterable[torch.Tensor], frame_rate: float) -> None:
    """Write frames, uint8 (N, H, W, 4) with straight alpha, as a MOV."""
    import av

    given = (av.VideoFrame.from_ndarray(x, format="rgba") for x in _pictures(chunks))
    frames = (frame.reformat(format="yuva444p10le", dst_colorspace=BT709) for frame in given)
    _write(path, frames, frame_rate, "prores_ks", _PRORES, (BT709, BT709, BT709))


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
    return av.VideoFrame.from_ndarray(codes.reshape(-1, width), format="yuv420p10le")


def _write(
    path: Path,
    frames: Iterable[Any],
    frame_rate: float,
    codec: str,
    options: dict[str, str],
    colors: tuple[int, int, int],  # AVColorSpace, AVColorPrimaries, AVColorTransferCharacteristic
) -> None:
    """The file appears under its name when it is complete."""
    import av

    kind, stream = "mp4" if codec == "libx265" else "mov", None
    with (
        whole_file(path) as partial,
        av.open(str(partial), "w", format=kind, options={"movflags": "+faststart"}) as container,
    ):
        for frame in frames:
            if stream is None:
                rate = exact_frame_rate(frame_rate)
                stream: Any = container.add_stream(codec, rate=rate, options=options)
                stream.height, stream.width = frame.height, frame.width
                stream.pix_fmt = frame.format.name
                context = stream.codec_context
                context.colorspace, context.color_primaries, context.color_trc = colors
                context.color_range = LIMITED_RANGE
                if codec == "libx265":
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
