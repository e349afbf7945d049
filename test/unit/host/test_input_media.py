"""Sound and video that users have: files read as ltx-pipelines reads them, spectrograms as
torchaudio makes them, clips encoded in tiles."""

import math
import struct
from fractions import Fraction
from functools import partial
from itertools import islice

import av
import numpy as np
import pytest
import torch
from helpers import one_thread, randn, rel, tone, write_sound  # noqa: F401

from ltx_neuron.errors import UserError
from ltx_neuron.host.encoding import encode_tiled, parts
from ltx_neuron.host.media import first_frames, footage, pixels_of, read_sound
from ltx_neuron.host.spectrogram import MelSizes, log_mel, mel_filters, resample
from ltx_neuron.host.video import write_video
from ltx_neuron.sampling.size import Size

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = MelSizes(rate=16000, bins=64, hop=160, window=1024)
# float32 against float64: the filters' own rounding (measured 2.4e-6), and that of a sum of 1024.
RESAMPLED, SPECTRUM = 5e-6, 1e-5
FLAG = "--audio-path"


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """25 frames of 96 x 64 at 24 fps with two seconds of AAC."""
    frames = torch.randint(0, 255, (25, 8, 12, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    frames = frames.repeat_interleave(8, 1).repeat_interleave(8, 2)
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    write_video(path, [frames], 24.0, lambda: tone(48000, 25 / 24), 48000)
    return path


# --- spectrograms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [44100, 48000, 8000, 11025, 22050])
def test_a_tone_is_the_same_tone_at_the_encoders_rate(rate):
    got = resample(tone(rate, 0.5), rate, SIZES.rate)
    assert got.shape == (2, math.ceil(0.5 * SIZES.rate))
    inner = slice(200, -200)  # the filter reads silence before and after
    assert rel(got[:, inner], tone(SIZES.rate, 0.5)[:, inner]) < 2e-3


def test_a_sound_at_the_encoders_rate_stays_as_it_is():
    sound = randn(2, 100)
    assert torch.equal(resample(sound, 16000, 16000), sound)


@pytest.mark.parametrize("rate, samples", [(44100, 4410), (48000, 1001), (8000, 333)])
def test_resampling_is_the_windowed_sinc_of_torchaudio(rate, samples):
    """By its definition, one sample at a time and in float64."""
    divisor = math.gcd(rate, 16000)
    old, new = rate // divisor, 16000 // divisor
    cutoff = 0.99 * min(old, new)
    sound = randn(1, samples)
    count = math.ceil(new * samples / old)
    time = torch.arange(count, dtype=torch.float64)[:, None] * (old / new)  # in old samples
    t = ((torch.arange(samples, dtype=torch.float64) - time) * (cutoff / old)).clamp(-6, 6)
    kernel = torch.sinc(t) * (math.pi * t / 12).cos() ** 2 * (cutoff / old)
    assert rel(resample(sound, rate, 16000), (kernel @ sound[0].double())[None]) < RESAMPLED


def test_filters_are_slaneys_triangles_of_equal_area():
    filters = mel_filters(SIZES)
    assert filters.shape == (513, 64) and (filters >= 0).all()
    hertz = torch.linspace(0, 8000, 513)
    centres = hertz[filters.argmax(0)]
    # 66.7 Hz apart up to 1 kHz, then each 6.4 ** (1 / 27) times the last in steps of one mel.
    mels = torch.where(centres < 1000, centres / (200 / 3), 15 + (centres / 1000).log() * 27 / math.log(6.4))
    top = 15 + 27 * math.log(8) / math.log(6.4)
    expected = torch.arange(1, 65) * top / 65
    assert (mels - expected).abs().max() < 0.15  # a bin is 15.6 Hz wide
    wide = filters[:, 20:]  # of those that have enough bins to be summed
    assert ((wide.sum(0) * 15.625 - 1).abs() < 0.05).all()


@pytest.mark.parametrize("samples", [1600, 1601, 5000])
def test_the_spectrogram_is_of_magnitudes_around_each_hop_with_reflected_ends(samples):
    sound = randn(2, samples)
    got = log_mel(sound, SIZES)
    assert got.shape == (1, 2, 1 + samples // SIZES.hop, SIZES.bins)
    padded = np.pad(sound.double().numpy(), ((0, 0), (512, 512)), mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1024) / 1024)
    frames = [padded[:, i : i + 1024] * window for i in range(0, samples + 1, SIZES.hop)]
    magnitudes = np.abs(np.fft.rfft(np.stack(frames, axis=1)))
    expected = np.log(np.maximum(magnitudes @ mel_filters(SIZES).double().numpy(), 1e-5))
    assert rel(got[0], torch.from_numpy(expected)) < SPECTRUM


def test_silence_is_the_floor_and_no_infinity():
    assert (log_mel(torch.zeros(2, 2000), SIZES) == math.log(1e-5)).all()


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start, duration", [(0.0, None), (0.3, 0.4), (0.31, None), (0.0, 0.5)])
def test_a_films_sound_is_what_ltx_pipelines_reads(film, start, duration):
    from ltx_pipelines.utils.media_io import decode_audio_from_file

    theirs = decode_audio_from_file(str(film), torch.device("cpu"), start, duration)
    ours = read_sound(film, FLAG, start, duration)
    assert ours.rate == theirs.sampling_rate == 48000
    assert torch.equal(ours.samples, theirs.waveform[0])


@pytest.mark.parametrize(
    "suffix, codec, format, scale",
    [
        (".wav", "pcm_s16le", "s16", 2**15),
        (".wav", "pcm_s32le", "s32", 2**31),
        (".wav", "pcm_f32le", "flt", 1),
        (".flac", "flac", "s16", 2**15),
    ],
)
def test_samples_of_any_format_are_those_that_were_written(tmp_path, suffix, codec, format, scale):
    sound = tone(22050, 0.2)
    kind = {"s16": np.int16, "s32": np.int32, "flt": np.float32}[format]
    stored = (sound.double() * min(scale, 2**31 - 1)).numpy().astype(kind)
    path = write_sound(tmp_path / f"a{suffix}", stored.T.reshape(1, -1).copy(), 22050, codec, format=format)
    samples, rate = read_sound(path, FLAG)
    assert rate == 22050 and torch.equal(samples, torch.from_numpy(stored / scale).float())


def test_eight_bit_silence_is_silence_and_a_mono_sound_has_one_channel(tmp_path):
    silence = write_sound(tmp_path / "a.wav", np.full((1, 2000), 128, np.uint8), 8000, "pcm_u8", format="u8")
    assert (read_sound(silence, FLAG).samples == 0).all()
    stored = (tone(8000, 0.1)[:1] * 2**15).numpy().astype(np.int16)
    mono = write_sound(tmp_path / "b.wav", stored, 8000, "pcm_s16le", "mono", "s16")
    assert read_sound(mono, FLAG).samples.shape == (1, 800)


def test_a_file_without_sound_or_none_at_that_time_gives_none(film, tmp_path):
    assert read_sound(film, FLAG, start=9.0) is None
    silent = tmp_path / "silent.mp4"
    with av.open(str(silent), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        for frame in (av.VideoFrame(64, 32, "yuv420p"), None):
            container.mux(stream.encode(frame))
    assert read_sound(silent, FLAG) is None


# The first four numbers of an MP4's display matrix, in 16.16 fixed point -> quarter turns
# counterclockwise from what is stored to what is shown. A phone that is held upright writes the
# third: a point to the right of the stored picture is shown at the bottom.
MATRICES = {(1, 0, 0, 1): 0, (0, -1, 1, 0): 1, (0, 1, -1, 0): 3, (-1, 0, 0, -1): 2}


def turned(film, path, matrix: tuple[int, int, int, int]):
    """The film with another display matrix in its video track's header."""
    content = bytearray(film.read_bytes())
    at = content.index(b"tkhd") + 4 + 40  # version 0: 40 bytes before the matrix
    a, b, c, d = (number << 16 for number in matrix)
    content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("matrix", MATRICES)
def test_a_video_is_taken_as_it_is_shown_and_as_it_is_stored_on_request(film, tmp_path, matrix):
    path = turned(film, tmp_path / "phone.mp4", matrix)
    stored, turns = list(first_frames(film, FLAG)), MATRICES[matrix]
    expected = [np.rot90(frame, turns) for frame in stored]
    sides = (96, 64) if turns % 2 else (64, 96)
    assert footage(path, FLAG) == Size(*sides, 25, 24.0)
    assert all(map(np.array_equal, first_frames(path, FLAG), expected))
    assert footage(path, FLAG, upright=False) == Size(64, 96, 25, 24.0)
    assert all(map(np.array_equal, first_frames(path, FLAG, upright=False), stored))


def test_a_mirrored_video_is_refused_with_the_command_that_mends_it(film, tmp_path):
    path = turned(film, tmp_path / "mirror.mp4", (-1, 0, 0, 1))
    with pytest.raises(UserError, match="mirrored .*\nType: ffmpeg -i .* mirror-even.mp4"):
        footage(path, FLAG)
    with pytest.raises(UserError, match="is displayed mirrored or at an odd angle\npass another"):
        next(first_frames(path, FLAG))
    next(first_frames(path, FLAG, upright=False))


def written_at(path, times: list[float]):
    """A video with a frame at each of these seconds."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1200)
        for time in times:
            frame = av.VideoFrame(64, 32, "yuv420p")
            frame.pts, frame.time_base = round(time * 1200), Fraction(1, 1200)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_footage_of_a_variable_rate_is_refused_with_the_command_that_makes_it_constant(tmp_path):
    """A phone lowers its rate in the dark: half of the frames are shown for twice as long."""
    times = [number / 24 for number in range(12)] + [0.5 + number / 12 for number in range(12)]
    path = written_at(tmp_path / "dark.mp4", times)
    with pytest.raises(
        UserError, match=r"variable frame rate: .* 0.04167 to 0.08333 s, .*\nType: ffmpeg .* fps=.*-even.mp4"
    ):
        footage(path, "--video-path")
    even = written_at(tmp_path / "even.mp4", [number / 20 for number in range(24)])
    assert footage(even, "--video-path").frame_rate == pytest.approx(20, rel=0.01)
    rounded = [round(number / 24, 3) for number in range(24)]  # a container's milliseconds
    footage(written_at(tmp_path / "rounded.mp4", rounded), "--video-path")


def test_frames_are_read_scaled_and_cropped_as_in_ltx_pipelines(film):
    from ltx_pipelines.utils import media_io

    theirs = [frame[0].numpy() for frame in media_io.decode_video_from_file(str(film), 25, "cpu")]
    ours = list(first_frames(film, "--video-path"))
    assert len(ours) == len(theirs) == 25 and all(map(np.array_equal, ours, theirs))
    theirs = media_io.load_video_conditioning(str(film), 32, 96, 9, torch.float32, torch.device("cpu"))
    ours = pixels_of(islice(first_frames(film, "--video-conditioning"), 9), 32, 96)
    assert ours.shape == (1, 3, 9, 32, 96) and torch.equal(ours, theirs)


def test_a_file_that_cannot_be_read_is_refused_by_its_flag(film, tmp_path):
    (tmp_path / "text.mp4").write_text("no film")
    (tmp_path / "empty.mp4").touch()
    for name in ("text.mp4", "empty.mp4", "missing.mp4", "."):
        for read in (read_sound, footage):
            with pytest.raises(UserError, match="--some-flag"):
                read(tmp_path / name, "--some-flag")
    sound = write_sound(tmp_path / "a.wav", np.zeros((1, 2000), np.int16), 8000, "pcm_s16le", format="s16")
    with pytest.raises(UserError, match="has no video: pass a video file with --video-path"):
        footage(sound, "--video-path")
    short = tmp_path / "short.mp4"
    short.write_bytes(film.read_bytes()[: film.stat().st_size // 2])
    try:
        assert len(list(first_frames(short, "--video-path"))) < 25
    except UserError as error:
        assert "--video-path" in str(error)


# --- tiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 10, 11, 12, 16, 17, 18, 24, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_weights_of_tiles_add_up_to_one_and_each_tile_has_its_size(length, causal):
    tiles = parts(length, 10, 3, causal)
    total = torch.zeros(length)
    for tile in tiles:
        assert len(tile.weights) == tile.stop - tile.start
        total[tile.start : tile.stop] += tile.weights
    assert (total - 1).abs().max() < 1e-6
    assert tiles[0].start == 0 and tiles[-1].stop == length
    assert [t.start for t in tiles[1:]] == [7 * i - causal for i in range(1, len(tiles))]


def test_a_later_tiles_first_latent_counts_for_nothing_in_time():
    first, second = parts(12, 10, 3, causal=True)
    assert (first.start, first.stop) == (0, 10) and (second.start, second.stop) == (6, 12)
    assert torch.allclose(second.weights[:4], torch.tensor([0, 0.25, 0.5, 0.75]))
    assert torch.allclose(first.weights[-3:], torch.tensor([0.75, 0.5, 0.25]))


def test_a_clip_of_eighty_frames_is_encoded_whole_and_a_longer_one_in_tiles():
    seen = []

    def encode(pixels):  # a mean over each latent's pixels
        seen.append(tuple(pixels.shape[2:]))
        spaces = torch.nn.functional.avg_pool3d(pixels, (1, 32, 32))
        later = spaces[:, :, 1:].unflatten(2, (-1, 8)).mean(3)
        return torch.cat([spaces[:, :, :1], later], 2)

    short, long, wide = randn(1, 3, 73, 32, 64), randn(1, 3, 97, 32, 64), randn(1, 3, 9, 32, 1024)
    assert torch.equal(encode_tiled(partial(map, encode), short), encode(short))
    assert seen[0] == (73, 32, 64)
    seen.clear()
    got, whole = encode_tiled(partial(map, encode), long), encode(long)
    # The first latent of the second tile is one frame, and weighs nothing.
    assert seen[:2] == [(73, 32, 64), (49, 32, 64)] and rel(got, whole) < 1e-6
    seen.clear()
    assert rel(encode_tiled(partial(map, encode), wide), encode(wide)) < 1e-6
    assert seen[:2] == [(9, 32, 768), (9, 32, 320)]
