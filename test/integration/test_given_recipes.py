"""Audio to video, retake, IC-LoRA and keyframe interpolation against ltx-pipelines
(test/given_oracle.py), latent for latent, and against what each wrong way to do them makes.

Through the engine that the scripts call, in this process, with text contexts that are drawn.
"""

import zlib
from dataclasses import replace
from functools import cache

import given_oracle
import pytest
import torch
from given_oracle import Given, Stream
from helpers import STREAMS, one_thread, randn, rel, tone, write_sound  # noqa: F401

from ltx_neuron.engine import Engine, RunOptions
from ltx_neuron.host.video import write_video
from ltx_neuron.job import Job, Size
from ltx_neuron.profiles import resolve
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditioning import (
    AttentionMask,
    ImageCondition,
    ReferenceVideo,
    Retake,
    SoundCondition,
)
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.lora import Lora
from ltx_neuron.workspace import Workspace

pytestmark = pytest.mark.slow

FP32, GUIDED = 1e-5, 3e-5  # guidance multiplies what sums in another order change
SHOWS = 1e-3  # what a wrong way changes at least

RAIN, DUST = "rain on a tin roof", "dust"
VIDEO = (
    ("cfg_scale", 2.5),
    ("stg_scale", 0.8),
    ("stg_blocks", (1,)),
    ("modality_scale", 2.2),
    ("rescale_scale", 0.6),
)
AUDIO = (("cfg_scale", 5.0), ("stg_scale", 1.3), ("stg_blocks", (0,)), ("modality_scale", 1.7))


