"""A job's sounds, videos, references and masks as tensors are ltx-core's of what ltx-pipelines reads of the files."""

from types import SimpleNamespace

import pytest
import torch
from helpers import made_config, one_thread, picture_frames, randn, rel, tone, write_film, write_sound  # noqa: F401
from jobs import make_job, read_clip, replace
from PIL import Image
from safetensors.torch import save_file
from typed import said

from ltx_neuron.engine.decode import Decoder
from ltx_neuron.engine.outputs import JobRun, restore_state, save_state
from ltx_neuron.engine.preflight import _host_models
from ltx_neuron.errors import UserError
from ltx_neuron.host.encode_inputs import encode
from ltx_neuron.host.input_files import Sound, check, fill, mask_divides, read_sound, sound_latent_frames
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.spectrogram import log_mel, mel_sizes, resample
from ltx_neuron.host.video import write_video
from ltx_neuron.job import Job, Size
from ltx_neuron.pipeline import _trimmed
from ltx_neuron.pipeline.diffusers import LTXPipelineOutput
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.conditions import AttentionMask, ReferenceVideo, Retake, SoundCondition
from ltx_neuron.sampling.shapes import SAMPLE_RATE
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.lora import Lora

CPU, TWO_STAGES = torch.device("cpu"), Size(64, 96, 25, two_stage=True)
WHOLE = make_job("rain", Size(64, 96, 25))
# The video encoder sums convolutions in another order where frames are laid out otherwise.
ENCODED = 2e-6


def wav(path, samples, rate):
    stored = (samples * 2**15).clamp(-(2**15), 2**15 - 1).short().T.reshape(1, -1).numpy()
    return write_sound(path, stored, rate, "pcm_s16le", ("mono", "stereo")[len(samples) - 1], "s16")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    for name, count, size in (("film", 25, (64, 96)), ("long", 89, (32, 64))):
        write_video(folder / f"{name}.mp4", [picture_frames(count, *size, 3)], 24.0, lambda: tone(48000, 4.0), 48000)
    wav(folder / "sound.wav", tone(44100, 3.0), 44100)
    return folder


@pytest.fixture(scope="module")
def host(tiny):
    return HostModels(tiny.checkpoint, made_config()[0], torch.float32)


@pytest.fixture(scope="module")
def theirs(tiny):
    from ltx_core.loader.single_gpu_model_builder import SingleGPUModelBuilder
    from ltx_core.model import audio_vae, video_vae

    parts = {"video": (video_vae.VideoEncoderConfigurator, video_vae.VAE_ENCODER_COMFY_KEYS_FILTER)}
    parts["audio"] = audio_vae.AudioEncoderConfigurator, audio_vae.AUDIO_VAE_ENCODER_COMFY_KEYS_FILTER
    builders = {name: SingleGPUModelBuilder(kind, str(tiny.checkpoint), keys) for name, (kind, keys) in parts.items()}
    models = {name: builder.build(CPU, torch.float32).eval() for name, builder in builders.items()}
    return SimpleNamespace(**{name: model.requires_grad_(False) for name, model in models.items()})


def sound_latent(theirs, host, path, duration):
    """(mel, latent) of what ltx-pipelines reads, by ltx-core's encoder. The mel is ours: torchaudio need not be
    there, and test_sound.py compares it with its definition."""
    from ltx_pipelines.utils.media_io import decode_audio_from_file

    sound, sizes = decode_audio_from_file(str(path), CPU, 0.0, duration), mel_sizes(host.config)
    mel = log_mel(resample(sound.waveform[0], sound.sampling_rate, sizes.rate), sizes)
    return mel, theirs.audio(mel)


def pixels(path, height, width, count):
    from ltx_pipelines.utils.media_io import load_video_conditioning

    return load_video_conditioning(str(path), height, width, count, torch.float32, CPU)


def checked(host, job):
    check(job)
    return encode(host, job)


def a2v(path, frames=25, rate=24.0, **settings):
    return make_job("", Size(64, 96, frames, rate), sound=SoundCondition(path, **settings))


def retake(path, frames, size=(64, 96)):
    return make_job("", Size(*size, frames), retake=Retake(path, 0.1, 0.3))


def ic_lora(*references, frames=25, mask=None, size=(64, 96)):
    return make_job("", Size(*size, frames), references=references, attention_mask=mask)


