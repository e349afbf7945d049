"""Written files: MP4s whose bytes depend on frames and sound alone, PNG frames, masters read back, frame rates."""

import itertools
import os
import subprocess
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from helpers import picture_frames, read_video, tone
from PIL import Image

from ltx_neuron.errors import UserError
from ltx_neuron.host.input_files import read_sound
from ltx_neuron.host.masters import write_hlg, write_prores
from ltx_neuron.host.video import BT709, write_frames, write_video, yuv420
from ltx_neuron.job import Job
from ltx_neuron.sampling.size import exact_frame_rate

# An MP4's durations are whole milliseconds or whole ticks of 1/12288 s, each rounded on its own.
DURATION_TOLERANCE = 2e-3
# The sine survives AAC at 0.9999 (measured); one AAC frame of delay (1024 samples) makes it 0.59.
SOUND_CORRELATION = 0.99


def clip(count: int, height: int = 64, width: int = 96) -> torch.Tensor:
    """Smooth, colourful pictures that change, uint8 (count, height, width, 3)."""
    frame, y, x = torch.meshgrid(*map(torch.arange, (count, height, width)), indexing="ij")
    return (127 + 100 * torch.sin((x / 40 + y / 55 + frame / 9)[..., None] * torch.tensor([0.5, 1.0, 1.5]))).byte()


def sine(samples: int) -> torch.Tensor:
    return 0.5 * torch.sin(torch.arange(samples) / 20).expand(2, -1)


# A sound that is a little shorter, longer, and almost none
@pytest.mark.parametrize("frames, frame_rate, samples", [(17, 24.0, 33120), (25, 29.97, 60000), (1, 12.5, 480)])
def test_a_video_shows_the_frames_and_sounds_the_waveform_equally_long(tmp_path, frames, frame_rate, samples):
    path, pictures, waveform = tmp_path / "new folder" / "out.mp4", clip(frames), sine(samples)
    write_video(path, [pictures], frame_rate, lambda: waveform, 48000)
    rate = exact_frame_rate(frame_rate)
    seconds = pytest.approx(float(frames / rate), abs=DURATION_TOLERANCE)
    wanted = {"frame_count": frames, "frame_rate": rate, "video_seconds": seconds, "audio_seconds": seconds}
    wanted |= {"width": 96, "height": 64, "video_codec": "h264", "pixel_format": "yuv420p"}
    assert read_video(path) == wanted | {"audio_codec": "aac", "channels": 2, "sample_rate": 48000}
    with av.open(str(path)) as container:
        shown = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        container.seek(0)
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
        assert container.streams.video[0].codec_context.colorspace == BT709
    # H.264 at the default quality moves these pictures by 1.6 counts of 255 on average (measured); colours converted
    # with another matrix (BT.601) than the declared one move them by 5.9.
    assert np.abs(shown.astype(int) - pictures.numpy().astype(int)).mean() < 3.0
    both = min(samples, heard.shape[1] - 1024)  # the last AAC frame ends in silence
    assert frames == 1 or np.corrcoef(heard[0, :both], waveform[0, :both])[0, 1] > SOUND_CORRELATION


# AAC has not these; the next one above, or its highest
@pytest.mark.parametrize("rate, written", [(37800, 44100), (6000, 7350), (192000, 96000)])
def test_a_sound_of_any_rate_is_written_at_a_rate_that_aac_has(tmp_path, rate, written):
    sound, path = tone(rate, 1.0), tmp_path / "out.mp4"
    write_video(path, [clip(24)], 24.0, lambda: sound, rate)
    facts = read_video(path)
    assert (facts["sample_rate"], facts["audio_seconds"]) == (written, pytest.approx(1, abs=DURATION_TOLERANCE))
    # AAC's frames begin and end inside a second of 7350 samples.
    heard = read_sound(path, "--video-path", duration=1.0).samples[:, 1024:-1024]
    for ours, theirs in zip(heard, tone(written, 1.0)[:, 1024:], strict=True):
        assert np.corrcoef(ours, theirs[: len(ours)])[0, 1] > SOUND_CORRELATION


def planes(frame) -> list[np.ndarray]:
    rows = [np.frombuffer(p, np.uint8).reshape(p.height, p.line_size) for p in frame.planes]
    return [row[:, : plane.width] for row, plane in zip(rows, frame.planes, strict=True)]


