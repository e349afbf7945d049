"""Gemma3Encoder gives transformers' hidden states of Gemma 3 and 4 and ltx-core's features, with any padding."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import STREAMS, made_config, one_thread, randn, randomised, rel  # noqa: F401
from tiny import TinySizes
from tiny.gemma import gemma_4_config
from tiny.gemma import gemma_config as tiny_gemma_config
from torch import nn
from torch.func import functional_call

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.gemma import read_config
from ltx_neuron.models.gemma3 import Gemma3Encoder, layers_first
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.rope import half_rope
from ltx_neuron.text.inputs import embedded_ids, encoder_inputs, scale_embeddings

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
ROUNDED = "embeddings", "attention_mask"  # inputs in the run's dtype


def hidden_states(reference, ids):
    padding = TEXT_TOKENS - len(ids)
    mask, padded = torch.tensor([[0] * padding + [1] * len(ids)]), torch.tensor([[0] * padding + list(ids)])
    return reference(input_ids=padded, attention_mask=mask, output_hidden_states=True).hidden_states, mask


def published(name: str, sizes: TinySizes) -> tuple[dict, nn.Module]:
    """A config in the published format, and transformers' text model of it."""
    import transformers

    if name != "Gemma 4":
        content = tiny_gemma_config(sizes)
        config = transformers.Gemma3Config.from_dict(content).text_config
        return content, randomised(transformers.Gemma3TextModel(config))
    if not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("transformers 4 has no Gemma 4: pip install 'transformers>=5.10'")
    content = gemma_4_config(sizes)
    config = transformers.Gemma4UnifiedConfig.from_dict(content).text_config
    reference = randomised(transformers.Gemma4UnifiedTextModel(config))
    for index, layer in enumerate(reference.layers):
        layer.layer_scalar.fill_(0.7 + 0.1 * index)
    return content, reference


@pytest.fixture(scope="module", params=PATTERNS)
def setting(request) -> SimpleNamespace:
    """A random model in both forms, and what transformers makes of one prompt padded on its left to 1024."""
    sizes = PATTERNS[request.param]
    content, reference = published(request.param, sizes)
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


def inputs_of(setting, tokens, ids=None):
    """Our inputs for a prompt at the end of `tokens` positions."""
    rows = scale_embeddings(setting.table[ids or setting.ids], torch.float32)
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
    given = {name: inputs[name].to(torch.bfloat16) for name in ROUNDED}
    ours = encode(setting, inputs | given, weights)["hidden_states"]
    assert ours.dtype == torch.bfloat16
    for layer in range(truth.shape[-1]):
        near, far = (rel(x[..., layer].float(), truth[..., layer]) for x in (ours, theirs))
        assert near <= 2 * far + 0.005, layer


def test_features_are_ltx_cores_of_the_same_states(setting):
    from ltx_core.text_encoders.gemma.feature_extractor import FeatureExtractorV2

    video, audio = setting.projections
    extractor = FeatureExtractorV2(video, setting.gemma.hidden_size, audio)
    theirs = extractor(setting.states, setting.mask)
    for tokens in (COUNT, BUCKET):
        ours = encode(setting, inputs_of(setting, tokens))
        for got, wanted in zip([*ours.values()][:2], theirs, strict=True):
            assert rel(got[:, -COUNT:], wanted[:, -COUNT:]) < EQUAL


def test_gemma_4_encodes_the_padding_token_in_place_of_an_image_or_a_sound():
    gemma = read_config(gemma_4_config(PATTERNS["Gemma 4"]), Path("Gemma 4"))
    image, sound = (token for token, _ in gemma.replaced_tokens[:2])
    assert embedded_ids([[2, image], [sound, 9]], gemma) == [2, 0, 0, 9]


def test_tokens_keep_the_positions_that_padding_to_1024_gives_them(setting):
    positions = torch.arange(TEXT_TOKENS - COUNT, TEXT_TOKENS)
    wanted = half_rope(positions, setting.gemma.head_dim, 1e4, 1.0)
    for tokens in (COUNT, BUCKET):
        assert torch.equal(inputs_of(setting, tokens)["local_cos"][:, :, -COUNT:], wanted.cos)


def test_what_stands_in_the_padding_changes_no_token(setting):
    inputs = inputs_of(setting, BUCKET)
    changed = inputs["embeddings"].clone()
    changed[:, :-COUNT] = randn(1, BUCKET - COUNT, setting.gemma.hidden_size)
    before, after = encode(setting, inputs), encode(setting, inputs | {"embeddings": changed})
    for name in ("video_features", "hidden_states"):
        assert torch.equal(before[name][:, -COUNT:], after[name][:, -COUNT:])


def test_a_token_sees_no_later_one(setting):
    changed = [*setting.ids[:-1], setting.ids[-1] + 1 if setting.ids[-1] < 500 else 5]
    inputs = (inputs_of(setting, COUNT, ids) for ids in (setting.ids, changed))
    before, after = (encode(setting, each)["hidden_states"] for each in inputs)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert rel(before[:, -1:], after[:, -1:]) > SHOWS


def test_embeddings_are_scaled_in_their_own_dtype():
    """In bf16 the release's sqrt(3840) = 61.97 is 62, as in transformers."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    for dtype in (torch.float32, torch.bfloat16):
        theirs = Gemma3TextScaledWordEmbedding(4, 3840, 0, embed_scale=3840**0.5)
        theirs.weight.data = randn(4, 3840).to(dtype)
        assert torch.equal(scale_embeddings(theirs.weight.data, dtype), theirs(torch.arange(4)))
    assert scale_embeddings(torch.ones(1, 3840), torch.bfloat16)[0, 0] == 62


def test_the_encoder_returns_states_only_when_asked(setting):
    inputs = inputs_of(setting, COUNT)
    outputs = encode(setting, inputs, states=False)
    assert [*outputs] == ["video_features", "audio_features"]
    assert torch.equal(outputs["video_features"], encode(setting, inputs)["video_features"])
