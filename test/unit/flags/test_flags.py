"""The command line: help of two lengths, flags of several values, and what people type wrongly."""

import argparse
import re
import shlex
import subprocess
import sys
from functools import cache

import pytest
import typed as words_typed
from typed import parsed, said

from ltx_neuron import command_line, errors, flags
from ltx_neuron.command_line import Parser, advanced
from ltx_neuron.commands import VERBS, dispatch
from ltx_neuron.commands.generate import words_of
from ltx_neuron.demo import ASSETS
from ltx_neuron.errors import UserError
from ltx_neuron.flags import verbs
from ltx_neuron.report.price import Price
from ltx_neuron.sampling.spec import GUIDANCE_KEYS, GuidanceFields, JobFields, names_of
from ltx_neuron.tune.flags import build_parser as tune

OF_MODELS = [f"{verb} {model}" for verb in ("shard", "compile") for model in ("transformer", "gemma3", "vae")]


@cache
def parser_of(command: str) -> Parser:
    return words_typed.parser_of(command.split())


def test_a_verb_requires_the_model_files_that_it_reads_and_takes_every_flag_of_a_generation():
    needs = dict.fromkeys(("generate", "batch", "prepare"), (True, True)) | {"plan": (True, False)}
    needs |= {"tune": (True, False), "doctor": (False, False), "serve": (False, True)}  # which alone adds a token
    for verb, (checkpoint, gemma) in needs.items():
        parser = parser_of(verb)
        assert ("checkpoint_path" in {action.dest for action in parser._actions if action.required}) == checkpoint
        assert parser.get_default("needs_gemma") == gemma
        usual = {action.dest for action in parser._actions if getattr(action, "usual", False)}
        assert ("gemma_root" in usual) == (gemma and checkpoint), verb
        assert parser_of("generate")._option_string_actions.keys() <= parser._option_string_actions.keys()


@pytest.mark.parametrize("command", ["generate", "batch", "serve", "plan"])
def test_the_price_is_for_the_runs_that_the_machine_has_room_for(command):
    def price(*words):
        return flags.price(parser_of(command).parse_known_args(["--checkpoint-path", "c", "--profile", *words])[0])

    for machine, runs in (("trn2.48xlarge", 16), ("trn2.48xlarge-cp4", 4), ("trn2.3xlarge", 1)):
        assert price(machine, "--price-per-hour", "14.56") == Price(14.56, runs)
    assert price("trn2.3xlarge") is None
    for wrong in ("0", "-1", "nan", "inf"):
        with pytest.raises(UserError, match=f"--price-per-hour {wrong}: wanted US dollars above 0"):
            price("trn2.3xlarge", f"--price-per-hour={wrong}")


