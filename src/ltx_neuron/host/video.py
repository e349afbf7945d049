"""Writes results: an MP4 with H.264 video and AAC sound, a WAV, and frames as PNG pictures."""

import platform
import wave
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import torch

from ltx_neuron import files
from ltx_neuron.host.background import check_cancelled
from ltx_neuron.host.hdr import write_exr
from ltx_neuron.host.input_files import AAC_RATES, aac_rate
from ltx_neuron.host.spectrogram import resample
from ltx_neuron.sampling.size import exact_frame_rate

# Quality, size and speed are those of ltx-pipelines since 1.1.3. The output depends on the number
# of threads, so that is fixed. x264's AVX-512 code of the macroblock tree (PyAV 18.1) reads past
# each row of blocks: equal frames give other bytes in each run if the width is no multiple of 128.
# Its SSSE3 code does not, and gives the bytes of its AVX2 code in the same time.
X264_THREADS = 4
X264_CODE = "asm=ssse3" if platform.machine() == "x86_64" else "cpu-independent=1"
X264_OPTIONS = {"crf": "19", "preset": "veryfast", "x264-params": X264_CODE}
# AVColorSpace, AVColorPrimaries, AVColorTransferCharacteristic of BT.709; range 16..235.
BT709, LIMITED_RANGE = 1, 1


def write_video(
    path: str | Path,
    # Frames in order of time, each uint8 (N, H, W, 3), H and W even; only the one that is encoded
    # is in memory
    chunks: Iterable[torch.Tensor],
    frame_rate: float,  # frames per second, see `exact_frame_rate`
    # Called after a chunk if the sound is ready, and otherwise after the last one; returns float32
    # (2, samples) in [-1, 1]. It is cut, or padded with silence, to the video's length, because
    # decoded lengths differ by some milliseconds
    waveform: Callable[[], torch.Tensor] | None,  # None: a silent video
    sample_rate: int,  # samples of `waveform` per second; resampled if AAC does not support it
    # Whether `waveform` returns at once: encoded pictures wait in memory for the sound of their
    # time
    sound_is_ready: Callable[[], bool] = lambda: False,
    # In place of `waveform`, of a sound that grows with the pictures: its samples from a position
    # to another one, or as far as it goes; they are not asked for again
    next_samples: Callable[[int, int], torch.Tensor] | None = None,
) -> None:
    """Write an MP4 with H.264 video and AAC stereo sound; equal inputs give equal bytes, for any
    division into chunks and any time at which the sound is ready. The file appears only when
    complete; a failure does not change an older file."""
    import av

    rate, count, samples = exact_frame_rate(frame_rate), 0, 0
    if waveform and (decoded_rate := sample_rate) not in AAC_RATES:
        sample_rate, decoded = aac_rate(decoded_rate), waveform
        waveform = cache(lambda: resample(decoded(), decoded_rate, sample_rate))

    def mux_sound(last: bool = False) -> None:
        """Encode the sound up to the frames so far, from its last position on."""
        nonlocal samples
        end = _sample_count(count, frame_rate, sample_rate)
        if next_samples:
            block = next_samples(samples, end)
        elif waveform:
            block = waveform()[:, samples:end]
        else:
            return
        if next_samples and not last:
            end = samples + block.shape[1]
        if end == samples:
            return
        frame = av.AudioFrame.from_ndarray(
            _to_int16(block, end - samples), format="s16", layout="stereo"
        )
        frame.sample_rate, frame.pts, samples = sample_rate, samples, end
        container.mux(audio_stream.encode(frame))

    # max_interleave_delta 0: the muxer waits for both streams without limit.
    options = {"movflags": "+faststart", "max_interleave_delta": "0"}
    with (
        files.whole_file(path) as partial,
        av.open(str(partial), "w", format="mp4", options=options) as container,
    ):
        for chunk in chunks:
            if not count:
                video_stream = _add_video_stream(container, rate, *chunk.shape[1:3])
                if waveform or next_samples:
                    audio_stream = container.add_stream("aac", rate=sample_rate, layout="stereo")
            for picture in chunk.numpy():
                check_cancelled()
                container.mux(video_stream.encode(yuv420(picture)))
            count += len(chunk)
            del chunk, picture  # not kept while the next one is made
            if next_samples or sound_is_ready():
                mux_sound()
        container.mux(video_stream.encode())
        if waveform or next_samples:
            mux_sound(last=True)
            container.mux(audio_stream.encode())


