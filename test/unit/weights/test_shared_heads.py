"""With more ranks than key-value heads, neighbouring ranks have copies of a head, and nothing else
changes. Gemma 3 has 8 of these heads, and Gemma 4's full layers have 1."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from helpers import Together, block_summands, fp32_bound, one_thread, randn, rel  # noqa: F401
from safetensors.torch import load_file
from tiny import TinySizes, make_tiny
from tiny.gemma import write_gemma4_file
from torch.func import functional_call

from ltx_neuron.backends.export import fake_process_group
from ltx_neuron.config.gemma import gemma_config, read_config
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.models.gemma3 import Gemma3Encoder, layers_first
from ltx_neuron.plan import text_weights
from ltx_neuron.text.inputs import encoder_inputs
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.model_files import TextEncoderFile
from ltx_neuron.weights.rankfiles import rank_file
from ltx_neuron.weights.sharder import TensorLayout, shard_specs, shard_weights
from ltx_neuron.weights.sharding import SHARDED_MODELS

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


@pytest.mark.parametrize("tp", DEGREES)
def test_each_rank_holds_the_key_value_heads_of_its_queries(model, tp):
    ranks = ranks_of(model, tp)
    for layer in (0, 1):  # the second one attends to all tokens
        size = model.gemma.attention(full=layer == 1)
        for kind in "k" if size.keys_are_values else "kv":
            name = f"layers.{layer}.self_attn.{kind}_proj.weight"
            heads = model.source.tensor(name).float().split(size.head_dim)
            assert len(heads) == size.key_value_heads
            for rank, weights in enumerate(ranks):
                queries = range(rank * HEADS // tp, (rank + 1) * HEADS // tp)
                reference = sorted({query * len(heads) // HEADS for query in queries})
                expected = torch.cat([heads[head] for head in reference])
                assert torch.equal(weights[name], expected)


@pytest.mark.parametrize("tp", DEGREES)
def test_a_plan_counts_every_copy(model, tp):
    """The plan counts as many numbers for a rank as its file has."""
    with fake_process_group(tp):
        planned = sum(text_weights(model.gemma, model.config, tp).values())
    for weights in ranks_of(model, tp):
        assert sum(tensor.numel() for tensor in weights.values()) == planned


def test_degrees_that_cut_a_head_are_refused(model):
    for tp in (3, 6, 16):
        with pytest.raises(UserError, match=rf"degree {tp} does not divide Gemma num_attention_heads=8"):
            model.gemma.check_tensor_parallel(tp)
    for tp in DEGREES:
        model.gemma.check_tensor_parallel(tp)
