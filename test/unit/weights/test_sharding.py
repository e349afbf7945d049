"""Every tensor has one row of the sharding tables, and rank files hold exactly its parts."""

import json
import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from helpers import made_config
from safetensors.torch import load_file, save_file
from tiny import TinySizes
from tiny.config import released_config
from tiny.gemma import gemma_config as tiny_gemma_config

from ltx_neuron.config.gemma import gemma_config
from ltx_neuron.config.transformer import Bucket, transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.models.gemma3 import layers_first
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import connector_program, dit_program, gemma3_program
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.rankfiles import HOST_FILE, rank_file
from ltx_neuron.weights.sharder import TensorLayout, shard_specs, shard_weights
from ltx_neuron.weights.sharding import ALL, COL, HOST, ROW, SHARDED_MODELS, local_shape, rename, rule
from ltx_neuron.weights.tensorfile import TensorFile

TP = 4
DIT_TENSORS, CONNECTOR_TENSORS = 4186, 258  # of the released checkpoint


@cache
def released_shapes() -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes of the full-size model, by ltx-core's modules on the meta device: none has
    memory."""
    from ltx_core.model.transformer import LTXModelConfigurator
    from ltx_core.text_encoders.gemma.embeddings_connector import (
        AudioEmbeddings1DConnectorConfigurator,
        Embeddings1DConnectorConfigurator,
    )

    parts = {
        "": LTXModelConfigurator,
        "video_connector.": Embeddings1DConnectorConfigurator,
        "audio_connector.": AudioEmbeddings1DConnectorConfigurator,
    }
    shapes = {}
    with torch.device("meta"):
        for prefix, configurator in parts.items():
            tensors = configurator.from_config(released_config()).state_dict()
            shapes[prefix] = {prefix + name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return {"dit": shapes[""], "gemma3": shapes["video_connector."] | shapes["audio_connector."]}


def rows(model: str, name: str) -> list:
    return [pattern for pattern in SHARDED_MODELS[model].table if re.fullmatch(pattern, name)]


@pytest.fixture(scope="module")
def sources(tiny):
    """The tensors of both models of the tiny assets."""
    checkpoint = Checkpoint(tiny.checkpoint)
    return {
        "dit": Source(SHARDED_MODELS["dit"], [checkpoint]),
        "gemma3": Source(SHARDED_MODELS["gemma3"], [checkpoint, *gemma_files(tiny.gemma_root)]),
    }


@pytest.fixture(scope="module")
def layouts(tiny):
    """How shard_weights() lays out the two projections of the text encoder."""
    width = gemma_config(tiny.gemma_root).hidden_size
    names = [f"{stream}_aggregate_embed.weight" for stream in ("video", "audio")]
    return {
        "dit": {},
        "gemma3": dict.fromkeys(names, TensorLayout(lambda weight: layers_first(weight, width), split=1)),
    }


@pytest.fixture(scope="module", params=["dit", "gemma3"])
def sharded(request, sources, layouts, tmp_path_factory):
    """One model cut into four in fp32, which keeps every bit of bf16 and of fp32 sources."""
    model, folder = request.param, tmp_path_factory.mktemp(request.param)
    shard_weights(
        sources[model], folder, {"tp": TP}, TP, torch.float32, shard_specs(sources[model], TP, layouts[model])
    )
    return SimpleNamespace(model=model, folder=folder, source=sources[model], layouts=layouts[model])


def test_every_tensor_has_exactly_one_row_and_every_row_a_tensor(sources):
    shapes = released_shapes()
    assert {model: len(names) for model, names in shapes.items()} == {"dit": DIT_TENSORS, "gemma3": CONNECTOR_TENSORS}
    for model, source in sources.items():
        for names in (source.locations, shapes[model]):
            assert {name: len(rows(model, name)) for name in names if len(rows(model, name)) != 1} == {}
        used = {pattern for name in source.locations for pattern in rows(model, name)}
        later = {"keyframes_abs_pos_embedding"}  # LTX-2.5's
        assert set(SHARDED_MODELS[model].table) - later == used


def test_every_dimension_that_a_row_splits_can_be_split_in_the_released_model():
    for model, shapes in released_shapes().items():
        for name, shape in shapes.items():
            split = rule(SHARDED_MODELS[model], name)
            for tp in (4, 8, 16, 32):
                local = local_shape(shape, split, tp, name)
                assert torch.Size(local).numel() * (tp if split in (COL, ROW) else 1) == torch.Size(shape).numel()


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("transformer_blocks.47.attn1.to_q.weight", COL),
        ("transformer_blocks.0.audio_to_video_attn.to_gate_logits.bias", COL),
        ("transformer_blocks.3.attn2.k_norm.weight", COL),
        ("transformer_blocks.3.attn2.to_out.0.weight", ROW),
        ("transformer_blocks.3.attn2.to_out.0.bias", ALL),
        ("transformer_blocks.3.audio_ff.net.2.weight", ROW),
        ("transformer_blocks.3.audio_ff.net.2.bias", ALL),
        ("transformer_blocks.3.prompt_scale_shift_table", ALL),
        ("proj_out.weight", ALL),
        ("av_ca_a2v_gate_adaln_single.linear.weight", HOST),
        ("audio_prompt_adaln_single.emb.timestep_embedder.linear_1.bias", HOST),
    ],
)
def test_a_tensor_is_split_as_the_computation_wants_it(name, split):
    assert name in released_shapes()["dit"]
    assert rule(SHARDED_MODELS["dit"], name) == split


@pytest.mark.parametrize(
    "name",
    [
        "transformer_blocks.0.attn3.to_q.weight",
        "transformer_blocks.0.attn1.to_q.weight_scale",
        "keyframes_rel_pos_embedding",
    ],
)
def test_a_tensor_that_nobody_knows_stops_the_sharder(name, tmp_path):
    with pytest.raises(UserError, match=f"(?s){re.escape(name)}.*0 rows of the dit"):
        rule(SHARDED_MODELS["dit"], name)
    path = tmp_path / "one.safetensors"
    save_file({f"model.diffusion_model.{name}": torch.ones(4, 4)}, path)
    source = Source(SHARDED_MODELS["dit"], [TensorFile(path, "")])
    with pytest.raises(UserError, match=re.escape(name)):
        shard_specs(source, 2, {})
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_two_rows_match_stops_the_sharder():
    model = SHARDED_MODELS["dit"]._replace(table={**SHARDED_MODELS["dit"].table, r"proj_out\.\w+": COL})
    with pytest.raises(UserError, match="matches 2 rows"):
        rule(model, "proj_out.weight")


def test_a_tensor_of_another_model_is_left_out():
    assert rename(SHARDED_MODELS["dit"], "text_model.proj.weight") is None


def test_a_tensor_found_in_two_files_stops_the_sharder(tmp_path):
    files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for path in files:
        save_file({"language_model.model.norm.weight": torch.ones(4)}, path)
    with pytest.raises(
        UserError, match=r"(?s)'norm\.weight' is in two places.*one\.safetensors and .*two\.safetensors"
    ):
        Source(SHARDED_MODELS["gemma3"], [TensorFile(path, "") for path in files])


def whole_again(name, split, parts, arranged):
    """A source's tensor from its parts of all ranks. A layout by layer puts out-features second."""
    if split == ALL:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if arranged:
        layered = torch.cat(parts, dim=1)  # (layers, out, width)
        return layered.permute(1, 2, 0).flatten(1)
    return torch.cat(parts, dim=split)


