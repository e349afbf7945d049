"""The tiny assets have the released format and can be loaded by those who read the released
files."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import TinySizes, assets_in, make_tiny
from tiny.__main__ import main
from tiny.config import released_config
from tiny.weights import DIFFUSION

from ltx_neuron.errors import UserError
from ltx_neuron.host.models import import_ltx_core

OTHER_SIZES = TinySizes(
    layers=3,
    heads=8,
    head_dim=10,
    audio_head_dim=6,
    connector_layers=1,
    gemma_layers=6,
    gemma_heads=4,
    gemma_kv_heads=2,
    gemma_head_dim=16,
    gemma_hidden=48,
    gemma_vocab=600,
    gemma_sliding_window_pattern=3,
    seed=5,
)


@pytest.fixture(scope="module", params=["tiny", "other"])
def assets(request, tiny, tmp_path_factory):
    return tiny if request.param == "tiny" else make_tiny(tmp_path_factory.mktemp("o"), OTHER_SIZES)


def metadata(path: Path) -> dict:
    with safe_open(str(path), "pt") as file:
        return file.metadata()


def part(weights: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def every_tensor(assets) -> dict:
    files = [path for path in assets if path.suffix == ".safetensors"] + [assets.gemma_root / "model.safetensors"]
    return {(file.name, name): tensor for file in files for name, tensor in load_file(file).items()}


def test_scale_shift_tables_are_fp32_all_else_is_bf16_and_no_weight_constant_or_infinite(assets):
    for (_, name), tensor in every_tensor(assets).items():
        expected = torch.float32 if "scale_shift_table" in name else torch.bfloat16
        assert tensor.dtype == expected, name
        assert tensor.isfinite().all(), name
        assert tensor.numel() == 1 or tensor.float().std() > 0, name


def test_the_metadata_is_the_released_config_with_other_sizes(tiny):
    actual = metadata(tiny.checkpoint)
    config = json.loads(actual["config"])
    assert actual["model_version"] == "2.3.0"
    assert config.keys() == released_config().keys()
    assert config["transformer"].keys() == released_config()["transformer"].keys()
    assert (config["transformer"]["num_layers"], config["transformer"]["cross_attention_dim"]) == (2, 32)


def test_config_overrides_reach_the_metadata_and_the_weights(tmp_path):
    overrides = {"transformer": {"num_layers": 1, "rope_type": "interleaved"}}
    assets = make_tiny(tmp_path, config_overrides=overrides, model_version="2.0.0")
    actual = metadata(assets.checkpoint)
    transformer = json.loads(actual["config"])["transformer"]
    assert actual["model_version"] == "2.0.0"
    assert (transformer["num_layers"], transformer["rope_type"], transformer["num_attention_heads"]) == (
        1,
        "interleaved",
        4,
    )
    assert not any("transformer_blocks.1." in name for name in load_file(assets.checkpoint) if "connector" not in name)


def test_ltx_core_loads_every_part_strictly(assets):
    import_ltx_core()
    from ltx_core.model.audio_vae import AudioDecoderConfigurator, VocoderConfigurator
    from ltx_core.model.transformer import LTXModelConfigurator
    from ltx_core.model.video_vae import VideoDecoderConfigurator, VideoEncoderConfigurator

    weights = load_file(assets.checkpoint)
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


def test_ltx_core_loads_both_upsamplers_from_their_own_config(assets):
    from ltx_core.model.upsampler import LatentUpsamplerConfigurator

    for path in (assets.spatial_upsampler, assets.temporal_upsampler):
        upsampler = LatentUpsamplerConfigurator.from_config(json.loads(metadata(path)["config"]))
        upsampler.load_state_dict(load_file(path), strict=True)


def test_transformers_reads_the_layer_types_and_both_ropes_from_the_published_config(tiny):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny.gemma_root).text_config
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2
    if hasattr(config, "rope_parameters"):
        full = config.rope_parameters["full_attention"]
        sliding = config.rope_parameters["sliding_attention"]
    else:  # transformers 4
        full = {"rope_theta": config.rope_theta} | config.rope_scaling
        sliding = {"rope_theta": config.rope_local_base_freq, "rope_type": "default"}
    assert (full["rope_theta"], full["rope_type"], full["factor"]) == (1e6, "linear", 8.0)
    assert (sliding["rope_theta"], sliding["rope_type"]) == (1e4, "default")


def test_transformers_loads_gemma_whole_and_its_hidden_states_are_lively(assets):
    from transformers import AutoTokenizer, Gemma3ForConditionalGeneration

    root = assets.gemma_root
    model, loading = Gemma3ForConditionalGeneration.from_pretrained(root, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    tokens = AutoTokenizer.from_pretrained(root)("a man says hello to the world", return_tensors="pt").input_ids
    with torch.inference_mode():
        hidden = model.model.language_model(tokens, output_hidden_states=True).hidden_states
    for state in hidden:
        assert state.isfinite().all()
        assert state.float().std(dim=1).mean() > 0.1, "all tokens look alike"


def test_the_tokenizer_pads_on_the_left_and_gives_the_text_back(tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.gemma_root)
    encoded = tokenizer("a golden retriever, naïve ☂", padding="max_length", max_length=64)
    padding = encoded.attention_mask.count(0)
    assert encoded.attention_mask == [0] * padding + [1] * (64 - padding)
    assert 0 < padding < 60
    assert encoded.input_ids[padding] == tokenizer.bos_token_id == 2
    assert set(encoded.input_ids[:padding]) == {tokenizer.pad_token_id} == {0}
    assert max(encoded.input_ids) < TinySizes().gemma_vocab
    assert tokenizer.decode(encoded.input_ids, skip_special_tokens=True) == "a golden retriever, naïve ☂"


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tiny, tmp_path):
    again = make_tiny(tmp_path / "again")
    different = make_tiny(tmp_path / "different", TinySizes(seed=2))
    files = sorted(path.relative_to(tiny.image.parent) for path in tiny.image.parent.rglob("*") if path.is_file())
    assert len(files) == 5 + 6
    for file in files:
        first = (tiny.image.parent / file).read_bytes()
        assert first == (again.image.parent / file).read_bytes(), file
        if file.suffix == ".safetensors":
            assert first != (different.image.parent / file).read_bytes(), file


def test_an_earlier_set_is_replaced_and_nothing_else_is_left(tmp_path):
    make_tiny(tmp_path)
    (tmp_path / "gemma" / "stale").touch()
    assets = make_tiny(tmp_path, TinySizes(layers=1))
    assert sorted(tmp_path.iterdir()) == sorted(assets)
    assert not (tmp_path / "gemma" / "stale").exists()


def test_an_interrupted_run_leaves_no_file_under_its_final_name(tmp_path, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("tiny.picture", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_tiny(tmp_path)
    assert list(tmp_path.iterdir()) == []


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


def test_the_command_prints_paths_and_sizes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tiny", str(tmp_path / "tiny"), "--layers", "1"])
    main()
    printed = capsys.readouterr().out
    assert all(str(path) in printed for path in assets_in(tmp_path / "tiny"))
    assert "layers=1 heads=4" in printed
