"""The weight sets that flags, lines and calls name, and how their files and sets are found."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from helpers import one_thread  # noqa: F401
from jobs import make_job, replace
from safetensors.torch import save_file
from typed import parsed

from ltx_neuron import flags
from ltx_neuron.artifacts import build, finished_weights
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.commands import dispatch
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.preflight import check_distilled_loras
from ltx_neuron.errors import UserError
from ltx_neuron.hub import RELEASE_FILES
from ltx_neuron.invocation import command
from ltx_neuron.job import Size
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.weights.lora import Lora, are_silent, detailing_scale, identity_of, reference_scale

TWO = Size(64, 64, 9, two_stage=True)


def named(sets) -> list[list[tuple[str, float]]]:
    return [[(str(lora.path), lora.strength) for lora in loras] for loras in sets]


HQ = "--distilled-lora d --distilled-lora-strength-stage-"


@pytest.mark.parametrize(
    ("words", "sets"),
    [
        ("", [[]]),
        ("--lora style .8", [[("style", 0.8)]]),
        ("--distilled-lora d", [[], [("d", 1.0)]]),
        ("--distilled-lora d --lora style .8", [[("style", 0.8)], [("style", 0.8), ("d", 1.0)]]),
        ("--lora style .8 --ic-lora ic .9", [[("style", 0.8), ("ic", 0.9)], [("style", 0.8)]]),
        (HQ + "1 .25", [[("d", 0.25)], [("d", 0.5)]]),
        (HQ + "2 .5", [[("d", 0.25)], [("d", 0.5)]]),
        (HQ + "1 0", [[("d", 0.0)], [("d", 0.5)]]),
        (HQ + "1 .3 --distilled-lora-strength-stage-2 .6", [[("d", 0.3)], [("d", 0.6)]]),
        (HQ + "2 .75 --lora s", [[("s", 1.0), ("d", 0.25)], [("s", 1.0), ("d", 0.75)]]),
    ],
)
def test_flags_name_the_weight_sets_of_both_stages(words, sets):
    assert named(flags.spec(parsed(*words.split())).weight_sets) == sets


def test_a_lines_loras_take_the_place_of_the_commands():
    typed = flags.spec(parsed("--two-stage", "--lora", "a", ".5", "--ic-lora", "i"))

    def sets(**line) -> list[list]:
        return named(stage.loras for stage in typed.updated({"prompt": "x"} | line).stages)

    assert sets() == sets(lora=None) == [[("a", 0.5), ("i", 1.0)], [("a", 0.5)]]
    assert sets(lora=["b", 2]) == [[("b", 2.0), ("i", 1.0)], [("b", 2.0)]]
    assert sets(lora=[["b"], ["c", 0.1]], ic_lora=[]) == [[("b", 1.0), ("c", 0.1)]] * 2
    distilled = {"distilled-lora-strength-stage-1": 0.2, "distilled-lora": "d", "ic-lora": [], "lora": []}
    assert sets(**distilled) == [[("d", 0.2)], [("d", 0.5)]]


def test_a_call_of_the_api_may_have_loras_of_its_own(tiny, tmp_path, monkeypatch):
    paths = {"checkpoint_path": tiny.checkpoint, "gemma_root": tiny.gemma_root, "artifacts_dir": tmp_path}
    loras = {"loras": [("a", 1)], "distilled_loras": [("d", 1)]}
    pipe, jobs = LTXPipeline.from_pretrained(**paths, **loras, profile="cpu", recipe="dev"), []

    def run(given, **_):
        jobs.extend(given)
        raise UserError("enough")

    monkeypatch.setattr(pipe.engine, "run", run)

    def sets(**call) -> list[list]:
        with pytest.raises(UserError, match="enough"):
            pipe("x", **call)
        return named(stage.loras for stage in jobs[-1].stages)

    a, b, c, d = ("a", 1.0), ("b", 0.5), ("c", 2.0), ("d", 1.0)
    assert sets(two_stage=True) == [[a], [a, d]]
    assert sets(loras=[b]) == [[b]] and sets(loras=()) == [[]]
    assert sets(two_stage=True, ic_loras=[c], distilled_loras=[b]) == [[a, c], [a, b]]


def test_a_file_of_named_sets_takes_the_place_of_the_commands_loras(tmp_path):
    path = tmp_path / "sets.json"

    def sets(content) -> dict:
        path.write_text(json.dumps(content))
        args = parsed("--lora", "a", "--distilled-lora", "d")
        args.lora_sets = path
        return flags.lora_sets(args)

    anime = sets({"anime": {"lora": ["b", 0.5]}})
    assert named([anime["default"].loras, anime["anime"].loras]) == [[("a", 1.0)], [("b", 0.5)]]
    assert anime["anime"].stage_2_loras == anime["default"].stage_2_loras != ()
    for wrong in ({"anime": {"seed": 3}}, {"anime": ["b"]}):
        with pytest.raises(UserError, match="'anime': wanted an object with the keys lora, ic-lora, distilled-lora"):
            sets(wrong)


def test_the_distilled_lora_is_for_stage_2_of_dev_and_that_stage_needs_it():
    lora = (Lora(Path("d")),)
    refining = make_job("x", TWO, recipe="dev", stage_2_loras=lora)
    one_stage = make_job("x", Size(64, 64, 9), recipe="dev", stage_2_loras=lora)
    check_distilled_loras([refining, one_stage])  # the command's flags, of lines of both kinds
    check_distilled_loras([replace(refining, stage_2_loras=(), skip_stage_2=True)])
    for jobs in ([refining, replace(refining, stage_2_loras=())], [make_job("x", TWO, recipe="dev")]):
        with pytest.raises(UserError, match="needs --distilled-lora: .*\n.*hf download"):
            check_distilled_loras(jobs)
    for jobs in ([one_stage], [refining, replace(refining, recipe="distilled")]):
        with pytest.raises(UserError, match="--distilled-lora is for stage 2 of --recipe dev"):
            check_distilled_loras(jobs)


# --- weight sets on the disk ----------------------------------------------------------------------


def test_a_missing_set_names_the_command_that_makes_what_is_missing_and_no_more(tiny, tmp_path):
    lora, artifacts = Lora(tiny.lora, 0.5), tmp_path / "artifacts"
    workspace = Workspace(tiny.checkpoint, resolve("cpu"), artifacts, 1, "bfloat16")
    jobs = [
        make_job("plain", Size(64, 64, 9)),
        make_job("hq", TWO, recipe="dev", stage_1_loras=(lora,), stage_2_loras=(Lora(tiny.lora, 2),)),
        make_job("style", Size(64, 64, 9), loras=(lora,)),  # stage 1 of hq is that set
    ]
    build.make(workspace, workspace.weight_sets("dit"))
    sets = [workspace.weight_set("dit", stage.loras) for job in jobs for stage in job.stages]
    with pytest.raises(UserError) as error:
        workspace.find_all(sets)
    program = command("shard transformer")
    commands = [line.partition(program)[2] for line in str(error.value).splitlines() if program in line]
    assert len(commands) == 2
    for typed in commands:
        dispatch(["shard", "transformer", *shlex.split(typed)])
    workspace.find_all(sets)
    assert len(finished_weights(artifacts, "dit")) == 3
    # The set is found by the LoRA's content, wherever that lies.
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(tiny.lora.read_bytes())
    anew = Workspace(tiny.checkpoint, resolve("cpu"), artifacts, 1, "bfloat16")
    assert anew.dit_weights((Lora(copy, 0.5),)) == workspace.dit_weights((lora,))


def test_weight_sets_are_told_apart_by_file_strength_and_order(tiny, tmp_path):
    save_file({"a.lora_A.weight": torch.zeros(1)}, tmp_path / "b")
    a, b = Lora(tiny.lora, 0.7), Lora(tmp_path / "b", 0.7)
    sets = (), (a,), (Lora(tiny.lora, 0.8),), (b,), (a, b), (b, a)
    assert len({str(identity_of(loras)) for loras in sets}) == len(sets)
    assert identity_of((Lora(tiny.lora, 1),)) == identity_of((Lora(tiny.lora, 1.0),))


# --- metadata and layers -----------------------------------------------------------------------------


def test_the_scale_of_references_is_the_files_metadata_and_1_is_printed_once(tmp_path, capsys):
    def lora(name: str, *factors: str) -> Lora:
        keys = "reference_downscale_factor", "reference_temporal_scale_factor"
        save_file({"a": torch.zeros(1)}, tmp_path / name, dict(zip(keys, factors, strict=False)))
        return Lora(tmp_path / name)

    silent, one, two, both = lora("silent"), lora("one", "1"), lora("two", "2"), lora("both", "2", "4")
    scales = [reference_scale(loras) for loras in ((), (one,), (silent, two), (one, two), (both, two))]
    assert scales == [(1, 1), (1, 1), (2, 1), (2, 1), (2, 4)]
    assert [detailing_scale((x,)) for x in (silent, one, both)] == [2, 1, 2] and detailing_scale(()) is None
    assert capsys.readouterr().out == ""  # one that has a scale decides for all
    assert reference_scale((silent,)) == reference_scale((silent,)) == (1, 1)
    printed = f"IC-LoRA {silent.path} has no reference scale: references get the size of stage 1 (factor 1)"
    assert capsys.readouterr().out.splitlines() == [printed]
    with pytest.raises(UserError, match="2 of .*two.*, 3 of .*three"):
        reference_scale((two, lora("three", "3")))
    for factor in ("0", "-1", "1.5", "", "\u00b2"):
        message = f"odd.*: its metadata has reference_temporal_scale_factor '{factor}', wanted a whole number from 1"
        with pytest.raises(UserError, match=message):
            reference_scale((lora("odd", "1", factor),))


def test_a_dubbing_lora_without_layers_of_sound_is_noticed(tmp_path):
    silent, voiced = Lora(tmp_path / "pose"), Lora(tmp_path / "dub")
    for lora, layer in ((silent, "attn1"), (voiced, "audio_attn1")):
        save_file({f"blocks.0.{layer}.to_q.lora_A.weight": torch.zeros(1)}, lora.path)
    assert are_silent((silent,)) and not are_silent((silent, voiced))


def test_a_missing_lora_is_offered_no_other_file(tmp_path):
    published, style = Path(RELEASE_FILES["Lightricks/LTX-2.3"]["lora"]).name, tmp_path / "style.safetensors"
    style.touch()
    for name, message in {
        "9": "no such file; type a .safetensors file",
        "styl.safetensors": f"(nearest: {style})",
        "style.safetensors:0.8": f"a word of its own: --lora {style} 0.8",
        ".": f"type its file: --lora {style}",
        published: f"hf download Lightricks/LTX-2.3 {published}",
    }.items():
        with pytest.raises(UserError) as error:
            Lora(tmp_path / name).file()
        text = str(error.value)
        assert text.startswith(f"--lora {tmp_path / name}: ") and message in text
        assert ("hf download" in text) == (name == published)
