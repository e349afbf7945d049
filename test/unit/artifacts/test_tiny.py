"""The tiny assets have the released format, at any size, and take no other files' place."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny import TinySizes, assets_in, make_tiny
from tiny.config import released_config

from ltx_neuron.errors import UserError


def metadata(path: Path) -> dict:
    with safe_open(str(path), "pt") as file:
        return file.metadata()


def test_the_metadata_is_the_released_config_with_other_sizes(tiny):
    actual, released = metadata(tiny.checkpoint), released_config()
    config = json.loads(actual["config"])
    assert actual["model_version"] == "2.3.0" and config.keys() == released.keys()
    assert config["transformer"].keys() == released["transformer"].keys()
    assert (config["transformer"]["num_layers"], config["transformer"]["cross_attention_dim"]) == (2, 32)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_or_size_replaces_them(tiny, tmp_path):
    make_tiny(tmp_path / "again")
    folder = tiny.image.parent
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    first = {file: (folder / file).read_bytes() for file in files}
    assert len(files) == 5 + 6
    assert {file: (tmp_path / "again" / file).read_bytes() for file in files} == first
    (tmp_path / "again/gemma/stale").touch()
    assets = make_tiny(tmp_path / "again", TinySizes(seed=2, layers=1))
    assert sorted((tmp_path / "again").iterdir()) == sorted(assets) and not (assets.gemma_root / "stale").exists()
    for file in (file for file in files if file.suffix == ".safetensors"):
        assert (tmp_path / "again" / file).read_bytes() != first[file], file


def test_a_directory_that_holds_a_real_gemma_is_refused(tmp_path):
    root = assets_in(tmp_path).gemma_root
    root.mkdir()
    with pytest.raises(UserError, match="contains gemma but no ltx-2.3-tiny.safetensors"):
        make_tiny(tmp_path)
    assert list(tmp_path.iterdir()) == [root]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 7}, "an even head_dim"),
        ({"layers": 0}, "layers >= 1"),
        ({"gemma_vocab": 100}, "gemma_vocab >= 320"),
        ({"gemma_kv_heads": 3}, "gemma_heads divisible by gemma_kv_heads; got 8 and 3"),
    ],
)
def test_sizes_the_models_cannot_have_are_refused_before_anything_is_written(sizes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        make_tiny(tmp_path / "tiny", TinySizes(**sizes))
    assert not (tmp_path / "tiny").exists()
