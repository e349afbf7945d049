"""Frames that are generated and cut off (--tail-frames), and noise under what the model hears of an
input sound (--audio-bed)."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import one_thread, randn, tone, write_sound  # noqa: F401
from jobs import make_job, replace
from safetensors import safe_open
from typed import parsed, said

from ltx_neuron import flags
from ltx_neuron.artifacts.workspace import job_flags
from ltx_neuron.engine.decode import Decoder
from ltx_neuron.engine.resume import JobRun
from ltx_neuron.errors import UserError
from ltx_neuron.host.encode_inputs import check, encode
from ltx_neuron.host.media import Sound, read_sound
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.spectrogram import resample
from ltx_neuron.host.video import write_video
from ltx_neuron.job import Job, Size
from ltx_neuron.pipeline import _trimmed
from ltx_neuron.pipeline.diffusers import LTXPipelineOutput
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditions import ImageCondition, SoundCondition
from ltx_neuron.sampling.shapes import SAMPLE_RATE
from ltx_neuron.text.encoders import Contexts

pytestmark = pytest.mark.usefixtures("one_thread")

FILE = __file__
WHOLE = make_job("rain", Size(64, 96, 25))
TAILED = replace(WHOLE, tail_frames=8)


# --- what a tail is -------------------------------------------------------------------------------


def test_a_tail_needs_the_graphs_of_the_sum_and_is_typed_as_it_was():
    job = said("--num-frames", "17", "--tail-frames", "8", "--height", "64", "--width", "96")
    assert job.buckets == WHOLE.buckets and job.size == WHOLE.size
    assert (job.output_size.num_frames, job.output_frames) == (17, 17)
    assert (job.num_frames, job.tail_frames) == (17, 8)
    assert Job.validated(job.to_line()).describe() == job.describe()
    line = job.describe()
    assert (line["num_frames"], line["tail_frames"]) == (17, 8)
    words = [*map(str, job_flags(job))]
    assert "--num-frames 17" in " ".join(words) and "--tail-frames 8" in " ".join(words)
    assert "--tail-frames" not in map(str, job_flags(WHOLE))
    assert flags.shape(parsed(*words, compiles=True), "distilled").buckets == job.buckets
    assert replace(job, upscale="temporal").output_frames == 33
    replace(job, images=(ImageCondition(FILE, 16),)).check()  # up to the last frame that is kept


def decoded(job: Job, video, audio, rate: int = 48000, **more):
    """A job's result, from a decoder whose frames depend on all latents. `more`: its tensors."""
    run = JobRun(job, [Contexts(*[torch.zeros(1)] * 3, None)])
    run.tensors |= {"s1_video": video, "s1_audio": audio} | more

    def frames(latent, seed, keyframes):
        shade = (latent.mean() * 100).long() % 256
        everything = (torch.arange(8 * latent.shape[2] - 7) + shade).byte()
        for chunk in everything[:, None, None, None].expand(-1, 32, 32, 3).split(16):
            closed.append(len(chunk))
            yield chunk

    closed = []
    host = SimpleNamespace(sample_rate=rate, upsample=lambda latent, kind: latent)

    def sound(latent):
        return randn(2, round(latent.shape[2] / 25 * rate) + 500, seed=1)

    return Decoder(host, Recorder(), False, frames, sound).result(run), closed


@pytest.mark.parametrize("frame_rate", [23.976, 24.0, 25.0, 24000 / 1001])
def test_a_tails_frames_and_its_sound_are_cut_exactly(frame_rate, tmp_path):
    import av

    whole = replace(WHOLE, size=Size(32, 32, 49, frame_rate))
    video, audio = randn(1, 128, 7, 1, 1), randn(1, 8, whole.size.audio_frames, 16)
    (all_of_it, _), (kept, chunks) = (decoded(job, video, audio) for job in (whole, replace(whole, tail_frames=16)))
    samples = round(33 * {25.0: 1920, 24.0: 2000}.get(frame_rate, 2002))
    assert torch.equal(kept.frames, all_of_it.frames[:33]) and chunks == [16, 16, 16]
    assert torch.equal(kept.waveform, all_of_it.waveform[:, :samples])
    assert kept.waveform.shape == (2, samples) and len(kept.tensors["s1_video"][0, 0]) == 7
    written, expected = tmp_path / "out.mp4", tmp_path / "wanted.mp4"
    kept.clip().write(written)
    beginning = all_of_it.frames[:33]
    write_video(expected, [beginning], frame_rate, lambda: all_of_it.waveform, 48000)
    assert written.read_bytes() == expected.read_bytes()
    with av.open(str(written)) as container:
        sound = container.streams.audio[0]
        seconds = float(sound.duration * sound.time_base)
        assert sum(1 for _ in container.decode(video=0)) == 33
        assert abs(seconds - samples / 48000) < 1e-3  # of the container's clock
    latents = LTXPipelineOutput("latent", [_trimmed(kept, latent=True)])
    assert torch.equal(latents.video_latent, video[:, :, :5])
    assert latents.audio_latent.shape[2] == Size(32, 32, 33, frame_rate).audio_frames


