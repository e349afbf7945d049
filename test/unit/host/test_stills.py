"""A file is a picture or a video by its content, whatever its name; and frames, rates and addresses
as people type them."""

import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from helpers import picture_frames, write_film
from jobs import make_job
from PIL import Image
from printed import runs

from ltx_neuron.errors import UserError
from ltx_neuron.host.encode_inputs import check, notes
from ltx_neuron.host.images import decode_image, is_still
from ltx_neuron.host.media import first_frames
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import ImageCondition

PICTURES = [Image.fromarray(each.numpy()) for each in picture_frames(3, 64, 96, 3)]
MOVING = {"save_all": True, "append_images": PICTURES[1:], "duration": 100}
PAGES = {"save_all": True, "append_images": PICTURES[1:]}
# The name, Pillow's format and settings, and whether it is a still.
FILES = [
    *((name, "PNG", {}, True) for name in ("a.png", "A.PNG", "a.jfif", "a", "a.mp4", "a.mov")),
    *((name, "JPEG", {}, True) for name in ("a.jpg", "a.jpe", "a.JFIF", "a.webm", "a b'.x")),
    ("a.avif", "AVIF", {}, True),
    ("A.AVIF", "AVIF", {}, True),
    ("a.webp", "WEBP", {}, True),
    ("a.tif", "TIFF", {}, True),
    ("pages.tif", "TIFF", PAGES, True),
    ("photo of a phone.jpg", "MPO", PAGES, True),
    ("one.gif", "GIF", {}, True),
    ("a.jp2", "JPEG2000", {}, True),
    ("a.bmp", "BMP", {}, True),
    ("moves.gif", "GIF", MOVING, False),
    ("moves.png", "PNG", MOVING, False),
    ("moves.jpg", "GIF", MOVING, False),
    ("moves.avif", "AVIF", MOVING, False),
]


@pytest.mark.parametrize("name, format, settings, still", FILES)
def test_a_file_is_a_still_by_its_content(tmp_path, name, format, settings, still):
    PICTURES[0].save(tmp_path / name, format=format, **settings)
    job = Job(video_conditioning=[(str(tmp_path / name), 1.0)], num_frames=17)
    assert is_still(tmp_path / name) == still
    (reference,) = job.references
    assert (reference.still, reference.num_frames) == (still, 1 if still else 3)
    # And so it has the graphs of one.
    assert reference.latent_shape(Size(num_frames=17)) == (3 if still else 1, 16, 24)
    if not still:
        assert len(list(first_frames(tmp_path / name, ""))) == 3


def test_neither_films_nor_pictures_depend_on_their_names(tmp_path):
    path = write_film(tmp_path / "film.mp4", picture_frames(9, 64, 96, 3)).rename(tmp_path / "film.png")
    (reference,) = Job(video_conditioning=[(str(path), 1.0)]).references
    assert (reference.still, reference.num_frames) == (False, 9)
    for name in ("a.png", "a.jfif", "a.mp4", "a", "A.PNG"):
        PICTURES[0].save(tmp_path / name, format="PNG")
        assert np.array_equal(decode_image(tmp_path / name, "shown"), np.array(PICTURES[0]))


def test_a_picture_that_cannot_be_read_is_no_video_of_one_tile(tmp_path):
    """A phone's HEIC is a grid of tiles, of which a video's reader takes the first."""
    path = tmp_path / "photo.heic"
    path.write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    assert is_still(path)
    job = Job(video_conditioning=[(str(path), 1.0)], num_frames=17)
    with pytest.raises(UserError, match="photo.heic cannot be read as an image"):
        check(job)


def typed(message: str) -> None:
    """Type what a message prints, in the present folder."""
    (line,) = re.findall(r"^Type: (?:pip install \S+ && )?(python .*)", message, re.MULTILINE)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", line], env=os.environ | {"PATH": path}, check=True)


