"""The tiny assets have the released format, at any size, and take no other files' place."""

import pytest
from tiny import TinySizes, assets_in, make_tiny

from ltx_neuron.errors import UserError


def test_the_same_seed_gives_the_same_bytes_and_another_seed_or_size_replaces_them(tiny, tmp_path):
    def contents(folder) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    make_tiny(tmp_path / "again")
    first = contents(tmp_path / "again")
    assert first == contents(tiny.image.parent) and len(first) == 5 + 6
    (tmp_path / "again/gemma/stale").touch()
    make_tiny(tmp_path / "again", TinySizes(seed=2, layers=1))
    second = contents(tmp_path / "again")
    assert second.keys() == first.keys()
    assert not [file for file in first if file.endswith(".safetensors") and first[file] == second[file]]


def test_a_folder_with_a_real_gemma_and_sizes_that_no_model_has_are_refused_before_anything_is_written(tmp_path):
    for sizes, message in (
        ({"head_dim": 7}, "an even head_dim"),
        ({"layers": 0}, "layers >= 1"),
        ({"gemma_vocab": 100}, "gemma_vocab >= 320"),
        ({"gemma_kv_heads": 3}, "gemma_heads divisible by gemma_kv_heads; got 8 and 3"),
    ):
        with pytest.raises(UserError, match=message):
            make_tiny(tmp_path, TinySizes(**sizes))
    assert list(tmp_path.iterdir()) == []
    root = assets_in(tmp_path).gemma_root
    root.mkdir()
    with pytest.raises(UserError, match="contains gemma but no ltx-2.3-tiny.safetensors"):
        make_tiny(tmp_path)
    assert list(tmp_path.iterdir()) == [root]