@cache
def contexts(prompt: str, widths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of video and audio; a model that reads them as it would an encoder's."""
    seed = zlib.crc32(prompt.encode())
    return tuple(randn(1, 1024, width, seed=seed + n) for n, width in enumerate(widths))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """film: 17 frames of 64 x 64 with sound, mute: without; short: 9 frames; mask: grey."""
    folder = tmp_path_factory.mktemp("media")
    x, y = torch.arange(96), torch.arange(64)[:, None]
    films = {"film": (17, 64, 64, 20.0), "short": (9, 64, 80, 24.0), "mask": (9, 64, 96, 24.0)}
    for name, (count, height, width, rate) in films.items():
        planes = [
            torch.stack([2 * x + 5 * f + y, 3 * y - 4 * f + x, x + y + 7 * f], -1)[:height, :width]
            for f in range(count)
        ]
        frames = (128 + 110 * torch.sin(torch.stack(planes) / 17)).byte()
        if name == "mask":
            frames = frames[..., :1].expand(-1, -1, -1, 3).contiguous()
        sound = tone(48000, count / rate * (0.6 if name == "short" else 1))
        write_video(folder / f"{name}.mp4", [frames], rate, lambda sound=sound: sound, 48000)
    stored = (tone(44100, 1.5, 330.0) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    write_sound(folder / "sound.wav", stored, 44100, "pcm_s16le", "stereo", "s16")
    return folder


@pytest.fixture(scope="module")
def workspace(tiny, tmp_path_factory):
    artifacts = tmp_path_factory.mktemp("artifacts")
    found = Workspace(tiny.checkpoint, resolve("cpu"), artifacts, 1, "float32", tiny.gemma_root)
    found.shard_dit([(), loras_of(lora(tiny))])
    return found


@pytest.fixture(scope="module")
def opened(workspace, tiny):
    """opened(compat): an engine, the same one for the same release."""
    made = {}

    def engine(compat: str | None = None) -> Engine:
        if compat not in made:
            options = RunOptions(compat=compat, spatial_upsampler_path=tiny.spatial_upsampler)
            made[compat] = Engine(workspace, Recorder(), options)
            made[compat].progress = False
        return made[compat]

    yield engine
    for one in made.values():
        one.close()


@pytest.fixture(scope="module")
def drawn(workspace):
    """The contexts of a prompt."""
    widths = workspace.transformer.video.inner, workspace.transformer.audio.inner
    return lambda prompt: contexts(prompt, widths)


@pytest.fixture(scope="module")
def wanted(tiny, drawn):
    return cache(lambda job, recipe=Given: given_oracle.generate(tiny, job, drawn, recipe))


@pytest.fixture(scope="module")
def generate(opened, drawn):
    @cache
    def generate(given: given_oracle.Job, compat: str | None = None) -> dict[str, torch.Tensor]:
        engine, job = opened(compat), told(given)
        for stage in job.stages:
            engine.workspace.compile_dit([job.bucket(stage)])
        engine._contexts[job.prompts] = [
            Contexts(*drawn(prompt), torch.ones(1, 1024), None) for prompt in job.prompts
        ]
        (result,) = engine.run([job], keep=True, decode=False)
        return result.tensors

    return generate


def told(job: given_oracle.Job) -> Job:
    """The oracle's job in our words."""
    more = {}
    if job.video is not None:
        guidance = Guidance(*(StreamGuidance(**parameters) for parameters in job.guidance))
        more |= dict(recipe="dev", guidance=guidance, num_inference_steps=job.steps)
        more |= dict(negative_prompt=job.negative_prompt)
    if job.sound:
        more["sound"] = SoundCondition(*job.sound)
    if job.retake:
        more["retake"] = Retake(*job.retake)
    if job.attention_mask:
        more["attention_mask"] = AttentionMask(*job.attention_mask)
    frames = {"film.mp4": 17, "short.mp4": 9}
    return Job(
        job.prompt,
        Size(job.height, job.width, job.num_frames, job.frame_rate, job.two_stage),
        job.seed,
        images=tuple(ImageCondition(*image) for image in job.images),
        references=tuple(
            ReferenceVideo(path, strength, frames[path.name], *job.scales)
            for path, strength in job.references
        ),
        images_as_guides=job.images_as_guides,
        skip_stage_2=job.skip_stage_2,
        loras=loras_of(job.loras),
        stage_1_loras=loras_of(job.stage_1_loras),
        stage_2_loras=loras_of(job.refining_loras),
        **more,
    )


def lora(tiny) -> tuple:
    return ((tiny.lora, 0.7),)


def loras_of(loras: tuple) -> tuple[Lora, ...]:
    return tuple(Lora(path, strength) for path, strength in loras)


def distances(got: dict, want: dict) -> dict[str, float]:
    """By the names of `want` that the run returns: what the first step predicts is not read."""
    return {name: rel(got[name], want[name]) for name in want if "step0" not in name}


def assert_equals_the_oracle(got: dict, want: dict, bound: float = FP32) -> None:
    found = distances(got, want)
    print({name: f"{distance:.1e}" for name, distance in found.items()})
    assert {"s1_video", "s1_audio"} <= found.keys()
    assert {name: distance for name, distance in found.items() if not distance <= bound} == {}


def assert_differs(got: dict, other: dict, *names: str) -> None:
    found = {name: rel(got[name], other[name]) for name in names}
    print({name: f"{distance:.1e}" for name, distance in found.items()})
    assert {name: distance for name, distance in found.items() if not distance > SHOWS} == {}


# --- audio to video -------------------------------------------------------------------------------


def a2v(files, **more) -> given_oracle.Job:
    """In two stages, with a first frame held in part; the sound is read longer than the video."""
    sizes = dict(height=64, width=128, num_frames=9, frame_rate=30.0, seed=5)
    sound = dict(sound=(files / "sound.wav", 0.21, 0.5))
    return given_oracle.Job(RAIN, **sizes | sound | dict(two_stage=True) | more)


def a2v_dev(files, tiny) -> given_oracle.Job:
    guided = dict(video=VIDEO, audio=(), negative_prompt=DUST, steps=3)
    return a2v(files, **guided, seed=8, refining_loras=lora(tiny), images=((tiny.image, 0, 0.6),))


class FrozenAtTheStepsSigma(Given):
    """ltx-pipelines 1.0.0."""

    @staticmethod
    def frozen_sigma(sigma):
        return sigma


class SoundBeginsAsNoise(Given):
    def given_sound(self, scale):
        return Stream(self.inputs["audio_latent"], 1.0, frozen=True)


class SoundIsNoisedAgainInStage2(Given):
    def given_sound(self, scale):
        first = isinstance(scale, float)
        return Stream(self.inputs["audio_latent"], 0.0 if first else scale, frozen=first)


class NoNoiseIsDrawnForSound(Given):
    def drawn(self, kind, before, own_tokens):
        if kind == "audio":
            self.noiser.generator.set_state(before)


class SoundReadsTheNegativePrompt(Given):
    def negative_contexts(self):
        return self.contexts(self.job.negative_prompt)


def test_a_video_for_a_sound_in_one_stage_equals_ltx_pipelines(generate, wanted, files):
    job = a2v(files, two_stage=False, height=64, width=64, sound=(files / "sound.wav", 0.4, None))
    got = generate(job)
    assert_equals_the_oracle(got, wanted(job))
    assert torch.equal(got["s1_audio"], got["audio_latent"])
    for wrong in (FrozenAtTheStepsSigma, SoundBeginsAsNoise):
        assert_differs(got, wanted(job, wrong), "s1_video")


def test_a_video_for_a_sound_in_two_stages_equals_ltx_pipelines(generate, wanted, files):
    job = a2v(files)
    got = generate(job)
    assert_equals_the_oracle(got, wanted(job))
    assert torch.equal(got["s2_audio"], got["audio_latent"])
    for wrong in (NoNoiseIsDrawnForSound, SoundIsNoisedAgainInStage2):
        assert_differs(got, wanted(job, wrong), "s2_video")
    assert_differs(got, wanted(replace(job, sound=(files / "sound.wav", 0.22, 0.5))), "s1_video")


def test_a_guided_video_for_a_sound_equals_ltx_pipelines(generate, wanted, files, tiny):
    job = a2v_dev(files, tiny)
    got = generate(job)
    assert_equals_the_oracle(got, wanted(job), GUIDED)
    assert_differs(got, wanted(job, SoundReadsTheNegativePrompt), "s1_video")
