"""Gemma3Encoder gives transformers' hidden states of Gemma 3 and 4 and ltx-core's features, with any padding, and
Connectors ltx-core's contexts."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import STREAMS, block_summands, fp32_bound, made_config, one_thread, randn, randomised, rel  # noqa: F401
from tiny import TinySizes
from tiny.gemma import gemma_4_config
from tiny.gemma import gemma_config as tiny_gemma_config
from torch import nn
from torch.func import functional_call

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.gemma import read_config
from ltx_neuron.models.attention import sdpa
from ltx_neuron.models.connectors import Connectors
from ltx_neuron.models.gemma3 import Gemma3Encoder, layers_first
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.rope import half_rope
from ltx_neuron.text.inputs import connector_inputs, embedded_ids, encoder_inputs, scale_embeddings

# Every second layer attends to all with the global RoPE; every third, in a model of other widths
# throughout. Full layers of Gemma 4 have larger heads, one of them for keys that are the values.
PATTERNS = {
    "every 2nd of 4": TinySizes(),
    "every 3rd of 6": TinySizes(
        **{"gemma_layers": 6, "gemma_heads": 4, "gemma_kv_heads": 2, "gemma_head_dim": 16, "gemma_hidden": 48},
        gemma_sliding_window_pattern=3,
    ),
    "Gemma 4": TinySizes(gemma_layers=6, gemma_head_dim=16, gemma_sliding_window_pattern=3),
}
COUNT, BUCKET = 12, 128  # tokens of the prompt, and positions of the smallest compiled graph
# RoPE turns by positions up to 1023, and a prompt packed behind another has other positions than
# alone: fp32 rounds each of the two angles by up to 2**-24 of 1024, and a query and a key by twice
# as much. Next to it, the order of sums (fp32_bound of six layers: 2e-5) matters little.
EQUAL = 1024 * 2**-24
SHOWS = 1e-2  # a wrong base, layer kind or mask


def hidden_states(reference, ids):
    padding = TEXT_TOKENS - len(ids)
    mask, padded = torch.tensor([[0] * padding + [1] * len(ids)]), torch.tensor([[0] * padding + list(ids)])
    return reference(input_ids=padded, attention_mask=mask, output_hidden_states=True).hidden_states, mask


@pytest.fixture(scope="module", params=PATTERNS)
def setting(request) -> SimpleNamespace:
    """A random model in both forms, and what transformers makes of one prompt padded on its left to 1024."""
    sizes = PATTERNS[request.param]
    if request.param != "Gemma 4":
        content = tiny_gemma_config(sizes)
        text_config = transformers.Gemma3Config.from_dict(content).text_config
        reference = randomised(transformers.Gemma3TextModel(text_config))
    elif not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("transformers 4 has no Gemma 4: pip install 'transformers>=5.10'")
    else:
        content = gemma_4_config(sizes)
        text_config = transformers.Gemma4UnifiedConfig.from_dict(content).text_config
        reference = randomised(transformers.Gemma4UnifiedTextModel(text_config))
        for index, layer in enumerate(reference.layers):
            layer.layer_scalar.fill_(0.7 + 0.1 * index)
    gemma, config = read_config(content, Path(request.param)), made_config(sizes)[1]
    width, weights = gemma.hidden_size * (gemma.num_hidden_layers + 1), dict(reference.state_dict())
    table, projections = weights.pop("embed_tokens.weight"), []
    for seed, stream in enumerate(STREAMS):
        projections.append(randomised(nn.Linear(width, getattr(config, stream).inner), seed))
        weights[f"{stream}_aggregate_embed.weight"] = layers_first(projections[-1].weight, gemma.hidden_size)
        weights[f"{stream}_aggregate_embed.bias"] = projections[-1].bias
    ids = torch.randint(5, gemma.vocab_size, (COUNT,), generator=torch.Generator().manual_seed(3)).tolist()
    states, mask = hidden_states(reference, ids)  # the states are (1, 1024, width)
    return SimpleNamespace(
        **{"gemma": gemma, "config": config, "weights": weights, "table": table, "projections": projections},
        **{"ids": ids, "states": states, "mask": mask, "reference": reference},
    )


def inputs_of(setting, tokens):
    """Our inputs for a prompt at the end of `tokens` positions."""
    rows = scale_embeddings(setting.table[setting.ids], torch.float32)
    padding = torch.zeros(tokens - len(rows), setting.gemma.hidden_size)
    return encoder_inputs(torch.cat([padding, rows])[None], [len(rows)], setting.gemma)


def encode(setting, inputs, weights=None, states=True):
    with torch.device("meta"):
        encoder = Gemma3Encoder(setting.gemma, setting.config, 1, SingleRank(), states)
    return functional_call(encoder, weights or setting.weights, (inputs,), strict=True)


def last_states(states):
    """(1, COUNT, width, layers + 1) of the prompt's own tokens."""
    return torch.stack(states, dim=-1)[:, -COUNT:]


