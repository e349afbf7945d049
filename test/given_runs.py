"""Runs of what is given (a sound, a video to change, references, guides) by engines of one rank in
this process, with text contexts that are drawn, and their oracle's jobs (test/given_oracle.py).
Imported as `given_runs`."""

import zlib
from functools import cache, partial
from pathlib import Path

import given_oracle
import pytest
import torch
from engines import drawn, give_contexts, opened_engine, opened_workspace, sharing
from given_oracle import Given
from helpers import STREAMS, picture_frames, rel, tone, write_film, write_sound
from jobs import make_job, read_clip, read_voice, replace
from PIL import Image

from ltx_neuron.artifacts import build
from ltx_neuron.engine.run import Engine
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling import extension
from ltx_neuron.sampling.conditions import AttentionMask, ImageCondition, ReferenceVideo, Retake, SoundCondition
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.weights.lora import Lora

FP32, GUIDED = 1e-5, 3e-5  # guidance multiplies what sums in another order change

RAIN, DUST = "rain on a tin roof", "dust"
VIDEO = (("cfg_scale", 2.5), ("stg_scale", 0.8), ("stg_blocks", (1,)), ("modality_scale", 2.2), ("rescale_scale", 0.6))
AUDIO = (("cfg_scale", 5.0), ("stg_scale", 1.3), ("stg_blocks", (0,)), ("modality_scale", 1.7))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """film: 17 frames of 64 x 64 with sound; cut: with half of it; mute: with none; short: 9 of
    64 x 80 frames; held: a picture, and 17 frames of it; mask: 9 striped ones; speech: 20 with more
    sound than 17 have. And sound."""
    folder = tmp_path_factory.mktemp("media")
    film, seconds = picture_frames(17, 64, 64, 3), 17 / 20
    for name, sound in (("film", 1.0), ("cut", 0.5), ("mute", None)):
        sound = None if sound is None else tone(48000, seconds * sound)
        write_film(folder / f"{name}.mkv", film, 20, sound=sound)
    speech = picture_frames(20, 64, 64, 7)
    write_film(folder / "speech.mkv", speech, 20, sound=tone(48000, 1.0, 150.0))
    write_film(folder / "short.mkv", picture_frames(9, 64, 80, 40), 24)
    picture = picture_frames(1, 64, 80, 70)
    Image.fromarray(picture[0].numpy()).save(folder / "held.png")
    write_film(folder / "held.mkv", picture.expand(17, -1, -1, -1), 25, lossless=True)
    # At a third of its size every other stripe is seen, at a sixth each of them.
    bright = (torch.arange(192) % 6 - 2).abs() < 2
    grey = 250 - 20 * torch.arange(9)[:, None] - torch.arange(192)
    grey = grey.clamp(min=0)[..., None] * bright
    write_film(folder / "mask.mkv", grey[..., None].expand(-1, -1, -1, 3).byte().contiguous(), 24)
    stored = (tone(44100, 1.5, 330.0) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    write_sound(folder / "sound.wav", stored, 44100, "pcm_s16le", "stereo", "s16")
    return folder


@pytest.fixture(scope="module")
def workspace(tiny, artifacts):
    """workspace(dtype), of graphs of one block: they are compiled sooner."""
    return cache(lambda dtype="float32": opened_workspace(tiny, artifacts, 1, dtype))


@pytest.fixture(scope="module")
def opened(workspace, tiny):
    """opened(compat, dtype): an engine, on the same ranks for every release."""
    made = {}

    def engine(compat: str | None = None, dtype: str = "float32") -> Engine:
        if dtype not in made:
            opened = workspace(dtype)
            build.make(opened, opened.weight_sets("dit", [(), loras_of(lora(tiny))]))
            made[dtype] = opened_engine(opened, tiny)
        return sharing(made[dtype], compat=compat)

    yield engine
    for one in made.values():
        one.close()


@pytest.fixture(scope="module")
def contexts(workspace):
    """contexts(prompt, dtype): those of a prompt."""

    @cache
    def contexts(prompt: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [each.to(dtype) for each in drawn(workspace(), zlib.crc32(prompt.encode()))]

    return contexts


@pytest.fixture(scope="module")
def wanted(tiny, contexts):
    @cache
    def wanted(job, recipe=None, dtype=torch.float32) -> dict[str, torch.Tensor]:
        return given_oracle.generate(tiny, job, partial(contexts, dtype=dtype), recipe, dtype)

    return wanted


@pytest.fixture(scope="module")
def generate(opened, contexts):
    @cache
    def generate(given: given_oracle.Job, compat: str | None = None, dtype: str = "float32") -> dict[str, torch.Tensor]:
        return run(opened(compat, dtype), given, contexts)

    return generate


def run(engine: Engine, given: given_oracle.Job | Job, contexts) -> dict[str, torch.Tensor]:
    job = given if isinstance(given, Job) else told(given)
    build.make(engine.workspace, engine.workspace.dit_graphs(job.buckets))
    give_contexts(engine, job, partial(contexts, dtype=engine.workspace.dtype))
    (result,) = engine.run([job], keep=True, decode=False)
    return result.tensors


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
    size = Size(job.height, job.width, job.num_frames, job.frame_rate, job.two_stage)
    if job.dubbing:
        path, strength = job.dubbing
        more |= read_clip(path, loras_of(job.loras), reference_strength=strength)
    if job.voice:
        path, longest = job.voice
        given = dict(reference_audio_max_duration=longest)
        identity = dict(identity_guidance_scale=job.identity if job.video is not None else None)
        more["reference_sound"] = read_voice(path, **given, **identity)
    return make_job(
        job.prompt,
        size,
        job.seed,
        images=tuple(ImageCondition(*image) for image in job.images),
        references=tuple(reference(*given, job.scales) for given in job.references),
        images_as_guides=job.images_as_guides,
        skip_stage_2=job.skip_stage_2,
        sampler=job.sampler,
        sound_only=job.sound_only,
        loras=loras_of(job.loras),
        stage_1_loras=loras_of(job.stage_1_loras),
        stage_2_loras=loras_of(job.refining_loras),
        **more,
    )


def reference(path: Path, strength: float, scales: tuple[int, int]) -> ReferenceVideo:
    """Of a file of `files`; of held.mkv's frames, the picture that they show."""
    frames, still = {"short.mkv": 9}.get(path.name, 17), path.name == "held.mkv"
    path = path.with_suffix(".png") if still else path
    return ReferenceVideo(path, strength, frames, *scales, still)


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


# --- jobs -----------------------------------------------------------------------------------------


def a2v(files, **more) -> given_oracle.Job:
    """In two stages; the sound is read longer than the video."""
    sizes = dict(height=64, width=128, num_frames=9, frame_rate=30.0, seed=5)
    sound = dict(sound=(files / "sound.wav", 0.21, 0.5))
    return given_oracle.Job(RAIN, **sizes | sound | dict(two_stage=True) | more)


def a2v_dev(files, tiny) -> given_oracle.Job:
    guided = dict(video=VIDEO, audio=(), negative_prompt=DUST, steps=3)
    return a2v(files, **guided, seed=8, refining_loras=lora(tiny))


def retake(files, regenerate="both", film="film", **more) -> given_oracle.Job:
    """Of 17 frames at 20 a second, in three latent frames: a time in the second one."""
    sizes = dict(height=64, width=64, num_frames=17, frame_rate=20.0, seed=21)
    retake = (files / f"{film}.mkv", 0.12, 0.2, regenerate)
    return given_oracle.Job(RAIN, **sizes | dict(retake=retake) | more)


def ic_lora(files, tiny, **more) -> given_oracle.Job:
    """Two references, one shorter than the clip, behind an image as a guide, all masked."""
    sizes = dict(height=128, width=128, num_frames=17, frame_rate=25.0, seed=33)
    given = dict(
        images=((tiny.image, 8, 0.5),),
        references=((files / "film.mkv", 1.0), (files / "short.mkv", 0.6)),
        attention_mask=(files / "mask.mkv", 0.8),
        stage_1_loras=lora(tiny),
        two_stage=True,
    )
    return given_oracle.Job(RAIN, **sizes | given | more)


def scaled_ic_lora(files, tiny) -> given_oracle.Job:
    """Of half the size and every other frame, on the first stage alone."""
    return ic_lora(files, tiny, scales=(2, 2), images=(), skip_stage_2=True)


def interpolated(tiny) -> given_oracle.Job:
    sizes = dict(height=64, width=128, num_frames=9, frame_rate=30.0, seed=12, two_stage=True)
    guided = dict(video=VIDEO, audio=AUDIO, negative_prompt=DUST, steps=3)
    images = dict(images=((tiny.image, 0, 0.9), (tiny.image, 8, 0.5)), images_as_guides=True)
    return given_oracle.Job(RAIN, **sizes, **guided, **images, refining_loras=lora(tiny))


def dubbed(files, tiny, **more) -> given_oracle.Job:
    """17 of a clip's 20 frames, with all of its sound, behind an image."""
    sizes = dict(height=64, width=128, num_frames=17, frame_rate=20.0, seed=41, two_stage=True)
    given = dict(dubbing=(files / "speech.mkv", 0.8), images=((tiny.image, 0, 1.0),))
    return given_oracle.Job(RAIN, **sizes | given | dict(loras=lora(tiny)) | more)


def voiced(files, tiny, **more) -> given_oracle.Job:
    """Guided, in two stages, behind an image; the voice is read for longer than the clip."""
    sizes = dict(height=64, width=128, num_frames=9, frame_rate=30.0, seed=52, two_stage=True)
    guided = dict(video=VIDEO, audio=(*AUDIO, ("rescale_scale", 0.5)), negative_prompt=DUST, steps=3)
    voice = dict(voice=(files / "sound.wav", 0.63), identity=2.5, images=((tiny.image, 0, 0.9),))
    loras = dict(stage_1_loras=lora(tiny), refining_loras=lora(tiny))
    return given_oracle.Job(RAIN, **sizes | guided | voice | loras | more)


def sound_alone(files, tiny) -> given_oracle.Job:
    """Of a length that no video has."""
    length = dict(height=0, width=0, num_frames=30, frame_rate=30.0, seed=61, sound_only=True)
    audio = (*AUDIO[:-1], ("rescale_scale", 0.7))
    guided = dict(video=(), audio=audio, negative_prompt=DUST, steps=3)
    return given_oracle.Job(RAIN, **length, **guided)


def longer(files, **more) -> given_oracle.Job:
    """In one window: a retake of the longer clip (Longer)."""
    job = retake(files, num_frames=25, **more)
    return replace(job, retake=(files / "film.mkv", 17 / 20, 25 / 20, "both"))


class Longer(Given):
    """A retake of the clip that one window sees all of: what is known, and then zeros."""

    def _encoded_inputs(self):
        job, seconds = self.job, self.job.retake[1]
        self.job = short = replace(job, num_frames=round(seconds * job.frame_rate))
        known, self.job = super()._encoded_inputs(), job
        whole = extension.Extension(
            job.num_frames / job.frame_rate - seconds, short.num_frames, job.num_frames, job.frame_rate
        )
        video = torch.zeros(1, 128, whole.video_latents, *known["video_latent"].shape[3:])
        audio = torch.zeros(1, 8, whole.audio_latents, 16)
        video[:, :, whole.known_video] = known["video_latent"]
        audio[:, :, whole.known_audio] = known["audio_latent"][:, :, whole.known_audio]
        return {"video_latent": video, "audio_latent": audio}

    def padded(self, sound, frames):
        return sound


def assert_longer_equals_the_oracle(engine, contexts, job, want: dict, bound: float) -> None:
    asked = replace(told(job), retake=Retake(job.retake[0], extend=8 / 20, source_frames=17))
    assert len(asked.stages) == 1 and asked.stages[0].window
    build.make(engine.workspace, engine.workspace.dit_graphs(asked.buckets))
    give_contexts(engine, asked, contexts)
    (result,) = engine.run([asked], keep=True, decode=False)
    assert_equals_the_oracle(result.tensors, {f"s1_{s}": want[f"s1_{s}"] for s in STREAMS}, bound)


def assert_tail_is_cut(engine: Engine, job: Job, contexts=None) -> None:
    """The last 8 frames of a job as a tail: the others, their sound and all latents stay, bit for
    bit."""
    build.make(engine.workspace, engine.workspace.dit_graphs(job.buckets))
    if contexts:
        give_contexts(engine, job, contexts)
    jobs = [job, replace(job, tail_frames=8)]
    engine.on_step_end = None  # another test's reads that one's graphs
    whole, kept = engine.run(jobs, keep=True)
    assert {*whole.tensors} == {*kept.tensors}
    for name, tensor in whole.tensors.items():
        if name not in ("frames", "waveform"):
            assert torch.equal(kept.tensors[name], tensor), name
    cut = 8 * job.output_frame_rate / job.size.frame_rate
    assert len(whole.frames) - len(kept.frames) == cut
    assert torch.equal(kept.frames, whole.frames[: len(kept.frames)])
    samples = round(len(kept.frames) / job.output_frame_rate * kept.sample_rate)
    assert kept.waveform.shape == (2, samples)
    assert torch.equal(kept.waveform, whole.waveform[:, :samples])
