"""What is given, against ltx-pipelines (test/given_oracle.py): more of the dev recipe, bfloat16.
Each wrong way to do it is seen: ltx-pipelines makes other latents that way."""

from dataclasses import replace

import given_runs
import pytest
import torch
from given_oracle import Given, KeptBeginsAsNoise, Stream
from given_runs import (
    AUDIO,
    DUST,
    GUIDED,
    VIDEO,
    Longer,
    a2v,
    a2v_dev,
    assert_equals_the_oracle,
    assert_longer_equals_the_oracle,
    distances,
    ic_lora,
    interpolated,
    longer,
    retake,
    scaled_ic_lora,
)
from helpers import one_thread, rel  # noqa: F401

files, workspace, opened = given_runs.files, given_runs.workspace, given_runs.opened  # fixtures
contexts, wanted, generate = given_runs.contexts, given_runs.wanted, given_runs.generate

# bf16 keeps 8 bits: as far from the truth as ltx-core's own bf16 run, twice that where rounding
# falls out differently, and a floor of one rounding (2**-8 = 0.004).
BF16_FACTOR, BF16_FLOOR = 2, 0.005
SHOWS = 1e-3  # what a wrong way changes at least
RETAKE_DEV = dict(video=VIDEO, audio=AUDIO, negative_prompt=DUST, steps=3)


# --- the dev recipe -------------------------------------------------------------------------------


def a2v_dev_in_one_stage(files, tiny):
    return replace(a2v_dev(files, tiny), two_stage=False, refining_loras=(), seed=9)


def test_a_guided_video_for_a_sound_in_one_stage_equals_ltx_pipelines(
    generate, wanted, files, tiny
):
    job = a2v_dev_in_one_stage(files, tiny)
    got = generate(job)
    assert_equals_the_oracle(got, wanted(job), GUIDED)
    assert torch.equal(got["s1_audio"], got["audio_latent"]) and "s2_video" not in got


def test_a_guided_retake_equals_ltx_pipelines(generate, wanted, files):
    job = retake(files, **RETAKE_DEV)
    assert_equals_the_oracle(generate(job), wanted(job), GUIDED)


def test_a_guided_video_made_longer_in_one_window_equals_a_retake_of_the_longer_clip(
    opened, contexts, wanted, files
):
    job = longer(files, **RETAKE_DEV)
    assert_longer_equals_the_oracle(opened(), contexts, job, wanted(job, Longer), GUIDED)


# --- bfloat16 -------------------------------------------------------------------------------------

IN_BF16 = {
    "a retake of both": lambda files, tiny: retake(files),
    "masked references": lambda files, tiny: replace(ic_lora(files, tiny), skip_stage_2=True),
}


@pytest.mark.parametrize("kind", IN_BF16)
def test_bfloat16_is_as_near_to_the_truth_as_ltx_pipelines_own(generate, wanted, files, tiny, kind):
    """Three ways: ltx-pipelines in fp32 is the truth; ours in bf16 may be twice as far from it as
    theirs is."""
    job = IN_BF16[kind](files, tiny)
    truth, theirs = wanted(job), wanted(job, dtype=torch.bfloat16)
    ours = generate(job, dtype="bfloat16")
    off, allowed = distances(ours, truth), distances(theirs, truth)
    print({name: f"{off[name]:.4f} {allowed[name]:.4f}" for name in off})
    assert {"s1_video", "s1_audio"} <= off.keys() and ours["s1_video"].dtype == torch.bfloat16
    assert {name for name in off if not off[name] <= BF16_FACTOR * allowed[name] + BF16_FLOOR} == (
        set()
    )


# --- wrong ways -----------------------------------------------------------------------------------


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


class NoNoiseIsDrawnForKeptVideo(Given):
    def drawn(self, kind, before, own_tokens):
        if kind == "video":
            self.noiser.generator.set_state(before)


class Region:
    """Tokens of which something of their time lies in the region, or the middle of it."""

    def __init__(self, start, end, seconds):
        self.start, self.end, self.seconds = start, end, seconds

    def apply_to(self, latent_state, latent_tools):
        state = latent_state.clone()
        first, last = self.seconds(state.positions[:, 0], latent_tools)
        inside = (last > self.start) & (first < self.end)
        state.denoise_mask.copy_(inside[..., None])
        return state


