"""What a job takes: the graphs that its inputs need, and the same job by flags, lines and Python calls. What is
refused: test_refusals.py."""

import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from engines import opened_workspace
from helpers import picture_frames, tone, write_sound
from jobs import make_job, read_voice, replace
from safetensors.torch import save_file
from typed import parsed, said

from ltx_neuron import flags
from ltx_neuron.artifacts.workspace import RunOptions
from ltx_neuron.engine.outputs import run_identity
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.host import input_files
from ltx_neuron.host.video import write_video
from ltx_neuron.invocation import command
from ltx_neuron.job import Job, Size
from ltx_neuron.models.signatures import NO_VOICE, PASSES
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ImageCondition,
    ReferenceAudio,
    ReferenceVideo,
    Retake,
    SoundCondition,
    plain,
)
from ltx_neuron.sampling.guidance import DEFAULTS, NEGATIVE_PROMPT, Guidance, StreamGuidance
from ltx_neuron.service.jobs import job_of
from ltx_neuron.weights.lora import Lora

ONE, TWO = Size(128, 192, 17), Size(128, 192, 17, two_stage=True)
FILE = __file__  # checks of a job look no deeper than whether a file can be read
SOUND, RETAKE, MASK = SoundCondition(FILE), Retake(FILE, 0.2, 0.5), AttentionMask(FILE, 0.6)
FIRST, LATER = ImageCondition(FILE), ImageCondition(FILE, 16, 0.6)
REFERENCE, SHORT = ReferenceVideo(FILE, 1.0, num_frames=25), ReferenceVideo(FILE, 0.5, num_frames=9)
LORAS = (Lora(Path(FILE)),)
REFERRING = dict(size=TWO, references=(REFERENCE,), stage_1_loras=LORAS)
DEV = dict(size=TWO, recipe="dev")
DUBBED = dict(size=TWO, dubbing=REFERENCE, reference_sound=ReferenceAudio(FILE, 25), loras=LORAS)
TREF = 26  # latents of 1 s
SILENCED = ReferenceAudio(FILE, TREF, identity_scale=0.0)
VOICED = DEV | dict(reference_sound=ReferenceAudio(FILE, TREF), stage_1_loras=LORAS)


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Callable[..., str]:
    """clip(frames, height, width, rate): the path of a video with sound."""
    folder = tmp_path_factory.mktemp("clips")

    @cache
    def path_of(frames: int, height: int = 32, width: int = 64, rate: float = 24.0) -> str:
        path, pictures = folder / f"{frames}-{rate}.mp4", picture_frames(frames, height, width, 0)
        write_video(path, [pictures], rate, lambda: tone(48000, frames / rate), 48000)
        return str(path)

    return path_of


@pytest.fixture(scope="module")
def voice(tmp_path_factory) -> str:
    """The path of a mono sound of 1 s."""
    stored = (tone(16000, 1.0)[:1] * 2**15).short().numpy()
    return str(write_sound(tmp_path_factory.mktemp("voice") / "voice.wav", stored, 16000, "pcm_s16le", "mono", "s16"))


@pytest.fixture
def ic_lora(tmp_path) -> Callable[..., Lora]:
    """ic_lora(downscale_factor=...): a LoRA file whose metadata has these factors of references."""

    def lora_of(**factors: str) -> Lora:
        path = tmp_path / "ic_lora.safetensors"
        save_file({"a": torch.zeros(1)}, path, {f"reference_{name}": factor for name, factor in factors.items()})
        return Lora(path)

    return lora_of


def job(size=ONE, **inputs) -> Job:
    return make_job("rain", size, **inputs)


