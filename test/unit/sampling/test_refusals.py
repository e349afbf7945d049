"""Jobs that are refused: fields that need or exclude each other, limits, and files that do not fit. The message is the
same for a job of Python, flags, a line of a prompts file and a request."""

import json
import re
import shlex

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from helpers import made_film, picture_frames, tone, write_film, write_sound
from PIL import Image
from safetensors.torch import save_file
from typed import parsed

from ltx_neuron import batch, flags
from ltx_neuron.errors import FieldError, UserError
from ltx_neuron.host import input_files
from ltx_neuron.job import Job, Size, to_flags
from ltx_neuron.sampling import rules
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.spec import GuidanceFields, JobFields
from ltx_neuron.service.api_error import ApiError, field_of
from ltx_neuron.service.fields import _MEDIA, KNOWN, read_request, with_field_names
from ltx_neuron.service.jobs import public

FILE = __file__

# A value of each field of a rule that is not its default.
FIELDS = [
    (True, "two_stage sound_only skip_stage_2 stage_2_ic_lora tile images_as_guides dfr decode_with_keyframes chunked"),
    (True, "high_quality no_keyframes alpha_gen"),
    (FILE, "audio_path video_path upscale_video reference_video reference_audio text_embeddings"),
    (((FILE, 1.0),), "video_conditioning conditioning_attention_mask"),
    (((FILE,),), "lora ic_lora distilled_lora detailing_lora"),
    ([[FILE]], "image"),
    (0.0, "audio_start_time start_time end_time"),
    (0.5, "nag_alpha motion_speed reference_strength keyframe_strength"),
    (0.5, "distilled_lora_strength_stage_1 distilled_lora_strength_stage_2"),
    (1.0, "audio_max_duration extend reference_audio_max_duration"),
    (1, "num_generated_keyframes temporal_upsample_rounds"),
    (2, " ".join(name for name in GuidanceFields.model_fields if name.endswith(("scale", "step")))),
    (64, "height width tile_height tile_width"),
]
VALUES = {name: value for value, names in FIELDS for name in names.split()}
VALUES |= {"video_stg_blocks": (1,), "audio_stg_blocks": (1,), "auto_duration": (1, 2), "num_frames": 9}
VALUES |= {"frame_rate": 25.0, "tail_frames": 8, "audio_bed": -50.0, "nag_scale": 11.0, "nag_tau": 5.0}
VALUES |= {"regenerate": "video", "upscale": "both", "input_colorspace": "acescg", "exr_colorspace": "acescct"}
VALUES |= {"identity_guidance_scale": 2.0, "negative_prompt": "grey", "prompt": "a fox", "prompts": ["b", "c"]}


def values_of(*terms: str) -> dict:
    """The fields of a job in which these terms hold."""
    values = {}
    for term in terms:
        name, _, value = term.partition("=")
        name = "video_skip_step" if name == "guidance" else name
        if not name.startswith("!"):
            values[name] = value or VALUES[name]
    return values


def jobs_of(values: dict):
    """The job of these values from Python, from a line of a prompts file, and from flags."""
    yield (job := Job.validated(values))
    line = {name: value for name, value in job.to_json().items() if name in values}
    yield Job().updated(line)
    yield flags.spec(parsed(*to_flags(line, line), "--recipe", job.recipe))


CASES = [(rule, field) for rule in rules.RULES for field in rule.fields.split()]


