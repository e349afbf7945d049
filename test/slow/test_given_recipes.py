"""What is given, against ltx-pipelines (test/given_oracle.py): more of the dev recipe, bfloat16.
Each wrong way to do it is seen: ltx-pipelines makes other latents that way."""

import given_oracle
import given_runs
import pytest
import torch
from engines import give_contexts, opened_engine, opened_workspace
from given_oracle import Given, KeptBeginsAsNoise, Stream, TwoByTwo, VoiceReference
from given_runs import (
    AUDIO,
    DUST,
    FP32,
    GUIDED,
    RAIN,
    VIDEO,
    Longer,
    a2v,
    a2v_dev,
    assert_equals_the_oracle,
    assert_longer_equals_the_oracle,
    assert_tail_is_cut,
    distances,
    dubbed,
    ic_lora,
    interpolated,
    longer,
    lora,
    loras_of,
    retake,
    run,
    scaled_ic_lora,
    sound_alone,
    told,
    voiced,
)
from helpers import one_thread, rel  # noqa: F401
from jobs import replace
from nag_oracle import Nag, guided

from ltx_neuron.artifacts import build
from ltx_neuron.engine.resume import restore_state, save_state
from ltx_neuron.models.programs import may_divide

files, workspace, opened = given_runs.files, given_runs.workspace, given_runs.opened  # fixtures
contexts, wanted, generate = given_runs.contexts, given_runs.wanted, given_runs.generate

# bf16 keeps 8 bits: as far from the truth as ltx-core's own bf16 run, twice that where rounding
# falls out differently, and a floor of one rounding (2**-8 = 0.004).
BF16_FACTOR, BF16_FLOOR = 2, 0.005
SHOWS = 1e-3  # what a wrong way changes at least
TILED = 1e-6
DEV = dict(video=VIDEO, audio=AUDIO, negative_prompt=DUST, steps=3)


# --- the dev recipe -------------------------------------------------------------------------------


def a2v_dev_in_one_stage(files, tiny):
    return replace(a2v_dev(files, tiny), two_stage=False, refining_loras=(), seed=9)


@pytest.mark.parametrize("two_stage", [False, True])
def test_a_guided_video_for_a_sound_and_images_equals_ltx_pipelines(generate, wanted, files, tiny, two_stage):
    """A first frame held in part, and a keyframe."""
    job = a2v_dev(files, tiny) if two_stage else a2v_dev_in_one_stage(files, tiny)
    job = replace(job, images=((tiny.image, 0, 0.8), (tiny.image, 8, 0.6)))
    got = generate(job)
    assert_equals_the_oracle(got, wanted(job), GUIDED)
    assert torch.equal(got["s1_audio"], got["audio_latent"]) and ("s2_video" in got) == two_stage


def test_what_a_tail_leaves_is_the_beginning_of_the_longer_video(opened, contexts, files, tiny):
    job = replace(a2v_dev(files, tiny), sound=(files / "sound.wav", 0.21, None), num_frames=17)
    assert_tail_is_cut(opened(), told(job), contexts)


def test_a_guided_retake_equals_ltx_pipelines(generate, wanted, files):
    job = retake(files, **DEV)
    assert_equals_the_oracle(generate(job), wanted(job), GUIDED)


def test_a_guided_video_made_longer_in_one_window_equals_a_retake_of_the_longer_clip(opened, contexts, wanted, files):
    job = longer(files, **DEV)
    assert_longer_equals_the_oracle(opened(), contexts, job, wanted(job, Longer), GUIDED)


def in_one_stage(files, tiny, **more):
    return ic_lora(files, tiny, two_stage=False, **more)


def test_guided_references_in_one_stage_equal_ltx_pipelines(generate, wanted, files, tiny):
    job = in_one_stage(files, tiny, **DEV)
    assert_equals_the_oracle(generate(job), wanted(job), GUIDED)


def test_a_still_in_the_place_of_a_reference_video_equals_ltx_pipelines(generate, wanted, files, tiny):
    """The oracle reads a video that shows nothing but the picture."""
    still = ((files / "held.mkv", 1.0),)
    job = in_one_stage(files, tiny, references=still, attention_mask=None)
    assert_equals_the_oracle(generate(job), wanted(job))


