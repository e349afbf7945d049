"""The tiny assets have the released format, at any size, and take no other files' place."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import TinySizes, assets_in, make_tiny
from tiny.config import released_config
from tiny.weights import DIFFUSION

from ltx_neuron.errors import UserError
from ltx_neuron.host.models import import_ltx_core

GEMMA = dict(gemma_layers=6, gemma_heads=4, gemma_kv_heads=2, gemma_head_dim=16, gemma_hidden=48, gemma_vocab=600)
GEMMA |= {"gemma_sliding_window_pattern": 3}
OTHER_SIZES = TinySizes(layers=3, heads=8, head_dim=10, audio_head_dim=6, connector_layers=1, seed=5, **GEMMA)


def metadata(path: Path) -> dict:
    with safe_open(str(path), "pt") as file:
        return file.metadata()


def part(weights: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def test_the_metadata_is_the_released_config_with_other_sizes(tiny):
    actual, released = metadata(tiny.checkpoint), released_config()
    config = json.loads(actual["config"])
    assert actual["model_version"] == "2.3.0" and config.keys() == released.keys()
    assert config["transformer"].keys() == released["transformer"].keys()
    assert (config["transformer"]["num_layers"], config["transformer"]["cross_attention_dim"]) == (2, 32)


def test_other_sizes_are_loaded_strictly_by_ltx_core_and_by_transformers(tmp_path):
    import_ltx_core()
    from ltx_core.model.audio_vae import AudioDecoderConfigurator, VocoderConfigurator
    from ltx_core.model.transformer import LTXModelConfigurator
    from ltx_core.model.video_vae import VideoDecoderConfigurator, VideoEncoderConfigurator
    from transformers import AutoTokenizer, Gemma3ForConditionalGeneration

    assets = make_tiny(tmp_path, OTHER_SIZES)
    weights = load_file(assets.checkpoint)
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if "scale_shift_table" in name else torch.bfloat16), name
        assert tensor.isfinite().all() and (tensor.numel() == 1 or tensor.float().std() > 0), name
    config = json.loads(metadata(assets.checkpoint)["config"])
    transformer = {name: tensor for name, tensor in part(weights, DIFFUSION).items() if "connector" not in name}
    LTXModelConfigurator.from_config(config).load_state_dict(transformer, strict=True)
    VocoderConfigurator.from_config(config).load_state_dict(part(weights, "vocoder."), strict=True)
    for prefix, configurator in (
        ("vae.encoder.", VideoEncoderConfigurator),
        ("vae.decoder.", VideoDecoderConfigurator),
        ("audio_vae.decoder.", AudioDecoderConfigurator),
    ):
        shared = prefix.partition(".")[0] + ".per_channel_statistics."
        statistics = {f"per_channel_statistics.{name}": tensor for name, tensor in part(weights, shared).items()}
        configurator.from_config(config).load_state_dict(part(weights, prefix) | statistics, strict=True)
    root = assets.gemma_root
    model, loading = Gemma3ForConditionalGeneration.from_pretrained(root, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    tokens = AutoTokenizer.from_pretrained(root)("a man says hello to the world", return_tensors="pt").input_ids
    with torch.inference_mode():
        hidden = model.model.language_model(tokens, output_hidden_states=True).hidden_states
    assert all(state.isfinite().all() and state.float().std(dim=1).mean() > 0.1 for state in hidden)  # no two alike


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
