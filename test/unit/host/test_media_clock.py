"""Sound and picture of a file have one clock, whatever its container and its recorder do with
times: a click is read where its flash is seen, and silence where there is no sound."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from clips import FLASH, RATE, encoded, first_loud, noise_with_click, run_printed, seen, write_clip
from jobs import make_job

from ltx_neuron.errors import UserError
from ltx_neuron.host import encode_inputs
from ltx_neuron.host.media import ffmpeg, first_frames, footage, read_sound
from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import ReferenceAudio, ReferenceVideo, Retake, SoundCondition

# Containers round times: MP4's edit lists and Matroska to a millisecond.
EXACT = 2e-3


def from_(seconds: float):
    return lambda number: seconds + number / RATE


def without(first: float, last: float):
    return lambda time: None if first < time < last else time


def trimmed(path):
    """Without its first six frames: an editor wrote an edit list, and copied the tracks."""
    whole = write_clip(path.with_name("whole.mp4"))
    command = ffmpeg(whole, "trimmed.mp4", "-c", "copy", before=("-ss", "0.25"))
    run_printed(f"Type: cd {path.parent}; {command}", path.parent).rename(path)


LATE, EARLY, GAP = {"sound_at": 0.25}, {"times": from_(0.25), "seconds": 1.7}, without(0.2, 0.5)
BOTH = {"times": from_(0.25), "sound_at": 0.5}
SHIFTED = {"avoid_negative_ts": "disabled"}
# The file's name and how it is made.
CLIPS = [
    ("plain.mp4", {}),
    ("late.mp4", LATE),
    ("late.mov", LATE | {"codec": "pcm_s16le"}),
    ("late.mkv", LATE | {"codec": "flac"}),
    ("late.flv", LATE | {"rate": 44100}),
    ("late.ts", LATE | {"codec": "mp2"}),
    ("later than a second.mp4", {"sound_at": 0.1, "times": from_(0.0), "rate": 22050}),
    ("early.mp4", EARLY),
    ("early.mkv", EARLY | {"codec": "libopus"}),
    ("early.ts", EARLY | {"codec": "mp2"}),
    ("both.mp4", BOTH),
    ("both.mov", BOTH | {"codec": "pcm_s16le"}),
    ("before zero.mkv", {"sound_at": -0.25, "container": SHIFTED, "codec": "pcm_s16le"}),
    ("before zero.mp4", {"sound_at": -0.25}),
    ("gap.mp4", {"moved": GAP}),
    ("gap.mkv", {"moved": GAP, "codec": "libopus"}),
    ("gap.mov", {"moved": GAP}),
    ("gap.ts", {"moved": GAP, "codec": "mp2"}),
    ("two gaps.mkv", {"moved": lambda time: GAP(time) and without(0.55, 0.6)(time)}),
    ("late with a gap.mp4", LATE | {"moved": without(0.4, 0.6)}),
    ("one packet lost.mkv", {"moved": without(0.39, 0.41), "codec": "libopus"}),
    ("delay of AAC.mkv", {}),
    ("delay of MP3.mkv", {"codec": "libmp3lame"}),
    ("delay of MP3.mp4", {"codec": "libmp3lame", "rate": 44100}),
    ("delay of Opus.mp4", {"codec": "libopus"}),
    ("short.mp4", {"seconds": 0.8}),
    ("mono.mp4", LATE | {"layout": "mono", "rate": 8000}),
]


def read_at(path, start: float = 0.0, duration: float | None = None) -> float:
    """Seconds at which a file's click is read."""
    sound = read_sound(path, "--video-path", start, duration)
    return first_loud(sound.samples.numpy()) / sound.rate


def flash_of(path) -> int:
    return next(n for n, each in enumerate(first_frames(path, "")) if each.mean() > 150)


@pytest.mark.parametrize("name, made", CLIPS, ids=[name for name, _ in CLIPS])
def test_a_click_is_read_at_the_number_of_its_flash(tmp_path, name, made):
    path = write_clip(tmp_path / name, **made)
    assert flash_of(path) == FLASH and footage(path, "").num_frames == 33
    assert read_at(path) == pytest.approx(FLASH / RATE, abs=EXACT)
    assert read_at(path, 0.55) == pytest.approx(FLASH / RATE - 0.55, abs=EXACT)
    assert read_at(path, 0.0, 0.7) == pytest.approx(FLASH / RATE, abs=EXACT)


