"""Films and sounds are read on one clock, as ltx-pipelines reads them, or refused with a command that mends them."""

import re
import shlex
from functools import partial

import av
import numpy as np
import pytest
import torch
from clips import FLASH, MIRROR, RATE, encoded, first_loud, noise_with_click, run_printed, seen, turned, write_clip
from helpers import one_thread, picture_frames, tone, write_sound  # noqa: F401
from jobs import make_job

from ltx_neuron.errors import UserError
from ltx_neuron.host import encode_inputs, input_files
from ltx_neuron.host.facts import video_size
from ltx_neuron.host.input_files import ffmpeg, first_frames, footage, read_sound
from ltx_neuron.host.video import write_video
from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import ReferenceAudio, ReferenceVideo, Retake, SoundCondition

EXACT = 2e-3  # containers round times: MP4's edit lists and Matroska to a millisecond
TOGETHER = 512 / 48000  # an AAC packet's half: its encoder's quantisation spreads a click within a packet
RETAKEN = partial(make_job, "", Size(64, 96, 33))


@pytest.mark.parametrize("codec, kind", [("s16le", "i2"), ("s32le", "i4"), ("f32le", "f4"), ("u8", "u1")])
def test_samples_of_any_format_are_those_that_were_written(tmp_path, codec, kind):
    format = codec.removesuffix("le").replace("f32", "flt")
    scale = 1 if kind == "f4" else 2 ** (8 * np.dtype(kind).itemsize - 1)
    silence = 128 if codec == "u8" else 0
    stored = (tone(22050, 0.2).double() * min(scale, 2**31 - 1)).numpy()
    stored = (np.floor(stored) + silence if silence else stored).astype(kind)
    path = write_sound(tmp_path / "a.wav", stored.T.reshape(1, -1).copy(), 22050, f"pcm_{codec}", format=format)
    samples, rate = read_sound(path, "")
    assert rate == 22050 and torch.equal(samples, torch.from_numpy((stored.astype(float) - silence) / scale).float())


def test_a_video_is_taken_as_it_is_shown_and_as_it_is_stored_on_request(tmp_path):
    write_video(path := tmp_path / "phone.mp4", [picture_frames(25, 64, 96, 3)], 24.0, None, 48000)
    content, stored = path.read_bytes(), list(first_frames(path, ""))
    # The first four numbers of an MP4's display matrix -> quarter turns counterclockwise from what is stored to what is
    # shown. A phone that is held upright writes the third.
    for matrix, turns in {(1, 0, 0, 1): 0, (0, -1, 1, 0): 1, (0, 1, -1, 0): 3, (-1, 0, 0, -1): 2}.items():
        path.write_bytes(content)
        assert footage(turned(path, matrix), "") == Size(*(96, 64) if turns % 2 else (64, 96), 25, 24.0)
        assert np.array_equal(list(first_frames(path, "")), np.rot90(stored, turns, axes=(1, 2)))
        assert footage(path, "", upright=False) == Size(64, 96, 25, 24.0)
        assert np.array_equal(list(first_frames(path, "", upright=False)), stored)


def test_a_file_that_cannot_be_read_is_refused_by_its_flag(tmp_path):
    (tmp_path / "text.mp4").write_text("no film")
    for name in ("text.mp4", "missing.mp4", "."):
        for read in (read_sound, footage):
            with pytest.raises(UserError, match="--some-flag"):
                read(tmp_path / name, "--some-flag")
    with pytest.raises(UserError, match="is displayed mirrored or at an odd angle\npass another"):
        next(first_frames(turned(write_clip(tmp_path / "mirror.mp4"), MIRROR), ""))
    next(first_frames(tmp_path / "mirror.mp4", "", upright=False))


def test_a_variable_rate_is_measured_and_a_containers_milliseconds_are_none(tmp_path):
    def written_at(name, time):
        return write_clip(tmp_path / name, frames=24, times=time, codec=None)

    dark = written_at("dark.mp4", lambda n: n / 24 if n < 12 else 0.5 + (n - 12) / 12)
    with pytest.raises(UserError, match=r"variable frame rate: .* 0.04167 to 0.08333 s, .*\nType: ffmpeg .* fps="):
        footage(dark, "")
    assert footage(written_at("even.mp4", lambda n: n / 20), "").frame_rate == pytest.approx(20, rel=0.01)
    footage(written_at("rounded.mp4", lambda n: round(n / 24, 3)), "")


def without(first: float, last: float):
    return lambda time: None if first < time < last else time


def from_(seconds: float):
    return lambda number: seconds + number / RATE