def yuv420(picture: np.ndarray, threads: int = 0):
    """A picture, uint8 (H, W, 3), H and W even, as a frame in BT.709 whose colours are the means of
    2x2 pixels; PyAV's default takes others. Equal for any number of threads; 0: one a CPU."""
    import av

    frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
    return frame.reformat(
        format="yuv420p", dst_colorspace=BT709, interpolation="AREA", threads=threads
    )


def write_wav(path: str | Path, waveform: torch.Tensor, sample_rate: int) -> None:
    """Write a waveform (2, samples) in [-1, 1] as 16-bit PCM; the file appears when complete."""
    with files.whole_file(path) as partial, wave.open(str(partial), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(_to_int16(waveform, waveform.shape[1]).astype("<i2").tobytes())


def _sample_count(frames: int, frame_rate: float, sample_rate: int) -> int:
    return round(frames / exact_frame_rate(frame_rate) * sample_rate)


def cut_frames(
    chunks: Generator[torch.Tensor, None, None], count: int, part: tuple[int, ...] = ()
) -> Generator[torch.Tensor, None, None]:
    """The first `count` frames of a decoded video, which is decoded as far as they depend on it.
    part: N, rows, columns: of these every Nth frame from 0 on, and its first rows and columns."""
    done, (every, height, width) = 0, part or (1, None, None)
    with closing(chunks):
        while done < count:
            chunk = next(chunks)[: count - done]
            first, done = -done % every, done + len(chunk)
            yield chunk[first::every, :height, :width]
            del chunk  # freed while the next one is decoded


def cut_sound(
    waveform: Callable[[], torch.Tensor], frames: int, frame_rate: float, sample_rate: int
) -> torch.Tensor:
    """The samples (2, n) of the first `frames` frames."""
    return waveform()[:, : _sample_count(frames, frame_rate, sample_rate)]


def write_frames(
    folder: str | Path, chunks: Iterable[torch.Tensor], space: str | None = None
) -> Iterator[torch.Tensor]:
    """Write frames as frame_00000.png and so on. Yields each chunk, uint8 (N, H, W, 3) or with
    alpha (N, H, W, 4), after it. At the end, pictures with higher numbers from an earlier run of
    this toolkit are removed. space: of EXR files instead, of float frames in ACEScct."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    folder, mark = Path(folder), PngInfo()
    mark.add_text(*files.FRAME_MARK)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chunk in chunks:
        for picture in chunk.numpy():
            check_cancelled()
            written.append(folder / f"frame_{len(written):05d}.{'exr' if space else 'png'}")
            with files.whole_file(written[-1]) as partial:
                if space:
                    write_exr(partial, picture, space)
                else:
                    Image.fromarray(picture).save(partial, format="PNG", pnginfo=mark)
        yield chunk
        del chunk, picture  # not kept while the next one is made
    for stale in set(files.frames_in(folder)) - set(written):
        if files.is_our_frame(stale):
            stale.unlink()


def _add_video_stream(container, rate: Fraction, height: int, width: int):
    """Add an H.264 stream. It declares its colour space, which players otherwise guess."""
    stream = container.add_stream("libx264", rate=rate, options=X264_OPTIONS)
    stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
    context = stream.codec_context
    # A thread a picture: PyAV's default, threads within a picture, cuts it into slices
    context.thread_count, context.thread_type = X264_THREADS, "FRAME"
    context.colorspace = context.color_primaries = context.color_trc = BT709
    context.color_range = LIMITED_RANGE
    return stream


def _to_int16(waveform: torch.Tensor, count: int) -> np.ndarray:
    """Interleaved 16-bit samples (1, 2 * count) of a waveform (2, n), after whose end silence."""
    waveform = torch.nn.functional.pad(waveform, (0, count - waveform.shape[1]))
    return (waveform.clip(-1.0, 1.0) * 32767.0).to(torch.int16).T.reshape(1, -1).numpy()