# Stage 1 of WIDE: 2 x 4 latents, 3 frames; a reference of every second frame: frames 0, 1, 3, .. 15
WIDE = REFERRING | dict(size=Size(128, 256, 17, two_stage=True))
HALF, SLOW, WEAK = replace(REFERENCE, space_scale=2), replace(REFERENCE, time_scale=2), replace(REFERENCE, strength=0.0)
CUT = dict(size=replace(TWO, num_frames=25), references=(replace(REFERENCE, num_frames=24),))  # 17 of 24 frames
# What a job has -> the names of its graphs, stage 1's first: tokens, timesteps, steps and what else differs
BUCKETS = {
    "a retake": (dict(retake=RETAKE), "v72-a18t2-t2-s8"),
    "a sound": (dict(size=TWO, sound=SOUND), "v18-a18-t1-s8 v72-a18-t1-s8"),
    "a sound and an image, guided": (DEV | dict(sound=SOUND, images=(FIRST,)), "v18-a18-t2-s64-guided v72-a18-t2-s8"),
    "images": (dict(size=TWO, images=(FIRST, LATER)), "v24-a18-t3-s8 v96-a18-t3-s8"),
    "guides": (DEV | dict(images=(FIRST, LATER), images_as_guides=True), "v30-a18-t3-s64-guided v120-a18-t3-s8"),
    "references": (REFERRING | dict(references=(REFERENCE, SHORT)), "v48-a18-t3-s8 v72-a18-t1-s8"),
    "a reference that is shorter": (REFERRING | CUT, "v42-a26-t2-s8 v96-a26-t1-s8"),
    "a reference in one stage": (REFERRING | dict(size=ONE), "v144-a18-t2-s8"),
    "a reference of half the sides": (WIDE | dict(references=(HALF,)), "v30-a18-t2-s8 v96-a18-t1-s8"),
    "a reference of half the frames": (WIDE | dict(references=(SLOW,)), "v40-a18-t2-s8 v96-a18-t1-s8"),
    "a reference of strength 0": (REFERRING | dict(references=(WEAK,)), "v36-a18-t1-s8 v72-a18-t1-s8"),
    "a masked reference": (REFERRING | dict(attention_mask=MASK), "v36-a18-t2-s8-biased v72-a18-t1-s8"),
    "a guided one": (REFERRING | DEV | dict(attention_mask=MASK), "v36-a18-t2-s64-guided-biased v72-a18-t1-s8"),
    "nag": (dict(size=TWO, nag_scale=11.0), "v18-a18-t1-s8-nag v72-a18-t1-s8-nag"),
    "nag of scale 1": (dict(size=TWO, nag_scale=1), "v18-a18-t1-s8 v72-a18-t1-s8"),
    "a dubbed clip": (DUBBED, "v36-a43t2-t2-s8 v144-a36-t2-s8"),
    "a dubbed clip of strength 0": (DUBBED | dict(dubbing=WEAK), "v36-a43t2-t2-s8 v144-a36-t2-s8"),
    "a dubbed clip and an image": (DUBBED | dict(images=(LATER,)), "v42-a43t2-t3-s8 v168-a36-t3-s8"),
    "a voice": (VOICED, "v18-a44t2-t1-s64-guided-identity v72-a18-t1-s8"),
    "a voice of scale 0": (VOICED | dict(size=ONE, reference_sound=SILENCED), "v72-a44t2-t1-s64-guided"),
    "a voice of the distilled recipe": (VOICED | dict(size=ONE, recipe="distilled"), "v72-a44t2-t1-s8"),
    "stage 1 alone": (dict(size=TWO, skip_stage_2=True), "v18-a18-t1-s8"),
}


@pytest.mark.parametrize(("inputs", "names"), BUCKETS.values(), ids=BUCKETS)
def test_a_job_needs_the_graphs_of_its_inputs(inputs, names):
    made = job(**inputs)
    assert " ".join(bucket.name for bucket in made.buckets) == names
    if made.fixes_timesteps:
        assert made.buckets_to_compile == made.buckets
    else:  # with one timestep, and with two for an image at frame 0
        assert [b.timesteps for b in made.buckets_to_compile] == [1, 2] * len(made.stages)


