"""A model as graphs and the order in which they are called: what compile makes and what a backend runs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ltx_neuron.config import Bucket, GemmaConfig, TransformerConfig
from ltx_neuron.connectors import Connectors
from ltx_neuron.dit import Blocks, Head, Step, Tail
from ltx_neuron.gemma3 import Gemma3Encoder
from ltx_neuron.graphs import (
    BlockInputs,
    BlockOutputs,
    ConnectorInputs,
    ConnectorOutputs,
    Field,
    Gemma3Inputs,
    Gemma3Outputs,
    Gemma3OutputsWithStates,
    HeadInputs,
    HeadOutputs,
    StepInputs,
    TailInputs,
    TailOutputs,
    connector_fields,
    dit_fields,
    gemma3_fields,
)
from ltx_neuron.parallel import Comm


class Graph(NamedTuple):
    """A module to trace (on the meta device) and the named values it takes and returns."""

    module: nn.Module
    inputs: type
    outputs: type


@dataclass(frozen=True)
class Program:
    """Graphs by name, the calls that make one run, and the fields that describe every named value.

    A call is (graph, first block): the graph's `transformer_blocks.j` weights are those of block first + j.
    """

    graphs: dict[str, Graph]
    calls: tuple[tuple[str, int], ...]
    fields: dict[str, Field]


def weight_name(parameter: str, first_block: int) -> str:
    """The rank file's name for a graph's parameter when the graph stands for blocks first_block, first_block + 1, ..."""
    parts = parameter.split(".")
    if parts[0] in ("head", "blocks", "tail"):  # the parts of a whole Step
        parts = parts[1:]
    if parts[0] == "transformer_blocks":
        parts[1] = str(int(parts[1]) + first_block)
    return ".".join(parts)


def group_size(layers: int, blocks_per_graph: int) -> int:
    """Blocks per graph: the largest divisor of the depth that is at most the wanted number, so all groups are alike."""
    return max(n for n in range(1, min(blocks_per_graph, layers) + 1) if layers % n == 0)


def dit_program(
    config: TransformerConfig, bucket: Bucket, tp: int, comm: Comm, dtype: torch.dtype, blocks_per_graph: int
) -> Program:
    """The DiT step of a bucket; blocks_per_graph 0 is one graph for the whole step."""
    fields = dit_fields(config, bucket, tp, dtype)
    with torch.device("meta"):
        if blocks_per_graph == 0:
            step = Graph(Step(config, tp, comm), StepInputs, TailOutputs)
            return Program({"step": step}, (("step", 0),), fields)
        count = group_size(config.num_layers, blocks_per_graph)
        graphs = {
            "head": Graph(Head(config), HeadInputs, HeadOutputs),
            "blocks": Graph(Blocks(config, tp, comm, count), BlockInputs, BlockOutputs),
            "tail": Graph(Tail(config), TailInputs, TailOutputs),
        }
    calls = (("head", 0), *(("blocks", first) for first in range(0, config.num_layers, count)), ("tail", 0))
    return Program(graphs, calls, fields)


def gemma3_program(
    gemma: GemmaConfig, config: TransformerConfig, tokens: int, tp: int, comm: Comm, dtype: torch.dtype, states: bool
) -> Program:
    """The text encoder for a bucket of tokens."""
    with torch.device("meta"):
        encoder = Gemma3Encoder(gemma, config, tp, comm, states)
    graph = Graph(encoder, Gemma3Inputs, Gemma3OutputsWithStates if states else Gemma3Outputs)
    return Program({"gemma3": graph}, (("gemma3", 0),), gemma3_fields(gemma, config, tokens, tp, dtype))


def connector_program(config: TransformerConfig, tp: int, comm: Comm, dtype: torch.dtype) -> Program:
    """The two text connectors."""
    with torch.device("meta"):
        connectors = Connectors(config, tp, comm)
    graph = Graph(connectors, ConnectorInputs, ConnectorOutputs)
    return Program({"connectors": graph}, (("connectors", 0),), connector_fields(config, tp, dtype))
