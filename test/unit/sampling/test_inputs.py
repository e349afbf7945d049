"""Inputs of a job besides its prompt: the graphs that they need, and the job of flags, lines and Python calls.
What is refused: test_refusals.py."""

import argparse
import itertools
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jobs import make_job, replace
from safetensors.torch import save_file
from typed import parsed, said

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
DUBBED = dict(size=TWO, dubbing=REFERENCE, reference_sound=ReferenceAudio(FILE, VOICE), loras=LORAS)


def job(size=ONE, **given) -> Job:
    return make_job("rain", size, **given)


# --- graphs ---------------------------------------------------------------------------------------

FIRST, LATER = ImageCondition(FILE), ImageCondition(FILE, 16, 0.6)
SHORT = ReferenceVideo(FILE, 0.5, num_frames=9)  # 2 latent frames
MASK = AttentionMask(FILE, 0.6)
# Stage 1 of WIDE: 2 x 4 latents, 3 frames; a reference of every second frame: frames 0, 1, 3, .. 15
WIDE, HALF, SLOW = (
    Size(128, 256, 17, two_stage=True),
    replace(REFERENCE, space_scale=2),
    replace(REFERENCE, time_scale=2),
)
# What a job has -> the names of its graphs, stage 1's first: tokens, timesteps, steps and what else differs
BUCKETS = {
    "a retake": (dict(retake=RETAKE), "v72-a18t2-t2-s8"),
    "a retake of the picture": (dict(retake=replace(RETAKE, regenerate="video")), "v72-a18t2-t2-s8"),
    "a retake of the sound": (dict(retake=replace(RETAKE, regenerate="audio")), "v72-a18t2-t2-s8"),
    "a guided retake": (dict(retake=RETAKE, recipe="dev"), "v72-a18t2-t2-s64-guided"),
    "images": (dict(size=TWO, images=(FIRST, LATER)), "v24-a18-t3-s8 v96-a18-t3-s8"),
    "guides": (DEV | dict(images=(FIRST, LATER), images_as_guides=True), "v30-a18-t3-s64-guided v120-a18-t3-s8"),
    "references": (REFERRING | dict(references=(REFERENCE, SHORT)), "v48-a18-t3-s8 v72-a18-t1-s8"),
    "a reference that is shorter": (  # 17 of 24 frames
        REFERRING | dict(size=replace(TWO, num_frames=25), references=(replace(REFERENCE, num_frames=24),)),
        "v42-a26-t2-s8 v96-a26-t1-s8",
    ),
    "a reference in one stage": (REFERRING | dict(size=ONE), "v144-a18-t2-s8"),
    "a reference of half the sides": (REFERRING | dict(size=WIDE, references=(HALF,)), "v30-a18-t2-s8 v96-a18-t1-s8"),
    "a reference of half the frames": (REFERRING | dict(size=WIDE, references=(SLOW,)), "v40-a18-t2-s8 v96-a18-t1-s8"),
    "a reference of strength 0": (
        REFERRING | dict(references=(replace(REFERENCE, strength=0.0),)),
        "v36-a18-t1-s8 v72-a18-t1-s8",
    ),
    "a masked reference": (REFERRING | dict(attention_mask=MASK), "v36-a18-t2-s8-biased v72-a18-t1-s8"),
    "a guided one": (REFERRING | DEV | dict(attention_mask=MASK), "v36-a18-t2-s64-guided-biased v72-a18-t1-s8"),
    "nag": (dict(size=TWO, nag_scale=11.0), "v18-a18-t1-s8-nag v72-a18-t1-s8-nag"),
    "nag of scale 1": (dict(size=TWO, nag_scale=1), "v18-a18-t1-s8 v72-a18-t1-s8"),
    "a dubbed clip": (DUBBED, "v36-a43t2-t2-s8 v144-a36-t2-s8"),
    "a dubbed clip of strength 0": (
        DUBBED | dict(dubbing=replace(REFERENCE, strength=0.0)),
        "v36-a43t2-t2-s8 v144-a36-t2-s8",
    ),
    "a dubbed clip and images": (
        DUBBED | dict(dubbing=replace(REFERENCE, strength=0.7), images=(ImageCondition(FILE, 8, 0.7),)),
        "v42-a43t2-t3-s8 v168-a36-t3-s8",
    ),
    "stage 1 alone": (dict(size=TWO, skip_stage_2=True), "v18-a18-t1-s8"),
}


@pytest.mark.parametrize(("fields", "names"), BUCKETS.values(), ids=BUCKETS)
def test_the_graphs_of_a_job(fields, names):
    made = job(**fields)
    assert " ".join(bucket.name for bucket in made.buckets) == names
    if made.fixes_timesteps:
        assert made.buckets_to_compile == made.buckets
    else:  # with one timestep, and with two for an image at frame 0
        assert [b.timesteps for b in made.buckets_to_compile] == [1, 2] * len(made.stages)