def test_stages_steps_and_prompts_are_those_of_the_jobs_kind():
    nag = job(nag_scale=11.0)
    assert nag.texts == ("rain", NEGATIVE_PROMPT) and replace(nag, negative_prompt="").texts == ("rain", "")
    assert [job(nag_scale=scale).texts for scale in (None, 1)] == [("rain",)] * 2
    dubbed = job(**DUBBED)
    assert [stage.loras for stage in dubbed.stages] == [LORAS, LORAS] and dubbed.audio_key == "s1_audio"
    whole, half = job(TWO), job(TWO, skip_stage_2=True)
    assert half.stages == whole.stages[:1]
    assert (half.upsamplers, whole.upsamplers) == ({}, {"spatial": "--two-stage"})
    assert (half.latent_shape, whole.latent_shape) == ((3, 2, 3), (3, 4, 6))
    for steps, kind in (30, job(**DEV)), (40, job(recipe="dev", retake=RETAKE)), (15, job(**DEV, sampler="res_2s")):
        assert (kind.steps, replace(kind, num_inference_steps=7).steps) == (steps, 7)
    assert job(retake=RETAKE).steps == 8
    assert job(**DEV, sound=SOUND).resolved_guidance == Guidance(DEFAULTS.video, StreamGuidance())


def test_what_can_be_made_is_not_refused():
    for inputs in (
        DEV | dict(sound=SOUND, images=(ImageCondition(FILE, 16),)),
        dict(retake=Retake(FILE, 0, 17 / 24)),
        dict(retake=RETAKE, recipe="dev"),
        REFERRING | dict(attention_mask=AttentionMask(FILE, 0.0), skip_stage_2=True),
        REFERRING | dict(size=ONE, images=(FIRST,)),
        REFERRING | DEV,
        DUBBED | dict(images=(FIRST,)),
        dict(negative_prompt="grey", nag_scale=1),  # off, for a line of a prompts file
        # No bound that follows from one field, such as a clip's frames, refuses another's default.
        dict(size=Size(32, 32, 1), upscale="both"),
        dict(size=Size(64, 64, 17, 1.0, two_stage=True), recipe="dev", sampler="res_2s", tail_frames=16),
        # HQ has its distilled LoRA in both stages.
        DEV | dict(sampler="res_2s", stage_1_loras=LORAS, stage_2_loras=LORAS),
    ):
        job(**inputs).check()
    make_job("", ONE).check_shape()


LORA = str(ROOT / "test/demo_upscaler.safetensors")  # any file of weights
SMALL, SQUARE = "--height 128 --width 192 --num-frames 9", "--height 128 --width 128 --two-stage"
SMALL_CALL, SQUARE_CALL = dict(height=128, width=192, num_frames=9), dict(height=128, width=128, two_stage=True)
REFERENCE_AND_MASK = f"--ic-lora {LORA} --video-conditioning film 0.5 --conditioning-attention-mask film 0.5"
IC = dict(ic_loras=[(LORA, 1.0)])
OF_VIDEO = replace(DEFAULTS.video, cfg_scale=2.0, modality_scale=1.5)
# Flags -> the call of the Python API with the files film, long and voice
KINDS = {
    f"{SMALL} --audio-path film 0.5 2 --image film 8 0.5 20": SMALL_CALL
    | dict(audio=SoundCondition("film", 0.5, 2.0), image=[ImageCondition("film", 8, 0.5, 20)]),
    f"{SQUARE} --recipe dev --audio-path film --video-cfg-guidance-scale 2 --a2v-guidance-scale 1.5": SQUARE_CALL
    | dict(audio=Path("film"), guidance=Guidance(OF_VIDEO, StreamGuidance())),
    "--video-path film 0.1 0.2 --regenerate video": dict(video=Retake("film", 0.1, 0.2, "video")),
    "--video-path film --start-time 0.1 --end-time 0.2": dict(video="film", start_time=0.1, end_time=0.2),
    "--video-path long --extend -3 --num-frames 25": dict(video="long", extend=-3, num_frames=25),
    f"{SQUARE} --num-frames 9 {REFERENCE_AND_MASK} --skip-stage-2": SQUARE_CALL
    | dict(reference=[ReferenceVideo("film", 0.5, 9)], attention_mask=AttentionMask("film", 0.5))
    | dict(IC, num_frames=9, skip_stage_2=True),
    f"{SMALL} {REFERENCE_AND_MASK.replace(' 0.5', ' 1')}": dict(
        SMALL_CALL, **IC, reference="film", attention_mask="film"
    ),
    f"{SQUARE} --recipe dev --sampler res_2s --images-as-guides --image film 8 0.5 --num-frames 9": SQUARE_CALL
    | dict(sampler="res_2s", images_as_guides=True, image=[ImageCondition("film", 8, 0.5)], num_frames=9),
    f"{SQUARE} --reference-video film --reference-strength 0.5 --lora {LORA}": SQUARE_CALL
    | dict(reference_video=Path("film"), reference_strength=0.5, loras=[(LORA, 1.0)]),
    f"{SMALL} --recipe dev --ic-lora {LORA} --identity-guidance-scale 1.5 --reference-audio voice"
    " --reference-audio-max-duration 0.5": SMALL_CALL
    | dict(IC, reference_audio=Path("voice"), identity_guidance_scale=1.5, reference_audio_max_duration=0.5),
    f"{SMALL} --nag-scale 11 --negative-prompt grey": dict(SMALL_CALL, nag_scale=11, negative_prompt="grey"),
    f"{SMALL} --tail-frames 8": dict(SMALL_CALL, tail_frames=8),
    "--recipe dev --sound-only --num-frames 30 --frame-rate 25": dict(sound_only=True, num_frames=30, frame_rate=25),
}


