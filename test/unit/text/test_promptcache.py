"""Contexts kept on disk are those that were encoded, found by all they depend on, and never half a file."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import exit_code, forked, randn

import ltx_neuron
from ltx_neuron import artifacts
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.profiles import resolve
from ltx_neuron.text import cache
from ltx_neuron.text.cache import PromptCache
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.text.inputs import attention_mask

WIDTHS, PROMPTS = (6, 4), [[2, 5, 9], [2, 7]]
PACKAGE = Path(ltx_neuron.__file__).parent


def cache_in(folder, identity=None, widths=WIDTHS, dtype=torch.bfloat16) -> PromptCache:
    return PromptCache(folder, identity or {"encoder": "one"}, widths, dtype)


def contexts(seed: int) -> Contexts:
    video, audio = (randn(1, TEXT_TOKENS, width, seed=seed).bfloat16() for width in WIDTHS)
    return Contexts(video, audio, attention_mask(3), randn(1, 2, 3, 4))


@pytest.fixture
def written(tmp_path) -> list[Contexts]:
    """Contexts in the cache of tmp_path."""
    cache_in(tmp_path).write(PROMPTS, pair := [contexts(1), contexts(2)])
    return pair


def test_contexts_are_read_bit_for_bit_without_the_hidden_states(tmp_path, written, monkeypatch, capsys):
    # Root may mark files in any folder.
    monkeypatch.setattr(os, "utime", Mock(side_effect=OSError("Read-only file system")))
    for got, wanted in zip(cache_in(tmp_path).read(PROMPTS), written, strict=True):
        assert all(torch.equal(g, w) for g, w in zip(got[:3], wanted[:3], strict=True))
        assert got.hidden_states is None
    assert capsys.readouterr().out == ""


def test_contexts_of_anything_else_are_encoded_anew_and_a_damaged_file_is_as_if_it_were_not_there(tmp_path, written):
    for prompts, other in (
        ([[2, 5, 9], [2, 8]], {}),
        (PROMPTS[::-1], {}),
        (PROMPTS, {"identity": {"encoder": "two"}}),
        (PROMPTS, {"widths": (8, 4)}),
        (PROMPTS, {"dtype": torch.float32}),
    ):
        assert cache_in(tmp_path, **other).read(prompts) is None, other
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", b"{}", whole[:-1]):
        path.write_bytes(damaged)
        assert cache_in(tmp_path).read(PROMPTS) is None


def test_the_files_used_longest_ago_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MAX_FILES", 2)
    for number in range(3):
        cache_in(tmp_path).write([[number]], [contexts(number)])
        for path in tmp_path.iterdir():
            os.utime(path, ns=(path.stat().st_mtime_ns - 10**9,) * 2)  # a second passes
        if number == 1:
            assert cache_in(tmp_path).read([[0]])
    assert cache_in(tmp_path).read([[1]]) is None
    assert cache_in(tmp_path).read([[0]]) and cache_in(tmp_path).read([[2]])


def test_a_place_that_cannot_be_read_or_written_costs_one_line(tmp_path, written, capfd):
    (tmp_path / "a file").touch()
    cache_in(tmp_path / "a file").write(PROMPTS, written)
    assert cache_in(tmp_path / "a file").read(PROMPTS) is None
    assert "not kept for the next run" in capfd.readouterr().out
    tmp_path.chmod(0o700)
    prompts = cache_in(tmp_path)

    def as_nobody() -> None:  # root may read everything
        os.setuid(65534)
        for _ in range(3):
            assert prompts.read(PROMPTS) is None
            prompts.write(PROMPTS, written)
        sys.stdout.flush()

    assert exit_code(forked(as_nobody)) == 0, capfd.readouterr().err
    (line,) = capfd.readouterr().out.splitlines()
    assert "contexts of earlier runs cannot be read: " in line and "Permission denied" in line


def test_processes_that_write_read_and_make_room_at_once_end_well(tmp_path, monkeypatch, capfd):
    """Room for few files, so that each is removed while others look at it."""
    monkeypatch.setattr(cache, "MAX_FILES", 3)
    wanted = [contexts(number) for number in range(8)]

    def use(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(100):
            number = choose.randrange(len(wanted))
            cache_in(tmp_path).write([[number]], [wanted[number]])
            number = choose.randrange(len(wanted))
            if found := cache_in(tmp_path).read([[number]]):
                assert torch.equal(found[0].video, wanted[number].video)

    children = [forked(lambda seed=seed: use(seed)) for seed in range(4)]
    assert [exit_code(child) for child in children] == [0] * 4, capfd.readouterr().err
    assert capfd.readouterr().out == "" and len(list(tmp_path.iterdir())) == 3


def identity_of(tiny, gemma_root=None, on_ranks=False) -> dict:
    workspace = Workspace(tiny.checkpoint, resolve("cpu"), "none", 2, "float32", gemma_root or tiny.gemma_root)
    return workspace.prompt_cache(neuron_gemma=on_ranks).identity


@pytest.mark.parametrize("on_ranks", [False, True], ids=["host", "ranks"])
def test_another_gemma_config_makes_another_encoder_though_no_weight_differs(tiny, tmp_path, on_ranks):
    own = identity_of(tiny, on_ranks=on_ranks)
    assert own == identity_of(tiny, on_ranks=on_ranks) != identity_of(tiny, on_ranks=not on_ranks)
    root = Path(shutil.copytree(tiny.gemma_root, tmp_path / "gemma"))
    config = json.loads((root / "config.json").read_text())
    for key, value in (("rope_theta", 500_000), ("rope_local_base_freq", 20_000), ("rms_norm_eps", 1e-5)):
        changed = config | {"text_config": config["text_config"] | {key: value}}
        (root / "config.json").write_text(json.dumps(changed))
        assert identity_of(tiny, root, on_ranks) != own, key


def test_other_code_makes_another_encoder_on_the_host(tiny, tmp_path, monkeypatch):
    changed = Path(shutil.copytree(PACKAGE, tmp_path / "changed"))
    ours = identity_of(tiny)
    with open(changed / "models/gemma3.py", "a") as file:
        file.write("ADDED = 1\n")
    monkeypatch.setattr(artifacts, "__file__", str(changed / "artifacts/__init__.py"))
    artifacts._digest_of_code.cache_clear()
    others = identity_of(tiny)
    artifacts._digest_of_code.cache_clear()
    assert ours["code"] != others["code"] and ours | {"code": 0} == others | {"code": 0}


def test_the_code_of_an_encoder_is_all_that_it_imports():
    """The lists in text/cache.py, against what a process has imported for encoding on the host."""
    command = "import ltx_neuron.text.host_encoder, sys; print(*(m for m in sys.modules), sep='\\n')"
    printed = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    files = {name.partition(".")[2].replace(".", "/") for name in printed.split() if name.startswith("ltx_neuron.")}
    # The rank files are the other encoder's; the rest decides no number.
    files -= {"errors", "files", "format", "hub", "machine", "host/background", "weights/rankfiles"}
    modules = {name for name in files if (PACKAGE / f"{name}.py").is_file()}
    assert {n for n in modules if not n.startswith(cache.HOST_ENCODER_CODE)} == set()