def test_a_mono_sound_is_used_for_both_channels_with_a_message(tmp_path, host, capsys):
    one = tone(22050, 1.0)[:1]
    mono, both = (a2v(wav(tmp_path / f"{len(x)}.wav", x, 22050), 9) for x in (one, one.expand(2, -1)))
    check(mono)
    assert capsys.readouterr().out == ""
    tensors = encode(host, mono)
    assert capsys.readouterr().out.count("mono sound, used for both channels") == 1
    assert tensors["waveform"].shape == (2, 8269) and torch.equal(*tensors["waveform"])
    assert torch.equal(tensors["audio_latent"], encode(host, both)["audio_latent"])


def test_a_sound_as_long_as_the_video_is_taken_and_a_short_broken_or_almost_empty_one_refused(files, tmp_path):
    for frames, rate, samples in ((25, 24.0, 44100), (33, 25.0, 22050), (9, 60.0, 48000)):
        check(a2v(wav(tmp_path / "exact.wav", randn(2, round(frames / rate * samples)) / 9, samples), frames, rate))
    broken = torch.full((1, 16000), torch.nan).numpy()
    broken = write_sound(tmp_path / "nan.wav", broken, 48000, "pcm_f32le", format="flt")
    almost_none, sound = wav(tmp_path / "tiny.wav", torch.zeros(2, 200), 48000), files / "sound.wav"
    for path, frames, settings, message in (
        (sound, 81, {"start_time": 0.5}, r"got 2.50 s of sound from --audio-start-time 0.5 on, wanted 3.38 s \(81 fr"),
        (sound, 25, {"max_duration": 0.4}, "with --audio-max-duration 0.4, .* leave --audio-max-durat"),
        (sound, 1, {"start_time": 2.999999}, "got 0.00 s of sound from --audio-start"),
        (broken, 1, {}, "nan.wav has samples that are NaN or Inf"),
        (almost_none, 1, {}, "got 0.00 s of sound, wanted 0.04 s"),
    ):
        with pytest.raises(UserError, match=message):
            check(a2v(path, frames, **settings))


@pytest.mark.parametrize("rate", [16000, 44100])
def test_a_bed_is_heard_at_its_level_and_is_not_in_the_videos_sound(tmp_path, rate):
    path, heard, latent = wav(tmp_path / "a.wav", tone(rate, 1.2), rate), [], randn(1, 8, 27, 16)
    encoder = SimpleNamespace(encode_audio=lambda sound: heard.append(sound) or (None, latent))
    jobs = [replace(WHOLE, sound=SoundCondition(path, bed=level)) for level in (None, -50.0)]
    before = torch.get_rng_state()
    plain, bed = (encode(encoder, job) for job in jobs)
    assert torch.equal(torch.get_rng_state(), before)  # the job's draws stay
    assert torch.equal(plain["waveform"], bed["waveform"]) and torch.equal(heard[0].samples, plain["waveform"])
    assert (heard[0].rate, heard[1].rate) == (rate, SAMPLE_RATE)
    noise = heard[1].samples - resample(*heard[0], SAMPLE_RATE)
    assert (20 * noise.square().mean(1).sqrt().log10() + 50).abs().max() < 0.1 and not torch.equal(*noise)
    encode(encoder, replace(jobs[1], seed=99))
    assert torch.equal(heard[2].samples, heard[1].samples)
    typed = said("--audio-path", path, "--audio-bed", "-50")
    assert typed.sound.bed == -50 and typed.identity != said("--audio-path", path).identity


def decoded(job: Job, video, audio, **tensors):
    """A job's result, from a decoder whose frames depend on all latents, and the lengths of its chunks."""
    run, chunks = JobRun(job, [Contexts(*[torch.zeros(1)] * 3, None)]), []
    run.tensors |= {"s1_video": video, "s1_audio": audio} | tensors

    def frames(latent, seed, keyframes):
        everything = (torch.arange(8 * latent.shape[2] - 7) + (latent.mean() * 100).long() % 256).byte()
        for chunk in everything[:, None, None, None].expand(-1, 32, 32, 3).split(16):
            chunks.append(len(chunk))
            yield chunk

    def sound(latent):
        return randn(2, 1920 * latent.shape[2] + 500, seed=1)

    host = SimpleNamespace(sample_rate=48000, upsample=lambda latent, kind: latent)
    return Decoder(host, Recorder(), False, frames, sound).result(run), chunks


