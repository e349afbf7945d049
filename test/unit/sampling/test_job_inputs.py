"""What a job is given besides its prompt: which graphs it needs, which flags ask for it, and what
is refused before anything loads."""

import argparse
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import tone, write_film, write_sound
from jobs import make_job, replace
from safetensors.torch import save_file
from typed import parsed, run, said

from ltx_neuron import flags
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.batch import read_lines
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.engine.outputs import run_identity
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.host import encode_inputs
from ltx_neuron.host.media import read_sound
from ltx_neuron.host.video import write_video
from ltx_neuron.invocation import command
from ltx_neuron.job import Job, Size
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ImageCondition,
    ReferenceAudio,
    ReferenceVideo,
    Retake,
    SoundCondition,
)
from ltx_neuron.sampling.guidance import DEFAULTS, NEGATIVE_PROMPT, Guidance, StreamGuidance
from ltx_neuron.sampling.shapes import sound_latent_frames
from ltx_neuron.service.jobs import job_of
from ltx_neuron.weights.lora import Lora, are_silent, reference_scale

ONE, TWO = Size(128, 192, 17), Size(128, 192, 17, two_stage=True)
FILE = __file__  # checks of a job look no deeper than whether a file can be read
AUDIO = 18  # latents of 17 frames at 24 fps
SOUND, RETAKE = SoundCondition(FILE), Retake(FILE, 0.2, 0.5)
REFERENCE = ReferenceVideo(FILE, 1.0, num_frames=25)
LORAS = (Lora(Path(FILE)),)
REFERRING = dict(size=TWO, references=(REFERENCE,), stage_1_loras=LORAS)
DEV = dict(size=TWO, recipe="dev")
VOICE = 25  # latents of its sound
DUBBED = dict(dubbing=REFERENCE, reference_sound=ReferenceAudio(FILE, VOICE), loras=LORAS)


def job(size=ONE, **given) -> Job:
    return make_job("rain", size, **given)


# --- buckets --------------------------------------------------------------------------------------


def test_a_sound_needs_the_graphs_of_text_and_images_alone():
    for size, recipe in ((ONE, "distilled"), (TWO, "distilled"), (ONE, "dev"), (TWO, "dev")):
        for images in ((), (ImageCondition(FILE),)):
            plain = job(size, images=images, recipe=recipe)
            given = replace(plain, sound=SOUND)
            assert given.buckets == plain.buckets
            assert given.buckets_to_compile == plain.buckets_to_compile


@pytest.mark.parametrize("regenerate", ["both", "video", "audio"])
def test_every_retake_has_two_timesteps_of_both_streams(regenerate):
    given = job(retake=replace(RETAKE, regenerate=regenerate))
    assert given.buckets == given.buckets_to_compile == [Bucket(72, AUDIO, 2, 8, False, 2)]
    guided = replace(given, recipe="dev")
    assert guided.buckets == [Bucket(72, AUDIO, 2, 64, True, 2)]


def test_an_images_tokens_are_appended_unless_it_is_at_frame_0():
    images = ImageCondition(FILE), ImageCondition(FILE, 16, 0.6)
    first, second = job(TWO, images=images).buckets
    assert (first.video_tokens, second.video_tokens) == (18 + 6, 72 + 24)
    assert first.timesteps == second.timesteps == 3


def test_as_a_guide_an_image_at_frame_0_is_appended_in_both_stages():
    images = ImageCondition(FILE), ImageCondition(FILE, 16, 0.6)
    first, second = job(**DEV, images=images, images_as_guides=True).buckets
    assert (first.video_tokens, second.video_tokens) == (18 + 2 * 6, 72 + 2 * 24)
    assert first.timesteps == second.timesteps == 3 and first.guided and not second.guided


def test_references_are_appended_in_stage_1_alone():
    short = ReferenceVideo(FILE, 0.5, num_frames=9)  # 2 latent frames
    first, second = job(TWO, references=(REFERENCE, short), stage_1_loras=LORAS).buckets
    assert first == Bucket(18 + 18 + 12, AUDIO, 3, 8)  # kept, half kept and free
    assert second == Bucket(72, AUDIO, 1, 8)


def test_in_one_stage_and_in_the_dev_recipe_the_references_are_in_the_guided_stage_alone():
    (only,) = job(ONE, references=(REFERENCE,), stage_1_loras=LORAS).buckets
    assert only == Bucket(72 + 72, AUDIO, 2, 8)
    mask = AttentionMask(FILE, 0.6)
    first, second = job(**REFERRING | DEV, attention_mask=mask).buckets
    assert first == Bucket(18 + 18, AUDIO, 2, 64, guided=True, biased=True)
    assert second == Bucket(72, AUDIO, 1, 8)


def test_a_scaled_reference_has_fewer_tokens():
    size = Size(128, 256, 17, two_stage=True)  # stage 1: 2 x 4 latents, 3 frames
    half = replace(REFERENCE, space_scale=2)
    slow = replace(REFERENCE, time_scale=2)  # frames 0, 1, 3, .. 15: 9
    tokens = {
        reference: job(size, references=(reference,), stage_1_loras=LORAS).buckets[0].video_tokens
        for reference in (REFERENCE, half, slow)
    }
    assert tokens == {REFERENCE: 24 + 24, half: 24 + 3 * 2, slow: 24 + 2 * 8}


def test_only_stage_1_of_a_masked_reference_has_a_bias():
    masked = job(**REFERRING, attention_mask=AttentionMask(FILE, 0.6))
    assert [bucket.biased for bucket in masked.buckets] == [True, False]
    assert masked.buckets[0].name == "v36-a18-t2-s8-biased"


