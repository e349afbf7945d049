"""Every tensor has one row of the sharding tables, and rank files hold exactly its parts."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from helpers import Together, block_summands, fp32_bound, made_config, one_thread, randn, rel  # noqa: F401
from safetensors.torch import load_file, save_file
from tiny import TinySizes, make_tiny
from tiny.config import released_config
from tiny.gemma import gemma_config as tiny_gemma_config
from tiny.gemma import write_gemma4_file
from torch.func import functional_call

from ltx_neuron.config.gemma import gemma_config, read_config
from ltx_neuron.config.transformer import Bucket, transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.models.gemma3 import Gemma3Encoder, layers_first
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import connector_program, dit_program, gemma3_program
from ltx_neuron.plan.cost import text_weights
from ltx_neuron.text.inputs import encoder_inputs
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.model_files import TextEncoderFile
from ltx_neuron.weights.rankfiles import HOST_FILE, rank_file
from ltx_neuron.weights.sharder import TensorLayout, shard_specs, shard_weights
from ltx_neuron.weights.sharding import ALL, COL, HOST, ROW, SHARDED_MODELS, local_shape, rule
from ltx_neuron.weights.tensorfile import TensorFile

TP = 4
DIT_TENSORS, CONNECTOR_TENSORS = 4186, 258  # of the released checkpoint


@cache
def released_shapes() -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes of the full-size model, by ltx-core's modules on the meta device."""
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


def test_every_tensor_has_exactly_one_row_and_every_row_a_tensor(sources):
    shapes = released_shapes()
    assert {model: len(names) for model, names in shapes.items()} == {"dit": DIT_TENSORS, "gemma3": CONNECTOR_TENSORS}
    for model, source in sources.items():
        for names in (source.locations, shapes[model]):
            assert {name: len(rows(model, name)) for name in names if len(rows(model, name)) != 1} == {}
        used = {pattern for name in source.locations for pattern in rows(model, name)}
        later = {"keyframes_abs_pos_embedding"}  # LTX-2.5's
        assert set(SHARDED_MODELS[model].table) - later == used
        for name, shape in shapes[model].items():  # and what it splits can be split
            split = rule(SHARDED_MODELS[model], name)
            for tp in (4, 32):
                local = local_shape(shape, split, tp, name)
                assert torch.Size(local).numel() * (tp if split in (COL, ROW) else 1) == torch.Size(shape).numel()


@pytest.mark.parametrize(("name", "matches"), [("proj_out.weight_scale", 0), ("proj_out.weight", 2)])
def test_a_tensor_of_no_row_or_of_two_stops_the_sharder(name, matches, tmp_path):
    model = SHARDED_MODELS["dit"]._replace(table=SHARDED_MODELS["dit"].table | {r"proj_out\.weight": COL})
    save_file({f"model.diffusion_model.{name}": torch.ones(4, 4)}, tmp_path / "one.safetensors")
    source = Source(model, [TensorFile(tmp_path / "one.safetensors", "")])
    with pytest.raises(UserError, match=rf"{re.escape(name)}' matches {matches} rows"):
        shard_specs(source, 2, {})


def test_a_tensor_found_in_two_files_stops_the_sharder(tmp_path):
    paths = [tmp_path / f"{name}.safetensors" for name in ("one", "two")]
    for path in paths:
        save_file({"language_model.model.norm.weight": torch.ones(4)}, path)
    with pytest.raises(UserError, match=r"'norm\.weight' is in two places: .*one\.safetensors and .*two\.safetensors"):
        Source(SHARDED_MODELS["gemma3"], [TensorFile(path, "") for path in paths])


@pytest.mark.parametrize("model", ["dit", "gemma3"])
def test_the_parts_of_all_ranks_give_back_every_source_tensor_bit_for_bit(model, sources, layouts, tmp_path):
    source, arranged = sources[model], layouts[model]
    # fp32 keeps every bit of bf16 and of fp32 sources.
    shard_weights(source, tmp_path, {"tp": TP}, TP, torch.float32, shard_specs(source, TP, arranged))
    ranks, host = [load_file(tmp_path / rank_file(rank)) for rank in range(TP)], load_file(tmp_path / HOST_FILE)
    splits = {name: source.split(name) for name in source.locations}
    assert {*host} == {name for name, split in splits.items() if split == HOST} and host
    assert all({*rank} == {*splits} - {*host} for rank in ranks)
    for name, split in splits.items():
        parts = [host[name]] if split == HOST else [rank[name] for rank in ranks]
        if split in (HOST, ALL):
            assert all(torch.equal(part, parts[0]) for part in parts)
            whole = parts[0]
        elif name in arranged:  # (layers, out, width)
            whole = torch.cat(parts, dim=1).permute(1, 2, 0).flatten(1)
        else:
            whole = torch.cat(parts, dim=split)
        assert torch.equal(whole, source.tensor(name).float()), name


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


