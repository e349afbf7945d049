"""The command line: help of two lengths, names of 0.1.0, flags of several values."""

import argparse
import re
from functools import cache

import pytest
import typed
from typed import parsed, said

from ltx_neuron import flags
from ltx_neuron.command_line import Parser, advanced
from ltx_neuron.commands import VERBS
from ltx_neuron.errors import UserError
from ltx_neuron.report.price import Price
from ltx_neuron.sampling.spec import GUIDANCE_KEYS, GuidanceFields, JobFields, names_of

COLUMNS = 100
SINGLE = set(VERBS) - {"shard", "compile"}
COMMANDS = [*SINGLE, *(f"{verb} {m}" for verb in ("shard", "compile") for m in ("transformer", "gemma3", "vae"))]


@cache
def parser_of(command: str) -> Parser:
    return typed.parser_of(command.split())


def shown(parser: Parser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.help is not argparse.SUPPRESS]


# A verb -> whether it requires a checkpoint, and Gemma
NEEDS = dict.fromkeys(("generate", "batch", "prepare"), (True, True)) | {"plan": (True, False)}
NEEDS |= {"tune": (True, False), "doctor": (False, False), "serve": (False, True)}  # which alone adds a token


@pytest.mark.parametrize("verb", NEEDS)
def test_a_verb_requires_the_model_files_that_it_reads(verb):
    parser, (checkpoint, gemma) = parser_of(verb), NEEDS[verb]
    assert ("checkpoint_path" in {action.dest for action in parser._actions if action.required}) == checkpoint
    assert parser.get_default("needs_gemma") == gemma
    usual = {action.dest for action in parser._actions if getattr(action, "usual", False)}
    assert ("gemma_root" in usual) == (gemma and checkpoint)


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


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_flag_of_a_command_is_described_and_every_group_is_too(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    parser = parser_of(command)
    assert [action.dest for action in shown(parser) if not action.help] == []
    assert [group.title for group in parser._action_groups[2:] if not group.description] == []
    texts = [parser.format_help(everything) for everything in (False, True)]
    assert max(map(len, "\n".join(texts).splitlines())) <= COLUMNS
    if command == "generate":  # all of it has every name of every flag
        names = {name for action in shown(parser) for name in action.option_strings}
        names |= {f"--{n.replace('_', '-')}" for f in JobFields.model_fields for n in names_of(f)}
        assert [name for name in names if name not in texts[1].replace(",", " ").split()] == []


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


GUIDANCE_MISTAKES = {
    "video_cgf=3": "unknown key 'video_cgf'; did you mean video_cfg?\nKeys: video_cfg, ",
    "video_cfg": "--guidance video_cfg: no value; type for example --guidance video_cfg=3",
    "a2v=x": "--guidance a2v: got 'x', wanted a valid number",
    "video_cfg=3 video_cfg=4": "--guidance video_cfg is given twice; leave one out",
    "video_cfg=3 --video-cfg-guidance-scale 3": "--guidance video_cfg=... and --video-cfg-guidance-scale set the same",
}


@pytest.mark.parametrize("typed", GUIDANCE_MISTAKES)
def test_a_mistake_in_guidance_is_said_as_it_was_typed(typed):
    with pytest.raises(UserError, match=re.escape(GUIDANCE_MISTAKES[typed])):
        dev("--guidance", *typed.split())
    with pytest.raises(UserError, match="takes no --guidance video_cfg: .*(\n.*)*--recipe dev"):
        said("--guidance", "video_cfg=3")  # of the distilled recipe


def test_values_behind_a_file_are_those_of_their_own_flags():
    """The window of a sound, the seconds of a retake, also where its graphs are compiled."""
    joined = said("--audio-path", "a.wav", "0.5", "2")
    assert joined == said(*("--audio-path", "a.wav", "--audio-start-time", "0.5", "--audio-max-duration", "2"))
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
