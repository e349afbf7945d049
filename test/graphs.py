"""Exported graphs in tests."""

from functools import cache

import torch
from helpers import SIZES, made_config

from ltx_neuron.backends.export import TorchDistComm, fake_process_group, trace
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.models.programs import dit_program


def operations(exported) -> list:
    """The calls of operators in a graph: all but placeholders, the output and python's own
    unpacking of tuples."""
    called = [node for node in exported.graph.nodes if node.op not in ("placeholder", "output")]
    return [node for node in called if getattr(node.target, "__name__", "") != "getitem"]


@cache
def block_graph(kernel):
    _, config = made_config(SIZES["4 heads of 8"])
    with fake_process_group(2):
        program = dit_program(config, Bucket(6, 4, 1, 2), 2, TorchDistComm(2), torch.bfloat16, 1, kernel)
        return trace(program, "blocks", torch.bfloat16)
