"""ltx-neuron: its verbs, and how messages spell a command for whoever reads them."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from engines import opened_workspace
from typed import ended, run

from ltx_neuron import demo, invocation
from ltx_neuron.commands import dispatch
from ltx_neuron.commands.generate import arguments
from ltx_neuron.errors import UserError

SCRIPTS = {
    "shard transformer": "shards/shard_backbone_weights.py",
    "shard gemma3": "shards/shard_gemma3_weights.py",
    "shard vae": "shards/shard_vae_weights.py",
    "compile transformer": "compile/compile_transformer.py",
    "compile gemma3": "compile/compile_gemma3.py",
    "compile vae": "compile/compile_vae.py",
    "generate": "src/generate_ltx23.py",
}


def test_python_runs_the_package_as_the_program_and_nothing_typed_shows_the_verbs(capsys):
    command = [sys.executable, "-m", "ltx_neuron", "genrate"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 2 and "did you mean generate?" in process.stderr
    assert ended() == 2 and "generate" in capsys.readouterr().out


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
    shutil.rmtree(shlex.split(remove)[-1])
    words = shlex.split(make.replace("FILE", str(tiny.checkpoint)))
    dispatch([*words[words.index("shard") :], *common, *files[2:]])
    dispatch(["verify", *common])


def test_a_clones_script_is_its_verb(capsys):
    for verb, script in SCRIPTS.items():
        assert run(script, ["--qqq", "--checkpoint-path", "x", "--gemma-root", "y"]) == 2
        assert f"{invocation.command(verb)} --help" in capsys.readouterr().err
        assert (ROOT / script).read_text().count("\n") < 8


def test_a_command_is_spelled_for_the_program_or_for_python_as_the_run_was(tiny, tmp_path, monkeypatch):
    path = tmp_path / "ltx-neuron"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
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