@pytest.fixture(params=KINDS, ids=str)
def typed(request, clip, voice, tmp_path, monkeypatch) -> str:
    """The flags of a kind, where its files are."""
    for name, path in dict(film=clip(9), long=clip(26), voice=voice).items():
        (tmp_path / name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return request.param


def engine_of(jobs: list[Job]) -> SimpleNamespace:
    """An engine that keeps the jobs that it is asked for."""

    def run(given, **options):
        jobs.extend(given)
        raise UserError("enough")

    known = dict(compat=COMPAT[None], options=RunOptions(), workspace=SimpleNamespace(spatial_scale=2.0))
    return SimpleNamespace(**known, check_process=lambda: None, run=run)


def test_a_job_is_the_same_by_flags_by_a_call_of_python_and_again_from_its_line(typed):
    by_flags, called = said(*typed.split()).with_paths(lambda path: path.name), []
    by_flags.check()
    pipeline = LTXPipeline(engine_of(called), "dev" if "--recipe dev" in typed else "distilled")
    with pytest.raises(UserError, match="enough"):
        pipeline("rain", output_type="latent", **KINDS[typed])
    (by_call,) = called
    by_call.check()
    line = json.loads(json.dumps(by_flags.to_line()))
    assert by_call.describe() == by_flags.describe() == job_of(line, Path()).describe()
    assert by_call.buckets == by_flags.buckets
    assert json.loads(json.dumps(by_flags.describe())) == by_flags.describe()


def test_missing_graphs_are_refused_with_the_command_that_compiles_them(typed, tiny, tmp_path):
    kind = said(*typed.split())
    with pytest.raises(UserError) as error:
        opened_workspace(tiny, tmp_path, tp=2).dit_program_for(kind, kind.stages[0])
    words = shlex.split(str(error.value).splitlines()[-1].partition(command("compile transformer"))[2])
    parser = flags.parser("", "", gemma=False)
    flags.add_job(parser, flags.GRAPHS)
    args = parser.parse_args(words)
    shape = flags.shape(args, args.recipe)
    shape.check_shape()
    assert shape.buckets_to_compile == kind.buckets_to_compile
    assert not {"--start-time", "--audio-start-time", "--regenerate", "--sampler"} & {*words}


def test_a_retake_a_reference_and_a_video_to_dub_have_the_sizes_of_their_files(clip, ic_lora):
    path = clip(9, 32, 64, 25.0)
    assert said("--video-path", path, "0.1", "0.2").size == Size(32, 64, 9, 25.0)
    # A line's file counts, not the command.
    job_of_line = flags.job_of_line(parsed("--height", 128, "--num-frames", 17, "--two-stage"))
    retake = job_of_line({"prompt": "rain", "video_path": path, "start_time": 0.1, "end_time": 0.3})
    assert retake.describe() == make_job("rain", Size(32, 64, 9, 25.0), retake=Retake(path, 0.1, 0.3)).describe()
    lora = ic_lora(downscale_factor="2", temporal_scale_factor="4")
    words = "--two-stage", "--height", 256, "--width", 256, "--ic-lora", lora.path, 0.5
    referring = said(*words, "--video-conditioning", path, 0.8)
    assert referring.references == (ReferenceVideo(path, 0.8, 9, 2, 4),)
    assert referring.stage_1_loras == (Lora(lora.path, 0.5),)
    referring.check()
    # Of a video to dub the file tells length and rate, and the LoRA the scale.
    lora, film = ic_lora(downscale_factor="2", temporal_scale_factor="2"), clip(28, 64, 64, 29.97)
    words = "--height", 128, "--width", 128, "--two-stage", "--reference-strength", 0.5
    dubbed = said(*words, "--reference-video", film, "--lora", lora.path)
    rate = 30000 / 1001  # not 29: the video keeps the clip's speed
    assert dubbed.size == Size(128, 128, 25, rate, two_stage=True) and dubbed.output_frame_rate == rate
    # Of scales the LoRA has that of pixels alone; the sound is not cut to the video.
    assert dubbed.dubbing == ReferenceVideo(film, 0.5, 25, 2, 1) and dubbed.reference_sound == read_voice(film)
    dubbed.check()
    of_line = flags.job_of_line(parsed("--num-frames", 9, *words))({"reference_video": film, "lora": str(lora.path)})
    assert of_line.size == dubbed.size
    assert input_files.notes(dubbed) == [f"{film}: 25 of 28 frames are used (8k+1)"]


def test_a_voice_has_the_defaults_of_id_lora_and_is_a_file_or_its_first_seconds_noted_if_unusual(voice, ic_lora):
    made, off = job(**VOICED), job(**VOICED | dict(reference_sound=SILENCED))
    video, audio = made.resolved_guidance.streams
    assert video == StreamGuidance(3.0, 1.0, (29,), 3.0) and audio == replace(video, cfg_scale=7.0)
    assert (made.steps, made.identity_scale, made.passes) == (30, 3.0, (*PASSES, NO_VOICE))
    assert (off.identity_scale, off.passes) == (0.0, PASSES)
    assert make_job("rain", recipe="dev").resolved_guidance == DEFAULTS
    words = "--recipe", "dev", "--reference-audio", voice, "--ic-lora", ic_lora().path
    scales = "--identity-guidance-scale", 1.5, "--audio-cfg-guidance-scale", 4
    plain, scaled, hq = (said(*words, *more) for more in ((), scales, ("--sampler", "res_2s", "--two-stage")))
    for made in (plain, scaled, hq):
        made.check()
        assert made.resolved_guidance.video.rescale_scale == 0.0
    assert plain.reference_sound == ReferenceAudio(voice, TREF) and plain.identity_scale == 3.0
    audio = scaled.resolved_guidance.audio
    assert (scaled.identity_scale, audio.cfg_scale, audio.stg_blocks) == (1.5, 4.0, (29,))
    assert hq.resolved_guidance.audio.rescale_scale == 0.0
    # A shape needs no LoRA, as its graphs do not depend on one.
    shape = flags.shape(parsed("--reference-audio", voice, "--identity-guidance-scale", 0, compiles=True), "dev")
    shape.check_shape()
    assert not shape.buckets[0].identity
    assert read_voice(voice) == ReferenceAudio(voice, TREF)
    assert read_voice(voice, reference_audio_max_duration=0.5) == ReferenceAudio(voice, 13, 0.5)
    for latents, seconds in ((26, "1.0"), (126, None), (300, "12.0")):
        notes = input_files.notes(make_job("", reference_sound=ReferenceAudio(voice, latents)))
        message = f"{voice} gives {seconds} s of sound; its LoRA was trained on about 5 s"
        assert [message in note for note in notes] == [True] * (seconds is not None)


def test_a_run_depends_on_what_each_of_its_files_holds_and_not_on_where_they_lie(tiny, tmp_path, ic_lora):
    opened, loras = opened_workspace(tiny, tmp_path / "artifacts", tp=2), (ic_lora(),)
    paths = {name: str(tmp_path / name) for name in ("image", "sound", "reference", "mask", "video", "dubbed")}
    for path in paths.values():
        Path(path).write_bytes(b"before")
    references, voice = (replace(REFERENCE, path=paths["reference"]),), ReferenceAudio(paths["dubbed"], 25)
    kinds = [
        job(sound=SoundCondition(paths["sound"]), images=(ImageCondition(paths["image"]),)),
        job(TWO, references=references, stage_1_loras=loras, attention_mask=AttentionMask(paths["mask"], 1.0)),
        job(retake=Retake(paths["video"], 0.1, 0.2)),
        job(TWO, dubbing=replace(REFERENCE, path=paths["dubbed"]), reference_sound=voice, loras=loras),
    ]
    for kind in kinds:
        before = run_identity(kind, opened, RunOptions())
        for path in kind.files.values():
            path.write_bytes(b"after")
            assert run_identity(kind, opened, RunOptions()) != before
            path.write_bytes(b"before")
        assert run_identity(kind, opened, RunOptions()) == json.loads(json.dumps(before))
        elsewhere = kind.with_paths(lambda path: str(path.rename(f"{path}.moved")))
        assert run_identity(elsewhere, opened, RunOptions()) == before
    assert sum(len(kind.files) for kind in kinds) == len(paths)
    # No output may lie on what any job of a run reads.
    named = Engine(opened, Recorder()).preflight.files_read([job(sound=SOUND), job(retake=RETAKE)])
    assert named[f"--audio-path {FILE}"] == Path(FILE) == named[f"--video-path {FILE}"]


def test_a_call_is_refused_by_the_names_of_its_arguments():
    for message, arguments in {
        "unknown 'video_path'; did you mean video?": dict(video_path="x"),
        "unknown 'qwertz'": dict(qwertz="x"),
        "reference_strength needs reference_video FILE": dict(reference_strength=0.5),
        "video needs end_time: type the seconds": dict(video="a.mp4", start_time=0.5),
        "audio: got 5, wanted a valid string": dict(audio=5),
        "--video-path a.mp4: no such file": dict(video="a.mp4", start_time=0.0, end_time=0.1),
        "image: got 'a.png', wanted": dict(image=["a.png"], output_type="mp4", output_path="out.mp4"),
    }.items():
        with pytest.raises(TypeError if "unknown" in message else UserError, match=re.escape(message)):
            LTXPipeline(engine_of([]), "distilled")("rain", **arguments)


def test_an_image_at_frame_minus_1_is_the_last_frame_of_the_file_not_of_its_tail():
    tailed = job(replace(ONE, num_frames=25), tail_frames=8, image=(ImageCondition(FILE, -1),))
    assert tailed.placed[0].frame_index == 16


def test_whole_numbers_of_numpy_paths_and_all_defaults_are_right_in_python():
    image = ImageCondition(ROOT / "README.md", np.int64(8), np.float32(0.5), np.uint8(3))
    numbers = {"height": np.int64(64), "num_frames": np.int32(9), "seed": np.uint64(3), "frame_rate": np.float32(24)}
    for fields in ({}, {"frame_rate": 24}, numbers | {"image": (image,)}):
        made = Job.validated({"prompt": "rain"} | fields, strict=True)
        made.check()
    (held,) = made.image
    assert (held.frame_index, held.strength, held.crf) == (8, 0.5, 3) and type(plain(np.float32(0.5))) is float
    with pytest.raises(ValueError, match="wanted text or a number"):
        plain(np.ones(1))


def test_the_upsampler_of_one_and_a_half_makes_stage_1_two_thirds_of_the_size():
    size = Size(96, 192, 9, two_stage=True, spatial_scale=1.5)
    size.check()
    made = make_job("rain", size)
    assert size.first == Size(64, 128, 9)
    assert made.scaled(1.5) is made and made.scaled(2.0).size == Size(96, 192, 9, two_stage=True)
    assert [(stage.height, stage.width) for stage in made.stages] == [(64, 128), (96, 192)]
    assert (made.height, made.two_stage, made.describe()["spatial_scale"]) == (96, True, 1.5)
    assert "spatial_scale" not in make_job("rain", Size(two_stage=True)).describe()
    with pytest.raises(UserError, match="height 512 is not a multiple of 96 .* 1.5 .*nearest valid: 480 or 576"):
        Size(512, 768, 9, two_stage=True, spatial_scale=1.5).check()
