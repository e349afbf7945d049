"""Generations that the scripts or an engine and the oracle make alike, and how far apart their
tensors may be. Imported as `generations`."""

from dataclasses import dataclass
from pathlib import Path

import oracle
import pytest
import torch
from conftest import Generated
from helpers import read_video, rel
from jobs import make_job, replace

from ltx_neuron.config.profiles import resolve
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import ImageCondition

# Sums in another order: ranks, exported graphs and fused reductions leave about 1e-6. A wrong
# constant leaves 1e-3 or more.
FP32 = 1e-5
# Frames are cut to whole numbers, so one of 1e-6 below a number and one above it are a count apart.
FRAME_COUNTS = 1
# From equal latents, that is from ours: frames by the same modules, sound by other sums, whose
# roundings layers of random weights answer with ten each.
DECODED = 5 * FP32
# From the oracle's latents. A vocoder of random weights answers a change of the latents with about
# 200 times as much (measured).
WAVEFORM = 250 * FP32
# bf16 keeps 8 bits: as far from the truth as ltx-core's own bf16 run, twice that where rounding
# falls out differently in every rank, and a floor of one rounding (2**-8 = 0.004) for tensors that
# only one operation separates from exact ones.
BF16_FACTOR, BF16_FLOOR = 2, 0.005

PUPPY = "a golden retriever puppy runs across a sunny green meadow"
LATENTS = ("s1_video", "s1_audio", "upsampled", "s2_video", "s2_audio")
CONTEXTS = ("hidden_states", "video_context", "audio_context")


PUPPY_JOB = oracle.Job(PUPPY, height=128, width=192, num_frames=17, frame_rate=24, seed=10)


@dataclass(frozen=True)
class Case:
    """A generation, told to the scripts and to the oracle."""

    job: oracle.Job = PUPPY_JOB
    tp: int = 4
    profile_set: tuple[str, ...] = ()

    def generate(self, scripts, assets):
        """Shard, compile and generate, as far as no earlier test did."""
        job, setup = self.job, scripts(assets, self.tp)
        size = {name: getattr(job, name) for name in ("height", "width", "num_frames", "frame_rate", "two_stage")}
        setup.prepare(**size, profile_set=self.profile_set)
        flags = dict(prompt=job.prompt, seed=job.seed, profile_set=self.profile_set)
        return setup.generate(**size, **flags, neuron_gemma=True)


@pytest.fixture(scope="session")
def text_to_video(scripts, tiny) -> Generated:
    """By the scripts at TP 4, from graphs for text alone, with the prompt encoded on the ranks."""
    return Case().generate(scripts, tiny)


def with_images(assets, *images) -> oracle.Job:
    return replace(PUPPY_JOB, images=tuple((assets.image, *image) for image in images))


def assert_has_what_was_asked_for(video: Path, job: oracle.Job) -> None:
    """Codecs, size, frame rate, and length of the MP4 file that a job made."""
    found = read_video(video)
    assert (found["video_codec"], found["audio_codec"]) == ("h264", "aac")
    size = found["width"], found["height"], found["frame_count"]
    assert size == (job.width, job.height, job.num_frames)
    rates = found["frame_rate"], found["channels"], found["sample_rate"]
    assert rates == (job.frame_rate, 2, 48000)
    seconds = job.num_frames / job.frame_rate
    assert found["video_seconds"] == pytest.approx(seconds, abs=1e-3)
    assert found["audio_seconds"] == pytest.approx(seconds, abs=1 / job.frame_rate)


def distances(got: dict, want: dict) -> dict[str, float]:
    """Relative L2 of every text tensor and latent; hidden states where there are tokens."""
    tokens = want["attention_mask"].bool().flatten()
    pairs = {name: (got[name], want[name]) for name in (*CONTEXTS, *LATENTS) if name in want}
    pairs["hidden_states"] = tuple(states[:, tokens] for states in pairs["hidden_states"])
    return {name: rel(*pair) for name, pair in pairs.items()}


def assert_equals_the_oracle(assets, got: dict, want: dict) -> None:
    """Every tensor of a float32 run."""
    assert got.keys() == want.keys()
    assert torch.equal(got["attention_mask"], want["attention_mask"])
    found, bounds = distances(got, want), {"decoded": DECODED, "waveform": WAVEFORM}
    found["decoded"] = rel(got["waveform"], decoded_by_the_oracle(assets, got))
    found["waveform"] = rel(got["waveform"], want["waveform"])
    print({name: f"{distance:.1e}" for name, distance in found.items()})
    assert {name: distance for name, distance in found.items() if not distance <= bounds.get(name, FP32)} == {}
    assert got["frames"].shape == want["frames"].shape
    assert (got["frames"].int() - want["frames"].int()).abs().max() <= FRAME_COUNTS


def decoded_by_the_oracle(assets, got: dict) -> torch.Tensor:
    """ltx-core's waveform of our latents, with the threads of the script that decoded ours: a
    random vocoder turns another number's last bits into 2e-4."""
    with oracle.threads(resolve("cpu").host_threads):
        return oracle.decode_audio(assets, got["s2_audio" if "s2_audio" in got else "s1_audio"])


def told(job: oracle.Job) -> Job:
    """The oracle's job in our words."""
    size = Size(job.height, job.width, job.num_frames, job.frame_rate, job.two_stage)
    images = tuple(ImageCondition(str(path), *how) for path, *how in job.images)
    return make_job(job.prompt, size, job.seed, images=images)
