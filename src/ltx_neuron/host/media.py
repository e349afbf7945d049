"""The files people see: the conditioning image that goes in, the MP4, PNG frames and WAV that come
out."""

import hashlib
import math
import os
import warnings
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from ltx_neuron.errors import UserError
from ltx_neuron.files import check_writable as check_file_writable
from ltx_neuron.host.background import check_cancelled

# Pillow's own bound between a large photograph and a decompression bomb.
MAX_IMAGE_PIXELS = 89_478_485
# The sides libx264 takes: at least one 2x2 block of colour, at most 16384.
IMAGE_SIDES = 2, 16384
# x264's bytes depend on its thread count, so that is fixed. Its macroblock tree reads memory it
# never wrote where the width is not a multiple of 256 (seen with PyAV 18.1): switched off, the same
# frames make the same bytes every time.
X264_THREADS = 4
X264_OPTIONS = {"mbtree": "0"}
# AVColorSpace, AVColorPrimaries and AVColorTransferCharacteristic of ITU-R BT.709; AVColorRange of
# 16..235.
BT709, LIMITED_RANGE = 1, 1


def load_image(
    path: str | Path, height: int, width: int, crf: int = 33, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The image as pixels (1, 3, 1, height, width) in [-1, 1], as
    ltx_pipelines.utils.media_io.load_image_conditioning.

    One H.264 round trip at `crf` gives it the texture of the video frames the model was trained on
    (0 skips it); then it is scaled to fill height x width and cropped around its centre. Alpha is
    dropped, EXIF rotation is not applied. Raises UserError when `path` is not a readable image, or
    one too small or too large to use.
    """
    image = _decode_image(path)
    if crf != 0:
        image = _h264_round_trip(image, crf)
    size = _filling_size(path, image, height, width)
    pixels = torch.tensor(image, dtype=torch.float32).permute(2, 0, 1)[None]
    pixels = torch.nn.functional.interpolate(
        pixels, size=size, mode="bilinear", align_corners=False
    )
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    pixels = pixels[:, :, None, top : top + height, left : left + width]
    return (pixels / 127.5 - 1.0).to(dtype)


def check_image(path: str | Path, height: int = 1, width: int = 1) -> None:
    """Raise UserError where `load_image` could not read the file, or not fill height x width with
    it."""
    _filling_size(path, _decode_image(path), height, width)


def write_video(
    path: str | Path,
    frames: torch.Tensor,
    frame_rate: float,
    waveform: torch.Tensor,
    sample_rate: int,
) -> None:
    """Write an MP4 with H.264 video and AAC stereo sound, whole or not at all; the same input gives
    the same bytes.

    `frames` is uint8 (N, H, W, 3) with even H and W, `waveform` float32 (2, samples) in [-1, 1] at
    `sample_rate`. The sound is cut, or filled with silence, to the length of the video: the
    decoders' lengths differ by some milliseconds.
    """
    import av

    rate = exact_frame_rate(frame_rate)
    samples = round(len(frames) / rate * sample_rate)
    sound = _to_int16(
        torch.nn.functional.pad(waveform, (0, max(0, samples - waveform.shape[1])))[:, :samples]
    )
    # max_interleave_delta 0: the muxer waits for both streams however far apart they are handed
    # over.
    options = {"movflags": "+faststart", "max_interleave_delta": "0"}
    with (
        _whole(path) as partial,
        av.open(str(partial), "w", format="mp4", options=options) as container,
    ):
        video_stream = _add_video_stream(container, rate, frames.shape[1], frames.shape[2])
        audio_stream = container.add_stream("aac", rate=sample_rate, layout="stereo")
        for picture in frames.numpy():
            check_cancelled()
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(
                video_stream.encode(frame.reformat(format="yuv420p", dst_colorspace=BT709))
            )
        container.mux(video_stream.encode())
        frame = av.AudioFrame.from_ndarray(
            sound.T.reshape(1, -1).copy(), format="s16", layout="stereo"
        )
        frame.sample_rate, frame.pts = sample_rate, 0
        container.mux(audio_stream.encode(frame))
        container.mux(audio_stream.encode())


def write_frames(folder: str | Path, frames: torch.Tensor) -> None:
    """Write frames, uint8 (N, H, W, 3), as frame_00000.png and so on; later frames of a longer run
    are removed."""
    from PIL import Image

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"frame_{index:05d}.png" for index in range(len(frames))]
    for name, picture in zip(names, frames.numpy(), strict=True):
        with _whole(folder / name) as partial:
            Image.fromarray(picture).save(partial, format="PNG")
    for stale in set(folder.glob("frame_[0-9][0-9][0-9][0-9][0-9].png")) - {
        folder / name for name in names
    }:
        stale.unlink()


def write_wav(path: str | Path, waveform: torch.Tensor, sample_rate: int) -> None:
    """Write a waveform, float32 (channels, samples) in [-1, 1], as 16-bit PCM."""
    with _whole(path) as partial, wave.open(str(partial), "wb") as file:
        file.setnchannels(waveform.shape[0])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(_to_int16(waveform).T.astype("<i2").tobytes())


def read_video(path: str | Path) -> dict:
    """What a video file holds: codecs, sizes, rates, the number of decoded frames, and both
    durations in seconds."""
    import av

    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        return {
            "video_codec": video.codec_context.name,
            "pixel_format": video.codec_context.pix_fmt,
            "width": video.codec_context.width,
            "height": video.codec_context.height,
            "frame_rate": video.average_rate,
            "video_seconds": float(video.duration * video.time_base),
            "audio_codec": audio.codec_context.name,
            "channels": audio.codec_context.channels,
            "sample_rate": audio.codec_context.sample_rate,
            "audio_seconds": float(audio.duration * audio.time_base),
            "frame_count": sum(1 for _ in container.decode(video)),
        }


def check_writable(path: str | Path) -> None:
    """Raise UserError, before any work is done, where an MP4 could not be written to `path`.
    Creates nothing."""
    if Path(path).suffix.lower() != ".mp4":
        raise UserError(
            f'the output is an MP4 file, got the name "{path}": pass --output-path FILE.mp4'
        )
    check_file_writable(Path(path), "--output-path FILE.mp4")


def file_digest(path: str | Path) -> str:
    """What a picture is known by, whatever its name; check_image says what is wrong with one that
    cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return "unreadable"


def exact_frame_rate(frame_rate: float) -> Fraction:
    """The rate as a fraction: what is written 29.97, 23.976 or 23.98 is 30000/1001 or 24000/1001
    frames per second."""
    if float(frame_rate).is_integer():
        return Fraction(int(frame_rate))
    broadcast = Fraction(math.ceil(frame_rate) * 1000, 1001)
    # Written with two decimals a broadcast rate is off by up to 1.7e-4; the integer rate above it
    # is off by 1e-3.
    if abs(frame_rate / broadcast - 1) < 2e-4:
        return broadcast
    return Fraction(frame_rate).limit_denominator(1001)


def _decode_image(path: str | Path) -> np.ndarray:
    """The picture as uint8 (H, W, 3)."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(path) as image:
                picture = np.array(_eight_bit(image).convert("RGB"))
        except FileNotFoundError:
            raise UserError(
                f"there is no image {path}: pass an existing file with --image FILE"
            ) from None
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise UserError(
                f"{path} is too large: {error}\npass a smaller image with --image FILE"
            ) from None
        except (OSError, SyntaxError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read as an image: {error}\npass another with --image FILE"
            ) from None
    height, width = picture.shape[:2]
    if min(height, width) < IMAGE_SIDES[0] or max(height, width) > IMAGE_SIDES[1]:
        raise UserError(
            f"{path} has a size no video can have: got {width}x{height} pixels, wanted"
            f" {IMAGE_SIDES[0]} to {IMAGE_SIDES[1]} on each side; pass another with --image FILE"
        )
    return picture


def _filling_size(path: str | Path, image: np.ndarray, height: int, width: int) -> tuple[int, int]:
    """Height and width of the image scaled to fill height x width."""
    scale = max(height / image.shape[0], width / image.shape[1])
    size = math.ceil(image.shape[0] * scale), math.ceil(image.shape[1] * scale)
    if size[0] * size[1] > MAX_IMAGE_PIXELS:
        raise UserError(
            f"{path} is too narrow to fill {width}x{height}: got {image.shape[1]}x{image.shape[0]}"
            " pixels, wanted a shape closer to the video's; crop it and pass it again with --image"
            " FILE"
        )
    return size


def _eight_bit(image):
    """The image with 16-bit greys scaled to 8 bits, which Pillow would clip to white."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))


def _h264_round_trip(image: np.ndarray, crf: int) -> np.ndarray:
    """The picture, cropped to even sides, after libx264 and back."""
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
    with av.open(file) as container:
        return next(container.decode(video=0)).to_ndarray(format="rgb24")


def _add_video_stream(container, rate: Fraction, height: int, width: int):
    """An H.264 stream whose colours are declared, so that players need not guess them from the
    size."""
    stream = container.add_stream("libx264", rate=rate, options=X264_OPTIONS)
    stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
    context = stream.codec_context
    context.thread_count = X264_THREADS
    context.colorspace = context.color_primaries = context.color_trc = BT709
    context.color_range = LIMITED_RANGE
    return stream


def _to_int16(waveform: torch.Tensor) -> np.ndarray:
    """The waveform as 16-bit samples, of the same shape."""
    return (waveform.clip(-1.0, 1.0) * 32767.0).to(torch.int16).numpy()


@contextmanager
def _whole(path: str | Path) -> Iterator[Path]:
    """A partial file beside `path` to write to: it takes the name at the end, and is removed if the
    writing fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