# --- tiles ---------------------------------------------------------------------------------------


def test_a_stage_in_two_by_two_tiles_equals_the_sum_of_what_ltx_core_predicts_of_each(
    opened, contexts, wanted, files, tiny
):
    """Of 4 x 4 cells, of which neighbours share two, with masked references behind a guide."""
    job = ic_lora(files, tiny, height=256, width=256, num_frames=9, skip_stage_2=True)
    tiled = replace(told(job), tile=True, tile_height=96, tile_width=96)
    assert len(tiled.stage_tiles(tiled.stages[0])) == 4
    assert_equals_the_oracle(run(opened(), tiled, contexts), wanted(job, TwoByTwo), TILED)


# --- normalized attention guidance ----------------------------------------------------------------

WITH_NAG = {
    "a sound": lambda files, tiny: a2v(files, two_stage=False),
    "a retake of both": lambda files, tiny: retake(files),
    "masked references": lambda files, tiny: ic_lora(files, tiny, skip_stage_2=True),
}


@pytest.mark.parametrize("kind", WITH_NAG)
def test_a_negative_prompt_of_the_distilled_recipe_equals_the_papers_equations(opened, contexts, files, tiny, kind):
    job, engine = WITH_NAG[kind](files, tiny), opened()
    video, audio = contexts(DUST)
    if job.sound:  # it is not generated, so nothing guides it
        audio = contexts(RAIN)[1]
    with guided(Nag(11.0), video, audio):
        want = given_oracle.generate(tiny, job, contexts)
    asked = replace(told(job), nag_scale=11.0, negative_prompt=DUST)
    build.make(engine.workspace, engine.workspace.dit_graphs(asked.buckets))
    give_contexts(engine, asked, contexts)
    (result,) = engine.run([asked], keep=True, decode=False)
    assert_equals_the_oracle(result.tensors, want)


# --- bfloat16 -------------------------------------------------------------------------------------