def test_the_parts_of_all_ranks_give_back_every_source_tensor_bit_for_bit(sharded):
    ranks = [load_file(sharded.folder / rank_file(rank)) for rank in range(TP)]
    host = load_file(sharded.folder / HOST_FILE)
    rules = {name: sharded.source.split(name) for name in sharded.source.locations}
    on_ranks = {name for name, split in rules.items() if split != HOST}
    assert all(set(rank) == on_ranks for rank in ranks)
    assert set(host) == set(rules) - on_ranks and host
    for name, split in rules.items():
        expected = sharded.source.tensor(name).float()
        if split == HOST:
            got = host[name]
        else:
            got = whole_again(name, split, [rank[name] for rank in ranks], name in sharded.layouts)
        assert torch.equal(got, expected), name


def test_ranks_get_just_the_parameters_of_the_graphs_in_their_shapes(sources, layouts, tiny):
    gemma = gemma_config(tiny.gemma_root)
    config = transformer_config(Checkpoint(tiny.checkpoint).config)
    how = TP, SingleRank(), torch.float32
    programs = {
        "dit": [dit_program(config, Bucket(6, 4, 1, 3), *how, blocks_per_graph=config.num_layers)],
        "gemma3": [gemma3_program(gemma, config, 8, *how, states=True), connector_program(config, *how)],
    }
    for model, source in sources.items():
        expected = {
            name: tuple(parameter.shape)
            for program in programs[model]
            for graph in program.graphs.values()
            for name, parameter in graph.module.named_parameters()
        }
        got = {cut.name: cut.stored for cut in shard_specs(source, TP, layouts[model]) if cut.split != HOST}
        assert got == expected


