"""Connectors turns features into ltx-core's contexts, with the registers where ltx-core puts
them."""

from functools import cache

import pytest
import torch
from helpers import STREAMS, block_summands, fp32_bound, made_config, randn, randomised, rel
from tiny import TinySizes
from torch.func import functional_call

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.transformer import REGISTERS
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
COUNTS = [1, 12, 128, 700, 1024]  # tokens of a prompt: one, few, as many as registers, more, all


@cache
def models(name="4 heads of 8", **overrides):
    """ltx-core's connector of each stream with random fp32 weights, and our config."""
    from ltx_core.text_encoders.gemma.embeddings_connector import (
        AudioEmbeddings1DConnectorConfigurator,
        Embeddings1DConnectorConfigurator,
    )

    content, config = made_config(SIZES[name], **overrides)
    configurators = Embeddings1DConnectorConfigurator, AudioEmbeddings1DConnectorConfigurator
    models = (randomised(configurator.from_config(content), seed) for seed, configurator in enumerate(configurators))
    return dict(zip(STREAMS, models, strict=True)), config


def features(config, count):
    """Features of a prompt padded on its left, whose padding no one may read."""
    sizes = {"video": config.video_connector, "audio": config.audio_connector}
    text_features = {
        stream: randn(1, TEXT_TOKENS, size.inner, seed=seed) for seed, (stream, size) in enumerate(sizes.items())
    }
    for tensor in text_features.values():
        tensor[:, : TEXT_TOKENS - count] = torch.nan
    return text_features


def ltx_contexts(connectors, text_features, count):
    from ltx_core.text_encoders.gemma.embeddings_processor import convert_to_additive_mask

    mask = torch.cat([torch.zeros(1, TEXT_TOKENS - count), torch.ones(1, count)], dim=1)
    additive = convert_to_additive_mask(mask, torch.float32)
    return {stream: connectors[stream](tensor.nan_to_num(), additive)[0] for stream, tensor in text_features.items()}


def our_inputs(connectors, config, text_features, count):
    own = {f"{stream}_features": tensor[:, TEXT_TOKENS - count :] for stream, tensor in text_features.items()}
    registers = {stream: connector.learnable_registers for stream, connector in connectors.items()}
    return connector_inputs(own, registers, config)


def our_contexts(connectors, config, inputs):
    with torch.device("meta"):
        module = Connectors(config, 1, SingleRank(), sdpa)
    weights = {
        f"{stream}_connector.{name}": weight
        for stream, connector in connectors.items()
        for name, weight in connector.state_dict().items()
        if name != "learnable_registers"
    }
    outputs = functional_call(module, weights, (inputs,), strict=True)
    return {stream: outputs[f"{stream}_context"] for stream in STREAMS}


@pytest.mark.parametrize("count", COUNTS)
def test_contexts_are_ltx_cores_for_prompts_of_any_length(count):
    connectors, config = models()
    text_features = features(config, count)
    theirs = ltx_contexts(connectors, text_features, count)
    ours = our_contexts(connectors, config, our_inputs(connectors, config, text_features, count))
    for stream in STREAMS:
        assert rel(ours[stream], theirs[stream]) < EQUAL


def test_contexts_are_ltx_cores_at_another_size():
    connectors, config = models("8 heads of 10")
    text_features = features(config, 12)
    theirs = ltx_contexts(connectors, text_features, 12)
    ours = our_contexts(connectors, config, our_inputs(connectors, config, text_features, 12))
    for stream in STREAMS:
        assert rel(ours[stream], theirs[stream]) < EQUAL


def test_connectors_of_unequal_depth_are_each_ltx_cores():
    connectors, config = models(audio_connector_num_layers=1)
    assert (config.connector_num_layers, config.audio_connector_num_layers) == (2, 1)
    text_features = features(config, 12)
    theirs = ltx_contexts(connectors, text_features, 12)
    ours = our_contexts(connectors, config, our_inputs(connectors, config, text_features, 12))
    for stream in STREAMS:
        assert rel(ours[stream], theirs[stream]) < EQUAL


@pytest.mark.parametrize("count", COUNTS)
def test_tokens_come_first_and_registers_stand_where_ltx_core_puts_them(count):
    connectors, config = models()
    text_features = features(config, count)
    inputs = our_inputs(connectors, config, text_features, count)
    mask = torch.cat([torch.full((1, 1, 1, TEXT_TOKENS - count), -1e9), torch.zeros(1, 1, 1, count)], dim=-1)
    for stream in STREAMS:
        theirs, _ = connectors[stream]._replace_padded_with_learnable_registers(
            text_features[stream].nan_to_num(), mask
        )
        ours = inputs[f"{stream}_tokens"]
        assert torch.equal(ours, theirs)
        registers = connectors[stream].learnable_registers
        assert torch.equal(ours[0, :count], text_features[stream][0, TEXT_TOKENS - count :])
        for position in [p for p in (count, 500, 1023) if count <= p < TEXT_TOKENS]:
            assert torch.equal(ours[0, position], registers[position % REGISTERS])


def test_every_register_position_reaches_the_first_token():
    """All attend to all: there is no mask that would make a prompt's context depend on its own
    tokens alone."""
    connectors, config = models()
    inputs = our_inputs(connectors, config, features(config, 12), 12)
    changed = inputs["video_tokens"].clone()
    changed[:, -1] += 10
    before, after = (our_contexts(connectors, config, i) for i in (inputs, inputs | {"video_tokens": changed}))
    assert rel(after["video"][:, :1], before["video"][:, :1]) > EQUAL
    assert torch.equal(after["audio"], before["audio"])


def test_contexts_differ_by_position_of_the_same_register():
    connectors, config = models()
    ours = our_contexts(connectors, config, our_inputs(connectors, config, features(config, 12), 12))
    assert rel(ours["video"][:, 200], ours["video"][:, 200 + REGISTERS]) > SHOWS