class RegionByMiddles(Given):
    def region(self, start, end):
        return Region(start, end, lambda bounds, _: [bounds.mean(-1)] * 2)


class RegionWithoutTheCausalShift(Given):
    def region(self, start, end):
        shift = 7 / self.job.frame_rate

        def seconds(bounds, tools):
            first, last = bounds.unbind(-1)
            if type(tools).__name__ == "AudioLatentTools":
                return first, last
            return torch.where(first > 0, first + shift, first), last + shift

        return Region(start, end, seconds)


class ScheduleOfTheClipsTokens(Given):
    def counted_latent(self):
        return self.inputs["video_latent"]


class PaddedWithEncodedSilence(Given):
    def padded(self, sound, frames):
        silence = self._latent_of_sound(torch.zeros(2, 48000), 48000)
        return torch.cat([sound, silence], dim=2)[:, :, :frames]


class LoraInStage2(Given):
    def loras_of_stage_2(self):
        return self.job.stage_1_loras


class NoNoiseIsDrawnForReferences(Given):
    def drawn(self, kind, before, own_tokens):
        if kind == "video":
            self.noiser.generator.set_state(before)
            torch.randn(1, own_tokens, 128, generator=self.noiser.generator)


class MaskIsIgnored(Given):
    def weights(self, mask, own_tokens):
        return torch.ones_like(mask)


class BiasIsTheWeightLessOne(Given):
    def weights(self, mask, own_tokens):
        return torch.where(mask > 0, (mask - 1).exp(), 0)


class MaskIsAThreshold(Given):
    def weights(self, mask, own_tokens):
        return (mask > 0.5).float()


class GroupsSeeEachOther(Given):
    def weights(self, mask, own_tokens):
        mask = mask.clone()
        mask[:, own_tokens:, own_tokens:] = 1
        return mask


class OneDirectionOnly(Given):
    def weights(self, mask, own_tokens):
        mask = mask.clone()
        mask[:, own_tokens:, :own_tokens] = 1
        return mask


class MaskOfTheReferencesSize(Given):
    def mask_size(self, height, width):
        return height // self.job.scales[0], width // self.job.scales[0]


class PlacesAreNotScaled(Given):
    def reference(self, item):
        item.downscale_factor = 1
        return super().reference(item)


class TimesAreNotScaled(Given):
    def reference(self, item):
        return item


class TimesAreNotShifted(Given):
    def reference(self, item):
        item.time_shift = 0
        return super().reference(item)


def first_stage(make):
    return lambda files, tiny: replace(make(files, tiny), skip_stage_2=True)


def full_strength(job):
    (film, strength), (short, _) = job.references
    return replace(job, references=((film, strength), (short, 1.0)))


def with_sound(files, tiny):
    return a2v(files)


def in_one_stage(files, tiny):
    return a2v(files, two_stage=False, sound=(files / "sound.wav", 0.4, None))


def with_images(files, tiny):
    return a2v(files, images=((tiny.image, 0, 0.8), (tiny.image, 8, 0.6)), seed=6)


def of_video(files, tiny):
    return retake(files, "video", seed=4)


def of_audio(files, tiny):
    return retake(files, "audio", seed=4)


def of_both(files, tiny):
    return retake(files)