@pytest.mark.parametrize("command", [*sorted({*VERBS} - {"shard", "compile"}), *OF_MODELS])
def test_every_flag_of_a_command_is_described_and_every_group_is_too(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    parser = parser_of(command)
    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    assert [action.dest for action in shown if not action.help] == []
    assert [group.title for group in parser._action_groups[2:] if not group.description] == []
    some, everything = parser.format_help(False), parser.format_help(True)
    assert max(map(len, f"{some}\n{everything}".splitlines())) <= 100
    if command == "generate":  # all of it has every name of every flag
        names = {name for action in shown for name in action.option_strings}
        names |= {f"--{n.replace('_', '-')}" for f in JobFields.model_fields for n in names_of(f)}
        assert [name for name in names if name not in everything.replace(",", " ").split()] == []


def test_help_leaves_advanced_flags_out_and_says_so(capsys):
    parser = Parser(prog="small")
    parser.add_argument("--often", "--usual", metavar="N", help="what most people type")
    advanced(parser.add_argument("--seldom", action="store_true", help="what few people type"))
    for flag, seldom in (("-h", False), ("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as end:
            parser.parse_args([flag])
        text = capsys.readouterr().out
        assert not end.value.code and "--often" in text
        assert [name in text for name in ("--seldom", "--usual")] == [seldom, seldom]
        assert ("1 of 4 flags. All of them: --help-all" in text) != seldom


def dev(*words: str):
    return said("--recipe", "dev", *words)


def test_guidance_has_a_key_for_each_flag_of_ltx_pipelines_and_takes_several_at_once_and_again():
    assert [*GUIDANCE_KEYS.values()] == [*GuidanceFields.model_fields]
    for key, field in GUIDANCE_KEYS.items():
        value = "3" if key.endswith(("_blocks", "_step")) else "0.5"
        assert dev("--guidance", f"{key}={value}") == dev(f"--{field.replace('_', '-')}", value) != dev()
    job = dev("--guidance", "video_cfg=4", "video_stg_blocks=2,3", "--guidance", "v2a=2")
    video, audio = job.resolved_guidance.streams
    assert (video.cfg_scale, video.stg_blocks, audio.modality_scale, audio.cfg_scale) == (4.0, (2, 3), 2.0, 7.0)
    assert dev("--guidance", "video_stg_blocks=").resolved_guidance.video.stg_blocks == ()


def test_a_mistake_in_guidance_is_said_as_it_was_typed():
    for typed, message in {
        "video_cgf=3": "unknown key 'video_cgf'; did you mean video_cfg?\nKeys: video_cfg, ",
        "video_cfg": "--guidance video_cfg: no value; type for example --guidance video_cfg=3",
        "a2v=x": "--guidance a2v: got 'x', wanted a valid number",
        "video_cfg=3 video_cfg=4": "--guidance video_cfg is given twice; leave one out",
        "video_cfg=3 --video-cfg-guidance-scale 3": "--guidance video_cfg=... and --video-cfg-guidance-scale set the",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            dev("--guidance", *typed.split())
    with pytest.raises(UserError, match="takes no --guidance video_cfg: .*(\n.*)*--recipe dev"):
        said("--guidance", "video_cfg=3")  # of the distilled recipe


def test_values_behind_a_file_are_those_of_their_own_flags():
    apart = "--audio-path a.wav --audio-start-time 0.5 --audio-max-duration 2"
    assert said("--audio-path", "a.wav", "0.5", "2") == said(*apart.split())
    assert said("--audio-path", "a.wav", "1").sound.start_time == 1.0
    joined, apart = ["--video-path", "v.mp4", "0.5", "1"], ["--video-path", "v.mp4", "--start-time", "0.5"]
    for compiles in (False, True):
        spec = flags.spec(parsed(*joined, compiles=compiles))
        assert (spec.video_path, spec.start_time, spec.end_time) == ("v.mp4", 0.5, 1.0)
    assert flags.spec(parsed(*joined)) == flags.spec(parsed(*apart, "--end-time", "1"))


def test_two_strengths_of_the_distilled_lora_are_those_of_the_stages():
    joined = said("--recipe", "dev", "--two-stage", "--distilled-lora", "d", "0.25", "0.5")
    flag = "--distilled-lora-strength-stage"
    apart = ["--distilled-lora", "d", f"{flag}-1", "0.25", f"{flag}-2", "0.5"]
    assert joined == said("--recipe", "dev", "--two-stage", *apart)
    for other in (["--distilled-lora", "e"], ["--distilled-lora", "e", "1", "1"], [f"{flag}-1", "1"]):
        with pytest.raises(UserError, match="with two strengths, of stage 1 and stage 2"):
            said("--distilled-lora", "d", "0.25", "0.5", *other)


MODEL = f"--checkpoint-path {ASSETS.checkpoint} --gemma-root {ASSETS.gemma_root}"
JOB = f"{MODEL} --prompt rain --output-path o.mp4"

# A command line -> what its answer contains, and after "not" what it does not contain
MISTAKES = """
generat                                     -> did you mean generate?
shard gemma                                 -> did you mean gemma3?
shard transformer --num-worker 1            -> did you mean --num-workers? | shard transformer --help
generate --promt rain                       -> missing: --checkpoint-path | did you mean --prompt?
generate JOB --audio-path x --audio-bed -50dB -> --audio-bed: got '-50dB', wanted a valid number
--fps 24 generate                           -> the verb comes first | generate --fps 24
generate MODEL --prompt a red circle        -> needs quotes: --prompt "a red circle"
generate MODEL --prompt it costs 5$ now     -> needs quotes: --prompt 'it costs 5$ now'
generate "a red circle" MODEL               -> needs its flag: --prompt "a red circle"
generate a red circle                       -> --prompt "a red circle" | missing: --checkpoint-path
generate MODEL --prompt x --output-path a b.mp4 -> needs quotes: --output-path "a b.mp4"
generate JOB --height 512 768               -> unknown: 768 | not quotes
generate MODEL --prompt --output-path o.mp4 -> --prompt has no value; type --prompt " | not argument
generate JOB --frames 120                   -> did you mean --num-frames 121?
generate JOB --num-frames 120               -> nearest valid: 113 or 121 | not recipe:
generate JOB --output out.mov               -> did you mean --output-path FILE? | not --output-dir
generate MODEL --prompt x --output-path FOLDER -> is a folder; type --output-path FOLDER/video.mp4
generate JOB --resolution=1280x720          -> did you mean --height 704 --width 1280? | not --resume
generate --model Lightricks/LTX-2.5         -> did you mean --checkpoint-path FILE? | not --model-path
generate JOB --guidance-scale 3             -> did you mean --guidance video_cfg=3 | not v2a
generate JOB --enhance-prompt               -> unknown: --enhance-prompt | not did you mean
report out.mp4                              -> it is no text | --perf-dump-path FILE.json | not codec
serve MODEL --host 0.0.0.0                  -> --new-token
batch bad.jsonl MODEL --output-dir out      -> did you mean 'seed'? | did you mean 'prompt'?
"""  # noqa: E501 - a mistake and its answer are one line
ROWS = [re.split(r" +-> ", line, maxsplit=1) for line in MISTAKES.strip().splitlines()]


@pytest.mark.parametrize(("typed", "wanted"), ROWS, ids=[row[0] for row in ROWS])
def test_a_mistake_is_answered_with_what_to_type(typed, wanted, tmp_path, monkeypatch, capsys):
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "out.mp4").write_bytes(b"\0\0\0\x20ftypisom\xff\xfe")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "sead": 3}\n{"promt": "b"}\n')
    monkeypatch.chdir(tmp_path)
    for name, value in {"MODEL": MODEL, "JOB": JOB}.items():
        typed = re.sub(rf"\b{name}\b", lambda _, value=value: value, typed)
    with pytest.raises(SystemExit) as end:
        errors.run(lambda: dispatch(shlex.split(typed)))
    printed = "".join(capsys.readouterr())
    assert end.value.code == 2 and "Traceback" not in printed
    for words in wanted.split(" | "):
        assert (words.removeprefix("not ") in printed) != words.startswith("not ")
    lists = re.findall(r"(?:[\w.'-]+, )+[\w.'-]+", printed)
    assert max((len(names.split(", ")) for names in lists), default=0) <= 10  # more is not read


WITHOUT_TORCH = """
import sys
from ltx_neuron.commands import dispatch

for verb in sys.argv[1:]:
    try:
        dispatch([verb, *["transformer"] * (verb in ("shard", "compile")), "--xyzzy"])
    except SystemExit as end:
        print(verb, end.code, {"torch", "numpy", "transformers"} & {*sys.modules})
"""


def test_a_mistyped_flag_is_found_without_torch():
    """`artifacts` has few flags, and its store needs fsspec and all."""
    typed = sorted(VERBS.keys() - {"artifacts"})
    process = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *typed], capture_output=True, text=True)
    assert process.stdout.splitlines() == [f"{verb} 2 set()" for verb in typed]
    assert process.stderr.count("unknown: --xyzzy") == len(typed)