@pytest.mark.parametrize("frame_rate, samples", [(24.0, 33 * 2000), (24000 / 1001, 33 * 2002)])
def test_a_tails_frames_and_its_sound_are_cut_exactly(frame_rate, samples, tmp_path):
    job = replace(WHOLE, size=Size(32, 32, 49, frame_rate))
    video, audio = randn(1, 128, 7, 1, 1), randn(1, 8, job.size.audio_frames, 16)
    (whole, _), (kept, chunks) = (decoded(each, video, audio) for each in (job, replace(job, tail_frames=16)))
    assert torch.equal(kept.frames, whole.frames[:33]) and chunks == [16, 16, 16]
    assert kept.waveform.shape == (2, samples) and torch.equal(kept.waveform, whole.waveform[:, :samples])
    assert torch.equal(kept.tensors["s1_video"], video)
    kept.clip().write(tmp_path / "out.mp4")
    write_video(tmp_path / "wanted.mp4", [whole.frames[:33]], frame_rate, lambda: whole.waveform, 48000)
    assert (tmp_path / "out.mp4").read_bytes() == (tmp_path / "wanted.mp4").read_bytes()
    latents = LTXPipelineOutput("latent", [_trimmed(kept, latent=True)])
    assert torch.equal(latents.video_latent, video[:, :, :5])
    assert latents.audio_latent.shape[2] == Size(32, 32, 33, frame_rate).audio_frames
    job = replace(WHOLE, upscale="temporal", tail_frames=8)  # its frame rate is doubled before the cut
    result, _ = decoded(job, randn(1, 128, 7, 1, 1), randn(1, 8, 26, 16))
    assert len(result.frames) == job.output_frames == 33 and result.waveform.shape[1] == 33 * 1000


def test_a_tail_hears_the_sound_that_goes_on_or_silence_and_the_video_has_its_sound_up_to_the_end(tmp_path, host):
    def heard(job, seconds):
        path = wav(tmp_path / "a.wav", tone(48000, seconds), 48000)
        return checked(host, replace(job, sound=SoundCondition(path)))

    tailed = replace(WHOLE, tail_frames=8)
    exact, whole, longer = heard(tailed, 17 / 24), heard(WHOLE, 3.0), heard(tailed, 3.0)
    assert all(torch.equal(longer[name], whole[name]) for name in ("mel", "audio_latent"))
    silent = torch.nn.functional.pad(exact["waveform"], (0, 16000))
    assert silent.shape == (2, 50000)
    assert torch.equal(exact["audio_latent"], host.encode_audio(Sound(silent, 48000))[1][:, :, :26])
    job = replace(tailed, sound=SoundCondition(tmp_path / "a.wav"))
    result, _ = decoded(job, randn(1, 128, 4, 1, 1), longer["audio_latent"], **longer)
    assert torch.equal(result.waveform, read_sound(job.sound.path, "").samples[:, :34000])
    with pytest.raises(UserError, match=r"got 0.60 s of sound, wanted 0.71 s \(17 frames"):
        heard(tailed, 0.6)


def test_a_long_retake_is_encoded_with_its_sound_in_upstreams_tiles(files, host, theirs):
    from ltx_core.model.video_vae.tiling import compute_trapezoidal_mask_1d
    from ltx_core.model.video_vae.video_vae import split_temporal_latents

    clip, wanted = pixels(files / "long.mp4", 32, 64, 89), torch.zeros(1, 128, 12, 1, 2)
    tiles = split_temporal_latents(10, 3)(12)
    for start, end, *ramps in zip(tiles.starts, tiles.ends, tiles.left_ramps, tiles.right_ramps, strict=True):
        weights = compute_trapezoidal_mask_1d(end - start, *ramps, left_starts_from_0=True)
        wanted[:, :, start:end] += theirs.video(clip[:, :, 8 * start : 8 * end - 7]) * weights[:, None, None]
    job = retake(files / "long.mp4", 89, (32, 64))
    assert _host_models(job) == ["video_decoder", "audio_decoder", "vocoder", "video_encoder", "audio_encoder"]
    tensors = checked(host, job)
    assert tensors.keys() == {"video_latent", "mel", "audio_latent"}
    assert rel(tensors["video_latent"], wanted) < ENCODED and len(tiles.starts) == 2
    assert rel(tensors["video_latent"], theirs.video(clip)) > 1e-2  # what encoding in other tiles changes at least
    mel, latent = sound_latent(theirs, host, files / "long.mp4", 89 / 24)
    assert torch.equal(tensors["mel"], mel) and torch.equal(tensors["audio_latent"], latent[:, :, :93])


