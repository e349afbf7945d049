"""Connectors turns features into ltx-core's contexts."""

from functools import cache

import pytest
import torch
from helpers import STREAMS, block_summands, fp32_bound, made_config, randn, randomised, rel
from tiny import TinySizes
from torch.func import functional_call

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.models.attention import sdpa
from ltx_neuron.models.connectors import Connectors
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.text.inputs import connector_inputs

# Up to three blocks of a width of up to 80, each attending to 1024 positions
EQUAL = fp32_bound(*block_summands(80, TEXT_TOKENS, attentions=1) * 3)
SHOWS = 1e-2
SIZES = {
    "4 heads of 8": TinySizes(),
    "8 heads of 10": TinySizes(heads=8, head_dim=10, audio_head_dim=6, connector_layers=3),
}
COUNTS = [1, 128, 700, 1024]  # tokens of a prompt: one, as many as registers, more, all


@cache
def models(name="4 heads of 8", **overrides):
    """ltx-core's connector of each stream with random fp32 weights, and our config."""
    from ltx_core.text_encoders.gemma import embeddings_connector as ltx

    content, config = made_config(SIZES[name], **overrides)
    configurators = ltx.Embeddings1DConnectorConfigurator, ltx.AudioEmbeddings1DConnectorConfigurator
    models = (randomised(configurator.from_config(content), seed) for seed, configurator in enumerate(configurators))
    return dict(zip(STREAMS, models, strict=True)), config


def ltx_contexts(connectors, text_features, count):
    from ltx_core.text_encoders.gemma.embeddings_processor import convert_to_additive_mask

    mask = torch.cat([torch.zeros(1, TEXT_TOKENS - count), torch.ones(1, count)], dim=1)
    additive = convert_to_additive_mask(mask, torch.float32)
    return {stream: connectors[stream](tensor.nan_to_num(), additive)[0] for stream, tensor in text_features.items()}


def our_contexts(connectors, config, text_features, count):
    own = {f"{stream}_features": tensor[:, TEXT_TOKENS - count :] for stream, tensor in text_features.items()}
    weights = {
        f"{stream}_connector.{name}": weight
        for stream, connector in connectors.items()
        for name, weight in connector.state_dict().items()
    }
    registers = {stream: weights.pop(f"{stream}_connector.learnable_registers") for stream in STREAMS}
    with torch.device("meta"):
        module = Connectors(config, 1, SingleRank(), sdpa)
    outputs = functional_call(module, weights, (connector_inputs(own, registers, config),), strict=True)
    return {stream: outputs[f"{stream}_context"] for stream in STREAMS}


@pytest.mark.parametrize(
    ("name", "depths", "count"),
    [
        *(("4 heads of 8", {}, count) for count in COUNTS),
        ("8 heads of 10", {}, 12),
        ("4 heads of 8", {"audio_connector_num_layers": 1}, 12),
    ],
)
def test_contexts_are_ltx_cores_for_prompts_of_any_length_and_any_size_and_depth(name, depths, count):
    connectors, config = models(name, **depths)
    widths = {"video": config.video_connector.inner, "audio": config.audio_connector.inner}
    features = {stream: randn(1, TEXT_TOKENS, width, seed=seed) for seed, (stream, width) in enumerate(widths.items())}
    for tensor in features.values():
        tensor[:, : TEXT_TOKENS - count] = torch.nan  # a padding on its left, which no one may read
    theirs = ltx_contexts(connectors, features, count)
    ours = our_contexts(connectors, config, features, count)
    assert all(rel(ours[stream], theirs[stream]) < EQUAL for stream in STREAMS)