@pytest.mark.parametrize("images", [(), (FIRST,)], ids=["no image", "an image"])
@pytest.mark.parametrize(("size", "recipe"), [*itertools.product((ONE, TWO), ("distilled", "dev"))])
def test_a_sound_needs_the_graphs_of_text_and_images_alone(size, recipe, images):
    plain = job(size, images=images, recipe=recipe)
    with_sound = replace(plain, sound=SOUND)
    assert with_sound.buckets == plain.buckets
    assert with_sound.buckets_to_compile == plain.buckets_to_compile


def test_nag_reads_the_negative_prompt():
    nag = job(nag_scale=11.0)
    assert nag.prompts == ("rain", NEGATIVE_PROMPT)
    assert replace(nag, negative_prompt="").prompts == ("rain", "")
    assert [job(nag_scale=scale).prompts for scale in (None, 1)] == [("rain",)] * 2


def test_a_dubbed_clips_stages_have_one_weight_set_and_stage_1s_sound():
    dubbed = job(**DUBBED)
    assert [stage.loras for stage in dubbed.stages] == [LORAS, LORAS]
    assert dubbed.audio_key == "s1_audio"


def test_without_stage_2_half_the_size_is_decoded_and_no_upsampler_is_needed():
    whole, half = job(TWO), job(TWO, skip_stage_2=True)
    assert half.stages == whole.stages[:1]
    assert (half.upsamplers, whole.upsamplers) == ({}, {"spatial": "--two-stage"})
    assert (half.latent_shape, whole.latent_shape) == ((3, 2, 3), (3, 4, 6))


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


# --- checks ---------------------------------------------------------------------------------------


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
    job(**DUBBED, images=(ImageCondition(FILE),)).check()
    job(negative_prompt="grey", nag_scale=1).check()  # off, for a line of a prompts file
    # HQ has its distilled LoRA in both stages.
    job(**DEV, sampler="res_2s", stage_1_loras=LORAS, stage_2_loras=LORAS).check()


def test_a_shape_is_checked_without_a_prompt():
    make_job("", ONE).check_shape()
    with pytest.raises(UserError, match="--prompt is empty"):
        make_job("", ONE).check()


# --- flags ----------------------------------------------------------------------------------------


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


def test_a_reference_is_scaled_as_the_metadata_of_its_lora_says(clip, ic_lora):
    path, two = clip(9, 32, 64), ("--two-stage", "--height", 256, "--width", 256)
    lora = ic_lora(downscale_factor="2", temporal_scale_factor="4")
    found = said("--ic-lora", lora.path, 0.5, "--video-conditioning", path, 0.8, *two)
    assert {*found.references} == {ReferenceVideo(path, 0.8, 9, 2, 4)}
    assert found.stage_1_loras == (Lora(lora.path, 0.5),)
    found.check()


def test_loras_without_a_reference_scale_have_factor_1_which_is_printed_once(ic_lora, capsys, tmp_path):
    silent = tmp_path / "depth.safetensors"
    silent.write_bytes(ic_lora().path.read_bytes())
    plain, half = Lora(silent), ic_lora(downscale_factor="2")
    assert [reference_scale((plain, half)), reference_scale((half,))] == [(2, 1), (2, 1)]
    assert capsys.readouterr().out == ""  # one that has a scale decides for all
    assert reference_scale((plain,)) == reference_scale((plain,)) == (1, 1)
    printed = f"IC-LoRA {silent} has no reference scale: references get the size of stage 1 (factor 1)"
    assert capsys.readouterr().out.splitlines() == [printed]


@pytest.mark.parametrize("factor", ["0", "-1", "1.5", ""])
@pytest.mark.parametrize("name", ["downscale_factor", "temporal_scale_factor"])
def test_a_factor_is_a_whole_number_from_1(ic_lora, name, factor):
    with pytest.raises(UserError, match=f"has reference_{name} {factor!r}, wanted a whole number from 1"):
        reference_scale((ic_lora(**{name: factor}),))


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
    assert encode_inputs.notes(dubbed) == [f"{film}: 25 of 28 frames are used (8k+1)"]


def test_a_dubbing_lora_without_layers_of_sound_is_noticed(tmp_path):
    silent, voiced = (Lora(tmp_path / name) for name in ("pose.safetensors", "dub.safetensors"))
    for lora, layer in ((silent, "attn1"), (voiced, "audio_attn1")):
        save_file({f"blocks.0.{layer}.to_q.lora_A.weight": torch.zeros(1)}, lora.path)
    assert are_silent((silent,)) and not are_silent((voiced,)) and not are_silent((silent, voiced))


def test_one_attention_mask_is_for_all_references():
    mask = "--conditioning-attention-mask", FILE, 0.5
    assert flags.spec(parsed(*mask)).attention_mask == AttentionMask(FILE, 0.5)


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


# --- one job of each kind -------------------------------------------------------------------------