def test_a_tail_is_cut_after_the_frame_rate_is_doubled():
    job = replace(WHOLE, upscale="temporal", tail_frames=8)
    frames = decoded(job, randn(1, 128, 7, 1, 1), randn(1, 8, 26, 16))[0]
    assert len(frames.frames) == 33 and frames.waveform.shape[1] == 33 * 1000


# --- an input sound -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(tiny):
    with safe_open(tiny.checkpoint, "pt") as file:
        config = json.loads(file.metadata()["config"])
    return HostModels(tiny.checkpoint, config, torch.float32)


def sound(folder, seconds: float, rate: int = 48000, name: str = "a.wav"):
    stored = (tone(rate, seconds) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    return write_sound(folder / name, stored, rate, "pcm_s16le", "stereo", "s16")


def test_a_tail_hears_the_sound_that_goes_on_and_then_silence(tmp_path, host):
    """Its kept part hears what the kept part of a longer video hears."""
    path = sound(tmp_path, 3.0)
    whole, tailed = (encode(host, replace(job, sound=SoundCondition(path))) for job in (WHOLE, TAILED))
    for name in ("mel", "audio_latent"):
        assert torch.equal(tailed[name], whole[name])
    exact = replace(TAILED, sound=SoundCondition(sound(tmp_path, 17 / 24, name="exact.wav")))
    check(exact)
    got = encode(host, exact)
    assert got["waveform"].shape == (2, 34000)
    silent = torch.nn.functional.pad(got["waveform"], (0, 16000))
    _, expected = host.encode_audio(Sound(silent, 48000))
    assert torch.equal(got["audio_latent"], expected[:, :, :26])
    with pytest.raises(UserError, match=r"got 0.60 s of sound, wanted 0.71 s \(17 frames"):
        check(replace(TAILED, sound=SoundCondition(sound(tmp_path, 0.6, name="short.wav"))))


def test_the_video_of_a_tail_has_the_sound_up_to_its_end(tmp_path, host):
    for job, samples in ((WHOLE, 50000), (TAILED, 34000)):
        given = replace(job, sound=SoundCondition(sound(tmp_path, 3.0)))
        tensors = encode(host, given)
        result, _ = decoded(given, randn(1, 128, 4, 1, 1), tensors["audio_latent"], **tensors)
        kept = read_sound(given.sound.path, "", 0.0, 3.0).samples[:, :samples]
        assert torch.equal(result.waveform, kept)


@pytest.mark.parametrize("rate", [16000, 44100, 48000])
def test_a_bed_is_heard_at_its_level_and_is_not_in_the_videos_sound(tmp_path, host, rate):
    path, heard = sound(tmp_path, 1.2, rate), []
    latent = randn(1, 8, 27, 16)
    encoder = SimpleNamespace(encode_audio=lambda sound: heard.append(sound) or (None, latent))
    plain, bed = (encode(encoder, replace(WHOLE, sound=SoundCondition(path, bed=level))) for level in (None, -50.0))
    assert torch.equal(plain["waveform"], bed["waveform"])
    assert heard[0].rate == rate and torch.equal(heard[0].samples, plain["waveform"])
    noise = heard[1].samples - resample(*heard[0], SAMPLE_RATE)
    assert heard[1].rate == SAMPLE_RATE
    for channel in noise:
        level = 20 * channel.square().mean().sqrt().log10()
        assert abs(level + 50) < 0.1
    assert not torch.equal(*noise)
    encode(encoder, replace(WHOLE, sound=SoundCondition(path, bed=-50.0), seed=99))
    assert torch.equal(heard[2].samples, heard[1].samples)
    with_bed = encode(host, replace(WHOLE, sound=SoundCondition(path, bed=-50.0)))
    without = encode(host, replace(WHOLE, sound=SoundCondition(path)))
    assert not torch.equal(with_bed["audio_latent"], without["audio_latent"])


def test_a_bed_leaves_the_draws_of_the_job_alone(tmp_path, host):
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    encode(host, replace(WHOLE, sound=SoundCondition(sound(tmp_path, 1.2), bed=-40.0)))
    assert torch.equal(torch.randn(4), expected)


def test_a_bed_is_part_of_the_job():
    job = said("--audio-path", FILE, "--audio-bed", "-50")
    assert job.sound.bed == -50 and job.audio_bed == -50
    assert job.identity != replace(job, sound=replace(job.sound, bed=None)).identity
    assert Job.validated(job.to_line()).describe() == job.describe()
