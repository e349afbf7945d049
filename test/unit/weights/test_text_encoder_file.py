"""LTX-2.5's text encoder in one file: its config, its tokenizer and the names of its weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lib.random_sources import GEMMA_4_SIZES
from safetensors.torch import load_file
from tiny import TinySizes
from tiny.gemma import gemma_4_config, write_gemma4_file
from tiny.weights import save

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.gemma import GEMMA_3_12B, GEMMA_4_12B, read_config
from ltx_neuron.errors import UserError
from ltx_neuron.text.inputs import embedded_tokenizer, load_tokenizer, tokenize
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.model_files import TextEncoderFile
from ltx_neuron.weights.sharding import SHARDED_MODELS

PROMPT = "a golden retriever puppy runs across a sunny green meadow"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.safetensors"
    write_gemma4_file(path, TinySizes())
    return path


@pytest.fixture(scope="module")
def tokenizer(path):
    return embedded_tokenizer(TextEncoderFile(path, ""))


def test_the_released_sizes_are_those_of_gemma_4_12b():
    config = read_config(gemma_4_config(GEMMA_4_SIZES), Path("text"))
    assert replace(config, replaced_tokens=GEMMA_4_12B.replaced_tokens) == GEMMA_4_12B
    assert GEMMA_4_12B.digest != GEMMA_3_12B.digest


def test_gemma_3_has_the_digest_that_it_had_before_gemma_4():
    assert GEMMA_3_12B.digest == "1e0d06ee5cfc"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_moe_block", True),
        ("num_kv_shared_layers", 2),
        ("hidden_size_per_layer_input", 256),
        ("use_double_wide_mlp", True),
        ("use_bidirectional_attention", "all"),
        ("sliding_window", 512),
        ("global_head_dim", 0.5),
    ],
)
def test_unimplemented_settings_are_refused_by_name(name, value):
    content = gemma_4_config(TinySizes())
    content["text_config"][name] = value
    with pytest.raises(UserError, match=rf"{name}.* '?{value}"):
        read_config(content, Path("text.safetensors"))


def test_other_models_are_refused():
    with pytest.raises(UserError, match=r"model_type is 'llama', wanted 'gemma3' or 'gemma4_unif"):
        read_config({"model_type": "llama", "text_config": {}}, Path("text"))


def test_full_layers_may_have_values_of_their_own():
    content = gemma_4_config(TinySizes())
    content["text_config"]["attention_k_eq_v"] = False
    sizes = read_config(content, Path("text")).attention(full=True)
    assert sizes == (16, TinySizes().gemma_kv_heads, False)


def test_a_prompt_begins_with_one_bos_and_has_no_eos(tokenizer, tiny):
    """Gemma 3's tokenizer adds BOS itself, Gemma 4's does not."""
    theirs = load_tokenizer(tiny.gemma_root)
    assert tokenizer(PROMPT).input_ids[0] != tokenizer.bos_token_id
    assert theirs(PROMPT).input_ids[0] == theirs.bos_token_id
    for each in (tokenizer, theirs):
        ids = tokenize(each, f"  {PROMPT}\n")
        assert ids == tokenize(each, PROMPT)
        assert ids[0] == each.bos_token_id and each.bos_token_id not in ids[1:]
        assert each.eos_token_id not in ids
        assert each.decode(ids[1:]) == PROMPT
    assert tokenize(tokenizer, f"<bos>{PROMPT}") == tokenize(tokenizer, PROMPT)


def test_a_long_prompt_is_cut_after_its_bos(tokenizer):
    ids = tokenize(tokenizer, f"{PROMPT} . " * 200)
    assert len(ids) == TEXT_TOKENS and ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("name", ["tokenizer_json", "hf_asset__tokenizer_config.json"])
def test_a_broken_tokenizer_is_refused(path, tmp_path, name):
    tensors = load_file(path)
    tensors[name] = tensors[name][: len(tensors[name]) // 2]
    broken = tmp_path / "broken.safetensors"
    save(broken, tensors, TextEncoderFile(path, "").metadata)
    with pytest.raises(UserError, match="the tokenizer in .*broken.safetensors cannot be loaded"):
        embedded_tokenizer(TextEncoderFile(broken, ""))


def test_files_with_the_names_of_transformers_and_of_comfyui_give_equal_weights(path, tmp_path):
    nested = tmp_path / "nested.safetensors"
    renamed = {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name.replace("vision_model.", "model.vision_embedder."): tensor
        for name, tensor in load_file(path).items()
    }
    save(nested, renamed, TextEncoderFile(path, "").metadata)
    flat, other = (Source(SHARDED_MODELS["gemma3"], [TextEncoderFile(p, "")]) for p in (path, nested))
    assert set(flat.names) == set(other.names)
    assert {"layers.0.layer_scalar", "video_aggregate_embed.bias", "norm.weight"} < set(flat.names)
    assert all(torch.equal(flat.tensor(name), other.tensor(name)) for name in flat.names)
