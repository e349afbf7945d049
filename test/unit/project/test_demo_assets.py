"""The demo's files that come with the package: what the README's first command takes."""

import json

from ltx_neuron.config.gemma import check_gemma_fits, gemma_config
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.demo import ASSETS
from ltx_neuron.weights.checkpoint import Checkpoint
from ltx_neuron.weights.lora import Lora, MergedSource
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.tensorfile import TensorFile


def test_the_demos_files_are_what_they_are_called():
    checkpoint = Checkpoint(ASSETS.checkpoint)
    config = transformer_config(checkpoint.config)
    check_gemma_fits(gemma_config(ASSETS.gemma_root), config, ASSETS.gemma_root)
    upsampler = json.loads(TensorFile(ASSETS.spatial_upsampler, "").metadata["config"])
    assert upsampler["spatial_upsample"] and not upsampler["temporal_upsample"]
    assert MergedSource(SHARDED_MODELS["dit"], [checkpoint], (Lora(ASSETS.style_lora),)).adapters