@pytest.mark.parametrize("size", [(34, 50), (130, 194), (1088, 1920)])
def test_a_frames_colours_are_the_means_of_two_by_two_pixels_for_any_number_of_threads(size):
    """By BT.709's definition, in float64."""
    noise = np.random.default_rng(0).normal(0, 25, (*size, 3))  # colours that change from pixel to pixel
    rgb = np.clip(clip(1, *size)[0].numpy() + noise, 0, 255).astype(np.uint8)
    red, green, blue = np.moveaxis(rgb / 255.0, 2, 0)
    luma = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    colours = [(blue - luma) / 1.8556, (red - luma) / 1.5748]
    means = [c.reshape(size[0] // 2, 2, size[1] // 2, 2).mean((1, 3)) for c in colours]
    one = planes(yuv420(rgb, threads=1))
    for got, exact in zip(one, [16 + 219 * luma, *(128 + 224 * mean for mean in means)], strict=True):
        # Rounding to whole numbers leaves 0.29 rms (1 / sqrt(12)), and swscale's 14-bit coefficients 0.3 (measured).
        # Every second pixel's colour instead of the mean leaves 2.6 on such a picture.
        assert np.sqrt(((got - exact) ** 2).mean()) < 0.35
    for threads in (0, 2, 5, 16):
        assert all(map(np.array_equal, planes(yuv420(rgb, threads)), one)), threads


def test_a_video_has_the_same_bytes_however_its_frames_and_sound_come_and_on_one_core(tmp_path):
    # 192 wide: no multiple of 128, so that x264's AVX-512 code would differ from run to run.
    frames, path = clip(17, 128, 192), tmp_path / "out.mp4"

    def write(lengths, sound_at: int = 1) -> bytes:
        """The video of chunks of frames, whose sound is there with that chunk."""
        polls = itertools.count(1)
        write_video(path, frames.split(lengths), 24.0, lambda: sine(33120), 48000, lambda: next(polls) >= sound_at)
        return path.read_bytes()

    videos = [write(lengths) for lengths in (17, (1, 9, 7), 1)] + [write(1, first) for first in (7, 17, 18)]
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        videos += [write(17) for _ in range(3)]
    finally:
        os.sched_setaffinity(0, cores)
    write_video(path, [frames], 24.0, lambda: sine(33120), 48000)
    assert len({*videos, path.read_bytes()}) == 1


def test_a_video_is_as_small_and_as_like_its_frames_as_with_upstreams_settings(tmp_path):
    frames, ours, theirs = picture_frames(49, 128, 192, 3), tmp_path / "ours.mp4", tmp_path / "theirs.mp4"
    write_video(ours, [frames], 24.0, lambda: sine(98000), 48000)
    with av.open(str(theirs), "w") as container:
        # Upstream takes the CPU's instructions: AVX-512 would give other bytes in each run.
        options = {"crf": "19", "preset": "veryfast", "x264-params": "asm=ssse3"}
        stream = container.add_stream("libx264", rate=24, options=options)
        stream.height, stream.width, stream.codec_context.thread_type = 128, 192, "FRAME"
        for picture in frames.numpy():
            container.mux(stream.encode(yuv420(picture)))
        container.mux(stream.encode())
    sizes_and_errors = []  # the bytes without the sound, and the luma's squared error
    for path in (ours, theirs):
        with av.open(str(path)) as container:
            packets = list(container.demux(video=0))
            pictures = [frame for packet in packets for frame in packet.decode()]
        pairs = zip(pictures, map(yuv420, frames.numpy()), strict=True)
        error = np.mean([np.square(planes(a)[0].astype(float) - planes(b)[0]) for a, b in pairs])
        sizes_and_errors.append((sum(packet.size for packet in packets), error))
    for one, other in zip(*sizes_and_errors, strict=True):
        assert one <= 1.05 * other  # 1.00 of both (measured); bytes with slices 1.07, without the macroblock tree 1.4


@pytest.mark.parametrize("ready", [False, True])
def test_encoded_pictures_are_written_as_soon_as_their_sound_is_there(tmp_path, ready):
    noise, sizes = torch.Generator().manual_seed(0), []

    def chunks():
        for _ in range(12):
            yield torch.randint(256, (12, 64, 96, 3), generator=noise, dtype=torch.uint8)
            (unfinished,) = tmp_path.iterdir()
            sizes.append(unfinished.stat().st_size)

    write_video(tmp_path / "out.mp4", chunks(), 24.0, lambda: sine(6 * 48000), 48000, lambda: ready)
    whole = (tmp_path / "out.mp4").stat().st_size
    # x264 looks some 15 frames ahead, of 144.
    assert (sizes[-1] > whole / 3) == ready and (sizes[-1] < whole / 100) != ready


@pytest.mark.parametrize("late", [False, True])
def test_an_error_while_a_video_is_written_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, late):
    path = tmp_path / "out.mp4"
    path.write_bytes(b"an earlier result")
    if late:  # by then the pictures are encoded: a partial file exists
        monkeypatch.setattr("av.AudioFrame", None)

    def chunks():
        yield clip(3)
        assert late

    with pytest.raises(AttributeError if late else AssertionError):
        write_video(path, chunks(), 24.0, lambda: sine(100), 48000)
    assert path.read_bytes() == b"an earlier result" and list(tmp_path.iterdir()) == [path]


def test_frames_are_written_as_lossless_pictures_chunk_by_chunk(tmp_path):
    frames, folder = picture_frames(5, 64, 96, 3), tmp_path / "new" / "frames"
    assert [len(chunk) for chunk in write_frames(folder, frames.split(2))] == [2, 2, 1]
    assert np.array_equal([np.array(Image.open(path)) for path in sorted(folder.iterdir())], frames.numpy())


def test_a_rounded_broadcast_rate_becomes_exact_and_a_fraction_is_typed_as_one():
    rates = {5.0: 5, 12.5: Fraction(25, 2), 23.9: Fraction(239, 10), 29.97: Fraction(30000, 1001)}
    rates |= {23.976: Fraction(24000, 1001), 23.98: Fraction(24000, 1001), 60000 / 1001: Fraction(60000, 1001)}
    assert {rate: exact_frame_rate(rate) for rate in rates} == rates
    for typed in ("30000/1001", "23.976"):
        for job in (Job.validated({"frame_rate": typed}), Job().updated({"fps": typed})):
            assert job.frame_rate == float(Fraction(typed))
    for typed in ("1/2/3", "2000/1", "1/1001", "nan/1"):
        with pytest.raises(UserError, match="--frame-rate: got .*, wanted"):
            Job.validated({"frame_rate": typed})


def test_the_hlg_master_is_tagged_and_shows_white_at_its_level(tmp_path):
    pytest.importorskip("PyOpenColorIO")
    codes = torch.full((9, 64, 96, 3), 0.5547945205479452)  # ACEScct of diffuse white
    codes[:, :, 48:] = torch.tensor([0.5, 0.2, 0.2])  # red
    for name, chunks in (("one", [codes]), ("two", codes.split(4)), ("small", [codes[:, :32, :32]])):
        write_hlg(tmp_path / f"{name}.mp4", chunks, 29.97)
    assert (tmp_path / "one.mp4").read_bytes() == (tmp_path / "two.mp4").read_bytes()
    with av.open(str(tmp_path / "one.mp4")) as container:
        stream = container.streams.video[0]
        context, frames = stream.codec_context, [*container.decode(stream)]
        tags = context.color_primaries, context.color_trc, context.colorspace, context.color_range
        assert tags == (9, 18, 9, 1)  # BT.2020, ARIB STD-B67, BT.2020 NCL, limited
        assert (context.name, context.pix_fmt, stream.codec_tag) == ("hevc", "yuv420p10le", "hvc1")
        assert str(stream.average_rate) == "30000/1001" and len(frames) == 9
    luma, _, red = (np.frombuffer(plane, np.uint16).reshape(plane.height, -1) for plane in frames[4].planes)
    # HLG's diffuse white, of 10 bits: 4 (219 x 0.75 + 16)
    assert abs(int(np.median(luma[:, :48])) - 721) <= 1
    assert abs(int(np.median(red[:, :24])) - 512) <= 1 and np.median(red[:, 25:48]) > 600


def test_prores_keeps_alpha_for_pyav_and_for_ffmpeg(tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    blocks, path = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 4)), tmp_path / "one.mov"
    blocks[:, 0, :2, 3] = 0, 255
    pictures = np.kron(blocks, np.ones((1, 16, 16, 1))).astype(np.uint8)
    for each in (path, tmp_path / "two.mov"):
        write_prores(each, torch.from_numpy(pictures).split(3), 24.0)
    assert path.read_bytes() == (tmp_path / "two.mov").read_bytes()
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_tag, stream.codec_context.profile) == ("prores", "ap4h", "4444")
        ours = np.stack([f.reformat(format="rgba").to_ndarray() for f in container.decode(stream)])
    command = [ffmpeg, "-loglevel", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "rgba", "-"]
    theirs = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, np.uint8)
    for got in (ours, theirs.reshape(pictures.shape)):
        assert np.abs(got.astype(int) - pictures).max() <= 1  # rounded to 10 bits and back, once in each library
