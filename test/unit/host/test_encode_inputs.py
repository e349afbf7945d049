"""A job's input files as tensors, against ltx-core's encoders, loaded by its own loader, on what
ltx-pipelines reads of the same files; and files that are refused before a model loads."""

import json

import pytest
import torch
from helpers import (
    one_thread,  # noqa: F401
    picture_frames,
    randn,
    rel,
    tone,
    write_film,
    write_sound,
)
from jobs import make_job, read_clip, replace
from PIL import Image
from safetensors import safe_open

from ltx_neuron.engine import preflight
from ltx_neuron.engine.decode import Decoder
from ltx_neuron.engine.resume import JobRun, restore_state, save_state
from ltx_neuron.errors import UserError
from ltx_neuron.host.arithmetic import FLOAT32
from ltx_neuron.host.encode_inputs import check, encode
from ltx_neuron.host.images import fill
from ltx_neuron.host.media import Sound, read_sound
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.spectrogram import log_mel, mel_sizes, resample
from ltx_neuron.host.video import write_video
from ltx_neuron.job import Job, Size
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditions import AttentionMask, ReferenceAudio, ReferenceVideo, Retake, SoundCondition
from ltx_neuron.sampling.shapes import sound_latent_frames
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.lora import Lora

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
# The video encoder sums convolutions in another order where frames are laid out otherwise.
ENCODED = 2e-6
SHOWS = 1e-2  # what encoding in other tiles changes at least


def write_wav(path, samples, rate):
    stored = (samples * 2**15).clamp(-(2**15), 2**15 - 1).numpy().astype("int16")
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(stored)]
    return write_sound(path, stored.T.reshape(1, -1).copy(), rate, "pcm_s16le", layout, "s16")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """film: 25 frames of 64 x 96 with sound; mask: as many in grey, without; long: 89 frames."""
    folder = tmp_path_factory.mktemp("media")
    for name, count, size in (("film", 25, (64, 96)), ("long", 89, (32, 64))):
        frames = [picture_frames(count, *size, 3)]
        sound = tone(48000, count / 24)
        write_video(folder / f"{name}.mp4", frames, 24.0, lambda sound=sound: sound, 48000)
    x = torch.arange(96) * 2.5
    grey = torch.stack([(x - 3 * number).clamp(0, 255) for number in range(25)]).byte()
    write_film(folder / "mask.mp4", grey[:, None, :, None].repeat(1, 64, 1, 3))
    write_wav(folder / "sound.wav", tone(44100, 2.0), 44100)
    return folder


@pytest.fixture(scope="module")
def host(tiny):
    with safe_open(tiny.checkpoint, "pt") as file:
        config = json.loads(file.metadata()["config"])
    return HostModels(tiny.checkpoint, config, torch.float32)


@pytest.fixture(scope="module")
def theirs(tiny):
    """ltx-core's video and audio encoders."""
    from ltx_core.loader.single_gpu_model_builder import SingleGPUModelBuilder
    from ltx_core.model import audio_vae, video_vae

    built = [
        (video_vae.VideoEncoderConfigurator, video_vae.VAE_ENCODER_COMFY_KEYS_FILTER),
        (audio_vae.AudioEncoderConfigurator, audio_vae.AUDIO_VAE_ENCODER_COMFY_KEYS_FILTER),
    ]
    return [
        SingleGPUModelBuilder(configurator, str(tiny.checkpoint), names).build(CPU, torch.float32).eval()
        for configurator, names in built
    ]


def sound_latent(theirs, host, path, start, duration):
    """(mel, latent) of what ltx-pipelines reads, by ltx-core's encoder. The mel is ours: torchaudio
    need not be there, and test_input_media.py compares it with its definition."""
    from ltx_pipelines.utils.media_io import decode_audio_from_file

    sound, sizes = decode_audio_from_file(str(path), CPU, start, duration), mel_sizes(host.config)
    mel = log_mel(resample(sound.waveform[0], sound.sampling_rate, sizes.rate), sizes)
    with torch.no_grad():
        return mel, theirs[1](mel)


def pixels(path, height, width, count):
    from ltx_pipelines.utils.media_io import load_video_conditioning

    return load_video_conditioning(str(path), height, width, count, torch.float32, CPU)


def a2v(path, frames=25, rate=24.0, **settings):
    return make_job("", Size(64, 96, frames, rate), sound=SoundCondition(path, **settings))