def test_a_trimmed_clip_begins_where_its_edit_list_says(tmp_path):
    trimmed(path := tmp_path / "clip.mp4")
    assert flash_of(path) == FLASH - 6 and footage(path, "").num_frames == 33 - 6
    assert read_at(path) == pytest.approx((FLASH - 6) / RATE, abs=EXACT)


def test_sound_that_overlaps_is_left_out_where_there_is_sound_already(tmp_path):
    """For 0.2 s each packet begins in the middle of the last one."""

    def moved(time: float) -> float:
        return time if time < 0.3 else (0.3 + time) / 2 if time < 0.5 else time - 0.1

    path = write_clip(tmp_path / "a.mkv", moved=moved, codec="pcm_s16le")
    assert read_at(path) == pytest.approx(FLASH / RATE - 0.1, abs=EXACT)


@pytest.mark.parametrize("name, codec", [("a.mkv", "pcm_s16le"), ("b.mkv", "flac")])
def test_there_is_silence_where_a_track_has_none_and_its_samples_elsewhere(tmp_path, name, codec):
    path = write_clip(tmp_path / name, moved=GAP, codec=codec, sound_at=0.125)
    samples, rate = read_sound(path, "")
    sound = noise_with_click(48000, 33 / RATE, FLASH / RATE - 0.125)
    silent = (samples == 0).all(0).numpy()
    changes = np.flatnonzero(np.diff(silent.astype(int))) / rate
    assert len(changes) == 3  # silent until 0.125; a pause
    assert changes == pytest.approx([0.125, 0.2, 0.5], abs=0.025)  # whole packets
    stored = torch.from_numpy((sound * 2**15).astype(np.int16) / 2**15).float()
    first = round(0.6 * rate)
    stored = stored[:, first - round(0.125 * rate) :]
    assert (samples[:, first:] - stored[:, : len(samples[0]) - first]).abs().max() <= 2**-14


def test_a_pause_of_hours_is_a_damaged_time_and_no_reason_to_fill_the_memory(tmp_path):
    path = write_clip(tmp_path / "a.mkv", moved=lambda time: time + 30_000 * (time > 0.4), codec="pcm_s16le")
    with pytest.raises(UserError, match="its sound pauses for more than 3600 s"):
        read_sound(path, "--reference-audio")


# A file that is sound alone begins with it, whatever its encoder puts before it.
@pytest.mark.parametrize(
    "name, codec, rate",
    [
        ("a.wav", "pcm_s16le", 44100),
        ("a.flac", "flac", 44100),
        ("a.mp3", "libmp3lame", 44100),
        ("a.m4a", "aac", 44100),
        ("a.opus", "libopus", 48000),
        ("a.mka", "libopus", 48000),
        ("late.mka", "pcm_s16le", 48000),
    ],
)
@pytest.mark.parametrize("start", [0.0, 0.3])
def test_a_sound_without_picture_begins_with_its_first_sample(tmp_path, name, codec, rate, start):
    import av

    with av.open(str(tmp_path / name), "w") as file:
        stream = file.add_stream(codec, rate=rate, layout="stereo")
        for packet in encoded(stream, noise_with_click(rate, 1.0, 0.5), rate, "stereo"):
            packet.pts += (name == "late.mka") * 2000
            file.mux(packet)
    assert read_at(tmp_path / name, start) == pytest.approx(0.5 - start, abs=EXACT)


