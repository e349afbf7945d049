"""The verbs of ltx-neuron, how messages spell them, and that each checks a job's files before anything is made."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from engines import opened_workspace
from helpers import one_thread  # noqa: F401
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typed import ended, run

from ltx_neuron import demo, invocation
from ltx_neuron.commands import dispatch
from ltx_neuron.commands.generate import arguments
from ltx_neuron.errors import UserError


def test_python_runs_the_package_as_the_program_which_shows_its_verbs_and_its_version(capsys):
    command = [sys.executable, "-m", "ltx_neuron", "genrate"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 2 and "did you mean generate?" in process.stderr
    assert ended() == 2 and "generate" in capsys.readouterr().out
    for typed in ("version", "--version"):
        assert ended(typed) == 0 and re.fullmatch(r"ltx-neuron \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_batch_takes_its_prompts_file_with_and_without_the_flag(capsys):
    common = ["--checkpoint-path", "distilled", "--gemma-root", "g", "--output-dir", "out"]
    for typed in (["p.jsonl", *common], [*common, "p.jsonl"], ["--prompts-file", "p.jsonl", *common]):
        assert arguments(typed, "batch").prompts_file == Path("p.jsonl")
    assert ended("batch", *common) == 2 and "which prompts?" in capsys.readouterr().err


def test_the_demo_prints_its_files_and_two_commands_that_can_be_typed_or_where_to_take_them_from(tmp_path, capsys):
    assert ended("demo", str(tmp_path)) == 2
    printed = capsys.readouterr().err
    assert "ltx-2.3-demo.safetensors" in printed and invocation.command("demo", "DIR") in printed
    for path in demo.assets_in(tmp_path):
        path.touch()
    dispatch(["demo", str(tmp_path)])
    *files, _, prepare, generate = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in files] == [*map(str, demo.assets_in(tmp_path))]
    assert prepare.startswith(invocation.command("prepare", "--checkpoint-path"))
    shared = prepare.partition(" prepare ")[2]
    assert generate.startswith(f"{invocation.command('generate')} {shared}")


def test_verify_checks_all_weights_that_are_there_and_says_how_to_make_damaged_ones(tiny, tmp_path, capsys):
    common = ["--artifacts-dir", str(tmp_path), "--profile", "cpu", "--tp-degree", "1", "--dtype", "float32"]
    assert ended("verify", *common) == 2 and "no finished weights" in capsys.readouterr().err
    files = ["--checkpoint-path", str(tiny.checkpoint), "--gemma-root", str(tiny.gemma_root)]
    dispatch(["shard", "transformer", *common, *files[:2]])
    dispatch(["shard", "gemma3", *common, *files])
    capsys.readouterr()
    dispatch(["verify", *common])
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["whole"] * 2
    dispatch(["verify", *common, *files])
    assert capsys.readouterr().out.count("bit-identical") == 2
    (rank,) = tmp_path.glob("weights/gemma3-*/rank0.safetensors")
    content = rank.read_bytes()
    rank.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert ended("verify", *common, *files) == 2
    printed = capsys.readouterr().err
    assert "content differs" in printed and invocation.command("shard gemma3") in printed
    assert ended("verify", *common) == 2
    remove, make = capsys.readouterr().err.partition("Make it again: ")[2].split(" && ")
    assert remove == f"rm -r {rank.parent}" and invocation.command("shard gemma3") in make


def test_a_clones_script_is_its_verb(capsys):
    scripts = {f"{verb} {model}": f"{verb}_{model}" for verb in ("shard", "compile") for model in ("gemma3", "vae")}
    scripts |= {"shard transformer": "shard_backbone", "compile transformer": "compile_transformer"}
    for verb, name in (scripts | {"generate": "generate_ltx23"}).items():
        (script,) = ROOT.glob(f"*/{name}*.py")
        assert run(str(script), ["--qqq", "--checkpoint-path", "x", "--gemma-root", "y"]) == 2
        assert f"{invocation.command(verb)} --help" in capsys.readouterr().err


def test_a_command_is_spelled_for_the_program_or_for_python_as_the_run_was(tiny, tmp_path, monkeypatch):
    path = tmp_path / "ltx-neuron"
    path.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(path), "generate"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert invocation.command("shard vae", "--tp-degree", 4) == "ltx-neuron shard vae --tp-degree 4"
    with pytest.raises(UserError, match=": ltx-neuron shard transformer --checkpoint-path"):
        opened_workspace(tiny, tmp_path / "artifacts").dit_weights()
    monkeypatch.setenv("PATH", "")
    assert invocation.command("plan") == f"{path} plan"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setattr(sys, "argv", ["a program of the user's own"])
    assert invocation.command("plan") == f"{tmp_path}/bin/python -m ltx_neuron plan"


def without(*prefixes: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        path.unlink()
        save_file({name: x for name, x in tensors.items() if not name.startswith(prefixes)}, path, metadata)

    return change


def text(path: Path) -> None:
    path.unlink()
    path.write_text("no such format")


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-100])


DEV = "--recipe dev --two-stage --spatial-upsampler-path {spatial} --distilled-lora {lora}"
DIT = "model.diffusion_model."
# The broken file, how it is broken, words of the error, and flags of the job that reads it
BROKEN = [
    ("checkpoint", cut, "truncated?", ""),
    ("checkpoint", without("audio_vae.decoder."), "the AudioDecoder", ""),
    ("checkpoint", without(f"{DIT}transformer_blocks.1."), "the files do not have", ""),
    ("checkpoint", without("text_embedding_projection."), "the text projection is missing", ""),
    ("checkpoint", without("vae.encoder."), "the VideoEncoder", "--image {image}"),
    ("gemma/tokenizer.json", text, "cannot be loaded", ""),
    ("gemma/model.safetensors", without("language_model.model.layers.1."), "the text encoder's", ""),
    ("lora", Path.unlink, "lora.safetensors", DEV),
    ("temporal", Path.unlink, "no such file", "--upscale temporal --temporal-upsampler-path {temporal}"),
    ("image", text, "image.png", "--image {image}"),
    ("image", text, "--audio-path", "--audio-path {image}"),
    ("image", Path.unlink, "--video-path", "--video-path {image} 0 1"),
    ("spatial", text, "cannot be read", "--ic-lora {lora} --video-conditioning {spatial} 1"),
]


@pytest.fixture
def files(tiny, tmp_path) -> dict[str, Path]:
    """Links to the tiny assets, whose content a test must not change in place."""
    assets = {"checkpoint": tiny.checkpoint, "lora": tiny.lora, "image": tiny.image}
    assets |= {"spatial": tiny.spatial_upsampler, "temporal": tiny.temporal_upsampler, "gemma": tiny.gemma_root}
    folder = tmp_path / "set"
    shutil.copytree(tiny.gemma_root, folder / tiny.gemma_root.name, copy_function=os.link)
    for path in assets.values():
        if path.is_file():
            os.link(path, folder / path.name)
    return {name: folder / path.name for name, path in assets.items()}


def words(verb: str, files: dict[str, Path], flags: str, folder: Path) -> list[str]:
    typed = "--checkpoint-path {checkpoint} --profile cpu --tp-degree 1 --dtype float32 " + flags
    typed += "" if "--recipe" in flags else " --recipe distilled"
    typed += "" if "--video-path" in flags else " --height 64 --width 64 --num-frames 9"
    typed += {"generate": " --prompt rain --output-path out.mp4", "doctor": " --json"}.get(verb, "")
    return [verb, *(word.format(**files) for word in typed.split()), "--artifacts-dir", str(folder)]


def told(capsys, *words: str) -> tuple[int, str]:
    """The exit code, and the first line of the error: of the doctor, of all that blocks."""
    capsys.readouterr()
    code = ended(*words)
    printed = capsys.readouterr()
    if words[0] == "doctor":
        findings = json.loads(printed.out)["findings"]
        return code, "\n".join(finding["text"] for finding in findings if finding["state"] == "blocks")
    return code, re.search(r"(?m)^error: (.*)|\Z", printed.err)[1] or ""


@pytest.mark.parametrize(("file", "breaks", "message", "flags"), BROKEN)
def test_a_broken_file_is_refused_alike_by_every_verb(files, tmp_path, capsys, file, breaks, message, flags):
    folder, (member, _, rest) = tmp_path / "artifacts", file.partition("/")
    breaks(files[member] / rest if rest else files[member])
    typed = f"--gemma-root {files['gemma']} {flags}"
    code, sentence = told(capsys, *words("generate", files, typed, folder))
    assert code == 2 and message in sentence
    # A plan and a preparation go the same way; parts that a file lacks are found by the same check.
    for verb in ("prepare", "plan") if breaks in (cut, text, Path.unlink) else ():
        assert told(capsys, *words(verb, files, typed, folder)) == (2, sentence)
    code, findings = told(capsys, *words("doctor", files, typed, folder))
    assert code == 1 and sentence in findings
    assert not folder.exists()


def test_a_whole_set_of_files_is_taken(files, tmp_path, capsys):
    typed = f"{DEV} --image {{image}} --gemma-root {{gemma}}"
    # A plan of two stages needs neither Gemma nor an upsampler.
    for verb, flags in (("prepare", f"{typed} --dry-run"), ("plan", typed), ("plan", "--two-stage")):
        assert told(capsys, *words(verb, files, flags, tmp_path / "artifacts")) == (0, "")
