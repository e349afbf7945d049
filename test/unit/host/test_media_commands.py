"""The ffmpeg commands that errors print, run on the files that provoke them: what they make is
taken, and its flash and click are still together."""

import shlex
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from clips import MIRROR, RATE, first_loud, noise_with_click, run_printed, seen, turned, write_clip
from helpers import write_sound
from jobs import make_job
from printed import runs

from ltx_neuron.errors import UserError
from ltx_neuron.host.encode_inputs import check, read_reference_audio
from ltx_neuron.host.media import ffmpeg, first_frames, footage, read_sound, video_size
from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import Retake, SoundCondition

# An AAC packet's half: its encoder's quantisation spreads a click within a packet.
TOGETHER = 512 / 48000


def take_retake(path):
    size = video_size(path, "--video-path")
    check(make_job("", size, retake=Retake(path, 0.1, 0.3)))


def take_reference(path):
    footage(path, "--video-conditioning")


def take_extended(path):
    video_size(path, "--video-path", extends=True)


def take_sound(path):
    check(make_job("", Size(64, 96, 17, 24.0), sound=SoundCondition(path)))


def take_voice(path):
    read_reference_audio(path, None)


def phone(number: int) -> float:
    """Frames that last longer in the dark: before the flash, and after it."""
    return number / RATE if number < 8 else 8 / RATE + (number - 8) / 12


def cut_off(path):
    """The beginning of a clip whose header comes first."""
    write_clip(path, container={"movflags": "+faststart"}, codec=None, sides=(256, 256))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 9 // 10])


def odd_rate(path):
    sound = (noise_with_click(44999, 1.375, 2 / 3) * 2**15).astype(np.int16)
    write_sound(path, sound.T.reshape(1, -1).copy(), 44999, "pcm_s16le", format="s16")


def surround(path):
    sound = (noise_with_click(48000, 1.375, 2 / 3, 6) * 2**15).astype(np.int16)
    write_sound(path, sound.T.reshape(1, -1).copy(), 48000, "pcm_s16le", "5.1", "s16")


def gap(time: float) -> float | None:
    return None if 0.2 < time < 0.5 else time


clip = partial
# The file's name, how it is made, who takes it, and a part of the message.
PROVOKING = [
    ("dark.mp4", clip(write_clip, times=phone), take_retake, "variable frame rate"),
    ("dark.mp4", clip(write_clip, times=phone), take_reference, "variable frame rate"),
    ("dark.mkv", clip(write_clip, times=phone), take_extended, "variable frame rate"),
    ("long.mp4", clip(write_clip, frames=39, seconds=2.0), take_retake, "39 frames of 64x96"),
    ("tall.mp4", clip(write_clip, sides=(142, 90)), take_retake, "33 frames of 142x90"),
    ("tall.mp4", clip(write_clip, sides=(142, 90)), take_extended, "33 frames of 142x90"),
    ("small.mp4", clip(write_clip, sides=(30, 50)), take_retake, "33 frames of 30x50"),
    ("mute.mp4", clip(write_clip, sides=(142, 90), codec=None), take_retake, "of 142x90"),
    (
        "late picture.mp4",
        clip(write_clip, frames=39, times=lambda number: 0.25 + number / RATE, seconds=2.5),
        take_retake,
        "39 frames",
    ),
    ("late.mp4", clip(write_clip, frames=39, sound_at=0.25), take_retake, "39 frames"),
    ("gap.mkv", clip(write_clip, moved=gap, codec="libopus", sides=(70, 96)), take_retake, "70x96"),
    ("stream.ts", clip(write_clip, frames=39, sides=(70, 96), codec="mp2"), take_retake, "39 frames of 70x96"),
    ("cut.mp4", cut_off, take_reference, "is cut off"),
    ("cut.mp4", cut_off, take_retake, "is cut off"),
    ("mirror.mp4", lambda path: turned(write_clip(path), MIRROR), take_reference, "mirrored"),
    (
        "selfie.mp4",
        lambda path: turned(write_clip(path, 39, (142, 90), phone, layout="5.1", seconds=3.0), MIRROR),
        take_retake,
        "variable frame rate.*mirrored.*of 142x90",
    ),
    ("surround.mp4", clip(write_clip, layout="5.1"), take_retake, "6 channels"),
    ("surround.mp4", clip(write_clip, layout="5.1", sound_at=0.25), take_sound, "6 channels"),
    ("surround.mkv", clip(write_clip, codec="ac3", layout="5.1", moved=gap), take_sound, "6 channels"),
    ("surround.wav", surround, take_sound, "6 channels"),
    ("surround.wav", surround, take_voice, "6 channels"),
    ("odd.wav", odd_rate, take_sound, "44999 samples"),
    ("odd.mkv", clip(write_clip, codec="flac", rate=44999), take_retake, "44999 samples"),
    ('-it\'s a "clip": 100%.mp4', clip(write_clip, sides=(70, 96)), take_retake, "of 70x96"),
]


