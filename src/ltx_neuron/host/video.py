"""Results as files: an MP4 with H.264 video and AAC sound, and frames as PNG pictures."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import torch

from ltx_neuron import files
from ltx_neuron.errors import UserError
from ltx_neuron.host.background import check_cancelled
from ltx_neuron.host.spectrogram import resample

# x264's bytes depend on its thread count, so that is fixed. Its macroblock tree reads memory it
# never wrote where the width is not a multiple of 256 (seen with PyAV 18.1): switched off, the same
# frames make the same bytes every time.
X264_THREADS = 4
X264_OPTIONS = {"mbtree": "0"}
# AVColorSpace, AVColorPrimaries and AVColorTransferCharacteristic of ITU-R BT.709; AVColorRange of
# 16..235.
BT709, LIMITED_RANGE = 1, 1
# Samples per second that AAC has.
AAC_RATES = 7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000
FRAME_NAME = re.compile(r"frame_[0-9]{5}\.png")
# The text chunk by which a frame is known as ours. It lies right behind the PNG's header.
_SOFTWARE, _MARKED = "Software", f"tEXtSoftware\0{files.MARK}".encode()


def check_output_path(path: str | Path) -> None:
    """Raise UserError unless an MP4 can be written to `path`. Creates nothing, so that it can be
    called before any work is done."""
    if Path(path).suffix.lower() != ".mp4":
        raise UserError(
            f'the output is an MP4 file, got the name "{path}": pass --output-path FILE.mp4'
        )
    files.check_writable(Path(path), "--output-path FILE.mp4")


def exact_frame_rate(frame_rate: float) -> Fraction:
    """The rate as a fraction of frames per second.

    Rounded broadcast rates become exact: 29.97 is 30000/1001; 23.976 and 23.98 are 24000/1001.
    """
    if float(frame_rate).is_integer():
        return Fraction(int(frame_rate))
    broadcast = Fraction(math.ceil(frame_rate) * 1000, 1001)
    # Written with two decimals a broadcast rate is off by up to 1.7e-4; the integer rate above it
    # is off by 1e-3.
    if abs(frame_rate / broadcast - 1) < 2e-4:
        return broadcast
    return Fraction(frame_rate).limit_denominator(1001)


def aac_rate(rate: int) -> int:
    """The rate itself, or the next one above it that AAC has, or its highest."""
    return min((each for each in AAC_RATES if each >= rate), default=AAC_RATES[-1])


def write_video(
    path: str | Path,
    chunks: Iterable[torch.Tensor],
    frame_rate: float,
    waveform: Callable[[], torch.Tensor],
    sample_rate: int,
    sound_is_ready: Callable[[], bool] = lambda: False,
) -> None:
    """Write an MP4 with H.264 video and AAC stereo sound; the same input gives the same bytes,
    however the frames are divided into chunks, and whenever the sound is there.

    The file appears only when whole; a failure leaves an older file of that name as it was.

    chunks       frames in the order of time, each uint8 (N, H, W, 3), H and W even; of them only
                 the one that is encoded is held
    frame_rate   frames per second, see `exact_frame_rate`
    waveform     called after a chunk if the sound is ready by then, and after the last one;
                 returns float32 (2, samples) in [-1, 1]; cut, or filled with silence, to the
                 length of the video, as the lengths of decoded video and sound differ by some
                 milliseconds
    sample_rate  samples of `waveform` per second; resampled where AAC has no such rate
    sound_is_ready  whether `waveform` returns at once: a picture that is encoded stays in memory
                 until the sound beside it is
    """
    import av

    rate, count, samples = exact_frame_rate(frame_rate), 0, 0
    if (given := sample_rate) not in AAC_RATES:
        sample_rate, decoded = aac_rate(given), waveform
        waveform = cache(lambda: resample(decoded(), given, sample_rate))

    def mux_sound() -> None:
        """The sound beside the frames so far, from where it ended before."""
        nonlocal samples
        end = round(count / rate * sample_rate)
        if end == samples:
            return
        frame = av.AudioFrame.from_ndarray(
            _to_int16(waveform(), samples, end), format="s16", layout="stereo"
        )
        frame.sample_rate, frame.pts, samples = sample_rate, samples, end
        container.mux(audio_stream.encode(frame))

    # max_interleave_delta 0: the muxer waits for both streams however far apart they are handed
    # over.
    options = {"movflags": "+faststart", "max_interleave_delta": "0"}
    with (
        files.whole_file(path) as partial,
        av.open(str(partial), "w", format="mp4", options=options) as container,
    ):
        for chunk in chunks:
            if not count:
                video_stream = _add_video_stream(container, rate, *chunk.shape[1:3])
                audio_stream = container.add_stream("aac", rate=sample_rate, layout="stereo")
            for picture in chunk.numpy():
                check_cancelled()
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                container.mux(
                    video_stream.encode(frame.reformat(format="yuv420p", dst_colorspace=BT709))
                )
            count += len(chunk)
            del chunk, picture  # not kept while the next one is made
            if sound_is_ready():
                mux_sound()
        container.mux(video_stream.encode())
        mux_sound()
        container.mux(audio_stream.encode())


def write_frames(folder: str | Path, chunks: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Write frames as frame_00000.png and so on. Every chunk of them, uint8 (N, H, W, 3), is handed
    on when it is written: nothing is done before it is asked for.

    Behind the last, pictures with higher numbers, which an earlier and longer run of this toolkit
    left there, are removed.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    folder, mark = Path(folder), PngInfo()
    mark.add_text(_SOFTWARE, files.MARK)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chunk in chunks:
        for picture in chunk.numpy():
            check_cancelled()
            written.append(folder / f"frame_{len(written):05d}.png")
            with files.whole_file(written[-1]) as partial:
                Image.fromarray(picture).save(partial, format="PNG", pnginfo=mark)
        yield chunk
        del chunk, picture  # not kept while the next one is made
    for stale in set(frames_in(folder)) - set(written):
        if _is_ours(stale):
            stale.unlink()


def frames_in(folder: Path) -> list[Path]:
    """What `write_frames` would find under a frame's name in a folder, which may be missing."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if FRAME_NAME.fullmatch(path.name)]


def check_frames(folder: Path) -> None:
    """Raise UserError where `write_frames` would write over pictures that it did not make."""
    for path in frames_in(folder):
        if not _is_ours(path):
            raise UserError(
                f"{path} exists and is not a frame that this toolkit wrote; pass an empty folder"
                " with --save-frames DIR"
            )


def _is_ours(picture: Path) -> bool:
    """Whether `write_frames` wrote a file."""
    return _MARKED in files.first_bytes(picture, 128)


def _add_video_stream(container, rate: Fraction, height: int, width: int):
    """Add an H.264 stream. Its colour space is declared, because players otherwise guess it from
    the picture's size."""
    stream = container.add_stream("libx264", rate=rate, options=X264_OPTIONS)
    stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
    context = stream.codec_context
    context.thread_count = X264_THREADS
    context.colorspace = context.color_primaries = context.color_trc = BT709
    context.color_range = LIMITED_RANGE
    return stream


def _to_int16(waveform: torch.Tensor, start: int, end: int) -> np.ndarray:
    """Samples of a waveform (2, n), or silence behind its end, as 16-bit ones in the order of a
    file: (1, 2 * (end - start))."""
    waveform = waveform[:, start:end]
    waveform = torch.nn.functional.pad(waveform, (0, end - start - waveform.shape[1]))
    return (waveform.clip(-1.0, 1.0) * 32767.0).to(torch.int16).T.reshape(1, -1).numpy()