LATE, EARLY, GAP = {"sound_at": 0.25}, {"times": from_(0.25), "seconds": 1.7}, without(0.2, 0.5)
# The file's name and how it is made.
CLIPS = [
    ("plain.mp4", {}),
    ("late.mp4", LATE),
    ("early.mp4", EARLY),
    ("early.mkv", EARLY | {"codec": "libopus"}),
    ("before zero.mkv", {"sound_at": -0.25, "container": {"avoid_negative_ts": "disabled"}, "codec": "pcm_s16le"}),
    ("gap.mp4", {"moved": GAP}),
    ("two gaps.mkv", {"moved": lambda time: GAP(time) and without(0.55, 0.6)(time)}),
    ("one packet lost.mkv", {"moved": without(0.39, 0.41), "codec": "libopus"}),
    ("delay of MP3.mp4", {"codec": "libmp3lame", "rate": 44100}),
    ("short.mp4", {"seconds": 0.8}),
    ("mono.mp4", LATE | {"layout": "mono", "rate": 8000}),
]


def click_of(sound) -> float:
    return first_loud(sound.samples.numpy()) / sound.rate


def flash_of(path) -> int:
    return next(n for n, frame in enumerate(first_frames(path, "")) if frame.mean() > 150)


@pytest.mark.parametrize("name, made", CLIPS, ids=[name for name, _ in CLIPS])
def test_a_click_is_read_at_the_time_of_its_flash_in_any_container(tmp_path, name, made):
    path = write_clip(tmp_path / name, **made)
    assert flash_of(path) == FLASH and footage(path, "").num_frames == 33
    for start, duration in ((0.0, None), (0.55, None), (0.0, 0.7)):
        assert click_of(read_sound(path, "", start, duration)) == pytest.approx(FLASH / RATE - start, abs=EXACT)


def test_a_trimmed_clip_begins_where_its_edit_list_says(tmp_path):
    command = ffmpeg(write_clip(tmp_path / "whole.mp4"), "trimmed.mp4", "-c", "copy", before=("-ss", "0.25"))
    path = run_printed(f"Type: cd {tmp_path}; {command}", tmp_path)
    assert flash_of(path) == FLASH - 6 and footage(path, "").num_frames == 33 - 6
    assert click_of(read_sound(path, "")) == pytest.approx((FLASH - 6) / RATE, abs=EXACT)


def test_sound_that_overlaps_is_left_out_and_a_pause_of_hours_is_a_damaged_time(tmp_path):
    def moved(time: float) -> float:  # for 0.2 s each packet begins in the middle of the last one
        return time if time < 0.3 else (0.3 + time) / 2 if time < 0.5 else time - 0.1

    path = write_clip(tmp_path / "a.mkv", moved=moved, codec="pcm_s16le")
    assert click_of(read_sound(path, "")) == pytest.approx(FLASH / RATE - 0.1, abs=EXACT)
    write_clip(path, moved=lambda time: time + 30_000 * (time > 0.4), codec="pcm_s16le")
    with pytest.raises(UserError, match="its sound pauses for more than 3600 s"):
        read_sound(path, "--reference-audio")


def test_there_is_silence_where_a_track_has_none_and_its_samples_elsewhere(tmp_path):
    samples, rate = read_sound(write_clip(tmp_path / "a.mkv", moved=GAP, codec="flac", sound_at=0.125), "")
    silent = (samples == 0).all(0).numpy()
    changes = np.flatnonzero(np.diff(silent.astype(int))) / rate
    assert changes == pytest.approx([0.125, 0.2, 0.5], abs=0.025)  # silent until 0.125; a pause of whole packets
    sound, first = noise_with_click(48000, 33 / RATE, FLASH / RATE - 0.125), round(0.6 * rate)
    stored = torch.from_numpy((sound * 2**15).astype(np.int16) / 2**15).float()[:, first - round(0.125 * rate) :]
    assert (samples[:, first:] - stored[:, : len(samples[0]) - first]).abs().max() <= 2**-14


# The last one has a cover, which is no picture.
SOUNDS = {"a.wav": "pcm_s16le", "a.mp3": "libmp3lame", "a.m4a": "aac", "late.mka": "pcm_s16le", "late cover.mp4": "aac"}