def ic_lora(*references, frames=25, mask=None, size=(64, 96)):
    return make_job("", Size(*size, frames), references=references, attention_mask=mask)


# --- an input sound -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, frames, rate, start, duration, latents",
    [
        ("sound.wav", 25, 24.0, 0.15, None, 26),
        ("sound.wav", 17, 25.0, 0.0, 1.5, 17),  # longer than the video
        ("film.mp4", 9, 30.0, 0.31, None, 8),
    ],
)
def test_a_sound_is_encoded_cut_to_the_video_and_its_waveform_is_unchanged(
    files, host, theirs, name, frames, rate, start, duration, latents
):
    job = a2v(files / name, frames, rate, start_time=start, max_duration=duration)
    check(job)
    tensors = encode(host, job)
    seconds = duration or frames / rate
    mel, latent = sound_latent(theirs, host, files / name, start, seconds)
    assert tensors.keys() == {"mel", "audio_latent", "waveform", "waveform_rate"}
    assert torch.equal(tensors["mel"], mel)
    assert tensors["audio_latent"].shape == (1, 8, latents, 16)
    assert torch.equal(tensors["audio_latent"], latent[:, :, :latents])
    sound = read_sound(files / name, "--audio-path", start, seconds)
    assert torch.equal(tensors["waveform"], sound.samples) and tensors["waveform_rate"] == sound.rate
    assert tensors["waveform"].shape == (2, round(seconds * sound.rate))


def test_a_mono_sound_is_used_for_both_channels_with_a_message(tmp_path, host, capsys):
    path = write_wav(tmp_path / "mono.wav", tone(22050, 1.0)[:1], 22050)
    check(a2v(path, 9))
    assert capsys.readouterr().out == ""
    tensors = encode(host, a2v(path, 9))
    assert capsys.readouterr().out.count("mono sound, used for both channels") == 1
    assert tensors["waveform"].shape == (2, 8269)
    assert torch.equal(*tensors["waveform"])
    both = write_wav(tmp_path / "both.wav", tone(22050, 1.0)[:1].expand(2, -1), 22050)
    assert torch.equal(tensors["audio_latent"], encode(host, a2v(both, 9))["audio_latent"])