@pytest.mark.parametrize(("rule", "field"), CASES, ids=lambda case: str(case)[:60])
def test_a_rule_refuses_a_field_without_what_it_needs_and_with_what_it_excludes(rule, field):
    needs, excludes, when = (x.split() for x in (rule.needs, rule.excludes, rule.when))
    wrong = [[x for x in needs if x != missing] for missing in needs]
    wrong += [[excluded] for excluded in excludes]
    other = {"recipe=dev": "recipe=distilled", "recipe=distilled": "recipe=dev"}
    for terms, named in zip(wrong, [*needs, *excludes], strict=True):
        against = [other[named]] if named in needs and named in other else []
        for job in jobs_of(values_of(field, *when, *terms, *against)):
            with pytest.raises(FieldError) as error:
                rule.check(job.holds)
            names = {field.partition("=")[0], named.partition("=")[0]}
            assert names & {*error.value.fields} and "THESE" not in str(error.value)
            with pytest.raises(FieldError):
                rules.check(job.holds)
    for job in jobs_of(values_of(field, *when, *needs, *(other[x] for x in excludes if x in other))):
        rule.check(job.holds)
    for job in jobs_of(values_of(*needs, *excludes[:1])):  # the field has its default
        if len(rule.fields.split()) == 1 and not job.holds(field):
            rule.check(job.holds)