@pytest.mark.parametrize("name", SOUNDS)
def test_a_sound_without_picture_begins_with_its_first_sample_whatever_its_encoder_adds(tmp_path, name):
    with av.open(str(tmp_path / name), "w") as file:
        stream = file.add_stream(SOUNDS[name], rate=44100, layout="stereo")
        if "cover" in name:
            cover = file.add_stream("mjpeg", rate=1)
            cover.width, cover.height, cover.pix_fmt = 32, 32, "yuvj420p"
            cover.disposition = av.stream.Disposition.attached_pic
        for packet in encoded(stream, noise_with_click(44100, 1.0, 0.5), 44100, "stereo"):
            packet.pts = packet.dts = packet.pts + name.startswith("late") * 2000
            file.mux(packet)
        if "cover" in name:
            file.mux([*cover.encode(av.VideoFrame(32, 32, "yuvj420p")), *cover.encode()])
    delay = 1024 / 44100 if "cover" in name else 0  # of AAC, which a late track of an MP4 does not take off
    for start in (0.0, 0.3):
        assert click_of(read_sound(tmp_path / name, "", start)) == pytest.approx(0.5 + delay - start, abs=EXACT)


def test_every_input_reads_a_clips_sound_by_the_clips_clock(tmp_path):
    path = write_clip(tmp_path / "clip.mp4", times=from_(0.25), sound_at=0.5, moved=GAP)
    after, before = (RETAKEN(retake=Retake(path, extend=seconds, source_frames=33)) for seconds in (1.0, -1.0))
    sound = make_job("", Size(64, 96, 25), sound=SoundCondition(path))
    for read, silence in (
        (input_files.retaken_sound(RETAKEN(retake=Retake(path, 0.1, 0.3))), 0),
        (encode_inputs._extended_sound(after, after.extension), 0),
        (encode_inputs._extended_sound(before, before.extension), before.extension.silence),
        (input_files.read_sound_condition(sound, sound.sound), 0),
        (input_files.read_reference_audio(path, 1.0), 0),
    ):
        assert click_of(read) == pytest.approx(silence + FLASH / RATE, abs=EXACT)


def test_what_is_filled_with_silence_or_left_out_is_noted_of_every_input_by_its_flag(tmp_path):
    late, plain = write_clip(tmp_path / "late.mp4", **LATE), write_clip(tmp_path / "plain.mp4")
    early, mute = write_clip(tmp_path / "early.mp4", **EARLY), write_clip(tmp_path / "mute.mp4", codec=None)
    gaps = write_clip(tmp_path / "gaps.mp4", **LATE | {"moved": without(0.5, 0.6), "seconds": 0.8})
    begins = "its sound begins after 0.2[35] s: silence before it"
    voice, sound = ReferenceAudio(late, 12), SoundCondition(late, 0.1)
    of_voice = "gives 0.5 s of sound; its LoRA was trained on about 5 s, wanted 2 to 10"
    pauses = "its sound has pauses of 0.[01][0-9] s in all: silence in them"
    ends = "its sound ends 0.[23][0-9] s before its picture: silence after it"
    retaken = [RETAKEN(retake=Retake(path, 0.1, 0.3)) for path in (plain, mute, early, gaps)]
    for job, flag, messages in (
        (retaken[0], "", ()),
        (retaken[1], "", ()),
        (retaken[2], "--video-path", (": 0.25 s of its sound before its picture are left out",)),
        (retaken[3], "--video-path", (f": {begins}", f": {pauses}", f": {ends}")),
        (RETAKEN(retake=Retake(late, extend=1.0, source_frames=33)), "--video-path", (f": {begins}",)),
        (make_job("", Size(64, 96, 25), sound=sound), "--audio-path", (f": {begins}",)),
        (make_job("", Size(64, 96, 25), reference_sound=voice), "--reference-audio", (f": {begins}", f" {of_voice}")),
        (RETAKEN(reference_sound=voice, dubbing=ReferenceVideo(late, 1.0, 33)), "--reference-video", (f": {begins}",)),
    ):
        for note, message in zip(input_files.notes(job), messages, strict=True):
            assert re.fullmatch(f"{flag} [^ ]*.mp4{message}", note), note


def take_retake(path):
    input_files.check(make_job("", video_size(path, "--video-path"), retake=Retake(path, 0.1, 0.3)))


def take_sound(path):
    input_files.check(make_job("", Size(64, 96, 17, 24.0), sound=SoundCondition(path)))


take_extended = partial(video_size, flag="--video-path", extends=True)
take_reference = partial(footage, flag="--video-conditioning")
take_voice = partial(input_files.read_reference_audio, max_duration=None)


def phone(number: int) -> float:
    """Frames that last longer in the dark: before the flash, and after it."""
    return number / RATE if number < 8 else 8 / RATE + (number - 8) / 12


def cut_off(path):
    """The beginning of a clip whose header comes first."""
    write_clip(path, container={"movflags": "+faststart"}, codec=None, sides=(256, 256))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 9 // 10])