def test_a_negative_prompt_of_the_distilled_recipe_has_graphs_of_its_own_in_every_stage():
    avoiding = job(TWO, nag_scale=11.0)
    assert [bucket.name for bucket in avoiding.buckets] == ["v18-a18-t1-s8-nag", "v72-a18-t1-s8-nag"]
    others = (replace(avoiding, nag_scale=scale, nag_tau=1.0) for scale in (2, 100.0))
    assert all(other.buckets == avoiding.buckets for other in others)
    assert avoiding.prompts == ("rain", NEGATIVE_PROMPT)
    assert replace(avoiding, negative_prompt="").prompts == ("rain", "")
    for scale in (None, 1):
        off = job(TWO, nag_scale=scale)
        assert off.buckets == job(TWO).buckets and off.prompts == ("rain",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(recipe="dev", nag_scale=11.0), "--nag-scale cannot be combined with --recipe dev"),
        (dict(nag_tau=5.0), "--nag-tau goes with --nag-scale"),
        (dict(nag_alpha=0.5), "--nag-alpha goes with --nag-scale"),
        (dict(nag_scale=0.9), "--nag-scale: got 0.9, wanted at least 1"),
        (dict(nag_scale=5.0, nag_alpha=2.0), "--nag-alpha: got 2.0, wanted at most 1"),
        (dict(negative_prompt="grey"), "--negative-prompt .* needs --nag-scale"),
    ],
)
def test_a_negative_prompt_that_no_stage_reads_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        job(**fields).check()
    job(negative_prompt="grey", nag_scale=1).check()  # off, for a line of a prompts file


def test_a_reference_of_strength_0_needs_no_second_timestep():
    nothing = job(TWO, references=(replace(REFERENCE, strength=0.0),), stage_1_loras=LORAS)
    assert nothing.buckets[0].timesteps == 1


def test_a_dubbed_clip_is_a_reference_of_both_stages_before_whose_sound_is_a_voice():
    dubbed = job(TWO, **DUBBED)
    first, second = dubbed.buckets
    assert first == Bucket(18 + 18, AUDIO + VOICE, 2, 8, audio_timesteps=2)
    assert second == Bucket(72 + 72, AUDIO + AUDIO, 2, 8)  # stage 1's sound, frozen
    assert dubbed.buckets_to_compile == dubbed.buckets
    # One weight set. What is heard is stage 1's sound.
    assert [stage.loras for stage in dubbed.stages] == [LORAS, LORAS]
    assert dubbed.audio_key == "s1_audio"