def dubbed(tiny, path, frames=25, sides=(128, 192)):
    clip = read_clip(path, (Lora(tiny.lora),), reference_strength=1.0)
    return make_job("", Size(*sides, frames, two_stage=True), **clip)


def test_a_dubbed_clip_is_encoded_for_each_stage_with_all_of_its_sound(files, host, theirs, tiny):
    path = files / "film.mp4"
    job = dubbed(tiny, path, 17)  # of 25 frames' pictures, and the sound of all
    assert _host_models(job)[3:] == ["video_encoder", "audio_encoder", "video_statistics"]
    first, second = checked(host, job), encode(host, job, upsampled=True)
    assert first.keys() == {"reference_latent", "mel", "audio_reference"} and second.keys() == {"s2_reference_latent"}
    for latent, sides in ((first["reference_latent"], (64, 96)), (second["s2_reference_latent"], (128, 192))):
        assert rel(latent, theirs.video(pixels(path, *sides, 17))) < ENCODED
    mel, latent = sound_latent(theirs, host, path, None)
    assert torch.equal(first["mel"], mel) and torch.equal(first["audio_reference"], latent)
    assert latent.shape[2] > job.size.audio_frames == 18
    for rate, samples in ((44100, 17640), (44100, 17641), (16000, 6559)):
        assert sound_latent_frames(samples, rate) == host.encode_audio(Sound(randn(2, samples), rate))[1].shape[2]


def test_the_ranks_encode_long_clips_in_tiles_and_the_host_an_ic_loras_references_whole(files, host, theirs, tiny):
    encoded, long, film, size = [], files / "long.mp4", files / "film.mp4", (32, 64)

    def tiles(several):
        encoded.append(len(several))
        return [host.video_encoder(tile) for tile in several]

    extended = make_job("", Size(64, 96, 17), retake=Retake(film, extend=0.3, source_frames=25))
    dub = dubbed(tiny, long, 89, (64, 128))
    for job, stage_2 in ((retake(long, 89, size), 0), (extended, 0), (dub, 0), (dubbed(tiny, film, 17), 1)):
        wanted, got = encode(host, job, bool(stage_2)), encode(host, job, bool(stage_2), tiles)
        assert wanted.keys() == got.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert encoded == [2, 1, 2, 1]
    reference = ic_lora(ReferenceVideo(long, 1.0, 89), frames=89, size=size)
    latent = encode(host, reference, rank_tiles=tiles)["reference_latent"]
    assert len(encoded) == 4 and rel(latent, theirs.video(pixels(long, *size, 89))) < ENCODED
    assert reference.encoded_clips[0].whole and not dub.encoded_clips[0].whole
    assert _host_models(reference)[3:] == ["video_encoder"]


def test_an_image_as_a_reference_is_encoded_as_a_video_of_equal_frames(tmp_path, host, theirs):
    picture, path = picture_frames(1, 100, 130, 5)[0].numpy(), tmp_path / "sheet.png"
    Image.fromarray(picture).save(path)
    (reference,) = Job(num_frames=17, video_conditioning=[(str(path), 1.0)]).references
    job, wanted = ic_lora(reference, frames=17), theirs.video(fill(picture, 64, 96).expand(-1, -1, 17, -1, -1))
    assert rel(checked(host, job)["reference_latent"], wanted) < ENCODED
    path.write_bytes(b"no image")
    with pytest.raises(UserError, match="sheet.png cannot be read.*\n.*--video-conditioning FILE"):
        check(job)


def test_references_and_masks_that_do_not_fit_are_refused_before_they_are_read(files, tmp_path):
    film = ReferenceVideo(files / "film.mp4", 1.0, 25)
    short = write_film(tmp_path / "short.mp4", picture_frames(12, 64, 96, 3))
    thin = write_film(tmp_path / "thin.mp4", picture_frames(9, 2, 1600, 3))
    for job, message in (
        (ic_lora(film, mask=AttentionMask(short, 1.0)), "got 12 frames for the 4 latent frames"),
        (ic_lora(film, mask=AttentionMask(files / "sound.wav", 1.0)), "sound.wav has no video"),
        (ic_lora(ReferenceVideo(short, 1.0, 25)), "got 12 frames, wanted 25"),
        (ic_lora(ReferenceVideo(thin, 1.0, 9), size=(640, 960)), "narrow.*--video-conditioning"),
    ):
        with pytest.raises(UserError, match=message):
            check(job)
    # A mask has equally many frames for each later latent frame.
    assert all(mask_divides(*each) for each in ((17, 3), (5, 1), (3, 3)))
    assert not any(mask_divides(*each) for each in ((12, 3), (17, 4), (1, 2), (2, 3)))