def selfie(path):
    turned(write_clip(path, 39, (142, 90), phone, layout="5.1", seconds=3.0), MIRROR)


def sound_alone(path, rate=48000, channels=2, layout="stereo"):
    stored = (noise_with_click(rate, 1.375, 2 / 3, channels) * 2**15).astype(np.int16)
    write_sound(path, stored.T.reshape(1, -1).copy(), rate, "pcm_s16le", layout, "s16")


clip, surround = partial(write_clip, sides=(70, 96)), partial(sound_alone, channels=6, layout="5.1")
# The file's name, how it is made, who takes it, and a part of the message.
PROVOKING = [
    ("dark.mp4", partial(write_clip, times=phone), take_reference, "variable frame rate"),
    ("dark.mkv", partial(write_clip, times=phone), take_extended, "variable frame rate"),
    ("tall.mp4", partial(write_clip, sides=(142, 90)), take_extended, "33 frames of 142x90"),
    ("mute.mp4", partial(write_clip, sides=(30, 50), codec=None), take_retake, "33 frames of 30x50"),
    ("late picture.mp4", partial(write_clip, frames=39, times=from_(0.25), seconds=2.5), take_retake, "39 frames"),
    ("gap.mkv", partial(clip, moved=GAP, codec="libopus"), take_retake, "70x96"),
    ("stream.ts", partial(clip, frames=39, codec="mp2"), take_retake, "39 frames of 70x96"),
    ("cut.mp4", cut_off, take_retake, "is cut off"),
    ("selfie.mp4", selfie, take_retake, "variable frame rate.*mirrored.*of 142x90"),
    ("surround.mp4", partial(write_clip, layout="5.1", sound_at=0.25), take_sound, "6 channels"),
    ("surround.wav", surround, take_voice, "6 channels"),
    ("odd.wav", partial(sound_alone, rate=44999), take_sound, "44999 samples"),
    ("odd.mkv", partial(write_clip, codec="flac", rate=44999), take_retake, "44999 samples"),
    ('-it\'s a "clip": 100%.mp4', clip, take_retake, "of 70x96"),
]


@pytest.mark.parametrize("name, make, take, message", PROVOKING, ids=[row[0] for row in PROVOKING])
def test_a_printed_command_mends_a_file_and_keeps_it_in_sync(tmp_path, monkeypatch, name, make, take, message):
    monkeypatch.chdir(tmp_path)  # the user's folder
    make(path := tmp_path / name)
    with pytest.raises(UserError, match=f"(?s){message}.*\nType: ffmpeg ") as refused:
        take(name if name.startswith("-") else path)
    converted = run_printed(str(refused.value), tmp_path)
    take(converted)
    sound = read_sound(converted, "")
    if path.suffix == ".wav":
        assert sound.rate == 48000 and click_of(sound) == pytest.approx(2 / 3, abs=TOGETHER)
        return
    before, after = seen(path), seen(converted)
    if before.click is not None:
        apart = TOGETHER + (1 / 24 if "variable" in message else 0)
        assert after.click - after.flash == pytest.approx(before.click - before.flash, abs=apart)
        rate = footage(converted, "").frame_rate
        assert click_of(sound) - flash_of(converted) / rate == pytest.approx(after.click - after.flash, abs=TOGETHER)
        if "--video-path" in str(refused.value) and "-frames:v" in str(refused.value):
            assert sound.samples.shape[1] / sound.rate < after.frames / rate + 0.1  # cut as well
    assert after.box[0] == pytest.approx(after.box[1], rel=0.1)  # nothing is stretched
    assert after.left == ("mirrored" not in message)
    if name == "tall.mp4":  # cropped, and as good as the file's
        frame, old = (next(first_frames(file, "")).astype(int) for file in (converted, path))
        assert np.abs(frame - old[7:-7, 13:-13]).mean() < 2


def test_a_command_names_its_files_so_that_ffmpeg_takes_them_and_replaces_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b-x.mp4", "b-2-x.mp4"):
        (tmp_path / name).touch()
    for name, read, converted in (
        ("a b.mp4", "a b.mp4", "a b-x.mp4"),
        ("b.mp4", "b.mp4", "b-3-x.mp4"),
        ("-a.mp4", "./-a.mp4", "./-a-x.mp4"),
        ("12:30.mp4", "./12:30.mp4", "./12:30-x.mp4"),
        ("/films/a.mp4", "/films/a.mp4", "a-x.mp4"),
    ):
        words = shlex.split(ffmpeg(name, "x.mp4"))
        assert (words[2], words[-1]) == (read, converted)