# A command line -> parts of its message
REFUSALS = r"""
# values of several words
--auto-duration 2 1 -> --auto-duration 2 1: wanted MIN_SECONDS MAX_SECONDS, the smaller number first
--image image.png 0 1.5 -> --image image.png: strength '1.5', wanted at most 1; type --image PATH [FRAME_IDX [STRENGTH
--image image.png 0 1 33 5 -> --image image.png: got '5', unexpected
--lora a --lora b nan -> --lora b: strength 'nan', wanted a finite number; type --lora PATH [STRENGTH]
--ic-lora ic much -> ic: strength 'much', wanted a valid number; type --ic-lora PATH [STRENGTH]
--ic-lora lora --video-conditioning film.mp4 -> --video-conditioning film.mp4: got ['film.mp4'], field required; type
# what every job needs
--prompt '' -> --prompt is empty; type for example --prompt 'a golden retriever runs across a meadow'
--prompt 'caf\udce9' -> --prompt is not UTF-8 text; type it again in a UTF-8 terminal or file
--height 100 -> --height 100 is not a multiple of 32; nearest valid: 96 or 128
--two-stage --height 96 -> --height 96 is not a multiple of 64 (two stages); nearest valid: 64 or 128
--num-frames 24 -> --num-frames 24 is not of the form 8k+1; nearest valid: 17 or 25
--num-frames 1 --frame-rate 60 -> 1 frames at --frame-rate 60 are too short for sound; lower the frame rate or raise
--num-inference-steps 20 -> the distilled recipe has one sigma table, of 8 steps (and 3 for stage 2); other counts need
--recipe dev --two-stage --sampler res_2s --num-steps 32 -> --num-inference-steps 32: type a number from 1 to 31
--num-frames 1 --num-generated-keyframes 1 -> --num-generated-keyframes 1: wanted at most 0
--dfr --two-stage --detailing-lora lora --num-frames 1 -> --num-frames 1: --dfr renders motion, wanted 9 or more
# a text for each of the rules
--audio-start-time 1 -> --audio-start-time needs --audio-path FILE
--sound-only --recipe dev --height 64 --v2a-guidance-scale 2 -> --sound-only makes no picture: leave out --height
--num-frames 9 --auto-duration 1 2 -> --num-frames cannot be combined with --auto-duration; leave one of them out
--video-path film.mp4 0 0.2 --height 64 --two-stage -> --height --two-stage cannot be combined with --video-path
--recipe dev --distilled-lora-strength-stage-1 0.3 -> --distilled-lora-strength-stage-1 needs --distilled-lora PATH
--video-cfg-guidance-scale 3 --audio-skip-step 1 -> recipe takes no --video-cfg-guidance-scale, --audio-skip-step
--recipe dev --audio-path sound.wav --audio-skip-step 1 --v2a-guidance-scale 2 -> --v2a-guidance-scale, --audio-skip
--video-path film.mp4 --extend 1 --end-time 3 -> --end-time cannot be combined with --extend, which keeps the whole
--video-path film.mp4 0.5 -> --video-path needs --end-time: type the seconds to regenerate, for example --start-time
--reference-audio voice.wav --reference-video film.mp4 -> --reference-audio does not go with --reference-video
--upscale spatial --two-stage -> --upscale is for one-stage runs; --two-stage upsamples between its stages already
--negative-prompt grey -> --negative-prompt with the distilled recipe needs --nag-scale; type --nag-scale 11 as well
--reference-audio voice.wav --ic-lora lora --identity-guidance-scale 2 -> is of the dev recipe, as the other
# combinations that depend on values
--ic-lora lora --video-conditioning film.mp4 1 --conditioning-attention-mask film.mp4 1 \
    --conditioning-attention-mask film.mp4 1 -> got 2 times --conditioning-attention-mask, wanted one mask
--lora lora 0.5 --video-conditioning film.mp4 1 -> needs an --ic-lora, and got --lora alone, | type --ic-lora lora 0.5
--recipe dev --two-stage --distilled-lora lora 1 --distilled-lora-strength-stage-2 0.5 -> \
    --distilled-lora-strength-stage-2 replaces the strength of --distilled-lora: type --distilled-lora PATH without
--recipe dev --two-stage --ic-lora lora -> --ic-lora lora needs a reference
--ic-lora lora --video-conditioning film.mp4 1 --tile --tile-height 64 --tile-width 96 --two-stage -> \
    tiles, which need the reference; type --stage-2-ic-lora as well
--recipe dev --two-stage --sampler res_2s --reference-audio voice.wav --distilled-lora lora \
    --distilled-lora-strength-stage-1 0.25 -> --reference-audio goes with --ic-lora
# images
--image absent.png -> --image absent.png: no such file; pass an image as --image FILE [FRAME_IDX [STRENGTH [CRF]]]
--num-frames 9 --image image.png 9 -> --image image.png: frame 9 is outside the clip's 0..8; -1 is the last one
--num-frames 17 --tail-frames 8 --image image.png 17 -> --image image.png: frame 17 is outside the clip's 0..16
# sounds
--audio-path absent.wav -> --audio-path absent.wav: no such file; pass a sound as --audio-path FILE
--num-frames 25 --audio-path sound.wav -> got 0.50 s of sound, wanted 1.04 s | type --num-frames 9
--num-frames 9 --audio-path mute.mkv -> mute.mkv has no sound: pass another file with --audio-path
--num-frames 9 --audio-path sound.wav 5 -> sound.wav ends before --audio-start-time 5: type a smaller one
--ic-lora lora --reference-audio six.wav -> six.wav has 6 channels of sound, wanted 1 or 2. Type: ffmpeg
--ic-lora lora --reference-audio silent.wav -> --reference-audio silent.wav holds no sound; pass another file
--ic-lora lora --reference-audio voice.wav --reference-audio-max-duration 0.01 -> --reference-audio voice.wav is too
# a video of which a part is regenerated
--video-path nine.mp4 0.2 0.2 -> --start-time 0.2 --end-time 0.2: wanted a start before the end, in seconds
--video-path nine.mp4 5 9 -> --start-time 5 --end-time 9 reaches beyond the 0.375 s of nine.mp4; type at most --end-time
--video-path odd.mp4 0 0.2 -> 26 frames of 48x64; wanted 8k+1 frames and | -i odd.mp4 | crop=64:32 | odd-32x64x25.mp4
# a video that is extended
--video-path film.mp4 --extend 0 -> --extend 0: wanted seconds of a frame or more and at most 3600, as in
--video-path film.mp4 --extend 1e9 -> --extend 1e+09: wanted seconds of a frame or more and at most 3600
--video-path image.png --extend 1 -> --extend needs a video of 9 frames or more, and --video-path has 1; pass
--video-path film.mp4 --extend 1 --num-frames 17 -> 25 to 49 frames | 26 known and 24 new | Type --num-frames 49
--video-path film.mp4 --extend 1 --num-frames 45 -> --num-frames 45 is not of the form 8k+1; nearest valid: 41 or 49
--video-path odd.mp4 --extend 1 -> has 26 frames of 48x64; wanted sides that are multiples of 32. | ffmpeg | crop=64:32
--video-path sound.wav --extend 1 -> sound.wav has no video: pass a video file with --video-path
--video-path half.mp4 --extend 1 -> is cut off: got | wanted the 30
# a video that is dubbed
--two-stage --reference-video film.mp4 -> --reference-video needs one --lora, the dubbing LoRA (it is in both stages)
--two-stage --reference-video film.mp4 --lora lora --num-frames 121 -> film.mp4 says how many (25 of its 26 frames
--two-stage --reference-video five.mp4 --lora lora -> --reference-video five.mp4 has 5 frames, wanted 9 or more
--two-stage --reference-video mute.mkv --lora lora -> mute.mkv has no sound, which | --end-time 5 --regenerate audio
--two-stage --reference-video film.mp4 --lora lora_2 --height 64 --width 64 -> --reference-video film.mp4: the IC-LoRA
# references
--ic-lora lora --video-conditioning absent.mp4 1 -> there is no file absent.mp4: pass another file with
--ic-lora lora_3 --video-conditioning film.mp4 1 --height 256 --width 256 --two-stage -> \
    whose sides must be multiples of 96; type a --height and --width that are multiples of 192: 192x192 or 384x384
--ic-lora lora_2 --ic-lora lora_3 --video-conditioning film.mp4 1 -> 2 of lora_2, 3 of lora_3
--ic-lora lora_half --video-conditioning film.mp4 1 -> has reference_downscale_factor 'half', wanted a whole number
"""
# A bound -> flags with values beyond it
LIMITS = {
    "at least 1": "height 0, num-frames 0, num-inference-steps 0, nag-scale 0.5, frame-rate 0.5",
    "at least 0": "tail-frames -8, num-generated-keyframes -1, audio-start-time -1, video-skip-step -1",
    "more than 0": "audio-max-duration 0, reference-audio-max-duration 0",
    "less than 0": "audio-bed 0",
    "a multiple of 8": "tail-frames 12",
    "a multiple of 32": "tile-width 80",
    "a finite number": "frame-rate nan, extend inf, audio-bed nan, video-cfg-guidance-scale inf",
    "a valid integer": "height 720p, seed random",
    "a valid number": "frame-rate 24/0, extend much",
    "at least -120": "audio-bed -200",
    "at least 0.025": "motion-speed 0",
    "at least 64": "tile-height 32",
    "less than 18446744073709551616": "seed 18446744073709551616",
}
MOST = {"nag-alpha": 1, "motion-speed": 1, "reference-strength": 1, "temporal-upsample-rounds": 2, "nag-tau": 10}
MOST |= {"num-inference-steps": 64, "nag-scale": 100, "frame-rate": 1000, "width": 16384, "num-frames": 100000}
LINES = re.sub(r" \\\n +", " ", REFUSALS).strip().splitlines()
ROWS = [line.split(" -> ") for line in LINES if not line.startswith("#")]
BEYOND = [(bound, row.split()) for bound, rows in LIMITS.items() for row in rows.split(", ")]
BEYOND += [(f"at most {most}", (flag, most + 1)) for flag, most in MOST.items()]
ROWS += [[f"--{flag} {x}", f"--{flag}: got '{x}', wanted {bound}"] for bound, (flag, x) in BEYOND]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of the table."""
    folder = tmp_path_factory.mktemp("files")
    for name, frames, height in (("film", 26, 64), ("odd", 26, 48), ("nine", 9, 64), ("five", 5, 64), ("long", 30, 64)):
        made_film(folder / f"{name}.mp4", frames, height, 64)
    whole = (folder / "long.mp4").read_bytes()
    (folder / "half.mp4").write_bytes(whole[: len(whole) // 2])
    write_film(folder / "mute.mkv", picture_frames(9, 64, 64, 3))
    for name, samples, rate, layout in (
        ("sound", 2**15 * tone(48000, 0.5), 48000, "stereo"),
        ("voice", 2**15 * tone(16000, 1.0)[:1], 16000, "mono"),
        ("silent", torch.zeros(1, 16000), 16000, "mono"),
        ("six", torch.ones(6, 8000), 16000, "5.1"),
    ):
        stored = samples.short().T.reshape(1, -1).contiguous().numpy()
        write_sound(folder / f"{name}.wav", stored, rate, "pcm_s16le", layout, "s16")
    Image.new("RGB", (64, 64)).save(folder / "image.png")
    for name, factor in (("lora", None), ("lora_2", "2"), ("lora_3", "3"), ("lora_half", "half")):
        save_file({"a": torch.zeros(1)}, folder / name, {"reference_downscale_factor": factor} if factor else None)
    return folder


def check(job: Job) -> None:
    job.check()
    input_files.check(job)


def text_values(words: list[str]) -> dict:
    """The fields of flags, as texts."""
    args, values = vars(parsed(*words)), {}
    for name, field in JobFields.model_fields.items():
        if args[name] not in (field.default, None, []):
            values[name] = args[name]
    return {"prompt": args["prompt"] if "--prompt" in words else "rain"} | values


def by_python(words, folder):
    check(Job.validated(text_values(words)))


def by_flags(words, folder):
    check(flags.job(parsed(*([] if "--prompt" in words else ["--prompt", "rain"]), *words)))


def by_line(words, folder):
    (folder / "jobs.jsonl").write_text(json.dumps(text_values(words)))
    batch.read_lines(folder / "jobs.jsonl", flags.job_of_line(parsed()), {}, check_files=input_files.check)


def by_request(words, folder):
    """As the service reads a body and makes a job of it; the files are there."""
    values = text_values(words)
    body = {name: values.pop(name) for name in values.keys() & KNOWN - _MEDIA.keys()}
    request = read_request(body)
    sides = request.requested_size.model_dump(exclude_none=True)
    try:
        check(Job.validated(request.job.replaced(**sides).to_json() | values))
    except UserError as error:
        raise ApiError(400, "", public(error.render(field_of), folder)) from None


# All rows by flags; of the other ways a quarter, which shows that they refuse the same.
QUARTER = [row for row in ROWS[::4] if "--prompt" not in row[0]]
WAYS = {by_flags: ROWS, by_python: QUARTER, by_line: QUARTER, by_request: QUARTER}


@pytest.mark.parametrize(
    ("way", "typed", "message"),
    [pytest.param(way, *row, id=f"{way.__name__} {ascii(row[0])[1:-1]}") for way, rows in WAYS.items() for row in rows],
)
def test_a_job_is_refused_with_what_to_type(way, typed, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises((UserError, ApiError)) as error:
        way(shlex.split(typed.replace(r"\udce9", "\udce9")), folder)
    printed = " ".join(str(error.value).split())
    for part in message.split(" | "):
        assert (with_field_names(part) if way is by_request else part) in printed


def test_a_value_of_another_type_is_refused_in_python():
    for message, fields in {
        "--height: got '64', wanted a valid integer": dict(height="64"),
        "--num-frames: got True, wanted text or a number": dict(num_frames=True),
        "--image: got [['a.png']], wanted a valid tuple": dict(image="a.png"),
        "strength '1', wanted a valid number": dict(image=(ImageCondition(FILE, strength="1"),)),
        "--sampler: got 'heun', wanted 'euler', 'res_2s' or 'gradient_estimation'": dict(sampler="heun"),
        "--height: got [0, 1, 2, 3, 4, 5, ...], wanted a valid integer": dict(height=[*range(10_000)]),
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            Job.validated({"prompt": "rain"} | fields, strict=True)


def test_the_rate_of_a_files_size_is_checked():
    Size(64, 64, 121, 1000).check()
    for rate in (0.5, 1001, float("nan")):
        with pytest.raises(UserError, match="--frame-rate: got .*, wanted 1 to 1000"):
            Size(64, 64, 121, rate).check()
