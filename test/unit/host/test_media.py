"""Conditioning images against ltx-pipelines' own function; MP4 files and PNG frames."""

import itertools
import os
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import read_video, tone
from PIL import Image, ImageCms

from ltx_neuron.errors import UserError
from ltx_neuron.host.images import content_digest, load_image
from ltx_neuron.host.media import read_sound
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.host.video import BT709, check_output_path, exact_frame_rate, write_frames, write_video, yuv420

# An MP4's durations are whole milliseconds or whole ticks of 1/12288 s, each rounded on its own: 2
# ms covers both.
DURATION_TOLERANCE = 2e-3
# H.264 at the default quality moves these pictures by 1.6 counts of 255 on average (measured);
# colours converted with another matrix (BT.601) than the declared one move them by 5.9.
PICTURE_TOLERANCE = 3.0
# Rounding to whole numbers leaves 0.29 counts rms (1 / sqrt(12)), and swscale's 14-bit coefficients
# 0.3 (measured). Every second pixel's colour instead of the mean leaves 2.6 on such a picture.
CHROMA_TOLERANCE = 0.35
# The sine survives AAC at 0.9999 (measured); one AAC frame of delay (1024 samples) makes it 0.59.
SOUND_CORRELATION = 0.99


def picture(height, width, shift=0.0):
    """A smooth, colourful picture, uint8 (height, width, 3)."""
    y, x = np.arange(height)[:, None, None], np.arange(width)[None, :, None]
    return (127 + 100 * np.sin((x / 40 + y / 55 + shift) * np.array([0.5, 1.0, 1.5]))).astype(np.uint8)


def clip(count, height=64, width=96):
    return torch.from_numpy(np.stack([picture(height, width, index / 9) for index in range(count)]))


def sine(samples):
    return 0.5 * torch.sin(torch.arange(samples) / 20).expand(2, -1)


def saved(image, path):
    image.save(path)
    return path