@pytest.mark.parametrize("frames, rate", [(25, 24.0), (9, 24.0), (33, 25.0), (121, 30.0), (9, 60.0)])
@pytest.mark.parametrize("samples", [44100, 48000, 22050])
def test_a_sound_as_long_as_the_video_is_long_enough(tmp_path, frames, rate, samples):
    sound = randn(2, round(frames / rate * samples)) / 9
    check(a2v(write_wav(tmp_path / "exact.wav", sound, samples), frames, rate))
    short = write_wav(tmp_path / "short.wav", sound[:, : -samples // 10], samples)
    with pytest.raises(UserError, match="is shorter than the video"):
        check(a2v(short, frames, rate))


@pytest.mark.parametrize("rate, samples", [(44100, 17640), (44100, 17641), (16000, 6559), (8000, 999)])
def test_latents_of_a_sound_are_counted_as_the_encoder_makes_them(host, tmp_path, rate, samples):
    _, latent = host.encode_audio(Sound(randn(2, samples), rate))
    assert sound_latent_frames(samples, rate) == latent.shape[2]
    one_frame = a2v(write_wav(tmp_path / "a.wav", tone(rate, 1.0), rate), 1, 30.0)
    assert encode(host, one_frame)["audio_latent"].shape == (1, 8, 1, 16)


def test_a_sound_that_cannot_be_used_is_refused(files, tmp_path):
    surround = write_wav(tmp_path / "5.1.wav", torch.zeros(6, 48000), 48000)
    odd = write_wav(tmp_path / "odd.wav", torch.zeros(2, 45000), 44999)
    broken = torch.full((2, 8000), torch.nan).T.reshape(1, -1).numpy()
    broken = write_sound(tmp_path / "nan.wav", broken, 48000, "pcm_f32le", format="flt")
    tiny_sound = write_wav(tmp_path / "tiny.wav", torch.zeros(2, 200), 48000)
    sound, late = files / "sound.wav", {"start_time": 9.0}
    for path, frames, settings, message in (
        (sound, 49, {"start_time": 0.5}, r"got 1.50 s of sound from --audio-start-time 0.5 on, wanted 2.04 s \(49 fr"),
        (sound, 49, {"start_time": 0.5}, "type --num-frames 33"),
        (sound, 25, {"max_duration": 0.4}, "with --audio-max-duration 0.4, .* leave --audio-max-durat"),
        (files / "mask.mp4", 1, {}, "mask.mp4 has no sound: pass another file with --audio-path"),
        (sound, 1, late, "ends before --audio-start-time 9"),
        (files / "film.mp4", 1, late, "ends before --audio-start-time 9"),
        (sound, 1, {"start_time": 1.999999}, "got 0.00 s of sound from --audio-start"),
        (surround, 1, {}, "6 channels of sound, wanted 1 or 2.\nType: ffmpeg .* -ac 2 "),
        (odd, 1, {}, "44999 samples of sound per second.*\nType: ffmpeg .* -ar 48000"),
        (broken, 1, {}, "nan.wav has samples that are NaN or Inf"),
        (tiny_sound, 1, {}, "got 0.00 s of sound, wanted 0.04 s"),
        (tmp_path / "none.wav", 1, {}, "--audio-path"),
    ):
        with pytest.raises(UserError, match=message):
            check(a2v(path, frames, **settings))
    check(a2v(sound, 33, start_time=0.5))


# --- retake ---------------------------------------------------------------------------------------


def retake(path, frames, size=(64, 96)):
    return make_job("", Size(*size, frames), retake=Retake(path, 0.1, 0.3))


def test_a_retaken_video_is_encoded_with_its_sound(files, host, theirs):
    given = retake(files / "film.mp4", 25)
    check(given)
    got = encode(host, given)
    with torch.no_grad():
        wanted = theirs[0](pixels(files / "film.mp4", 64, 96, 25))
    assert got.keys() == {"video_latent", "mel", "audio_latent"}
    assert got["video_latent"].shape == (1, 128, 4, 2, 3)
    assert rel(got["video_latent"], wanted) < ENCODED
    mel, latent = sound_latent(theirs, host, files / "film.mp4", 0.0, 25 / 24)
    assert torch.equal(got["mel"], mel) and torch.equal(got["audio_latent"], latent[:, :, :26])


def test_a_long_video_is_encoded_in_upstreams_tiles(files, host, theirs):
    from ltx_core.model.video_vae.tiling import compute_trapezoidal_mask_1d
    from ltx_core.model.video_vae.video_vae import split_temporal_latents

    given, wanted = pixels(files / "long.mp4", 32, 64, 89), torch.zeros(1, 128, 12, 1, 2)
    tiles = split_temporal_latents(10, 3)(12)
    for start, end, *ramps in zip(tiles.starts, tiles.ends, tiles.left_ramps, tiles.right_ramps, strict=True):
        weights = compute_trapezoidal_mask_1d(end - start, *ramps, left_starts_from_0=True)
        with torch.no_grad():
            encoded = theirs[0](given[:, :, 8 * start : 8 * end - 7])
        wanted[:, :, start:end] += encoded * weights[:, None, None]
    got = encode(host, retake(files / "long.mp4", 89, (32, 64)))["video_latent"]
    assert rel(got, wanted) < ENCODED and len(tiles.starts) == 2
    with torch.no_grad():
        whole = theirs[0](given)
    assert rel(got, whole) > SHOWS


def test_a_sound_that_ends_early_is_followed_by_zeros_and_a_silent_video_has_no_audio_latent(
    files, host, theirs, tmp_path
):
    assert encode(host, retake(files / "mask.mp4", 25)).keys() == {"video_latent"}
    path = write_film(tmp_path / "half.mkv", picture_frames(25, 64, 96, 3), sound=tone(48000, 0.5))
    check(retake(path, 25))
    audio = encode(host, retake(path, 25))["audio_latent"]
    _, latent = sound_latent(theirs, host, path, 0.0, 25 / 24)
    assert audio.shape == (1, 8, 26, 16) and latent.shape[2] < 26
    assert torch.equal(audio[:, :, : latent.shape[2]], latent)
    assert (audio[:, :, latent.shape[2] :] == 0).all()


def test_a_video_whose_times_do_not_begin_at_0_is_the_same_source_of_a_retake(tmp_path, host):
    frames, sound = picture_frames(9, 64, 96, 3), tone(48000, 1.0)
    late = write_film(tmp_path / "later.mkv", frames, 24, 6, sound, lossless=True)
    same = write_film(tmp_path / "same.mkv", frames, 24, 0, sound[:, 12000:], lossless=True)
    check(retake(late, 9))
    got, wanted = encode(host, retake(late, 9)), encode(host, retake(same, 9))
    assert all(torch.equal(got[name], wanted[name]) for name in ("video_latent", "mel"))


# --- references -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count, space, time, frames",
    [
        (25, 1, 1, range(25)),
        (20, 1, 1, range(17)),  # fewer than the clip's, cut to 8k+1
        (25, 2, 1, range(25)),
        (25, 1, 2, [0, *range(1, 16, 2)]),
        (25, 1, 3, [0, *range(1, 24, 3)]),
        (25, 2, 24, [0]),
    ],
)
def test_a_reference_is_encoded_whole_in_its_own_size_and_step(tmp_path, host, theirs, count, space, time, frames):
    path = write_film(tmp_path / "reference.mp4", picture_frames(count, 100, 130, 5), rate=30)
    reference = ReferenceVideo(path, 1.0, count, space, time)
    given = ic_lora(reference, size=(64, 128))
    check(given)
    got = encode(host, given)
    seen = pixels(path, 64 // space, 128 // space, 25)[:, :, list(frames)]
    with torch.no_grad():
        wanted = theirs[0](seen)
    assert got.keys() == {"reference_latent"}
    assert tuple(got["reference_latent"].shape[2:]) == reference.latent_shape(given.size)
    assert rel(got["reference_latent"], wanted) < ENCODED


def test_an_image_as_a_reference_is_encoded_as_a_video_of_equal_frames(tmp_path, host, theirs):
    picture, path = picture_frames(1, 100, 130, 5)[0].numpy(), tmp_path / "sheet.png"
    Image.fromarray(picture).save(path)
    (reference,) = Job(num_frames=17, video_conditioning=[(str(path), 1.0)]).references
    assert reference.still and reference.frames(Size(num_frames=17)) == 17
    job = ic_lora(reference, frames=17)
    check(job)
    repeated = fill(picture, 64, 96).expand(-1, -1, 17, -1, -1)
    with torch.no_grad():
        assert rel(encode(host, job)["reference_latent"], theirs[0](repeated)) < ENCODED
    path.write_bytes(b"no image")
    with pytest.raises(UserError, match="sheet.png cannot be read.*\n.*--video-conditioning FILE"):
        check(job)


def test_a_long_reference_is_not_encoded_in_tiles(files, host, theirs):
    reference = ReferenceVideo(files / "long.mp4", 1.0, 89)
    got = encode(host, ic_lora(reference, frames=89, size=(32, 64)))["reference_latent"]
    with torch.no_grad():
        assert rel(got, theirs[0](pixels(files / "long.mp4", 32, 64, 89))) < ENCODED


def test_a_mask_weighs_the_tokens_of_all_references_in_order(files, host, tiny):
    from ltx_core.types import VideoLatentShape
    from ltx_pipelines.ic_lora import ICLoraPipeline

    first = ReferenceVideo(files / "film.mp4", 1.0, 25, 1, 2)
    mask = AttentionMask(files / "mask.mp4", 0.6)
    job = ic_lora(first, replace(first, strength=0.5), mask=mask)
    check(job)
    tensors = encode(host, job)
    grey = pixels(mask.path, 64, 96, 25).mean(dim=1, keepdim=True)
    grey = ((grey + 1) / 2).clamp(0, 1)
    weights = ICLoraPipeline._downsample_mask_to_latent(grey, VideoLatentShape(1, 128, 2, 2, 3)) * 0.6
    assert torch.equal(tensors["reference_attention"], torch.cat([weights, weights], dim=1))
    assert tensors.keys() == {"reference_latent", "reference_latent_1", "reference_attention"}
    half = HostModels(tiny.checkpoint, host.config, torch.bfloat16, arithmetic=FLOAT32)
    rounded = encode(half, job)
    assert rounded.keys() == tensors.keys() and {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    assert 1e-4 < rel(rounded["reference_attention"].float(), tensors["reference_attention"]) < 1e-2


def test_references_and_masks_that_do_not_fit_are_refused_before_they_are_read(files, tmp_path):
    film = ReferenceVideo(files / "film.mp4", 1.0, 25)
    short = write_film(tmp_path / "short.mp4", picture_frames(12, 64, 96, 3))
    thin = write_film(tmp_path / "thin.mp4", picture_frames(9, 2, 1600, 3))
    for job, message in (
        (ic_lora(film, mask=AttentionMask(short, 1.0)), "got 12 frames for the 4 latent frames"),
        (ic_lora(film, mask=AttentionMask(files / "sound.wav", 1.0)), "sound.wav has no video"),
        (ic_lora(ReferenceVideo(short, 1.0, 25)), "got 12 frames, wanted 25"),
        (ic_lora(ReferenceVideo(thin, 1.0, 9), size=(640, 960)), "narrow.*--video-conditioning"),
        (ic_lora(ReferenceVideo(tmp_path / "no.mp4", 1.0, 9)), "--video-conditioning"),
    ):
        with pytest.raises(UserError, match=message):
            check(job)


# --- dubbing --------------------------------------------------------------------------------------


def dubbed(tiny, path, frames=25, sides=(128, 192), strength=1.0):
    size = Size(*sides, frames, two_stage=True)
    clip = read_clip(path, (Lora(tiny.lora),), reference_strength=strength)
    return make_job("", size, **clip)


def test_a_dubbed_clip_is_encoded_for_each_stage_with_all_of_its_sound(files, host, theirs, tiny):
    # 17 of 25 frames' pictures, and the sound of all.
    path = files / "film.mp4"
    given = dubbed(tiny, path, 17)
    check(given)
    first, second = encode(host, given), encode(host, given, upsampled=True)
    assert first.keys() == {"reference_latent", "mel", "audio_reference"}
    assert second.keys() == {"s2_reference_latent"}
    with torch.no_grad():
        for latent, sides in ((first["reference_latent"], (64, 96)), (second["s2_reference_latent"], (128, 192))):
            assert rel(latent, theirs[0](pixels(path, *sides, 17))) < ENCODED
    mel, latent = sound_latent(theirs, host, path, 0.0, None)
    assert torch.equal(first["mel"], mel) and torch.equal(first["audio_reference"], latent)
    assert latent.shape[2] > given.size.audio_frames == 18


def test_a_long_clip_to_dub_is_encoded_in_tiles(files, host, tiny):
    path = files / "long.mp4"
    given = dubbed(tiny, path, 89, (64, 128))
    got = encode(host, given)["reference_latent"]
    # As a retake is, of which upstream's tiles are shown above; no IC-LoRA's reference is.
    assert torch.equal(got, encode(host, retake(path, 89, (32, 64)))["video_latent"])
    (tiled, _), whole = given.encoded_clips, ReferenceVideo(path, 1.0, 89)
    assert not tiled.whole
    assert ic_lora(whole, frames=89, size=(32, 64)).encoded_clips[0].whole


def test_ranks_encode_the_tiles_of_every_clip_but_an_ic_loras_references(files, host, tiny):
    encoded = []

    def tiles(several):
        encoded.append(len(several))
        return [host.video_encoder(tile) for tile in several]

    film, longer = files / "film.mp4", Retake(files / "film.mp4", extend=0.3, source_frames=25)
    extended, dub = make_job("", Size(64, 96, 17), retake=longer), dubbed(tiny, film, 17)
    for given, upsampled in (
        (retake(files / "long.mp4", 89, (32, 64)), False),
        (extended, False),
        (dub, False),
        (dub, True),
    ):
        wanted, got = encode(host, given, upsampled), encode(host, given, upsampled, tiles)
        assert wanted.keys() == got.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert encoded == [2, 1, 1, 1]
    encode(host, ic_lora(ReferenceVideo(film, 1.0, 25)), rank_tiles=tiles)
    assert len(encoded) == 4


@pytest.mark.parametrize("channels", [1, 6])
def test_the_voice_of_a_dubbed_clip_has_one_or_two_channels(host, tiny, tmp_path, capsys, channels, monkeypatch):
    sound = Sound(tone(16000, 0.5)[:1].expand(channels, -1), 16000)
    monkeypatch.setattr("ltx_neuron.host.encode_inputs.read_sound", lambda *a: sound)
    path = write_film(tmp_path / "clip.mkv", picture_frames(9, 64, 96, 3))
    if channels == 6:
        with pytest.raises(UserError, match="--reference-video .*clip.mkv has 6 channels"):
            dubbed(tiny, path, 9)
        return
    encode(host, dubbed(tiny, path, 9))
    assert f"--reference-video {path}: mono sound, used for both" in capsys.readouterr().out


# --- the job --------------------------------------------------------------------------------------


def job_with(sound, **settings):
    return make_job("rain", Size(64, 96, 25, two_stage=True), sound=sound, **settings)


def run_of(job, **tensors):
    run = JobRun(job, [Contexts(torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.ones(1, 2), None)])
    run.tensors |= tensors
    return run


def test_of_two_stages_a_reference_is_encoded_at_half_the_size(files, host):
    reference = ReferenceVideo(files / "film.mp4", 1.0, 25)
    job = make_job("rain", Size(128, 192, 25, two_stage=True), references=(reference,))
    check(job)
    assert job.size.first == Size(64, 96, 25)
    assert torch.equal(encode(host, job)["reference_latent"], encode(host, ic_lora(reference))["reference_latent"])


def test_the_input_sound_is_the_videos_sound_and_is_not_decoded(files, tiny, host, tmp_path):
    job = job_with(SoundCondition(files / "sound.wav"))
    decoder = HostModels(tiny.checkpoint, host.config, torch.float32)
    run = run_of(job, **encode(host, a2v(files / "sound.wav")))
    run.finish(job.stages[1], randn(1, 128, 4, 2, 3), randn(1, 8, 26, 16))
    path, clips = tmp_path / "a.mp4", []
    write = lambda clip: clips.append(clip.write(path))  # noqa: E731
    result = Decoder(decoder, Recorder(), ahead=False).result(run, write)
    assert clips and not {"audio_decoder", "vocoder"} & vars(decoder).keys()
    assert result.sample_rate == 44100 and "waveform_rate" in result.tensors
    assert torch.equal(result.waveform, read_sound(files / "sound.wav", "", 0.0, 25 / 24).samples)
    samples, rate = read_sound(path, "--audio-path")
    assert rate == 44100
    assert rel(samples[:, 2048 : result.waveform.shape[1]], result.waveform[:, 2048:]) < 0.1


def test_the_models_of_a_job_are_those_that_encode_and_decode_its_inputs():
    size, reference = Size(64, 96, 9), ReferenceVideo("a.mp4", 1.0, 9)
    encoders = {"audio_encoder", "video_encoder"}
    for inputs, expected in (
        ({}, set()),
        ({"sound": SoundCondition("a.wav")}, {"audio_encoder"}),
        ({"retake": Retake("a.mp4", 0.0, 1.0)}, encoders),
        ({"references": (reference,)}, {"video_encoder"}),
        ({"dubbing": reference, "reference_sound": ReferenceAudio("a.mp4", 9)}, encoders),
    ):
        names = {*preflight._host_models(make_job("a", size, **inputs))}
        assert names & encoders == expected, inputs
        assert "video_decoder" in names and ("vocoder" in names) == ("sound" not in inputs)


SOUND_TENSORS = ("audio_latent", "waveform", "waveform_rate")
WRONG_TENSORS = {
    "audio_latent": [torch.zeros(1, 8, 25, 16)],
    "waveform": [torch.zeros(1, 8), torch.zeros(2, 8).double()],
    "waveform_rate": [torch.tensor([16000]), torch.tensor(16000.0)],
}


def test_a_resume_file_holds_the_input_sound_and_one_with_another_sound_is_refused(files, host, tmp_path):
    job, path = job_with(SoundCondition(files / "sound.wav")), tmp_path / "a.resume.safetensors"
    run = run_of(job, **encode(host, a2v(files / "sound.wav")))
    run.finish(job.stages[0], randn(1, 128, 4, 1, 1), run.tensors["audio_latent"].clone())

    def restored(tensors):
        saved = run_of(job)
        saved.tensors = tensors
        save_state(path, saved, {"seed": 10})
        return restore_state(path, job, {"seed": 10}, torch.float32).tensors

    tensors = restored(run.tensors)
    assert all(torch.equal(tensors[name], run.tensors[name]) for name in SOUND_TENSORS)
    for name in SOUND_TENSORS:
        with pytest.raises(UserError, match=f"{name}: missing"):
            restored({key: tensor for key, tensor in run.tensors.items() if key != name})
        for wrong in WRONG_TENSORS[name]:
            with pytest.raises(UserError, match=f"{name}: .*wanted"):
                restored(run.tensors | {name: wrong})