@pytest.mark.parametrize("tp", [12, 24])
def test_half_heads_are_refused_though_the_tensors_would_divide(tp, tmp_path):
    sizes = TinySizes(gemma_heads=24, gemma_kv_heads=8, gemma_head_dim=384, gemma_hidden=3840)
    (tmp_path / "config.json").write_text(json.dumps(tiny_gemma_config(sizes)))
    gemma = gemma_config(tmp_path)
    keys = (gemma.num_key_value_heads * gemma.head_dim, gemma.hidden_size)
    local_shape(keys, COL, tp, "k_proj")  # divides evenly: only the heads say no
    if tp == 24:  # each rank has one query and one key-value head, which three ranks share
        gemma.check_tensor_parallel(tp)
        return
    message = rf"(?s)degree {tp} does not divide Gemma num_key_value_heads=8.*one of 1, 2, 4, 8, 24$"
    with pytest.raises(UserError, match=message):
        gemma.check_tensor_parallel(tp)


def test_half_heads_of_the_transformer_are_refused():
    _, config = made_config()
    config.check_tensor_parallel(4)
    for tp in (8, 3, 0):
        with pytest.raises(UserError, match=rf"degree {tp} does not divide num_attention_heads=4"):
            config.check_tensor_parallel(tp)


def test_a_tensor_that_does_not_divide_is_refused_by_name():
    with pytest.raises(UserError, match=r"'to_q' of shape \[6, 4\] cannot be split over 4 ranks along dimension 0"):
        local_shape((6, 4), COL, 4, "to_q")


def test_a_rank_of_the_released_model_holds_9_gigabytes_of_four():
    sizes = {}
    for name, shape in released_shapes()["dit"].items():
        split = rule(SHARDED_MODELS["dit"], name)
        if split != HOST:
            sizes[name] = 2 * torch.Size(local_shape(shape, split, TP, name)).numel()
    assert round(sum(sizes.values()) / 1e9, 1) == 9.3
    # By hand: four matrices of two self and text attentions and of one audio-video attention each
    # way, and a feed-forward of four times the width. The head gates, biases and tables beside them
    # are three thousandths of a rank.
    video, audio = 4096, 2048
    block = (2 * 4 + 8) * (video**2 + audio**2) + 4 * (video + audio) * audio
    matrices = {n: size for n, size in sizes.items() if re.search(r"blocks.*(_[qkv]|out\.0|proj|net\.2)\.weight", n)}
    assert sum(matrices.values()) == 2 * 48 * block / TP
    assert round(sum(matrices.values()) / 1e9, 2) == 9.26
    assert sum(sizes.values()) - sum(matrices.values()) < 0.005 * sum(sizes.values())