IN_BF16 = {
    "a retake of both": lambda files, tiny: retake(files),
    "masked references, guided": lambda files, tiny: in_one_stage(files, tiny, **DEV),
    "a sound and images, guided": lambda files, tiny: replace(
        a2v_dev_in_one_stage(files, tiny), images=((tiny.image, 0, 0.8), (tiny.image, 8, 0.6))
    ),
    "dubbing": dubbed,
    "a voice, guided": voiced,
    "sound alone": sound_alone,
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
    streams = {"s1_audio"} if job.sound_only else {"s1_video", "s1_audio"}
    assert streams <= off.keys() and ours["s1_audio"].dtype == torch.bfloat16
    assert {name for name in off if not off[name] <= BF16_FACTOR * allowed[name] + BF16_FLOOR} == (set())


# --- dubbing --------------------------------------------------------------------------------------


def test_a_dubbed_clip_equals_ltx_pipelines(generate, wanted, files, tiny):
    job = dubbed(files, tiny)
    got, want = generate(job), wanted(job)
    assert got["audio_reference"].shape[2] > got["s1_audio"].shape[2] == 21
    assert_equals_the_oracle(got, want)
    # Stage 2 keeps stage 1's sound, so what is heard needs no tensor of its own.
    assert torch.equal(got["s2_audio"], got["s1_audio"])


def test_a_dubbed_clip_resumed_after_stage_1_ends_with_the_same_bits(generate, opened, contexts, files, tiny, tmp_path):
    given = dubbed(files, tiny)
    want, engine, job = generate(given), opened(), told(given)
    state = tmp_path / "state.safetensors"
    engine.on_stage_end = lambda run: state.exists() or save_state(state, run, {})
    give_contexts(engine, job, contexts)
    [*engine.run([job], keep=True, decode=False)]

    def resume(job):
        run = restore_state(state, job, {}, torch.float32)
        assert [stage.name for stage in run.stages_left] == ["stage_2"]
        return run

    (result,) = engine.run([job], keep=True, decode=False, resume=resume)
    for name in ("s1_audio", "s2_reference_latent", "s2_video", "s2_audio"):
        assert torch.equal(result.tensors[name], want[name])


# --- a reference voice ----------------------------------------------------------------------------


def test_a_guided_voice_equals_id_lora_on_the_later_core(generate, wanted, files, tiny):
    job = voiced(files, tiny)
    got, want = generate(job), wanted(job)
    assert got["audio_reference"].shape[2] == 16 > got["s1_audio"].shape[2] == 8
    assert_equals_the_oracle(got, want, GUIDED)
    assert torch.equal(got["s2_audio"], got["s1_audio"])


def test_a_voice_without_guidance_and_one_without_the_fifth_pass_do_too(generate, wanted, files, tiny):
    distilled = voiced(files, tiny, video=None, audio=(), identity=0.0, refining_loras=())
    for job, bound in ((distilled, FP32), (voiced(files, tiny, identity=0.0), GUIDED)):
        assert_equals_the_oracle(generate(job), wanted(job), bound)


def test_a_voice_in_hq_equals_id_lora_with_res_2s_in_both_stages(generate, wanted, files, tiny):
    job = voiced(files, tiny, sampler="res_2s")
    got = generate(job)
    assert_equals_the_oracle(got, wanted(job), GUIDED)
    assert torch.equal(got["s2_audio"], got["s1_audio"])


def test_sound_alone_equals_ltx_pipelines(generate, wanted, files, tiny):
    job = sound_alone(files, tiny)
    got = generate(job)
    assert "s1_video" not in got and rel(got["s1_audio"], wanted(job)["s1_audio"]) <= GUIDED


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


class VoiceFromZero(Given):
    """Where trainers' audio-to-audio LoRAs have it."""

    def dubbed(self, sound):
        return reheld(super().dubbed(sound), gap=None)


class VoiceWithoutAGap(Given):
    def dubbed(self, sound):
        return reheld(super().dubbed(sound), gap=0.0)


class VoiceIsPartlyFree(Given):
    def dubbed(self, sound):
        return reheld(super().dubbed(sound), mask=0.05)


def reheld(stream: Stream, **changed) -> Stream:
    return stream._replace(items=tuple(item._replace(**changed) for item in stream.items))


class VoiceIsCutToTheClip(Given):
    def seconds_of_voice(self):
        return self.job.num_frames / self.job.frame_rate


class VoiceDrawsNoNoise(Given):
    def drawn(self, kind, before, own_tokens):
        if kind == "audio":
            self.noiser.generator.set_state(before)
            torch.randn(1, own_tokens, 128, generator=self.noiser.generator)


class TheFilesVoiceInStage2(Given):
    def dubbed(self, sound):
        stream = super().dubbed(sound)
        voice = VoiceReference(self.inputs["audio_reference"])
        return stream if sound is None else stream._replace(items=(voice,))


class NoVoiceInStage2(Given):
    def dubbed(self, sound):
        stream = super().dubbed(sound)
        return stream if sound is None else stream._replace(items=())


class NoPictureInStage2(Given):
    def references_of(self, first):
        return super().references_of(first) if first else ()


class SoundIsNotFrozen(Given):
    def dubbed(self, sound):
        stream = super().dubbed(sound)
        return stream if sound is None else stream._replace(noise_scale=0.909375, frozen=False)


class IdentityOfThePicturesToo(Given):
    """ComfyUI."""

    def identified(self, kind, scale):
        return scale


class NoVoiceInTheNegativePass(Given):
    def negative(self, uncond, without):
        return without


class RescaledByTheClipAlone(Given):
    def rescaled(self, calculate, own, cond, *others):
        clip = calculate(cond[:, :own], *(other[:, :own] for other in others))
        return torch.cat([clip, cond[:, own:]], dim=1)


class LoraInStage1Alone(Given):
    def loras_of_stage_2(self):
        return ()


GUIDED_AUDIO = "a sound, guided, in one stage"
JOBS = {
    "a sound": lambda files, tiny: a2v(files),
    "a sound in one stage": lambda files, tiny: a2v(files, two_stage=False),
    "a sound and images": lambda files, tiny: a2v(files, images=((tiny.image, 0, 0.8), (tiny.image, 8, 0.6)), seed=6),
    "a sound, guided": a2v_dev,
    GUIDED_AUDIO: a2v_dev_in_one_stage,
    "both": lambda files, tiny: retake(files),
    "video": lambda files, tiny: retake(files, "video", seed=4),
    "audio": lambda files, tiny: retake(files, "audio", seed=4),
    "both, guided": lambda files, tiny: retake(files, **DEV),
    "both, cut": lambda files, tiny: retake(files, film="cut"),
    "masked": lambda files, tiny: ic_lora(files, tiny, skip_stage_2=True),
    "masked in two stages": ic_lora,
    "scaled": scaled_ic_lora,
    "guides": lambda files, tiny: interpolated(tiny),
    "dubbed": dubbed,
    "voiced": voiced,
}
VIDEO_1, AUDIO_1, VIDEO_2, AUDIO_2 = "s1_video", "s1_audio", "s2_video", "s2_audio"
# The job, a wrong way to do it or what another one asks for, and the latents where it shows.
OTHERWISE = [
    ("a sound in one stage", FrozenAtTheStepsSigma, [VIDEO_1]),
    ("a sound in one stage", SoundBeginsAsNoise, [VIDEO_1]),
    ("a sound", NoNoiseIsDrawnForSound, [VIDEO_2]),
    ("a sound", SoundIsNoisedAgainInStage2, [VIDEO_2]),
    ("a sound", lambda job: dict(sound=(job.sound[0], 0.22, 0.5)), [VIDEO_1]),
    ("a sound, guided", SoundReadsTheNegativePrompt, [VIDEO_1]),
    (GUIDED_AUDIO, SoundReadsTheNegativePrompt, [VIDEO_1]),
    (GUIDED_AUDIO, FrozenAtTheStepsSigma, [VIDEO_1]),
    ("a sound and images", SoundBeginsAsNoise, [VIDEO_1, VIDEO_2]),
    ("a sound and images", lambda job: dict(images=()), [VIDEO_1, VIDEO_2]),
    ("a sound and images", lambda job: dict(images=job.images[:1]), [VIDEO_1, VIDEO_2]),
    ("a sound and images", lambda job: dict(images=job.images[1:]), [VIDEO_1, VIDEO_2]),
    ("both", RegionByMiddles, [VIDEO_1, AUDIO_1]),
    ("both", RegionWithoutTheCausalShift, [VIDEO_1, AUDIO_1]),
    ("video", FrozenAtTheStepsSigma, [VIDEO_1]),
    ("video", KeptBeginsAsNoise, [VIDEO_1]),
    ("audio", FrozenAtTheStepsSigma, [AUDIO_1]),
    ("audio", KeptBeginsAsNoise, [AUDIO_1]),
    ("audio", NoNoiseIsDrawnForKeptVideo, [AUDIO_1]),
    ("both, guided", ScheduleOfTheClipsTokens, [VIDEO_1]),
    ("both, cut", PaddedWithEncodedSilence, [VIDEO_1, AUDIO_1]),
    ("masked in two stages", LoraInStage2, [VIDEO_2, AUDIO_2]),
    ("masked", lambda job: dict(stage_1_loras=()), [VIDEO_1]),
    ("masked", lambda job: dict(references=full_strength(job.references)), [VIDEO_1]),
    ("masked", lambda job: dict(attention_mask=(job.attention_mask[0], 1.0)), [VIDEO_1]),
    ("masked", NoNoiseIsDrawnForReferences, [AUDIO_1]),
    ("masked", MaskIsIgnored, [VIDEO_1]),
    ("masked", BiasIsTheWeightLessOne, [VIDEO_1]),
    ("masked", MaskIsAThreshold, [VIDEO_1]),
    ("masked", GroupsSeeEachOther, [VIDEO_1]),
    ("masked", OneDirectionOnly, [VIDEO_1]),
    ("scaled", MaskOfTheReferencesSize, [VIDEO_1]),
    ("scaled", PlacesAreNotScaled, [VIDEO_1]),
    ("scaled", TimesAreNotScaled, [VIDEO_1]),
    ("scaled", TimesAreNotShifted, [VIDEO_1]),
    ("scaled", lambda job: dict(scales=(1, 2)), [VIDEO_1]),
    ("scaled", lambda job: dict(scales=(2, 1)), [VIDEO_1]),
    ("guides", lambda job: dict(images_as_guides=False), [VIDEO_1, AUDIO_1, VIDEO_2]),
    ("dubbed", VoiceFromZero, [AUDIO_1]),
    ("dubbed", VoiceWithoutAGap, [AUDIO_1]),
    ("dubbed", VoiceIsPartlyFree, [AUDIO_1]),
    ("dubbed", VoiceIsCutToTheClip, [AUDIO_1, VIDEO_2]),
    ("dubbed", VoiceDrawsNoNoise, [VIDEO_2]),
    ("dubbed", TheFilesVoiceInStage2, [VIDEO_2]),
    ("dubbed", NoVoiceInStage2, [VIDEO_2]),
    ("dubbed", NoPictureInStage2, [VIDEO_2]),
    ("dubbed", SoundIsNotFrozen, [VIDEO_2]),
    ("dubbed", LoraInStage1Alone, [VIDEO_2]),
    ("dubbed", lambda job: dict(dubbing=(job.dubbing[0], 1.0)), [VIDEO_1, VIDEO_2]),
    ("dubbed", lambda job: dict(frame_rate=19.0), [VIDEO_1]),
    ("voiced", VoiceFromZero, [AUDIO_1]),
    ("voiced", VoiceWithoutAGap, [AUDIO_1]),
    ("voiced", VoiceIsPartlyFree, [AUDIO_1]),
    ("voiced", VoiceDrawsNoNoise, [VIDEO_2]),
    ("voiced", SoundIsNotFrozen, [VIDEO_2]),
    ("voiced", IdentityOfThePicturesToo, [VIDEO_1]),
    ("voiced", NoVoiceInTheNegativePass, [AUDIO_1]),
    ("voiced", RescaledByTheClipAlone, [AUDIO_1]),
    ("voiced", lambda job: dict(identity=0.0), [AUDIO_1]),
    ("voiced", lambda job: dict(voice=(job.voice[0], 0.5)), [AUDIO_1, VIDEO_2]),
]


def full_strength(references: tuple) -> tuple:
    return tuple((path, 1.0) for path, _ in references)


# References with a mask; a voice, guided.
DIVIDED = "masked in two stages", "voiced"


# tp, then the profile's settings.
SHARED = {"sequence parallelism": (2, "sequence_parallel=true"), "context parallelism": (1, "context_parallel=4")}


@pytest.fixture(scope="module", params=SHARED.values(), ids=SHARED)
def divided(request, tiny, artifacts):
    tp, settings = request.param
    workspace = opened_workspace(tiny, artifacts, 1, tp=tp, settings=settings.split())
    build.make(workspace, workspace.weight_sets("dit", [(), loras_of(lora(tiny))]))
    with opened_engine(workspace, tiny) as engine:
        yield engine


@pytest.mark.parametrize("what", DIVIDED)
def test_ranks_that_share_the_videos_tokens_equal_ltx_pipelines(divided, contexts, wanted, files, tiny, what):
    job = JOBS[what](files, tiny)
    if divided.workspace.profile.context_parallel == 1:  # which pads no tokens
        assert all(may_divide(bucket, 2) for bucket in told(job).buckets)
    assert_equals_the_oracle(run(divided, job, contexts), wanted(job), GUIDED if job.video else FP32)


@pytest.mark.parametrize(("what", "change", "names"), OTHERWISE)
def test_what_is_done_otherwise_is_seen(wanted, files, tiny, what, change, names):
    job = JOBS[what](files, tiny)
    is_recipe = isinstance(change, type)
    wrong = wanted(job, change) if is_recipe else wanted(replace(job, **change(job)))
    found = {name: rel(wrong[name], wanted(job)[name]) for name in names}
    print({name: f"{distance:.1e}" for name, distance in found.items()})
    assert {name: distance for name, distance in found.items() if not distance > SHOWS} == {}


def test_another_seed_of_a_longer_video_is_seen(wanted, files):
    job = longer(files)
    right, wrong = wanted(job, Longer), wanted(replace(job, seed=22), Longer)
    assert all(rel(wrong[name], right[name]) > SHOWS for name in (VIDEO_1, AUDIO_1))