def test_a_flag_without_effect_keeps_its_default_and_one_with_is_noted(capsys):
    command_line._note.cache_clear()  # it prints each note once
    words = [*MODEL.split(), "--prompt", "rain", "--video-path", "v.mp4", "--resume"]
    args = tune().parse_args(words)
    assert (args.prompt, args.video_path, args.gemma_root, args.resume) == ("", None, None, None)
    assert "tune is for a job without --video-path\n" in capsys.readouterr().err
    args = verbs.plan().parse_args(words)
    assert (args.prompt, args.video_path) == ("", "v.mp4") and args.gemma_root
    assert capsys.readouterr().err == ""


def test_a_seed_of_minus_one_is_drawn_and_printed(capsys):
    args = parsed("--prompt", "rain", "--seed", "-1")
    first, second = flags.job(args).seed, flags.job(args).seed
    assert first != second and min(first, second) >= 0
    assert f"seed: {first} (drawn for --seed -1; --seed {first} repeats it)" in capsys.readouterr().out


def test_a_word_of_a_flag_that_is_typed_twice_is_printed_once():
    typed = ["--num-frames", "49", "--lora", "a", "1", "--num-frames", "97", "--lora", "b", "--prompt", "x"]
    words = words_of(verbs.generate(), typed, lambda dest: dest != "prompt")
    assert words == ["--num-frames", "97", "--lora", "a", "1", "--lora", "b"]