def test_degrees_that_cut_a_head_or_a_tensor_are_refused_by_name(tmp_path):
    sizes = TinySizes(gemma_heads=24, gemma_kv_heads=8, gemma_head_dim=384, gemma_hidden=3840)
    (tmp_path / "config.json").write_text(json.dumps(tiny_gemma_config(sizes)))
    gemma = gemma_config(tmp_path)
    local_shape((gemma.num_key_value_heads * gemma.head_dim, gemma.hidden_size), COL, 12, "k_proj")  # divides evenly
    with pytest.raises(UserError, match=r"(?s)degree 12 .*Gemma num_key_value_heads=8.*one of 1, 2, 4, 8, 24$"):
        gemma.check_tensor_parallel(12)
    with pytest.raises(UserError, match="degree 16 does not divide Gemma num_attention_heads=24"):
        gemma.check_tensor_parallel(16)
    gemma.check_tensor_parallel(24)  # a rank has one query and one key-value head, which three ranks share
    _, config = made_config()
    config.check_tensor_parallel(4)
    for tp in (8, 3, 0):
        with pytest.raises(UserError, match=rf"degree {tp} does not divide num_attention_heads=4"):
            config.check_tensor_parallel(tp)
    with pytest.raises(UserError, match=r"'to_q' of shape \[6, 4\] cannot be split over 4 ranks along dimension 0"):
        local_shape((6, 4), COL, 4, "to_q")


# --- more ranks than key-value heads ----------------------------------------------------------------

HEADS, KEY_VALUE_HEADS, TOKENS = 8, 2, 12
DEGREES = (1, 4, 8)  # a rank holds 2 heads, 1 shared by two ranks, 1 shared by four
# Two layers of a width of 32, whose sums over up to eight ranks have another order
EQUAL = fp32_bound(*block_summands(32, TOKENS, attentions=1) * 2)


@pytest.fixture(scope="module", params=["Gemma 3", "Gemma 4"])
def model(request, tmp_path_factory):
    """A text encoder, and its rank files at every degree."""
    folder = tmp_path_factory.mktemp("shared")
    heads = {"heads": HEADS, "gemma_heads": HEADS, "gemma_kv_heads": KEY_VALUE_HEADS}
    sizes = TinySizes(layers=1, connector_layers=1, gemma_layers=2, **heads)
    assets = make_tiny(folder, sizes)
    checkpoint = Checkpoint(assets.checkpoint)
    if request.param == "Gemma 3":
        gemma, files = gemma_config(assets.gemma_root), gemma_files(assets.gemma_root)
    else:
        write_gemma4_file(folder / "text.safetensors", sizes)
        file = TextEncoderFile(folder / "text.safetensors", "")
        gemma, files = read_config(file.gemma_config, file.path), [file]
        for name in [name for name in checkpoint.shapes if name in file.shapes]:
            del checkpoint.shapes[name]  # the file has the projections
    config = transformer_config(checkpoint.config)
    source = Source(SHARDED_MODELS["gemma3"], [checkpoint, *files], config.heads | gemma.heads)
    layout = TensorLayout(lambda weight: layers_first(weight, gemma.hidden_size), split=1)
    layouts = {f"{stream}_aggregate_embed.weight": layout for stream in ("video", "audio")}
    for tp in DEGREES:
        identity = {"model": "gemma3", "tp": tp, "dtype": "float32"}
        specs = shard_specs(source, tp, layouts)
        shard_weights(source, folder / f"tp{tp}", identity, tp, torch.float32, specs)
    return SimpleNamespace(folder=folder, gemma=gemma, config=config, source=source)


def ranks_of(model, tp) -> list[dict]:
    return [load_file(model.folder / f"tp{tp}" / rank_file(rank)) for rank in range(tp)]


def encoded(model, tp):
    """Features of all ranks side by side, and every rank's hidden states."""
    comm = Together(tp)
    inputs = encoder_inputs(randn(1, TOKENS, model.gemma.hidden_size), [TOKENS], model.gemma)
    with torch.device("meta"):
        encoders = [Gemma3Encoder(model.gemma, model.config, tp, comm, states=True) for _ in range(tp)]

    def run(encoder, weights):
        mine = {name: weights[name] for name, _ in encoder.named_parameters()}
        with torch.no_grad():
            return functional_call(encoder, mine, (inputs,), strict=True)

    with ThreadPoolExecutor(tp) as pool:
        outputs = list(pool.map(run, encoders, ranks_of(model, tp)))
    features = torch.cat([out["video_features"] for out in outputs], -1)
    return features, [out["hidden_states"] for out in outputs]


def test_the_encoder_gives_the_same_at_every_degree(model):
    alone, (alone_states,) = encoded(model, 1)
    for tp in DEGREES[1:]:
        features, states = encoded(model, tp)
        assert rel(features, alone) < EQUAL, tp
        assert all(rel(mine, alone_states) < EQUAL for mine in states), tp


def test_each_rank_holds_the_key_value_heads_of_its_queries_and_a_plan_counts_every_copy(model):
    for tp in DEGREES:
        ranks = ranks_of(model, tp)
        for layer in (0, 1):  # the second one attends to all tokens
            size = model.gemma.attention(full=layer == 1)
            for kind in "k" if size.keys_are_values else "kv":
                name = f"layers.{layer}.self_attn.{kind}_proj.weight"
                heads = model.source.tensor(name).float().split(size.head_dim)
                assert len(heads) == size.key_value_heads
                for rank, weights in enumerate(ranks):
                    queries = range(rank * HEADS // tp, (rank + 1) * HEADS // tp)
                    own = sorted({query * len(heads) // HEADS for query in queries})
                    assert torch.equal(weights[name], torch.cat([heads[head] for head in own])), (tp, name)
        planned = sum(text_weights(model.gemma, model.config, tp).values())
        assert [sum(tensor.numel() for tensor in weights.values()) for weights in ranks] == [planned] * tp