@pytest.mark.parametrize("strength", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("images", [(), (ImageCondition(FILE),), (ImageCondition(FILE, 8, 0.7),)])
def test_the_strength_of_a_dubbed_clip_changes_no_graph(images, strength):
    whole = job(TWO, **DUBBED, images=images)
    other = replace(whole, dubbing=replace(REFERENCE, strength=strength))
    assert other.buckets == whole.buckets
    assert whole.buckets[0].timesteps == 2 + len(images)


def test_without_stage_2_neither_its_graph_nor_the_upsampler_is_needed():
    whole, half = job(TWO), job(TWO, skip_stage_2=True)
    assert half.buckets == whole.buckets[:1] and half.stages == whole.stages[:1]
    assert (half.upsamplers, whole.upsamplers) == ({}, {"spatial": "--two-stage"})
    assert len(half.buckets_to_compile) == 2


def test_text_to_video_is_compiled_with_one_timestep_and_two_and_what_is_fixed_once():
    plain = [(b.video_tokens, b.timesteps) for b in job(TWO).buckets_to_compile]
    assert plain == [(18, 1), (18, 2), (72, 1), (72, 2)]
    for fixed in (job(images=(ImageCondition(FILE),)), job(retake=RETAKE), job(**REFERRING)):
        assert fixed.buckets_to_compile == fixed.buckets


# --- steps and guidance ---------------------------------------------------------------------------


def test_steps_are_those_that_upstream_takes_for_each_kind():
    dev = job(**DEV)
    kinds = dev, replace(dev, size=ONE, retake=RETAKE), replace(dev, sampler="res_2s")
    assert [kind.steps for kind in kinds] == [30, 40, 15]
    assert [replace(kind, num_inference_steps=7).steps for kind in kinds] == [7, 7, 7]
    assert job(retake=RETAKE).steps == 8


def test_guidance_of_a_given_sound_is_the_videos_alone():
    guidance = job(**DEV, sound=SOUND).resolved_guidance
    assert guidance == Guidance(DEFAULTS.video, StreamGuidance())


def test_res_2s_has_guidance_of_its_own():
    video, audio = job(**DEV, sampler="res_2s").resolved_guidance.streams
    assert (video.cfg_scale, video.modality_scale, video.rescale_scale) == (3.0, 3.0, 0.45)
    assert (audio.cfg_scale, audio.modality_scale, audio.rescale_scale) == (7.0, 3.0, 1.0)
    assert video.stg_scale == audio.stg_scale == 0


# --- what is refused ------------------------------------------------------------------------------

MISSING = "/nowhere/a.mp4"
MISTAKES = {
    "--audio-path /nowhere/a.mp4: no such file": dict(sound=SoundCondition(MISSING)),
    "pass a sound as --audio-path FILE": dict(sound=SoundCondition(MISSING)),
    "pass a video as --video-path FILE": dict(retake=Retake(MISSING, 0, 1)),
    "pass a video or an image as --video-conditioning FILE STRENGTH": REFERRING
    | dict(references=(replace(REFERENCE, path=MISSING),)),
    "--video-path needs --end-time: type the seconds": dict(retake=Retake(FILE, 0.0, None)),
    "--audio-start-time: got -1.0, wanted at least 0": dict(sound=SoundCondition(FILE, -1.0)),
    "--audio-start-time: got nan, wanted a finite number": dict(sound=SoundCondition(FILE, float("nan"))),
    "--audio-max-duration: got 0.0, wanted more than 0": dict(sound=SoundCondition(FILE, 0.0, 0.0)),
    "--start-time 0.5 --end-time 0.5: wanted a start": dict(retake=Retake(FILE, 0.5, 0.5)),
    "--start-time -1 --end-time 0.5: wanted": dict(retake=Retake(FILE, -1.0, 0.5)),
    "reaches beyond the 0.708 s of": dict(retake=Retake(FILE, 0.5, 0.8)),
    "type at most --end-time 0.708": dict(retake=Retake(FILE, 5.0, 8.0)),
    "--regenerate: got 'sound', wanted 'both', 'video' or 'audio'": dict(retake=replace(RETAKE, regenerate="sound")),
    "--video-path cannot be combined with --audio-path": dict(retake=RETAKE, sound=SOUND),
    "--video-path cannot be combined with --image": dict(retake=RETAKE, images=(ImageCondition(FILE),)),
    "--two-stage cannot be combined with --video-path": dict(retake=RETAKE, size=TWO),
    "--video-path cannot be combined with --upscale": dict(retake=RETAKE, upscale="spatial"),
    "got no --ic-lora; type --ic-lora as well": REFERRING | dict(stage_1_loras=()),
    "--ic-lora goes with --video-conditioning": dict(size=TWO, stage_1_loras=LORAS),
    f"--ic-lora {FILE} needs a reference": DEV | dict(stage_1_loras=LORAS),
    "--sampler res_2s cannot be combined with --video-conditioning": DEV
    | dict(sampler="res_2s", references=(REFERENCE,), stage_1_loras=LORAS),
    "--conditioning-attention-mask goes with --video-conditioning": dict(attention_mask=AttentionMask(FILE, 1.0)),
    f"--conditioning-attention-mask {FILE}: strength 1.5, wanted at most 1": REFERRING
    | dict(attention_mask=AttentionMask(FILE, 1.5)),
    f"--video-conditioning {FILE}: strength -1.0, wanted at least 0": REFERRING
    | dict(references=(replace(REFERENCE, strength=-1.0),)),
    "sides must be multiples of 64; type a --height and --width that are multiples of 128: 128x128"
    " or 128x256": REFERRING | dict(references=(replace(REFERENCE, space_scale=2),)),
    "type a --height and --width that are multiples of 64: 64x64 or 128x64": dict(
        size=Size(96, 64, 17), references=(replace(REFERENCE, space_scale=2),), stage_1_loras=LORAS
    ),
    "--skip-stage-2 goes with --two-stage": dict(skip_stage_2=True),
    "--upscale is for one-stage runs": dict(size=TWO, skip_stage_2=True, upscale="spatial"),
    "--images-as-guides goes with --two-stage --recipe dev, got no --recipe dev": dict(size=TWO, images_as_guides=True),
    "--images-as-guides goes with --two-stage --recipe dev, got no --two-stage": dict(
        recipe="dev", images_as_guides=True
    ),
    "--sampler res_2s goes with --two-stage --recipe dev": dict(size=TWO, sampler="res_2s"),
    "--sampler res_2s cannot be combined with --audio-path": DEV | dict(sampler="res_2s", sound=SOUND),
    "--sampler: got 'heun', wanted 'euler', 'res_2s' or": dict(sampler="heun"),
    "--num-inference-steps 32: type a number from 1 to 31": DEV | dict(sampler="res_2s", num_inference_steps=32),
    "--reference-video goes with --two-stage --recipe distilled, got no --two-stage; type"
    " --two-stage as well, or leave out --reference-video": DUBBED,
    "--recipe distilled, got no --recipe distilled": DUBBED | DEV,
    "--reference-video cannot be combined with --audio-path": DUBBED | dict(size=TWO, sound=SOUND),
    "--reference-video cannot be combined with --ic-lora": DUBBED | REFERRING,
    "--reference-video cannot be combined with --skip-stage-2": DUBBED | dict(size=TWO, skip_stage_2=True),
    f"--reference-video {FILE}: the IC-LoRA takes references of 1/2 of stage 1's size": DUBBED
    | dict(size=TWO, dubbing=replace(REFERENCE, space_scale=2)),
    "pass a video with sound as --reference-video FILE": DUBBED
    | dict(size=TWO, dubbing=replace(REFERENCE, path=MISSING)),
    "--reference-strength: got 1.5, wanted at most 1": DUBBED
    | dict(size=TWO, dubbing=replace(REFERENCE, strength=1.5)),
    "guidance does not apply to a given sound": DEV | dict(sound=SOUND, guidance=DEFAULTS),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_what_cannot_be_made_is_refused_with_what_to_type(said):
    with pytest.raises(UserError) as error:
        job(**MISTAKES[said]).check()
    assert said in str(error.value)


def test_what_can_be_made_is_not_refused():
    job(sound=SOUND).check()
    job(**DEV, sound=SOUND, images=(ImageCondition(FILE, 16),)).check()
    job(retake=Retake(FILE, 0, 17 / 24)).check()
    job(retake=RETAKE, recipe="dev").check()
    job(**REFERRING, attention_mask=AttentionMask(FILE, 0.0), skip_stage_2=True).check()
    job(**REFERRING | {"size": ONE}, images=(ImageCondition(FILE),)).check()
    for size in (ONE, TWO):
        job(size, recipe="dev", references=(REFERENCE,), stage_1_loras=LORAS).check()
    job(**DEV, images_as_guides=True, images=(ImageCondition(FILE),)).check()
    job(**DEV, sampler="res_2s", num_inference_steps=31).check()
    job(TWO, **DUBBED, images=(ImageCondition(FILE),)).check()
    # HQ has its distilled LoRA in both stages.
    job(**DEV, sampler="res_2s", stage_1_loras=LORAS, stage_2_loras=LORAS).check()


def test_a_shape_is_checked_without_a_prompt():
    make_job("", ONE).check_shape()
    with pytest.raises(UserError, match="--prompt is empty"):
        make_job("", ONE).check()


# --- flags ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Makes video files of grey by frames, rows and columns."""
    folder = tmp_path_factory.mktemp("clips of grey")

    def made(frames: int, height: int, width: int, rate: float = 24.0) -> str:
        path = folder / f"{frames}x{height}x{width}.mp4"
        pixels = torch.full((frames, height, width, 3), 128, dtype=torch.uint8)
        write_video(path, [pixels], rate, lambda: tone(48000, 0.1), 48000)
        return str(path)

    return made


@pytest.fixture(scope="module")
def ic_lora(tmp_path_factory):
    """Makes LoRA files whose metadata says these scales."""
    folder = tmp_path_factory.mktemp("loras")

    def made(**metadata) -> Lora:
        path = folder / f"{'-'.join(metadata.values()) or 'plain'}.safetensors"
        save_file({"a": torch.zeros(1)}, path, {f"reference_{k}": v for k, v in metadata.items()})
        return Lora(path)

    return made


def refused(*words) -> str:
    with pytest.raises(UserError) as error:
        said(*words).check()
    return str(error.value)


def test_a_sound_is_its_file_with_where_it_begins_and_how_long_it_lasts():
    times = "--audio-start-time", 0.5, "--audio-max-duration", 2
    assert said("--audio-path", FILE).sound == SoundCondition(FILE)
    assert said("--audio-path", FILE, *times).sound == SoundCondition(FILE, 0.5, 2.0)


def test_a_retake_has_its_files_size_and_rate(clip):
    path = clip(9, 32, 64, 25.0)
    times = "--start-time", 0.1, "--end-time", 0.2
    found = said("--video-path", path, *times, "--regenerate", "audio")
    assert found.size == Size(32, 64, 9, 25.0)
    assert found.retake == Retake(path, 0.1, 0.2, "audio")
    assert said("--video-path", path, *times).retake.regenerate == "both"


def test_a_retake_whose_size_is_typed_as_well_is_refused(clip):
    retake = "--video-path", clip(9, 32, 64), "--start-time", 0, "--end-time", 0.2
    for typed in (("--height", 32), ("--fps", 24), ("--two-stage",), ("--num-frames", 1)):
        assert "cannot be combined with --video-path" in refused(*retake, *typed)
    assert "--video-path needs --end-time" in refused(*retake[:4])


def test_a_video_of_another_size_is_refused_with_the_command_that_cuts_and_scales_it(clip):
    path = clip(10, 40, 64)
    message = refused("--video-path", path, "--start-time", 0, "--end-time", 0.2)
    assert "has 10 frames of 40x64; wanted 8k+1 frames and sides" in message
    command = shlex.split(message.splitlines()[-1].removeprefix("Type: "))
    assert command[:3] == ["ffmpeg", "-i", path]  # test_media_commands.py runs it
    assert "scale=64:32:force_original_aspect_ratio=increase,crop=64:32" in command
    assert command[-5:] == ["-frames:v", "9", "-t", "0.375", "10x40x64-32x64x9.mp4"]


def test_a_reference_is_scaled_as_the_metadata_of_its_lora_says(clip, ic_lora):
    path, two = clip(9, 32, 64), ("--two-stage", "--height", 256, "--width", 256)
    lora = ic_lora(downscale_factor="2", temporal_scale_factor="4")
    found = said("--ic-lora", lora.path, 0.5, "--video-conditioning", path, 0.8, *two)
    assert found.references == (ReferenceVideo(path, 0.8, 9, 2, 4),)
    assert found.stage_1_loras == (Lora(lora.path, 0.5),)
    found.check()


def test_loras_that_scale_references_differently_are_refused(ic_lora):
    plain, half, third = ic_lora(), ic_lora(downscale_factor="2"), ic_lora(downscale_factor="3")
    assert reference_scale((plain,)) == (1, 1) and reference_scale((plain, half)) == (2, 1)
    with pytest.raises(UserError, match="different reference_downscale_factor: 2 of .*, 3 of "):
        reference_scale((half, third))
    with pytest.raises(UserError, match="factor 'half', wanted a whole number"):
        reference_scale((ic_lora(downscale_factor="half"),))


def generated(capsys, *words) -> tuple[int, str, str]:
    """Exit code of generate_ltx23.py, what it printed, and its error; no checkpoint is there."""
    common = "--checkpoint-path none --gemma-root none --output-path out.mp4 --prompt rain"
    code = run("src/generate_ltx23.py", [*common.split(), *map(str, words)])
    return code, *capsys.readouterr()


REFERRED = "--two-stage", "--height", 256, "--width", 256, "--num-frames", 9


def test_a_lora_that_says_no_reference_scale_is_taken_with_factor_1_and_that_is_said_once(
    clip, ic_lora, capsys, tmp_path
):
    lora = tmp_path / "depth.safetensors"
    lora.write_bytes(ic_lora().path.read_bytes())
    words = "--ic-lora", lora, "--video-conditioning", clip(9, 32, 64), 0.8, *REFERRED
    code, printed, error = generated(capsys, *words)
    assert code == 2 and "no such file: none" in error  # so nothing was loaded by then
    said_of_it = f"IC-LoRA {lora} has no reference scale: references get the size of stage 1 (factor 1)"
    assert said_of_it in printed.splitlines()
    line = {"ic-lora": str(lora), "video-conditioning": [words[3], 1.0]}
    assert len(lines(tmp_path, line, line, command=REFERRED)) == 2
    assert capsys.readouterr().out == ""


def test_a_lora_that_says_a_reference_scale_is_taken_in_silence(clip, ic_lora, capsys):
    film, silent = clip(9, 32, 64), ic_lora().path
    for lora in (ic_lora(downscale_factor="1").path, ic_lora(temporal_scale_factor="2").path):
        for more in ((), ("--ic-lora", silent)):  # one that says it speaks for all
            words = "--ic-lora", lora, *more, "--video-conditioning", film, 1.0, *REFERRED
            code, printed, _ = generated(capsys, *words)
            assert code == 2 and "reference scale" not in printed


@pytest.mark.parametrize("factor", ["0", "-1", "1.5", "half", ""])
@pytest.mark.parametrize("name", ["downscale_factor", "temporal_scale_factor"])
def test_a_factor_that_is_no_whole_number_from_1_ends_the_script(clip, ic_lora, capsys, name, factor):
    lora = ic_lora(**{name: factor}).path
    words = "--ic-lora", lora, "--video-conditioning", clip(9, 32, 64), 1.0, *REFERRED
    code, _, error = generated(capsys, *words)
    assert code == 2 and f"has reference_{name} {factor!r}, wanted a whole number from 1" in error


def test_sides_that_a_factor_does_not_divide_end_the_script(clip, ic_lora, capsys):
    lora = ic_lora(downscale_factor="3").path
    words = "--ic-lora", lora, "--video-conditioning", clip(9, 32, 64), 1.0, *REFERRED
    code, _, error = generated(capsys, *words)
    assert code == 2 and "stage 1's size, 128x128, whose sides must be multiples of 96" in error
    assert "type a --height and --width that are multiples of 192: 192x192 or 384x384" in error


def test_a_reference_for_a_lora_of_every_stage_is_refused_with_the_flag_to_type(clip, ic_lora, capsys):
    lora = ic_lora().path
    words = "--lora", lora, 0.5, "--video-conditioning", clip(9, 32, 64), 1.0, *REFERRED
    code, _, error = generated(capsys, *words)
    assert code == 2 and f"type --ic-lora {lora} 0.5 in its place" in error


DUBBING = "--two-stage", "--height", 128, "--width", 128, "--reference-video"


def voice_of(path) -> ReferenceAudio:
    """All of a file's sound."""
    samples, rate = read_sound(path, "")
    return ReferenceAudio(path, sound_latent_frames(samples.shape[1], rate))


def test_a_video_to_dub_says_its_length_and_rate_and_its_lora_the_scale(clip, ic_lora):
    lora, film = ic_lora(downscale_factor="2", temporal_scale_factor="2"), clip(28, 64, 64, 29.97)
    dubbed = said(*DUBBING, film, "--lora", lora.path, "--reference-strength", 0.5)
    rate = 30000 / 1001  # not 29: the video keeps the clip's speed
    assert dubbed.size == Size(128, 128, 25, rate, two_stage=True)
    assert dubbed.output_frame_rate == rate
    # Of scales the LoRA has that of pixels alone; the sound is not cut to the video.
    assert dubbed.dubbing == ReferenceVideo(film, 0.5, 25, 2, 1)
    assert dubbed.reference_sound == voice_of(film)
    dubbed.check()


def test_a_video_that_cannot_be_dubbed_ends_the_script(clip, ic_lora, tmp_path, capsys):
    film, lora = clip(30, 64, 64, 25.0), ic_lora().path
    short, silent = clip(5, 64, 64), tmp_path / "silent.mkv"
    write_film(silent, torch.zeros(9, 64, 64, 3, dtype=torch.uint8))
    counts, cut = "(25 of its 30 frames, 25 fps); leave it out", f"{film}: 25 of 30 frames are used"
    for words, text in (
        (
            (film, "--num-frames", 121),
            f"--num-frames 121 does not go with --reference-video: {film} says how many {counts}",
        ),
        ((film, "--frame-rate", 24), "--frame-rate 24 does not go with --reference-video"),
        ((short,), f"--reference-video {short} has 5 frames, wanted 9 or more; pass"),
        (
            (silent,),
            f"--reference-video {silent} has no sound, which the voice is taken from; a silent clip"
            f" gets one by --video-path {silent} --start-time 0 --end-time 5 --regenerate audio",
        ),
        ((film, "--video-path", film), "cannot be combined with --video-path"),
        ((tmp_path / "no.mp4",), "pass a video with sound as --reference-video FILE"),
    ):
        code, printed, error = generated(capsys, *DUBBING, *words, "--lora", lora)
        assert code == 2 and text in error and "Traceback" not in error
    needed = "needs one --lora, the dubbing LoRA (it is in both stages), got"
    for loras, text in (
        ((), f"--reference-video {needed} none; type --lora PATH"),
        (("--lora", lora) * 2, f"--reference-video {needed} 2; leave all but one out"),
    ):
        code, printed, error = generated(capsys, *DUBBING, film, *loras)
        assert code == 2 and text in error
    dubbed = said(*DUBBING, film, "--lora", lora)
    assert encode_inputs.notes(dubbed) == [f"{cut} (8k+1)"]
    assert "--reference-strength needs --reference-video FILE" in refused("--reference-strength", 0.5)


def test_a_dubbing_lora_without_layers_of_sound_is_noticed(tmp_path):
    silent, voiced = (Lora(tmp_path / name) for name in ("pose.safetensors", "dub.safetensors"))
    for lora, layer in ((silent, "attn1"), (voiced, "audio_attn1")):
        save_file({f"blocks.0.{layer}.to_q.lora_A.weight": torch.zeros(1)}, lora.path)
    assert are_silent((silent,)) and not are_silent((voiced,)) and not are_silent((silent, voiced))


FLAGS_ALONE = {
    "--audio-start-time needs --audio-path": ("--audio-start-time", 1),
    "--audio-max-duration needs --audio-path": ("--audio-max-duration", 1),
    "--end-time needs --video-path": ("--end-time", 1),
    "--regenerate needs --video-path": ("--regenerate", "both"),
    "got ['a.mp4'], field required; type --video-conditioning PATH STRENGTH": ("--video-conditioning", "a.mp4"),
    "a.mp4: strength 'b', wanted a valid number": ("--conditioning-attention-mask", "a.mp4", "b"),
    "--audio-cfg-guidance-scale, --v2a-guidance-scale cannot be combined with --audio-path": (
        *("--recipe", "dev", "--audio-path", FILE, "--video-cfg-guidance-scale", 2),
        *("--audio-cfg-guidance-scale", 2, "--v2a-guidance-scale", 1),
    ),
}


@pytest.mark.parametrize("text", FLAGS_ALONE)
def test_a_flag_that_says_nothing_is_refused(text):
    assert text in refused(*FLAGS_ALONE[text])


def test_one_attention_mask_is_for_all_references():
    mask = "--conditioning-attention-mask", FILE, 0.5
    assert flags.spec(parsed(*mask)).attention_mask == AttentionMask(FILE, 0.5)
    assert "got 2 times --conditioning-attention-mask" in refused(*mask, *mask)


def test_guidance_of_a_sound_changes_the_videos_scales_alone():
    sound = "--recipe", "dev", "--audio-path", FILE
    found = said(*sound, "--video-cfg-guidance-scale", 2, "--a2v-guidance-scale", 1.5)
    video = replace(DEFAULTS.video, cfg_scale=2.0, modality_scale=1.5)
    assert found.guidance == Guidance(video, StreamGuidance())
    found.check()


def test_compiling_takes_the_flags_that_shape_graphs_and_no_others(clip):
    path = clip(9, 32, 64)
    shape = flags.shape(parsed("--video-path", path, compiles=True), "distilled")
    shape.check_shape()
    assert shape.buckets == [Bucket(4, 9, 2, 8, False, 2)]
    for detail in ("--audio-start-time", "--start-time", "--regenerate", "--sampler"):
        with pytest.raises((SystemExit, argparse.ArgumentError)):
            parsed(detail, "1", compiles=True)


# --- prompts files --------------------------------------------------------------------------------


def lines(folder, *given, command=()):
    path = folder / "jobs.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "rain"} | line) for line in given))
    return read_lines(path, flags.job_of_line(parsed(*command)), {})


def test_lines_of_a_prompts_file_mix_all_kinds(tmp_path, clip, ic_lora):
    path, lora = clip(9, 32, 64), str(ic_lora().path)
    command = "--height", 128, "--width", 128, "--num-frames", 9, "--two-stage"
    found = [
        line.job
        for line in lines(
            tmp_path,
            {},
            {"audio_path": FILE, "audio-start-time": 0.5},
            {"video_path": path, "start_time": 0.1, "end_time": 0.3},
            {"ic_lora": lora, "video_conditioning": [path, 1.0], "skip_stage_2": True},
            {"recipe": "dev", "sampler": "res_2s", "images_as_guides": True},
            {"reference_video": clip(17, 32, 64, 25.0), "lora": lora},
            command=command,
        )
    ]
    plain, sound, retake, reference, hq, dubbed = found
    assert plain == make_job("rain", Size(128, 128, 9, two_stage=True))
    assert sound == replace(plain, sound=SoundCondition(FILE, 0.5))
    # The file's size takes the place of the command's.
    wanted = make_job("rain", Size(32, 64, 9), retake=Retake(path, 0.1, 0.3))
    assert retake.describe() == wanted.describe()
    assert reference.references == (ReferenceVideo(path, 1.0, 9),) and reference.skip_stage_2
    assert hq.sampler == "res_2s" and hq.images_as_guides
    # The file's length takes the place of the command's, and no more of its size.
    assert dubbed.size == Size(128, 128, 17, 25.0, two_stage=True)


def test_a_line_whose_file_has_another_content_is_another_line(tmp_path):
    sound = tmp_path / "a.wav"
    sound.write_bytes(b"one")
    (before,), (again,) = (lines(tmp_path, {"audio_path": str(sound)}) for _ in range(2))
    sound.write_bytes(b"two")
    (after,) = lines(tmp_path, {"audio_path": str(sound)})
    assert before.digest == again.digest != after.digest


def test_a_job_of_each_kind_is_the_same_again_from_its_line(tmp_path, clip, ic_lora):
    path = clip(9, 32, 64)
    of_file = Size(32, 64, 9)
    kinds = [
        job(sound=SoundCondition(path, 0.5, 2.0), images=(ImageCondition(path, 8, 0.5, 20),)),
        job(**DEV, sound=SoundCondition(path), guidance=Guidance(StreamGuidance(2.0), SILENT)),
        make_job("rain", of_file, retake=Retake(path, 0.1, 0.2, "video")),
        job(
            TWO,
            references=(ReferenceVideo(path, 0.5, 9),),
            attention_mask=AttentionMask(path, 0.5),
            stage_1_loras=(ic_lora(),),
            skip_stage_2=True,
        ),
        job(**DEV, images=(ImageCondition(path),), images_as_guides=True, sampler="res_2s"),
        job(
            replace(TWO, num_frames=9),
            dubbing=ReferenceVideo(path, 0.5, 9),
            reference_sound=voice_of(path),
            loras=(ic_lora(),),
        ),
    ]
    for kind in kinds:
        kind.check()
        line = json.loads(json.dumps(kind.with_paths(lambda path: path.name).to_line()))
        assert job_of(line, Path(path).parent).describe() == kind.describe()
        assert json.loads(json.dumps(kind.describe())) == kind.describe()


SILENT = StreamGuidance()


# --- the command that compiles what is missing, and what runs depend on ---------------------------


def workspace(tiny, folder) -> Workspace:
    return Workspace(tiny.checkpoint, resolve("cpu"), folder, 2, "float32", tiny.gemma_root)


def test_what_is_not_compiled_is_said_with_the_command_for_just_that(tiny, tmp_path, clip, ic_lora):
    path, opened = clip(9, 32, 64), workspace(tiny, tmp_path)
    lora, image = ic_lora(), ImageCondition(path, 8, 0.5)
    size = Size(128, 128, 9, two_stage=True)
    kinds = [
        job(ONE, sound=SoundCondition(path, 0.1), images=(image,)),
        make_job("rain", Size(32, 64, 9), retake=Retake(path, 0.1, 0.2, "video")),
        job(
            size,
            references=(ReferenceVideo(path, 0.5, 9),),
            attention_mask=AttentionMask(path, 0.5),
            stage_1_loras=(lora,),
            skip_stage_2=True,
        ),
        job(size, recipe="dev", images=(image,), images_as_guides=True),
        job(nag_scale=11.0),
        job(size, dubbing=ReferenceVideo(path, 0.5, 9), reference_sound=voice_of(path), loras=(lora,)),
    ]
    for kind in kinds:
        with pytest.raises(UserError) as error:
            opened.dit_program_for(kind, kind.stages[0])
        line = str(error.value).splitlines()[-1]
        words = shlex.split(line.partition(command("compile transformer"))[2])
        parser = flags.parser("", "", gemma=False)
        flags.add_job(parser, flags.GRAPHS)
        args = parser.parse_args(words)
        shape = flags.shape(args, args.recipe)
        shape.check_shape()
        assert shape.buckets_to_compile[: len(kind.buckets)] == kind.buckets
        assert "--start-time" not in words and "--audio-start-time" not in words


def test_a_run_depends_on_what_each_of_its_files_holds_and_not_on_where_they_lie(tiny, tmp_path, ic_lora):
    files = [tmp_path / name for name in ("image", "sound", "reference", "mask", "video", "dubbed")]
    for file in files:
        file.write_bytes(b"before")
    image, sound, reference, mask, video, dubbed = map(str, files)
    opened = workspace(tiny, tmp_path / "artifacts")
    kinds = [
        job(sound=SoundCondition(sound), images=(ImageCondition(image),)),
        job(**REFERRING, attention_mask=AttentionMask(mask, 1.0)),
        job(retake=Retake(video, 0.1, 0.2)),
        job(
            TWO,
            dubbing=replace(REFERENCE, path=dubbed),
            reference_sound=ReferenceAudio(dubbed, VOICE),
            loras=(ic_lora(),),
        ),
    ]
    references = (replace(REFERENCE, path=reference),)
    kinds[1] = replace(kinds[1], references=references, stage_1_loras=(ic_lora(),))
    for kind in kinds:
        before = run_identity(kind, opened, RunOptions())
        for path in kind.files.values():
            path.write_bytes(b"after")
            assert run_identity(kind, opened, RunOptions()) != before
            path.write_bytes(b"before")
        assert run_identity(kind, opened, RunOptions()) == json.loads(json.dumps(before))
        elsewhere = kind.with_paths(lambda path: str(path.rename(f"{path}.moved")))
        assert run_identity(elsewhere, opened, RunOptions()) == before
    assert {flag.split()[0] for kind in kinds for flag in kind.files} == {
        *("--image", "--audio-path", "--video-conditioning", "--conditioning-attention-mask"),
        *("--video-path", "--reference-video"),
    }


def test_no_output_may_lie_on_what_any_job_of_a_run_reads(tiny, tmp_path):
    engine = Engine(workspace(tiny, tmp_path), Recorder())
    other = SoundCondition("b.wav")
    named = engine.preflight.files_read([job(sound=SOUND), job(sound=other), job(retake=RETAKE)])
    assert named[f"--audio-path {FILE}"] == Path(FILE) == named[f"--video-path {FILE}"]
    assert named["--audio-path b.wav"] == Path("b.wav")


def test_without_stage_2_half_the_size_is_decoded():
    assert job(TWO).latent_shape == (3, 4, 6)
    assert job(TWO, skip_stage_2=True).latent_shape == (3, 2, 3)


def test_compat_of_the_pipelines_1_2_0_is_a_retakes_noise_and_the_orientations_that_it_ignores():
    ours, later = COMPAT[None], COMPAT["ltx-pipelines-1.2.0"]
    own = {"retake_noise": True, "orientation": "turned"}
    assert later == replace(ours, plain_stage_2=True, **own)
    assert not job(orientation="turned").upright and job().upright  # a video's display matrix
    assert not COMPAT["ltx-core-1.0.0"].retake_noise


# --- the Python API -------------------------------------------------------------------------------


class Jobs:
    """An engine that keeps the jobs that it is asked for."""

    compat, options = COMPAT[None], RunOptions()
    workspace = SimpleNamespace(spatial_scale=2.0)

    def __init__(self):
        self.jobs, self.on_step_end = [], None

    def check_process(self) -> None:
        pass

    def run(self, jobs, **options):
        self.jobs += jobs
        raise UserError("enough")


def called(recipe: str = "distilled", **given) -> Job:
    engine = Jobs()
    with pytest.raises(UserError, match="enough"):
        LTXPipeline(engine, recipe)("rain", output_type="latent", **given)
    (made,) = engine.jobs
    made.check()
    return made


def test_a_call_takes_paths_or_the_conditions_themselves(clip, ic_lora):
    path, lora = clip(9, 32, 64), ic_lora()
    assert called() == make_job("rain")
    assert called(audio=path).sound == called(audio=SoundCondition(path)).sound
    retake = called(video=path, start_time=0.1, end_time=0.2, regenerate="video")
    assert retake == called(video=Retake(path, 0.1, 0.2, "video"))
    assert retake.size == Size(32, 64, 9)
    given = dict(two_stage=True, ic_loras=[(lora.path, 1.0)], attention_mask=path)
    reference = called(reference=path, **given, skip_stage_2=True)
    assert reference.references == (ReferenceVideo(path, 1.0, 9),)
    assert reference.attention_mask == AttentionMask(path, 1.0)
    again = called(reference=[ReferenceVideo(path, 1.0, 9)], **given, skip_stage_2=True)
    assert again == reference
    given = dict(two_stage=True, loras=[(lora.path, 1.0)], height=128, width=128)
    dubbed = called(**given, reference_video=Path(path), reference_strength=0.5)
    typed = said(*DUBBING, path, "--lora", lora.path, "--reference-strength", 0.5)
    assert dubbed.describe() == typed.describe()
    tailed = called(num_frames=17, tail_frames=8)
    assert (tailed.size.num_frames, tailed.output_frames) == (25, 17)
    hq = called("dev", two_stage=True, sampler="res_2s", images_as_guides=True)
    assert hq.steps == 15 and hq.images_as_guides


def test_a_call_with_a_voice_is_the_job_of_the_flags(tmp_path, ic_lora):
    stored = (tone(16000, 1.0) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    path = write_sound(tmp_path / "voice.wav", stored, 16000, "pcm_s16le", "stereo", "s16")
    given = dict(reference_audio=path, reference_audio_max_duration=0.5, identity_guidance_scale=2)
    found = called("dev", **given, ic_loras=[(ic_lora().path, 1.0)], num_frames=17)
    assert found.reference_sound == ReferenceAudio(str(path), 13, 0.5, 2)
    words = "--reference-audio-max-duration", 0.5, "--identity-guidance-scale", 2
    words = "--reference-audio", path, *words, "--ic-lora", ic_lora().path, "--num-frames", 17
    assert found.describe() == said(*words, "--recipe", "dev").describe()


def test_a_side_of_0_is_no_side_left_out():
    with pytest.raises(UserError, match="^height: got 0, wanted at least 1"):
        LTXPipeline(Jobs(), "distilled")("rain", height=0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("num_frame", "unknown 'num_frame'; did you mean num_frames?"),
        ("video_path", "unknown 'video_path'; did you mean video?"),
        ("qwertz", "unknown 'qwertz'"),
        ("guidance_scale", "guidance_scale is diffusers' word; here: video_cfg_guidance_scale=3.0"),
    ],
)
def test_an_argument_that_a_call_does_not_have_is_refused_with_the_nearest(name, text):
    with pytest.raises(TypeError) as error:
        LTXPipeline(Jobs(), "distilled")("rain", **{name: "x"})
    assert str(error.value).startswith(text)
    assert name != "qwertz" or str(error.value) == text


TIMES = dict(start_time=0.0, end_time=0.1)
WRONG_CALLS = {
    "reference_video: got 5, wanted a valid string": dict(reference_video=5),
    "reference_strength needs reference_video FILE": dict(reference_strength=0.5),
    "video needs end_time: type the seconds": dict(video="a.mp4", start_time=0.5),
    "start_time needs video FILE": dict(start_time=0.5),
    "audio: got 5, wanted a valid string": dict(audio=5),
    "attention_mask: got 5, wanted": dict(attention_mask=5),
    "reference: got 5, wanted": dict(reference=5),
    "reference_audio: got 5, wanted a valid string": dict(reference_audio=5),
    "height cannot be combined with video": TIMES | dict(video="a.mp4", height=64),
    "two_stage cannot be combined with video": TIMES | dict(video="a.mp4", two_stage=True),
    "video: got 5, wanted a valid string": dict(video=5),
    "tail_frames: got '8', wanted a valid integer": dict(tail_frames="8"),
    "reference_audio_max_duration: got nan": dict(reference_audio="a.wav", reference_audio_max_duration=float("nan")),
    "--video-path a.mp4: no such file": TIMES | dict(video="a.mp4"),
}


@pytest.mark.parametrize("text", WRONG_CALLS)
def test_a_call_that_cannot_be_is_refused_in_words(text):
    with pytest.raises(UserError) as error:
        LTXPipeline(Jobs(), "distilled")("rain", **WRONG_CALLS[text])
    assert text in str(error.value)


def test_a_call_for_a_file_says_a_wrong_condition_in_words_too(tmp_path):
    path = tmp_path / "out.mp4"
    with pytest.raises(UserError, match="image: got 'a.png', wanted"):
        LTXPipeline(Jobs(), "distilled")("rain", image=["a.png"], output_type="mp4", output_path=path)