@runs("host/media.py:ffmpeg: ffmpeg")
@pytest.mark.parametrize(
    "name, make, take, said", PROVOKING, ids=[f"{each[0]}-{each[2].__name__}" for each in PROVOKING]
)
def test_what_a_printed_command_makes_is_taken_with_flash_and_click_together(
    tmp_path, monkeypatch, name, make, take, said
):
    monkeypatch.chdir(tmp_path)  # the user's folder
    path = tmp_path / name
    make(path)
    typed = name if name.startswith("-") else path
    before = seen(path) if path.suffix != ".wav" else None
    with pytest.raises(UserError, match=f"(?s){said}.*\nType: ffmpeg ") as refused:
        take(typed)
    made = run_printed(str(refused.value), tmp_path)
    take(made)
    read = read_sound(made, "")
    if before is None:
        assert read.rate == 48000
        assert first_loud(read.samples.numpy()) / read.rate == pytest.approx(2 / 3, abs=TOGETHER)
        return
    after = seen(made)
    if before.click is not None:
        assert after.click - after.flash == pytest.approx(
            before.click - before.flash, abs=TOGETHER + (1 / 24 if "variable" in said else 0)
        )
        # And so they are where the clip is read.
        rate = footage(made, "").frame_rate
        flash = next(n for n, each in enumerate(first_frames(made, "")) if each.mean() > 150)
        click = first_loud(read.samples.numpy()) / read.rate
        assert click - flash / rate == pytest.approx(after.click - after.flash, abs=TOGETHER)
        if "--video-path" in str(refused.value) and "-frames:v" in str(refused.value):
            assert read.samples.shape[1] / read.rate < after.frames / rate + 0.1  # cut as well
    height, width = after.box
    assert height == pytest.approx(width, rel=0.1)  # nothing is stretched
    assert after.left == ("mirrored" not in said)


def test_a_command_replaces_no_older_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_clip(tmp_path / "tall.mp4", sides=(70, 96))
    made = []
    for _ in range(3):
        with pytest.raises(UserError) as refused:
            take_retake(path)
        made.append(run_printed(str(refused.value), tmp_path))
    assert len(set(made)) == 3


def test_a_command_names_its_files_so_that_ffmpeg_takes_them_for_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, read, made in (
        ("a b.mp4", "a b.mp4", "a b-x.mp4"),
        ("-a.mp4", "./-a.mp4", "./-a-x.mp4"),
        ("12:30.mp4", "./12:30.mp4", "./12:30-x.mp4"),
        ("/films/a.mp4", "/films/a.mp4", "a-x.mp4"),
    ):
        words = shlex.split(ffmpeg(name, "x.mp4"))
        assert (words[2], words[-1]) == (read, made)


def test_a_converted_picture_is_as_good_as_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_clip(tmp_path / "tall.mp4", sides=(142, 90))
    with pytest.raises(UserError) as refused:
        take_retake(path)
    made = run_printed(str(refused.value), tmp_path)
    assert Fraction(RATE) == Fraction(footage(made, "").frame_rate)
    frame, old = next(first_frames(made, "")), next(first_frames(path, ""))
    top, left = (142 - 128) // 2, (90 - 64) // 2
    cropped = old[top : top + 128, left : left + 64].astype(int)
    assert np.abs(frame.astype(int) - cropped).mean() < 2
