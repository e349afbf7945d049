"""The released video encoder and decoder with random weights: ltx-core's own, and ours."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ltx_neuron.host.arithmetic import Arithmetic, arithmetic, fastest_libraries
from ltx_neuron.tiny.weights import random_weight

REFERENCE = "ltx-core float32"
MODELS = (REFERENCE, "ltx-core bfloat16", "ours float32", "ours")


def video_model(which: str, configurator: Any, fast: Callable, config: dict) -> nn.Module:
    """One of MODELS, with random weights that bfloat16 holds exactly. ltx-core's in float32 has
    them in float32, the others as a checkpoint stores them.

    configurator  ltx-core's, of the encoder or the decoder
    fast          our class that takes over such a model
    """
    with torch.device("meta"):
        model = configurator.from_config(config)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if which == REFERENCE else torch.bfloat16
    for name, tensor in model.state_dict().items():
        weight = random_weight(name, torch.empty(tensor.shape), generator).bfloat16().to(dtype)
        model.load_state_dict({name: weight}, strict=False, assign=True)
    model.eval().requires_grad_(False)
    return model if which.startswith("ltx-core") else fast(model, computes_in(which))


def computes_in(which: str) -> Arithmetic:
    """What our model of that name computes in."""
    found = arithmetic("float32" if which == "ours float32" else "auto", torch.bfloat16)
    return found._replace(libraries=fastest_libraries())