@runs("host/images.py:unreadable: python -c")
@pytest.mark.parametrize("name", ["a.webp", "it's one.webp"])
def test_an_animated_webp_is_taken_as_a_video_after_the_printed_command(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    PICTURES[0].save(name, lossless=True, **MOVING)
    for made in (f"{name[:-5]}.png", f"{name[:-5]}-2.png"):  # what is there is not replaced
        with pytest.raises(UserError, match="an animated WebP") as refused:
            list(first_frames(name, "--video-path"))
        typed(str(refused.value))
        frames = list(first_frames(made, "--video-path"))
        assert np.array_equal(frames, [np.array(each) for each in PICTURES])


def test_a_heic_is_taken_after_the_printed_command(tmp_path, monkeypatch):
    """Upright, as its viewer shows it."""
    pytest.importorskip("pillow_heif")  # not a package of this project
    monkeypatch.chdir(tmp_path)
    script = (
        "import pillow_heif; from PIL import Image; pillow_heif.register_heif_opener()\n"
        "picture = Image.new('RGB', (96, 64)); picture.paste((255, 0, 0), (0, 0, 48, 32))\n"
        "exif = picture.getexif(); exif[0x112] = 6\n"  # a quarter turn
        "picture.save('photo.heic', exif=exif.tobytes(), quality=95)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(UserError, match="it is HEIC") as refused:
        decode_image("photo.heic", "shown")
    typed(str(refused.value))
    shown = decode_image("photo.png", "shown")
    assert shown.shape == (96, 64, 3) and shown[5, 60, 0] > 200 and shown[5, 5, 0] < 50


@pytest.mark.parametrize(
    "begin, message",
    [
        (b"\0\0\0\x18ftypheic", "it is HEIC"),
        (b"%PDF-1.4", "it is a PDF"),
        (b"<svg xmlns=", "it is SVG"),
        (b"\xff\x0a\xfa", "it is JPEG XL"),
        (b"\0\0\0\x18ftypisom", "it is a video"),
        (b"\0\0\0\x18ftypavif", "as an image: "),
        (b"RIFF\0\0\0\0WEBP", "as an image: "),
    ],
)
def test_a_picture_of_another_format_is_refused_by_its_name(tmp_path, begin, message):
    (tmp_path / "a").write_bytes(begin + bytes(100))
    with pytest.raises(UserError, match=message) as refused:
        decode_image(tmp_path / "a", "shown")
    assert ("wanted PNG, JPEG" in str(refused.value)) == ("it is" in message and "HEIC" not in message)


def test_a_moving_picture_as_an_image_is_noted(tmp_path):
    PICTURES[0].save(tmp_path / "moves.gif", **MOVING)
    PICTURES[0].save(tmp_path / "still.gif")
    images = tuple(ImageCondition(tmp_path / name) for name in ("moves.gif", "still.gif"))
    job = make_job("", Size(64, 96, 9), images=images)
    message = [f"--image {tmp_path / 'moves.gif'} moves: its first picture is taken"]
    assert notes(job) == message


# --- large pictures -------------------------------------------------------------------------------


def test_a_phones_picture_of_108_megapixels_is_read_without_a_warning(tmp_path, recwarn):
    path = tmp_path / "large.png"
    Image.new("1", (12000, 9000), 1).save(path)
    assert is_still(path) and decode_image(path, "shown").shape == (9000, 12000, 3)
    assert not recwarn.list


# --- frames ---------------------------------------------------------------------------------------


def image_at(index: int, frames: int, **fields) -> Job:
    return make_job("", Size(64, 96, frames), images=(ImageCondition("a.png", index),), **fields)


@pytest.mark.parametrize("frames, tail, last", [(25, None, 24), (25, 8, 16), (1, None, 0)])
def test_minus_one_is_the_last_frame_of_the_file(frames, tail, last):
    job, same = (image_at(index, frames, tail_frames=tail) for index in (-1, last))
    assert job.placed == list(same.images)
    assert job.appended(False, 2, 3) == same.appended(False, 2, 3)
    job.images[0].check(frames)
    line = Job.validated({"image": [[__file__, "-1"]], "num_frames": frames})
    assert [image.frame_index for image in line.placed] == [frames - 1]
    assert Job().updated(json.loads(json.dumps(line.to_json()))).image == line.image


@pytest.mark.parametrize("index", [-2, -25, 25])
def test_another_frame_outside_the_clip_is_refused_with_how_to_name_the_last(index):
    with pytest.raises(UserError, match="outside the clip's 0..24; -1 is the last one"):
        ImageCondition("a.png", index).check(25)
    if index < 0:
        with pytest.raises(UserError, match="frame index -[0-9]+, wanted at least -1"):
            Job.validated({"image": [["a.png", index]]})


# --- rates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", ["24000/1001", "30000/1001", "60000/1001", "25/1", "23.976", "24"])
@pytest.mark.parametrize("key", ["frame_rate", "fps"])
def test_a_frame_rate_is_a_number_or_a_fraction(typed, key):
    assert Job.validated({key: typed}).frame_rate == float(Fraction(typed))
    assert Job().updated({key: typed}).frame_rate == float(Fraction(typed))


@pytest.mark.parametrize("typed", ["24000/0", "a/b", "1/2/3", "/", "2000/1", "1/1001", "nan/1"])
def test_another_text_is_refused_as_a_frame_rate(typed):
    with pytest.raises(UserError, match="--frame-rate: got .*, wanted"):
        Job.validated({"frame_rate": typed})


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["https://a.b/c.png", "http://a.b/c.mp4", "s3://bucket/c.wav"])
@pytest.mark.parametrize("field", ["image", "audio_path", "video_path", "reference_audio", "video_conditioning"])
def test_an_address_is_told_to_be_downloaded(url, field):
    values = {"image": [[url]], "video_conditioning": [[url, 1.0]]}.get(field, url)
    more = {"start_time": 0, "end_time": 1} if field == "video_path" else {"num_frames": 17}
    with pytest.raises(UserError, match="is an address .URL., wanted a file of this machine") as e:
        Job.validated({field: values} | more).check_inputs()
    assert Path(url).name in str(e.value)