def test_a_cover_is_no_picture(tmp_path):
    """The clock of a sound file with a cover is the sound's."""
    import av

    with av.open(str(tmp_path / "a.m4a"), "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=48000, layout="stereo")
        cover = file.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 32, 32, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        for packet in encoded(stream, noise_with_click(48000, 1.0, 0.5), 48000, "stereo"):
            packet.pts = packet.dts = packet.pts + 12000
            file.mux(packet)
        file.mux([*cover.encode(av.VideoFrame(32, 32, "yuvj420p")), *cover.encode()])
    delay = 1024 / 48000  # of AAC, which a late track of an MP4 does not take off
    assert read_at(tmp_path / "a.m4a") == pytest.approx(0.5 + delay, abs=EXACT)


# --- every reader ---------------------------------------------------------------------------------

RETAKEN = partial(make_job, "", Size(64, 96, 33))


def jobs_of(path) -> dict:
    """What each input reads of a clip: (channels, samples) and samples per second."""
    retake = RETAKEN(retake=Retake(path, 0.1, 0.3))
    longer = RETAKEN(retake=Retake(path, extend=1.0, source_frames=33))
    sound = make_job("", Size(64, 96, 25), sound=SoundCondition(path))
    return {
        "retake": encode_inputs._retaken_sound(retake),
        "extend": encode_inputs._extended_sound(longer, longer.extension),
        "sound": encode_inputs._read_sound_condition(sound, sound.sound),
        "voice": encode_inputs.read_reference_audio(path, None),
        "voice with a length": encode_inputs.read_reference_audio(path, 1.0),
        "dubbing": encode_inputs.read_reference_audio(path, None, encode_inputs.DUBBED),
    }


@pytest.mark.parametrize("made", [{}, LATE, EARLY, BOTH, {"moved": GAP}, LATE | {"moved": GAP}])
def test_every_input_reads_a_clips_sound_by_the_clips_clock(tmp_path, made):
    path = write_clip(tmp_path / "clip.mp4", **made)
    for name, sound in jobs_of(path).items():
        heard = first_loud(sound.samples.numpy()) / sound.rate
        assert heard == pytest.approx(FLASH / RATE, abs=EXACT), name


def test_before_an_extended_clip_is_silence_and_then_its_sound_by_its_clock(tmp_path):
    path = write_clip(tmp_path / "clip.mp4", **LATE)
    before = RETAKEN(retake=Retake(path, extend=-1.0, source_frames=33))
    sound = encode_inputs._extended_sound(before, before.extension)
    heard = first_loud(sound.samples.numpy()) / sound.rate
    assert heard == pytest.approx(before.extension.silence + FLASH / RATE, abs=EXACT)


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made, message",
    [
        ({}, []),
        ({"codec": None}, []),
        (LATE, ["its sound begins after 0.2[35] s: silence before it"]),
        (EARLY, ["0.25 s of its sound before its picture are left out"]),
        ({"moved": GAP}, ["its sound has pauses of 0.3[0-3] s in all: silence in them"]),
        ({"seconds": 0.8}, ["its sound ends 0.5[0-9] s before its picture: silence after it"]),
        (
            LATE | {"moved": without(0.5, 0.6), "seconds": 0.8},
            ["its sound begins after", "pauses of 0.[01]", "its sound ends 0.[23]"],
        ),
    ],
)
def test_what_is_filled_with_silence_or_left_out_is_said(tmp_path, made, message):
    path = write_clip(tmp_path / "clip.mp4", **made)
    notes = encode_inputs.notes(RETAKEN(retake=Retake(path, 0.1, 0.3)))
    assert len(notes) == len(message)
    for note, part in zip(notes, message, strict=True):
        assert note.startswith(f"--video-path {path}: ")
        assert re.search(part, note), note


def test_notes_are_of_every_input_by_its_flag(tmp_path):
    path = write_clip(tmp_path / "clip.mp4", **LATE)
    voice = ReferenceAudio(path, 12)
    clip_to_dub = ReferenceVideo(path, 1.0, 33)
    jobs = {
        "--audio-path": make_job("", Size(64, 96, 25), sound=SoundCondition(path, 0.1)),
        "--reference-audio": make_job("", Size(64, 96, 25), reference_sound=voice),
        "--reference-video": make_job("", Size(64, 96, 33), reference_sound=voice, dubbing=clip_to_dub),
        "--video-path": RETAKEN(retake=Retake(path, extend=1.0, source_frames=33)),
    }
    message = {flag: encode_inputs.notes(job) for flag, job in jobs.items()}
    for flag, (first, *more) in message.items():
        assert first.startswith(f"{flag} {path}: its sound begins after 0.2"), first
        if flag == "--reference-audio":
            assert "gives 0.5 s of sound; its LoRA was trained on about 5 s" in more.pop()
        assert not more


def test_the_clips_of_this_test_are_what_they_say(tmp_path):
    """By the file's own times, which players go by."""
    for name, made in CLIPS[:3] + [("early.mp4", EARLY), ("gap.mp4", {"moved": GAP})]:
        shown = seen(write_clip(tmp_path / name, **made))
        assert shown.click - shown.flash == pytest.approx(0, abs=EXACT), name