@pytest.mark.parametrize("tokens", [COUNT, BUCKET, TEXT_TOKENS])
def test_hidden_states_are_transformers_from_the_exact_tokens_a_bucket_or_all_1024(setting, tokens):
    ours = encode(setting, inputs_of(setting, tokens))["hidden_states"]
    assert ours.shape == (1, tokens, setting.gemma.hidden_size, setting.gemma.num_hidden_layers + 1)
    theirs = last_states(setting.states)
    for layer in range(setting.gemma.num_hidden_layers + 1):
        assert rel(ours[:, -COUNT:, :, layer], theirs[..., layer]) < EQUAL, layer
        assert layer == 0 or rel(theirs[..., layer], theirs[..., layer - 1]) > SHOWS


def test_in_bfloat16_the_states_are_as_near_to_fp32_as_transformers(setting):
    """The three-way rule."""
    truth = last_states(setting.states)
    rounded = deepcopy(setting.reference).to(torch.bfloat16)
    theirs = last_states(hidden_states(rounded, setting.ids)[0])
    weights = {name: weight.to(torch.bfloat16) for name, weight in setting.weights.items()}
    inputs = inputs_of(setting, COUNT)
    inputs |= {name: inputs[name].to(torch.bfloat16) for name in ("embeddings", "attention_mask")}
    ours = encode(setting, inputs, weights)["hidden_states"]
    assert ours.dtype == torch.bfloat16
    for layer in range(truth.shape[-1]):
        near, far = (rel(x[..., layer].float(), truth[..., layer]) for x in (ours, theirs))
        assert near <= 2 * far + 0.005, layer


def test_features_are_ltx_cores_of_the_same_states_also_where_no_states_are_returned(setting):
    from ltx_core.text_encoders.gemma.feature_extractor import FeatureExtractorV2

    video, audio = setting.projections
    extractor = FeatureExtractorV2(video, setting.gemma.hidden_size, audio)
    theirs = extractor(setting.states, setting.mask)
    for tokens in (COUNT, BUCKET):
        ours = encode(setting, inputs_of(setting, tokens))
        for got, wanted in zip([*ours.values()][:2], theirs, strict=True):
            assert rel(got[:, -COUNT:], wanted[:, -COUNT:]) < EQUAL
    alone = encode(setting, inputs_of(setting, BUCKET), states=False)
    assert [*alone] == ["video_features", "audio_features"]
    assert torch.equal(alone["video_features"], ours["video_features"])


def test_gemma_4_encodes_the_padding_token_in_place_of_an_image_or_a_sound():
    gemma = read_config(gemma_4_config(PATTERNS["Gemma 4"]), Path("Gemma 4"))
    image, sound = (token for token, _ in gemma.replaced_tokens[:2])
    assert embedded_ids([[2, image], [sound, 9]], gemma) == [2, 0, 0, 9]


def test_tokens_keep_the_positions_that_padding_to_1024_gives_them(setting):
    positions = torch.arange(TEXT_TOKENS - COUNT, TEXT_TOKENS)
    wanted = half_rope(positions, setting.gemma.head_dim, 1e4, 1.0)
    for tokens in (COUNT, BUCKET):
        assert torch.equal(inputs_of(setting, tokens)["local_cos"][:, :, -COUNT:], wanted.cos)