def test_an_input_sound_is_the_videos_is_not_decoded_and_is_in_the_resume_file(files, host, tiny, tmp_path):
    job, path = replace(WHOLE, size=TWO_STAGES, sound=SoundCondition(files / "sound.wav")), tmp_path / "a"
    assert _host_models(job) == ["video_decoder", "audio_encoder", "video_statistics"]
    contexts = [Contexts(torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.ones(1, 2), None)]
    run, saved = JobRun(job, contexts), JobRun(job, contexts)
    run.tensors |= encode(host, job)
    run.finish(job.stages[0], randn(1, 128, 4, 1, 1), run.tensors["audio_latent"].clone())

    def restored(tensors):
        saved.tensors = tensors
        save_state(path, saved, {"seed": 10})
        return restore_state(path, job, {"seed": 10}, torch.float32).tensors

    tensors = restored(run.tensors)
    for name, *mistakes in (
        ("audio_latent", torch.zeros(1, 8, 25, 16)),
        ("waveform", torch.zeros(1, 8), torch.zeros(2, 8).double()),
        ("waveform_rate", torch.tensor([16000]), torch.tensor(16000.0)),
    ):
        assert torch.equal(tensors[name], run.tensors[name])
        with pytest.raises(UserError, match=f"{name}: missing"):
            restored({key: tensor for key, tensor in run.tensors.items() if key != name})
        for wrong in mistakes:
            with pytest.raises(UserError, match=f"{name}: .*wanted"):
                restored(run.tensors | {name: wrong})
    run.finish(job.stages[1], randn(1, 128, 4, 2, 3), randn(1, 8, 26, 16))
    decoder = HostModels(tiny.checkpoint, host.config, torch.float32)
    result = Decoder(decoder, Recorder(), ahead=False).result(run)
    assert not {"audio_decoder", "vocoder"} & vars(decoder).keys() and result.sample_rate == 44100
    assert torch.equal(result.waveform, read_sound(files / "sound.wav", "", 0.0, 25 / 24).samples)


def test_a_clip_to_upscale_gives_the_job_what_the_model_can_have_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the user's folder
    save_file({"a": torch.zeros(1)}, "x2.safetensors", {"reference_downscale_factor": "2"})

    def upscaled(frames=20, rate=25, sound=None, **fields) -> Job:
        write_film("clip.mkv", picture_frames(frames, 50, 60, 1), rate, sound=sound)
        return Job(upscale_video="clip.mkv", ic_lora=["x2.safetensors"], **fields).with_upscaling()

    job = upscaled(sound=tone(48000, 0.5))  # a little shorter than 17 frames
    assert job.size.sides == (128, 128) and (job.size.num_frames, job.size.frame_rate) == (17, 25)
    assert (job.video_conditioning, job.audio_path) == ((("clip.mkv", 1.0),), "clip.mkv")
    assert job.tile and job.upscale_video is None and job.with_upscaling() is job
    assert "17 of 20 frames (8k+1) of 50x60 become 128x128" in capsys.readouterr().out
    assert job.references[0].pixels(job.size) == (17, 64, 64)
    job.check()
    check(job)  # with silence after its sound
    typed = upscaled(height=192, width=256, tile_height=64)
    assert typed.size.sides == (192, 256) and typed.audio_path is None and typed.tile_height == 64
    assert "clip.mkv has no sound: the model generates one" in capsys.readouterr().out
    long = upscaled(frames=42, rate=2)  # past the model's positions
    assert (long.size.num_frames, long.holds("chunked"), long.windows) == (41, True, ())  # it fits one of 97 frames
    assert "become 128x128, in windows" in capsys.readouterr().out
    assert not upscaled(frames=38, rate=2).holds("chunked")
    windows = upscaled(frames=42, rate=25, chunk_pixel_frames=25, chunk_carry_frames=17, chunk_blend_frames=0).windows
    assert [window.references[0].start for window in windows] == [0, 8, 16]