SMALL, TWO_STAGES = "--height 128 --width 192 --num-frames 9", "--height 128 --width 128 --num-frames 9 --two-stage"
KINDS = {
    "a sound and an image": f"{SMALL} --audio-path {{film}} 0.5 2 --image {{film}} 8 0.5 20",
    "a guided sound": f"{TWO_STAGES} --recipe dev --audio-path {{film}} --video-cfg-guidance-scale 2",
    "a retake": "--video-path {film} 0.1 0.2 --regenerate video",
    "an extension": "--video-path {long} --extend -3 --num-frames 25",
    "a masked reference": f"{TWO_STAGES} --ic-lora {{lora}} --video-conditioning {{film}} 0.5"
    " --conditioning-attention-mask {film} 0.5 --skip-stage-2",
    "guides": f"{TWO_STAGES} --recipe dev --sampler res_2s --images-as-guides --image {{film}} 8 0.5",
    "a dubbed clip": "--height 128 --width 128 --two-stage --reference-video {film} --reference-strength 0.5"
    " --lora {lora}",
    "a voice": f"{SMALL} --recipe dev --reference-audio {{film}} --ic-lora {{lora}} --identity-guidance-scale 1.5",
    "nag": f"{SMALL} --nag-scale 11 --negative-prompt grey",
    "a tail": f"{SMALL} --tail-frames 8",
    "sound alone": "--recipe dev --sound-only --num-frames 30 --frame-rate 25",
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request, clip, ic_lora) -> Job:
    paths = {"film": clip(9, 32, 64), "long": clip(26, 32, 64), "lora": ic_lora().path}
    made = said(*request.param.format(**paths).split())
    made.check()
    return made


def test_a_job_is_the_same_again_from_its_line(kind, clip):
    line = json.loads(json.dumps(kind.with_paths(lambda path: path.name).to_line()))
    assert job_of(line, Path(clip(9, 32, 64)).parent).describe() == kind.describe()
    assert json.loads(json.dumps(kind.describe())) == kind.describe()


def workspace(tiny, folder) -> Workspace:
    return Workspace(tiny.checkpoint, resolve("cpu"), folder, 2, "float32", tiny.gemma_root)


def test_missing_graphs_are_refused_with_the_command_that_compiles_them(kind, tiny, tmp_path):
    with pytest.raises(UserError) as error:
        workspace(tiny, tmp_path).dit_program_for(kind, kind.stages[0])
    line = str(error.value).splitlines()[-1]
    words = shlex.split(line.partition(command("compile transformer"))[2])
    parser = flags.parser("", "", gemma=False)
    flags.add_job(parser, flags.GRAPHS)
    args = parser.parse_args(words)
    shape = flags.shape(args, args.recipe)
    shape.check_shape()
    assert shape.buckets_to_compile == kind.buckets_to_compile
    assert not {"--start-time", "--audio-start-time", "--regenerate", "--sampler"} & {*words}


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
    extension = called(video=clip(26), extend=1, num_frames=25)
    assert extension == said("--video-path", clip(26), "--extend", 1, "--num-frames", 25)
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


def test_a_call_with_a_voice_is_the_job_of_the_flags(voice, ic_lora):
    given = dict(reference_audio=Path(voice), reference_audio_max_duration=0.5, identity_guidance_scale=2)
    found = called("dev", **given, ic_loras=[(ic_lora().path, 1.0)], num_frames=17)
    assert found.reference_sound == ReferenceAudio(voice, 13, 0.5, 2)
    words = "--reference-audio-max-duration", 0.5, "--identity-guidance-scale", 2
    words = "--reference-audio", voice, *words, "--ic-lora", ic_lora().path, "--num-frames", 17
    assert found.describe() == said(*words, "--recipe", "dev").describe()


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


CALLS = {
    "reference_video: got 5, wanted a valid string": dict(reference_video=5),
    "reference_strength needs reference_video FILE": dict(reference_strength=0.5),
    "video needs end_time: type the seconds": dict(video="a.mp4", start_time=0.5),
    "audio: got 5, wanted a valid string": dict(audio=5),
    "attention_mask: got 5, wanted": dict(attention_mask=5),
    "reference: got 5, wanted": dict(reference=5),
    "height cannot be combined with video": dict(video="a.mp4", start_time=0.0, end_time=0.1, height=64),
    "tail_frames: got '8', wanted a valid integer": dict(tail_frames="8"),
    "height: got 0, wanted at least 1": dict(height=0),
    "--video-path a.mp4: no such file": dict(video="a.mp4", start_time=0.0, end_time=0.1),
    "image: got 'a.png', wanted": dict(image=["a.png"], output_type="mp4", output_path="out.mp4"),
}


@pytest.mark.parametrize("message", CALLS)
def test_a_call_is_refused_by_the_names_of_its_arguments(message):
    with pytest.raises(UserError) as error:
        LTXPipeline(Jobs(), "distilled")("rain", **CALLS[message])
    assert message in str(error.value)