@pytest.mark.parametrize("size", [(301, 517), (64, 96), (33, 700), (720, 407)])
@pytest.mark.parametrize("crf", [33, 18, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_image_becomes_the_same_pixels_as_in_ltx_pipelines(tmp_path, size, crf, dtype):
    import_ltx_core()
    from ltx_pipelines.utils.media_io import load_image_conditioning

    path = saved(Image.fromarray(picture(*size)), tmp_path / "image.png")
    expected = load_image_conditioning(str(path), 128, 192, dtype, torch.device("cpu"), crf)
    got = load_image(path, 128, 192, crf, dtype)
    assert got.shape == (1, 3, 1, 128, 192)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("mode, suffix", [("RGBA", "png"), ("LA", "png"), ("L", "png"), ("P", "png"), ("CMYK", "tiff")])
def test_an_image_of_any_mode_is_converted_to_rgb(tmp_path, mode, suffix):
    image = Image.fromarray(picture(64, 96)).convert(mode)
    path = saved(image, tmp_path / f"image.{suffix}")
    assert torch.equal(load_image(path, 64, 96, crf=0)[0, :, 0], as_pixels(image.convert("RGB")))
    shades = np.array(image.convert("L"))
    path = saved(Image.fromarray(shades.astype(np.uint16) * 257), tmp_path / "sixteen bits.png")
    assert torch.equal(load_image(path, 64, 96, crf=0)[0, 0, 0], torch.from_numpy(shades) / 127.5 - 1)


# EXIF orientation -> what makes the stored picture of the one that is shown
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.parametrize("orientation", STORED)
def test_a_photograph_is_taken_as_shown_or_as_stored_or_without_what_1_2_0_does_not_turn(tmp_path, orientation, suffix):
    shown = Image.fromarray(picture(64, 96))
    stored = shown.transpose(STORED[orientation]) if STORED[orientation] is not None else shown
    exif = Image.Exif()
    exif[0x0112] = orientation
    path, plain = tmp_path / f"photo.{suffix}", tmp_path / f"plain.{suffix}"
    stored.save(path, exif=exif, quality=100)
    stored.save(plain, quality=100)
    got = load_image(path, 64, 96, crf=0)
    assert (got[0, :, 0] - as_pixels(shown)).abs().mean() < 0.1
    as_stored = load_image(path, *stored.size[::-1], crf=0, orientation="stored")
    assert torch.equal(as_stored, load_image(plain, *stored.size[::-1], crf=0))
    turned = orientation in (3, 6, 8)  # mirrored ones are not
    as_in_1_2_0 = load_image(path, *(64, 96) if turned else as_stored.shape[3:], crf=0, orientation="turned")
    assert torch.equal(as_in_1_2_0, got if turned else as_stored)


def test_an_images_colour_profile_is_applied_unless_it_is_damaged(tmp_path, capsys):
    shown = Image.fromarray(picture(64, 96))
    lab = ImageCms.createProfile("LAB")
    stored = ImageCms.profileToProfile(shown, ImageCms.createProfile("sRGB"), lab, outputMode="LAB")
    path, damaged = tmp_path / "profile.tiff", tmp_path / "damaged.png"
    stored.save(path, icc_profile=ImageCms.ImageCmsProfile(lab).tobytes())
    got = load_image(path, 64, 96, crf=0)
    assert (got[0, :, 0] - as_pixels(shown)).abs().mean() < 0.02  # rounded twice to 8 bits
    shown.save(damaged, icc_profile=b"no profile")
    assert torch.equal(load_image(damaged, 64, 96, crf=0)[0, :, 0], as_pixels(shown))
    assert "colour profile is ignored" in capsys.readouterr().out


def as_pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1


def test_an_image_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "text.png").write_text("hello")
    whole = saved(Image.fromarray(picture(64, 96)), tmp_path / "whole.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    os.mkfifo(tmp_path / "pipe")
    saved(Image.fromarray(np.linspace(0, 1, 64 * 96, dtype=np.float32).reshape(64, 96)), tmp_path / "floats.tiff")
    for sides in ((20000, 20000), (17000, 4), (1, 50), (2, 16000)):
        saved(Image.new("1", sides), tmp_path / f"{sides[0]}x{sides[1]}.png")
    for name, message in {
        ".": "cannot be read as an image.*\n.*--image FILE",
        "text.png": "cannot be read as an image.*\n.*--image FILE",
        "half.png": "cannot be read as an image.*\n.*--image FILE",
        "absent.png": "there is no image .*--image FILE",
        "pipe": "pipe cannot be read as an image: that is a named pipe",
        "floats.tiff": "floating-point numbers, wanted 8 bits: convert it\n.*--im",  # would be black
        "20000x20000.png": "too large",
        "17000x4.png": "2 to 16384",
        "1x50.png": "2 to 16384",
        "2x16000.png": "too narrow",
    }.items():
        # A small target: should the bounds ever be lost, the last image then needs 1.6 GB, not 25.
        with pytest.raises(UserError, match=message):
            load_image(tmp_path / name, 96, 128)
    assert content_digest(tmp_path / "pipe") == "unreadable"


@pytest.mark.parametrize(
    "frames, frame_rate, samples",
    [
        (17, 24.0, 33120),  # sound a little shorter than the video
        (25, 29.97, 60000),  # much longer
        (9, 12.5, 480),  # almost none
        (1, 24.0, 480),
    ],
)
def test_a_video_and_its_sound_last_equally_long(tmp_path, frames, frame_rate, samples):
    path = tmp_path / "new folder" / "out.mp4"
    write_video(path, [clip(frames)], frame_rate, lambda: sine(samples), 48000)
    properties = read_video(path)
    seconds = float(frames / exact_frame_rate(frame_rate))
    assert properties["frame_count"] == frames
    assert properties["frame_rate"] == exact_frame_rate(frame_rate)
    assert properties["video_seconds"] == pytest.approx(seconds, abs=DURATION_TOLERANCE)
    assert properties["audio_seconds"] == pytest.approx(seconds, abs=DURATION_TOLERANCE)
    assert (properties["width"], properties["height"]) == (96, 64)
    assert (properties["video_codec"], properties["pixel_format"]) == ("h264", "yuv420p")
    assert (properties["audio_codec"], properties["channels"], properties["sample_rate"]) == ("aac", 2, 48000)


@pytest.mark.parametrize(
    "rate, written",
    [(48000, 48000), (44100, 44100), (22050, 22050), (96000, 96000), (8000, 8000)]
    # AAC has none of these: the next one above, or its highest.
    + [(37800, 44100), (6000, 7350), (192000, 96000)],
)
def test_a_sound_of_any_rate_is_written_at_a_rate_that_aac_has(tmp_path, rate, written):
    given = tone(rate, 1.0)
    write_video(tmp_path / "out.mp4", [clip(24)], 24.0, lambda: given, rate)
    properties = read_video(tmp_path / "out.mp4")
    assert properties["sample_rate"] == written
    assert properties["audio_seconds"] == pytest.approx(1, abs=DURATION_TOLERANCE)
    heard = read_sound(tmp_path / "out.mp4", "--video-path", duration=1.0).samples
    expected = tone(written, 1.0)
    for side in range(2):
        # AAC's frames begin and end inside a second of 7350 samples.
        ours, theirs = heard[side, 1024:-1024], expected[side, 1024 : heard.shape[1] - 1024]
        assert np.corrcoef(ours, theirs)[0, 1] > SOUND_CORRELATION, side


def test_a_video_shows_the_frames_and_sounds_the_waveform(tmp_path):
    import av

    frames, waveform = clip(17), sine(34000)
    write_video(tmp_path / "out.mp4", [frames], 24.0, lambda: waveform, 48000)
    with av.open(str(tmp_path / "out.mp4")) as container:
        shown = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        container.seek(0)
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)[:, :34000]
        assert container.streams.video[0].codec_context.colorspace == BT709
    assert np.abs(shown.astype(int) - frames.numpy().astype(int)).mean() < PICTURE_TOLERANCE
    assert np.corrcoef(heard[0], waveform[0])[0, 1] > SOUND_CORRELATION


def detailed(height, width):
    """A picture whose colours change from pixel to pixel."""
    noise = np.random.default_rng(0).normal(0, 25, (height, width, 3))
    return np.clip(picture(height, width) + noise, 0, 255).astype(np.uint8)


def planes(frame) -> list[np.ndarray]:
    rows = [np.frombuffer(p, np.uint8).reshape(p.height, p.line_size) for p in frame.planes]
    return [each[:, : plane.width] for each, plane in zip(rows, frame.planes, strict=True)]


@pytest.mark.parametrize("size", [(64, 96), (34, 50), (512, 768)])
def test_a_frames_colours_are_the_means_of_two_by_two_pixels(size):
    """By BT.709's definition, in float64."""
    rgb = detailed(*size)
    red, green, blue = np.moveaxis(rgb / 255.0, 2, 0)
    luma = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    colours = [(blue - luma) / 1.8556, (red - luma) / 1.5748]
    height, width = size
    means = [c.reshape(height // 2, 2, width // 2, 2).mean((1, 3)) for c in colours]
    expected = [16 + 219 * luma, *(128 + 224 * mean for mean in means)]
    for got, exact in zip(planes(yuv420(rgb)), expected, strict=True):
        assert np.sqrt(((got - exact) ** 2).mean()) < CHROMA_TOLERANCE


@pytest.mark.parametrize("size", [(64, 96), (130, 194), (1088, 1920)])
def test_a_frame_is_the_same_for_any_number_of_threads(size):
    rgb = detailed(*size)
    expected = planes(yuv420(rgb, threads=1))
    for threads in (0, 2, 3, 5, 16):
        assert all(map(np.array_equal, planes(yuv420(rgb, threads)), expected)), threads


def test_a_video_has_the_same_bytes_however_its_frames_and_its_sound_come(tmp_path):
    # 192 wide: a width at which x264's macroblock tree, were it on, differs from run to run.
    frames, order = clip(17, 128, 192), []

    def write(lengths, sound_at: int = 1) -> bytes:
        """The video of chunks of frames, whose sound is there with that chunk."""
        polls, path = itertools.count(1), tmp_path / "out.mp4"

        def chunks():
            for chunk in frames.split(lengths):
                order.append("frames")
                yield chunk

        def sound():
            order.append("sound")
            return sine(33120)

        write_video(path, chunks(), 24.0, sound, 48000, lambda: next(polls) >= sound_at)
        return path.read_bytes()

    def write_without_poll() -> bytes:
        write_video(tmp_path / "plain.mp4", [frames], 24.0, lambda: sine(33120), 48000)
        return (tmp_path / "plain.mp4").read_bytes()

    videos = [write(lengths) for lengths in ((17,), (1, 9, 7), (1,) * 17)]
    videos += [write((1,) * 17, first) for first in (7, 16, 17, 18)]
    assert order[-18:] == 17 * ["frames"] + ["sound"]
    assert len({*videos, *(write_without_poll() for _ in range(3))}) == 1


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
    # x264 looks some 50 frames ahead, of 144.
    assert (sizes[-1] > whole / 3) == ready and (sizes[-1] < whole / 100) != ready


@pytest.mark.parametrize("error", [ZeroDivisionError, AttributeError])
def test_an_error_while_a_video_is_written_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error):
    path = tmp_path / "out.mp4"
    path.write_bytes(b"an earlier result")
    if error is AttributeError:  # by then the pictures are encoded: a partial file exists
        monkeypatch.setattr("av.AudioFrame", None)

    def chunks():
        yield clip(3)
        if error is ZeroDivisionError:
            raise error

    with pytest.raises(error):
        write_video(path, chunks(), 24.0, lambda: sine(100), 48000)
    assert path.read_bytes() == b"an earlier result" and list(tmp_path.iterdir()) == [path]


RATES = {24: 24, 5.0: 5, 12.5: Fraction(25, 2), 23.9: Fraction(239, 10), 29.97: Fraction(30000, 1001)}
RATES |= {23.976: Fraction(24000, 1001), 23.98: Fraction(24000, 1001), 59.94: Fraction(60000, 1001)}
RATES |= {30000 / 1001: Fraction(30000, 1001)}


@pytest.mark.parametrize("rate, exact", RATES.items())
def test_a_broadcast_frame_rate_is_exact(rate, exact):
    assert exact_frame_rate(rate) == exact


def test_frames_are_written_as_lossless_pictures_without_those_of_a_longer_run(tmp_path):
    folder = tmp_path / "new" / "frames"
    assert [len(chunk) for chunk in write_frames(folder, clip(5).split(2))] == [2, 2, 1]
    (folder / "notes.txt").write_text("kept")
    list(write_frames(folder, [clip(3)]))
    assert sorted(os.listdir(folder)) == ["frame_00000.png", "frame_00001.png", "frame_00002.png", "notes.txt"]
    assert np.array_equal(np.array(Image.open(folder / "frame_00002.png")), clip(3)[2].numpy())


def test_an_output_path_must_be_an_mp4_that_can_be_written(tmp_path, monkeypatch):
    check_output_path(tmp_path / "out.mp4")
    check_output_path(tmp_path / "new" / "folder" / "OUT.MP4")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch(0o755)
    for path, message in [
        ("", "is a folder; type --output-path video.mp4"),
        (tmp_path / "out.avi", "MP4"),
        (tmp_path / "folder.mp4", "is a folder"),
        (tmp_path / "file" / "out.mp4", "not a folder you may write to"),
    ]:
        with pytest.raises(UserError, match=message):
            check_output_path(path)
    # Root may write everywhere, so a folder without permission is played.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="not a folder you may write to.*--output-path"):
        check_output_path(tmp_path / "out.mp4")
