"""Contexts kept on disk are those that were encoded, found by all they depend on, and never half a
file."""

import os

import pytest
import torch
from helpers import randn

from ltx_neuron.config import TEXT_TOKENS
from ltx_neuron.text import cache
from ltx_neuron.text.cache import PromptCache
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.text.inputs import attention_mask

WIDTHS, PROMPTS = (6, 4), [[2, 5, 9], [2, 7]]


def cache_in(folder, identity=None, dtype=torch.bfloat16) -> PromptCache:
    return PromptCache(folder, identity or {"encoder": "one"}, WIDTHS, dtype)


def contexts(seed: int) -> Contexts:
    video, audio = (randn(1, TEXT_TOKENS, width, seed=seed).bfloat16() for width in WIDTHS)
    return Contexts(video, audio, attention_mask(3), randn(1, 2, 3, 4))


def test_what_was_written_is_read_bit_for_bit_without_the_hidden_states(tmp_path):
    written = [contexts(1), contexts(2)]
    cache_in(tmp_path).write(PROMPTS, written)
    found = cache_in(tmp_path).read(PROMPTS)
    for got, wanted in zip(found, written, strict=True):
        assert all(torch.equal(g, w) for g, w in zip(got[:3], wanted[:3], strict=True))
        assert got.hidden_states is None


@pytest.mark.parametrize("other", ["prompts", "their order", "encoder", "dtype"])
def test_anything_else_is_not_found(tmp_path, other):
    cache_in(tmp_path).write(PROMPTS, [contexts(1), contexts(2)])
    prompts = {"prompts": [[2, 5, 9], [2, 8]], "their order": PROMPTS[::-1]}.get(other, PROMPTS)
    identity = {"encoder": "two"} if other == "encoder" else None
    dtype = torch.float32 if other == "dtype" else torch.bfloat16
    assert cache_in(tmp_path, identity, dtype).read(prompts) is None


@pytest.mark.parametrize("damage", [b"", b"{}", "truncated", "of another size"])
def test_a_damaged_file_is_as_if_it_were_not_there(tmp_path, damage):
    cache_in(tmp_path).write(PROMPTS, [contexts(1), contexts(2)])
    (path,) = tmp_path.iterdir()
    if damage == "of another size":
        wide = PromptCache(tmp_path, {"encoder": "one"}, (8, 4), torch.bfloat16)
        assert wide.read(PROMPTS) is None
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "truncated" else damage)
        assert cache_in(tmp_path).read(PROMPTS) is None


def test_a_place_that_cannot_be_written_costs_the_next_run_its_contexts_and_this_one_nothing(
    tmp_path, capsys
):
    (tmp_path / "a file").touch()
    cache_in(tmp_path / "a file").write(PROMPTS, [contexts(1), contexts(2)])
    assert "not kept for the next run" in capsys.readouterr().out
    assert cache_in(tmp_path / "a file").read(PROMPTS) is None


def test_the_files_used_longest_ago_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "KEPT", 2)
    for number in range(3):
        cache_in(tmp_path).write([[number]], [contexts(number)])
        for path in tmp_path.iterdir():
            os.utime(path, ns=(path.stat().st_mtime_ns - 10**9,) * 2)  # a second passes
        if number == 1:
            assert cache_in(tmp_path).read([[0]])
    assert cache_in(tmp_path).read([[1]]) is None
    assert cache_in(tmp_path).read([[0]]) and cache_in(tmp_path).read([[2]])
