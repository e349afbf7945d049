"""Conditioning images: pixels as ltx-pipelines', pictures and videos told apart by content, refusals."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import picture_frames
from jobs import make_job
from PIL import Image, ImageCms

from ltx_neuron.errors import UserError
from ltx_neuron.files import content_digest
from ltx_neuron.host.encode_inputs import load_image
from ltx_neuron.host.input_files import check, decode_image, first_frames, is_still, notes
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import ImageCondition

PICTURES = [Image.fromarray(each.numpy()) for each in picture_frames(3, 64, 96, 3)]
SHOWN = PICTURES[0]
PAGES = {"save_all": True, "append_images": PICTURES[1:]}
MOVING = PAGES | {"duration": 100}
# By EXIF orientation, from 2 on: what makes the stored picture of the one that is shown
STORED = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_90", "TRANSVERSE", "ROTATE_270"]


def as_pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1


def test_pixels_are_those_of_ltx_pipelines_for_any_aspect_ratio_and_compression(tmp_path):
    from ltx_pipelines.utils.media_io import load_image_conditioning

    path, exact = tmp_path / "image.png", torch.float32
    for size, crf, dtype in (((301, 517), 33, exact), ((33, 700), 18, torch.bfloat16), ((720, 407), 0, exact)):
        Image.fromarray(picture_frames(1, *size, 5)[0].numpy()).save(path)
        expected = load_image_conditioning(str(path), 128, 192, dtype, torch.device("cpu"), crf)
        assert expected.shape == (1, 3, 1, 128, 192) and torch.equal(load_image(path, 128, 192, crf, dtype), expected)


def test_an_image_of_any_mode_is_converted_to_rgb_without_a_warning(tmp_path, recwarn):
    grey = SHOWN.convert("L")
    sixteen_bits = Image.fromarray(np.array(grey).astype(np.uint16) * 257)
    rows = [(SHOWN.convert(mode), SHOWN.convert(mode)) for mode in ("RGBA", "L", "P", "CMYK")]
    for image, wanted in [*rows, (sixteen_bits, grey)]:
        image.save(path := tmp_path / "image.tiff")
        assert torch.equal(load_image(path, 64, 96, crf=0)[0, :, 0], as_pixels(wanted.convert("RGB"))), image.mode
    Image.new("1", (12000, 9000), 1).save(path := tmp_path / "large.png")  # a phone's 108 megapixels
    assert is_still(path) and decode_image(path, "shown").shape == (9000, 12000, 3)
    assert not recwarn.list


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_taken_as_shown_as_stored_or_as_1_2_0_turns_it(tmp_path, orientation):
    stored = SHOWN.transpose(Image.Transpose[STORED[orientation - 2]]) if orientation > 1 else SHOWN
    exif, path = Image.Exif(), tmp_path / "photo.png"
    exif[0x0112] = orientation
    stored.save(path, exif=exif)
    turned = SHOWN if orientation in (3, 6, 8) else stored  # 1.2.0 leaves mirrored ones
    for setting, wanted in (("shown", SHOWN), ("stored", stored), ("turned", turned)):
        got = load_image(path, *wanted.size[::-1], crf=0, orientation=setting)
        assert torch.equal(got[0, :, 0], as_pixels(wanted)), setting


def test_a_colour_profile_is_applied_unless_it_is_damaged(tmp_path, capsys):
    lab = ImageCms.createProfile("LAB")
    stored = ImageCms.profileToProfile(SHOWN, ImageCms.createProfile("sRGB"), lab, outputMode="LAB")
    stored.save(tmp_path / "profile.tiff", icc_profile=ImageCms.ImageCmsProfile(lab).tobytes())
    got = load_image(tmp_path / "profile.tiff", 64, 96, crf=0)
    assert (got[0, :, 0] - as_pixels(SHOWN)).abs().mean() < 0.02  # rounded twice to 8 bits
    SHOWN.save(tmp_path / "damaged.png", icc_profile=b"no profile")
    assert torch.equal(load_image(tmp_path / "damaged.png", 64, 96, crf=0)[0, :, 0], as_pixels(SHOWN))
    assert "colour profile is ignored" in capsys.readouterr().out


def test_an_image_that_cannot_be_used_is_refused_and_a_file_of_another_format_by_the_formats_name(tmp_path):
    SHOWN.save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    os.mkfifo(tmp_path / "pipe")
    Image.fromarray(np.linspace(0, 1, 64 * 96, dtype=np.float32).reshape(64, 96)).save(tmp_path / "floats.tiff")
    for sides in ((20000, 20000), (17000, 4), (1, 50), (2, 16000)):
        Image.new("1", sides).save(tmp_path / f"{sides[0]}x{sides[1]}.png")
    for name, message in {
        ".": "cannot be read as an image.*\n.*--image FILE",
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
    for begin, message in (
        (b"%PDF-1.4", "it is a PDF; wanted PNG, JPEG"),
        (b"\xff\x0a\xfa", "it is JPEG XL; wanted PNG"),
        (b"\0\0\0\x18ftypisom", "it is a video; wanted PNG"),
        (b"RIFF\0\0\0\0WEBP", "as an image: (?!it is)"),
        (b"\0\0\0\x18ftypheic", "it is HEIC"),
    ):
        (tmp_path / "a").write_bytes(begin + bytes(100))
        with pytest.raises(UserError, match=message):
            decode_image(tmp_path / "a", "shown")
    with pytest.raises(UserError, match="a cannot be read as an image"):  # HEIC is no video of one tile either
        check(Job(video_conditioning=[(str(tmp_path / "a"), 1.0)], num_frames=17))


def test_an_animated_webp_is_taken_as_a_video_after_the_printed_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    SHOWN.save("it's one.webp", lossless=True, **MOVING)
    for converted in ("it's one.png", "it's one-2.png"):  # what is there is not replaced
        with pytest.raises(UserError, match="an animated WebP") as refused:
            list(first_frames("it's one.webp", "--video-path"))
        (line,) = re.findall(r"^Type: (python .*)", str(refused.value), re.MULTILINE)
        subprocess.run(["bash", "-c", line], check=True)
        assert np.array_equal(list(first_frames(converted, "--video-path")), [np.array(each) for each in PICTURES])


# The name, Pillow's format and settings, and whether it is a still.
FILES = [
    ("a.mp4", "PNG", {}, True),
    ("a", "JPEG", {}, True),
    ("a.webp", "WEBP", {}, True),
    ("pages.tif", "TIFF", PAGES, True),
    ("photo of a phone.jpg", "MPO", PAGES, True),
    ("one.gif", "GIF", {}, True),
    ("moves.png", "PNG", MOVING, False),
    ("moves.avif", "AVIF", MOVING, False),
]


@pytest.mark.parametrize("name, format, settings, still", FILES)
def test_a_file_is_a_still_or_a_video_by_its_content(tmp_path, name, format, settings, still):
    """Of a moving picture as an image the first is taken, with a note."""
    SHOWN.save(path := tmp_path / name, format=format, **settings)
    (reference,) = Job(video_conditioning=[(str(path), 1.0)], num_frames=17).references
    assert (is_still(path), reference.still, reference.num_frames) == (still, still, 1 if still else 3)
    assert reference.latent_shape(Size(num_frames=17)) == (3 if still else 1, 16, 24)
    assert still or len(list(first_frames(path, ""))) == 3
    moves = [] if still else [f"--image {path} moves: its first picture is taken"]
    assert notes(make_job("", Size(64, 96, 9), images=(ImageCondition(path),))) == moves


def test_an_address_of_the_web_is_refused_as_no_file_of_this_machine():
    url = "https://a.b/c.png"
    for fields in (
        {"image": [[url]]},
        {"video_conditioning": [[url, 1.0]]},
        {"audio_path": "s3://bucket/c.wav"},
        {"video_path": url, "start_time": 0, "end_time": 1, "num_frames": None},
    ):
        with pytest.raises(UserError, match="c.(png|wav).* is an address .URL., wanted a file of this machine"):
            Job.validated({"num_frames": 17} | fields).check_inputs()