VIDEO_1, AUDIO_1, VIDEO_2, AUDIO_2 = "s1_video", "s1_audio", "s2_video", "s2_audio"
# The job, a wrong way to do it, and the latents where it shows.
WRONG_WAYS = [
    (in_one_stage, FrozenAtTheStepsSigma, [VIDEO_1]),
    (in_one_stage, SoundBeginsAsNoise, [VIDEO_1]),
    (with_sound, NoNoiseIsDrawnForSound, [VIDEO_2]),
    (with_sound, SoundIsNoisedAgainInStage2, [VIDEO_2]),
    (a2v_dev, SoundReadsTheNegativePrompt, [VIDEO_1]),
    (a2v_dev_in_one_stage, SoundReadsTheNegativePrompt, [VIDEO_1]),
    (a2v_dev_in_one_stage, FrozenAtTheStepsSigma, [VIDEO_1]),
    (with_images, SoundBeginsAsNoise, [VIDEO_1, VIDEO_2]),
    (of_both, RegionByMiddles, [VIDEO_1, AUDIO_1]),
    (of_both, RegionWithoutTheCausalShift, [VIDEO_1, AUDIO_1]),
    (of_video, FrozenAtTheStepsSigma, [VIDEO_1]),
    (of_audio, FrozenAtTheStepsSigma, [AUDIO_1]),
    (of_video, KeptBeginsAsNoise, [VIDEO_1]),
    (of_audio, KeptBeginsAsNoise, [AUDIO_1]),
    (of_audio, NoNoiseIsDrawnForKeptVideo, [AUDIO_1]),
    (lambda files, tiny: retake(files, **RETAKE_DEV), ScheduleOfTheClipsTokens, [VIDEO_1]),
    (lambda files, tiny: retake(files, film="cut"), PaddedWithEncodedSilence, [VIDEO_1, AUDIO_1]),
    (ic_lora, LoraInStage2, [VIDEO_2, AUDIO_2]),
    (first_stage(ic_lora), NoNoiseIsDrawnForReferences, [AUDIO_1]),
    (first_stage(ic_lora), MaskIsIgnored, [VIDEO_1]),
    (first_stage(ic_lora), BiasIsTheWeightLessOne, [VIDEO_1]),
    (first_stage(ic_lora), MaskIsAThreshold, [VIDEO_1]),
    (first_stage(ic_lora), GroupsSeeEachOther, [VIDEO_1]),
    (first_stage(ic_lora), OneDirectionOnly, [VIDEO_1]),
    (scaled_ic_lora, MaskOfTheReferencesSize, [VIDEO_1]),
    (scaled_ic_lora, PlacesAreNotScaled, [VIDEO_1]),
    (scaled_ic_lora, TimesAreNotScaled, [VIDEO_1]),
    (scaled_ic_lora, TimesAreNotShifted, [VIDEO_1]),
]
# The job, what another one asks for, and the latents where it shows.
OTHER_JOBS = {
    "a sound from 10 ms later": (
        with_sound,
        lambda job: replace(job, sound=(job.sound[0], 0.22, 0.5)),
        [VIDEO_1],
    ),
    "no image": (with_images, lambda job: replace(job, images=()), [VIDEO_1, VIDEO_2]),
    "no keyframe": (
        with_images,
        lambda job: replace(job, images=job.images[:1]),
        [VIDEO_1, VIDEO_2],
    ),
    "no first frame": (
        with_images,
        lambda job: replace(job, images=job.images[1:]),
        [VIDEO_1, VIDEO_2],
    ),
    "no LoRA": (ic_lora, lambda job: replace(job, stage_1_loras=()), [VIDEO_1]),
    "a reference at full strength": (ic_lora, full_strength, [VIDEO_1]),
    "a mask at full strength": (
        ic_lora,
        lambda job: replace(job, attention_mask=(job.attention_mask[0], 1.0)),
        [VIDEO_1],
    ),
    "half the frames": (scaled_ic_lora, lambda job: replace(job, scales=(1, 2)), [VIDEO_1]),
    "half the size": (scaled_ic_lora, lambda job: replace(job, scales=(2, 1)), [VIDEO_1]),
    "images that replace frames": (
        lambda files, tiny: interpolated(tiny),
        lambda job: replace(job, images_as_guides=False),
        [VIDEO_1, AUDIO_1, VIDEO_2],
    ),
}


def assert_differs(right: dict, wrong: dict, names: list[str]) -> None:
    found = {name: rel(wrong[name], right[name]) for name in names}
    print({name: f"{distance:.1e}" for name, distance in found.items()})
    assert {name: distance for name, distance in found.items() if not distance > SHOWS} == {}


@pytest.mark.parametrize(
    ("make", "wrong", "names"), WRONG_WAYS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_wrong_way_is_seen(wanted, files, tiny, make, wrong, names):
    job = make(files, tiny)
    assert_differs(wanted(job), wanted(job, wrong), names)


@pytest.mark.parametrize("what", OTHER_JOBS)
def test_another_job_is_seen(wanted, files, tiny, what):
    make, change, names = OTHER_JOBS[what]
    job = make(files, tiny)
    assert_differs(wanted(job), wanted(change(job)), names)


def test_another_seed_of_a_longer_video_is_seen(wanted, files):
    job = longer(files)
    other = wanted(replace(job, seed=22), Longer)
    assert_differs(wanted(job, Longer), other, [VIDEO_1, AUDIO_1])