def test_a_token_sees_neither_the_padding_nor_a_later_token(setting):
    inputs = inputs_of(setting, BUCKET)
    changed = inputs["embeddings"].clone()
    changed[:, :-COUNT] = randn(1, BUCKET - COUNT, setting.gemma.hidden_size)
    changed[:, -1] *= -2
    before, after = encode(setting, inputs), encode(setting, inputs | {"embeddings": changed})
    for name in ("video_features", "hidden_states"):
        assert torch.equal(before[name][:, -COUNT:-1], after[name][:, -COUNT:-1])
        assert rel(before[name][:, -1], after[name][:, -1]) > SHOWS


def test_embeddings_are_scaled_in_their_own_dtype():
    """In bf16 the release's sqrt(3840) = 61.97 is 62, as in transformers."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    for dtype in (torch.float32, torch.bfloat16):
        theirs = Gemma3TextScaledWordEmbedding(4, 3840, 0, embed_scale=3840**0.5)
        theirs.weight.data = randn(4, 3840).to(dtype)
        assert torch.equal(scale_embeddings(theirs.weight.data, dtype), theirs(torch.arange(4)))
    assert scale_embeddings(torch.ones(1, 3840), torch.bfloat16)[0, 0] == 62


# --- connectors -----------------------------------------------------------------------------------

# Up to three blocks of a width of up to 80, each attending to 1024 positions
CONTEXT = fp32_bound(*block_summands(80, TEXT_TOKENS, attentions=1) * 3)
CONNECTORS = {
    "4 heads of 8": TinySizes(),
    "8 heads of 10": TinySizes(heads=8, head_dim=10, audio_head_dim=6, connector_layers=3),
}


@cache
def models(name, **overrides):
    """ltx-core's connector of each stream with random fp32 weights, and our config."""
    from ltx_core.text_encoders.gemma import embeddings_connector as ltx

    content, config = made_config(CONNECTORS[name], **overrides)
    configurators = ltx.Embeddings1DConnectorConfigurator, ltx.AudioEmbeddings1DConnectorConfigurator
    models = (randomised(configurator.from_config(content), seed) for seed, configurator in enumerate(configurators))
    return dict(zip(STREAMS, models, strict=True)), config


def our_contexts(connectors, config, features):
    weights = {
        f"{stream}_connector.{name}": weight
        for stream, connector in connectors.items()
        for name, weight in connector.state_dict().items()
    }
    registers = {stream: weights.pop(f"{stream}_connector.learnable_registers") for stream in STREAMS}
    with torch.device("meta"):
        module = Connectors(config, 1, SingleRank(), sdpa)
    outputs = functional_call(module, weights, (connector_inputs(features, registers, config),), strict=True)
    return {stream: outputs[f"{stream}_context"] for stream in STREAMS}


@pytest.mark.parametrize(
    ("name", "depths", "count"),
    [
        # Tokens of a prompt: one, as many as registers, more, all
        *(("4 heads of 8", {}, count) for count in (1, 128, 700, 1024)),
        ("8 heads of 10", {}, 12),
        ("4 heads of 8", {"audio_connector_num_layers": 1}, 12),
    ],
)
def test_contexts_are_ltx_cores_for_prompts_of_any_length_and_any_size_and_depth(name, depths, count):
    from ltx_core.text_encoders.gemma.embeddings_processor import convert_to_additive_mask

    connectors, config = models(name, **depths)
    padding, widths = TEXT_TOKENS - count, (config.video_connector.inner, config.audio_connector.inner)
    own = {f"{stream}_features": randn(1, count, width) for stream, width in zip(STREAMS, widths, strict=True)}
    mask = convert_to_additive_mask(torch.tensor([[0.0] * padding + [1.0] * count]), torch.float32)
    ours = our_contexts(connectors, config, own)
    for stream, connector in connectors.items():
        padded = nn.functional.pad(own[f"{stream}_features"], (0, 0, padding, 0))
        assert rel(ours[stream], connector(padded, mask)[0]) < CONTEXT
